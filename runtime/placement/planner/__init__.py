"""The placement planner: pure functions over integers, the same on every rank.

    load = expected_load(history, window)                                        rows per expert to expect
    placement = materialize(load, owners, topology, budget)                who holds what next, as in the paper
    placement = materialize_fastest(load, owners, costs, ...)              the same by predicted time
    quotas = assign_tokens(counts, placement, topology, rank)              who computes which rows
    owners = shard_owners(loads, owners, topology, overlap)                who owns what, every hundred steps

No process group, no clock, no device. The inputs are the counts that every exchange gathers anyway, so a plan costs
no communication. Loads are rows, int64. Ties go to the smaller id, so equal input gives equal plans.
"""

from hecate.runtime.placement.planner.balance import balance, balance_in_nodes, local_split, owners_only, shed_excess
from hecate.runtime.placement.planner.cost import CostModel, LayerSizes, Rates, StepTime
from hecate.runtime.placement.planner.dispatch import Dispatch, Quotas, assign_tokens, rows_per_rank
from hecate.runtime.placement.planner.fastest import (
    Choice,
    Recipe,
    materialize_again,
    materialize_fastest,
    near_recipes,
    quota_matrix,
    split_fastest,
)
from hecate.runtime.placement.planner.forecast import expected_load
from hecate.runtime.placement.planner.paper import Budget, materialize
from hecate.runtime.placement.planner.resharding import shard_owners
from hecate.runtime.placement.planner.stages import Stage, stages_of

__all__ = [
    "Budget",
    "Choice",
    "CostModel",
    "Dispatch",
    "LayerSizes",
    "Quotas",
    "Rates",
    "Recipe",
    "Stage",
    "StepTime",
    "assign_tokens",
    "balance",
    "balance_in_nodes",
    "expected_load",
    "local_split",
    "materialize",
    "materialize_again",
    "materialize_fastest",
    "near_recipes",
    "owners_only",
    "quota_matrix",
    "rows_per_rank",
    "shard_owners",
    "shed_excess",
    "split_fastest",
    "stages_of",
]
