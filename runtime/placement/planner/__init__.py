"""The placement planner: pure functions over integers, the same on every rank.

    load = expected_load(history, window)                                        rows per expert to expect
    placement = materialize(load, owners, topology, budget)                who holds what next, as in the paper
    placement = materialize_fastest(load, owners, costs, ...)              the same by predicted time
    quotas = assign_tokens(counts, placement, topology, rank)              who computes which rows
    owners = swap_owners(load, owners, costs, ...)                         who owns what, every fifty steps
    owners = shard_owners(loads, owners, topology, overlap)                the same as in the paper

No process group, no clock, no device. The inputs are the counts that every exchange gathers anyway, so a plan costs
no communication. Loads are rows, int64. Ties go to the smaller id, so equal input gives equal plans.

The largest assumption of all plans: every rank routes the same share of each expert's rows. A load is a sum over
ranks and does not say who has the rows. Where ranks route differently, more or fewer rows travel than predicted;
nothing is computed wrongly.

An example: two nodes of two ranks, and rank r owns expert r. Every rank has 8 rows for expert 0, 4 for expert 1, and
2 for each of the others.

>>> import numpy as np
>>> from hecate.runtime.placement.owners import Owners
>>> from hecate.runtime.placement.placement import Placement
>>> from hecate.runtime.placement.topology import Topology
>>> owners, topology = Owners.contiguous(4, 4), Topology.even(4, 2)
>>> counts = np.array([[8, 4, 2, 2]] * 4)
>>> load = counts.sum(0)
>>> load.tolist()
[32, 16, 8, 8]

A row takes one operation and one byte, an expert four bytes. A rank does one operation in a second. In a second eight
bytes leave a rank, but only two a node. With one slot on each rank, a replica of expert 0 goes to both ranks of the
other node.

>>> sizes = LayerSizes(row_flops=1, row_bytes=1, expert_bytes=4)
>>> costs = CostModel(topology=topology, sizes=sizes, rates=Rates(flops=1, rank_bytes=8, node_bytes=2))
>>> choice = materialize_fastest(load, owners, costs, slots=1)
>>> print(choice.placement.holders)
((0, 2, 3), (1,), (2,), (3,))

Node 1 has 16 rows for expert 0. Its two replicas compute them, so none of them crosses.

>>> split = split_fastest(load.tolist(), choice.placement, costs)
>>> split
[[16, 8, 8], [16], [8], [8]]

Rank 3 sends, expert by expert: its 8 rows for expert 0 stay with it, and the others go to the owners.

>>> print(assign_tokens(counts, choice.placement, topology, rank=3, split=split).sends)
[[0 0 0 8]
 [0 4 0 0]
 [0 0 2 0]
 [0 0 0 2]]

The busiest rank computes half as many rows as before.

>>> print(rows_per_rank(counts, Placement.owned(owners), topology))
[32 16  8  8]
>>> print(rows_per_rank(counts, choice.placement, topology))
[16 16 16 16]

In seconds: a rank computes 16 rows, once forward and twice backward. Each node receives 8 rows from the other, two in
a second, four times: there and back, forward and backward. Expert 0 crosses in 2 seconds and is passed on in half a
second, and gradients take as long.

>>> print(choice.time.compute, choice.time.rows, choice.time.experts)
48.0 16.0 5.0
"""

from hecate.runtime.placement.planner.balance import local_split, shed_excess
from hecate.runtime.placement.planner.cost import CostModel, LayerSizes, Rates, StepTime
from hecate.runtime.placement.planner.dispatch import Quotas, assign_tokens, rows_per_rank
from hecate.runtime.placement.planner.fastest import (
    Choice,
    materialize_again,
    materialize_fastest,
    materialize_frugally,
    seconds_of,
    split_fastest,
)
from hecate.runtime.placement.planner.forecast import expected_load, steady_steps
from hecate.runtime.placement.planner.paper import Budget, materialize
from hecate.runtime.placement.planner.recipes import Recipe, near_recipes
from hecate.runtime.placement.planner.resharding import shard_owners, swap_owners
from hecate.runtime.placement.planner.segments import Segments, segments_of
from hecate.runtime.placement.planner.stages import (
    Parts,
    Stage,
    StageOfRank,
    Travels,
    places_of,
    rounds_of,
    stages_of,
)

__all__ = [
    "Budget",
    "Choice",
    "CostModel",
    "LayerSizes",
    "Parts",
    "Quotas",
    "Rates",
    "Recipe",
    "Segments",
    "Stage",
    "StageOfRank",
    "StepTime",
    "Travels",
    "assign_tokens",
    "expected_load",
    "local_split",
    "materialize",
    "materialize_again",
    "materialize_fastest",
    "materialize_frugally",
    "near_recipes",
    "places_of",
    "rounds_of",
    "rows_per_rank",
    "seconds_of",
    "segments_of",
    "shard_owners",
    "shed_excess",
    "split_fastest",
    "stages_of",
    "steady_steps",
    "swap_owners",
]
