"""Shared state of the placements of a model's layers, and proof that all ranks have the same.

A digest of all placements so far travels with the counts of each exchange; ranks that drifted apart stop with an
error that names the layer and the step. A placement is made during its layer's exchange in the step before, so
another layer's exchange compares it before it is used; that of a model's only MoE layer, and additions of
``calibrate``, are compared in the exchange after.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

import torch

from hecate.runtime.comm.agreement import agree, compare_histories
from hecate.runtime.comm.history import proven
from hecate.runtime.comm.world import World
from hecate.runtime.placement import native
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Rates
from hecate.runtime.placement.policy import Policy, Static
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state.step_mode import CurrentStep


class Placer:
    """The policy of all layers of a model. One per compiled model; each layer has a ``LayerPlacer`` over it."""

    def __init__(self, policy: Policy, topology: Topology, world: World, step: CurrentStep | None = None) -> None:
        self.policy, self.topology, self.world = policy, topology, world
        self.step = step if step is not None else CurrentStep()
        self.rates = Rates(flops=1.0, rank_bytes=1.0, node_bytes=1.0)
        self.rates_from = "not measured"  # for people
        self.digest = b"\0" * 8  # of all plans so far
        # An optimizer with experts of this model has stepped since the last training forward.
        self.optimizer_stepped = False
        self._last: dict[str, tuple[int, Placement]] = {}
        if world.size > 1:
            # Compiled here if need be, where nobody waits, and not in the first exchange.
            native.library()

    @classmethod
    def static(cls, world: World) -> Placer:
        """Return a placer that replicates nothing, on one node."""
        return cls(Static(), Topology.even(world.size, world.size), world)

    @property
    def learning(self) -> bool:
        """Tell whether the counts of a forward tell about the next ones: not while gradients are off."""
        return self.step.mode is None or self.step.mode.training

    def state_dict(self) -> dict[str, Any]:
        """Return the state that layers share between steps, for checkpoints."""
        return {"rates": asdict(self.rates), "optimizer_stepped": self.optimizer_stepped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, with the same policy on as many ranks in the same nodes."""
        self.set_rates(Rates(**state["rates"]), because="as in the checkpoint")
        self.optimizer_stepped = state["optimizer_stepped"]

    def set_rates(self, rates: Rates, *, because: str) -> None:
        """Set the rates to plan with from now on. All ranks set the same rates at the same time."""
        self.rates, self.rates_from = rates, because

    # --- the same on all ranks ---

    def sign(self, name: str, step: int, owners: Owners, placement: Placement) -> None:
        self._last[name] = step, placement
        holders = placement.pairs if self.policy.replicates else ()
        plan = b"".join(part.tobytes() for part in (owners.array, *holders))
        self.digest = hashlib.blake2b(self.digest + f"{name} {step}".encode() + plan, digest_size=8).digest()

    def places_first(self, name: str) -> bool:
        """Tell whether forwards begin with this layer."""
        return next(iter(self._last), None) == name

    @property
    def signature(self) -> int:
        # It fits beside the counts.
        return int.from_bytes(self.digest, "little", signed=True)

    def check(self, signatures: torch.Tensor) -> None:
        """Compare what travelled with the counts: signature and proof of each rank, int64 ``[W, 3]``.

        On every rank DisagreementError names the first collective in which ranks parted, or the first layer whose
        plan differs.
        """
        plans, *_ = columns = signatures.T.tolist()
        if not proven(list(zip(*columns[1:], strict=True))):
            compare_histories(self.world)
        if plans.count(plans[0]) == len(plans):
            return
        agree(
            [f"layer {name}, step {step}: {_describe(placement)}" for name, (step, placement) in self._last.items()],
            "the placement of experts",
            "Every rank must run the same forwards in the same order, with the same policy and library versions.",
            self.world,
        )
        raise RuntimeError("hecate: ranks planned differently in an earlier step; the last plans are equal again")


def _describe(placement: Placement) -> str:
    replicas = [
        f"expert {expert} also on ranks {[rank for rank in ranks if rank != owner]}"
        for expert, (ranks, owner) in enumerate(zip(placement.holders, placement.owners.ranks, strict=True))
        if len(ranks) > 1
    ]
    return f"owners {list(placement.owners.ranks)}; {'; '.join(replicas) or 'no replicas'}"
