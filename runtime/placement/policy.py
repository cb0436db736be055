"""Who holds what, and who computes what: the interface of policies, and static expert parallelism.

A policy sees loads and sizes and returns placements. It never communicates and never looks at its own rank; what it
remembers between steps comes from the same calls on all ranks. So all ranks come to the same plan. The engine
(the layers' records, the operators, the passes) knows only :class:`Policy`; give an instance of your own to
``hecate.Config(policy=...)``.
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
    """What a policy may know about one layer. Equal on all ranks.

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
        """What a step of this layer takes."""
        return CostModel(topology=self.topology, sizes=self.sizes, rates=self.rates)


class Policy:
    """The interface, and the static policy: owners compute their experts, and nothing is replicated.

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
        # Ranks compare their options as text, which must not hold an address: so no functions in public attributes.
        options = {name: value for name, value in sorted(vars(self).items()) if not name.startswith("_")}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())})"

    def place(self, layer: LayerView) -> Placement:
        """Holders for the next step, before its gate has run: owners and replicas."""
        return Placement.owned(layer.owners)

    def calibrate(self, layer: LayerView, placement: Placement, counts: Ints) -> Placement:
        """More holders, now that the rows ``[W, E]`` are known. Must include ``placement``."""
        return placement

    def assign(self, layer: LayerView, placement: Placement, counts: Ints, rank: int) -> Quotas:
        """Split the rows ``[W, E]`` over the holders."""
        return assign_tokens(counts, placement, layer.topology, rank)

    def choose_owners(self, layers: Sequence[LayerView]) -> list[Owners]:
        """New owners of all layers, for a step boundary."""
        return [layer.owners for layer in layers]

    def state_dict(self) -> dict[int, Any]:
        """What it remembers of layers between steps, by ``LayerView.id``, for checkpoints.

        Plain data: numbers, strings, lists, tuples, dicts and arrays.
        """
        return {}

    def load_state_dict(self, state: dict[int, Any]) -> None:
        """Go on from what :meth:`state_dict` gave, with the same layers on as many ranks; ids may be others."""


@dataclass
class Static(Policy):
    """Expert parallelism: every expert is computed by its owner."""
