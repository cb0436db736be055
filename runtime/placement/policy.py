"""Policies: who holds what and who computes what; their interface, and static expert parallelism.

A policy sees loads and sizes and returns placements. It never communicates and never looks at its own rank, and its
memory comes from the same calls on all ranks, so all ranks come to the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import CostModel, LayerSizes, Quotas, Rates, assign_tokens
from hecate.runtime.placement.topology import Topology


@dataclass(frozen=True, kw_only=True)
class LayerView:
    """A layer as a policy sees it. Equal on all ranks.

    Attributes:
        id: number of the layer, a key for what a policy remembers.
        owners: who owns what now.
        loads: rows per expert in the last steps, oldest first, at most ``Policy.window`` of them; ``[T][E]``.
        long_load: mean rows per expert and step since owners were last reconsidered, ``[E]``.
        topology: ranks in nodes.
        sizes: bytes and operations.
        rates: how fast the machine is.
    """

    id: int
    owners: Owners
    loads: Sequence[Ints]
    long_load: Ints
    topology: Topology
    sizes: LayerSizes
    rates: Rates

    @cached_property
    def costs(self) -> CostModel:
        """Cost model of a step of this layer."""
        return CostModel(topology=self.topology, sizes=self.sizes, rates=self.rates)


class Policy:
    """The interface of policies, and the static policy: owners compute their experts, and nothing is replicated.

    Attributes:
        replicates: whether :meth:`place` or :meth:`calibrate` may return replicas. Without it the graph has no
            sparse collectives at all.
        calibrates: whether to ask again after the gate, on the critical path.
        window: steps of history to keep.
        reshard_every: optimizer steps between calls of :meth:`choose_owners`; 0 for never.
    """

    replicates: bool = False
    calibrates: bool = False
    window: int = 1
    reshard_every: int = 0

    def __repr__(self) -> str:
        # Ranks compare their options as text, which must not hold an address; so public attributes must not be
        # functions.
        options = {name: value for name, value in sorted(vars(self).items()) if not name.startswith("_")}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def place(self, layer: LayerView) -> Placement:
        """Return the holders for the next step, before its gate has run: owners and replicas."""
        return Placement.owned(layer.owners)

    def calibrate(self, layer: LayerView, placement: Placement, counts: Ints) -> Placement:
        """Return a placement with more holders, as the rows ``[W, E]`` are known. It must include ``placement``."""
        return placement

    def assign(self, layer: LayerView, placement: Placement, counts: Ints, rank: int) -> Quotas:
        """Split the rows ``[W, E]`` over the holders."""
        return assign_tokens(counts, placement, layer.topology, rank)

    def choose_owners(self, layers: Sequence[LayerView]) -> list[Owners]:
        """Return new owners of all layers, for a step boundary."""
        return [layer.owners for layer in layers]

    def state_dict(self) -> dict[int, Any]:
        """Return the policy's memory of layers between steps, by ``LayerView.id``, for checkpoints.

        It is plain data: numbers, strings, lists, tuples, dicts and arrays.
        """
        return {}

    def load_state_dict(self, state: dict[int, Any]) -> None:
        """Continue from a :meth:`state_dict`, with the same layers on as many ranks; ids may be others."""


@dataclass
class Static(Policy):
    """Expert parallelism: every expert is computed by its owner."""
