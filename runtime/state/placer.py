"""The placements of one model's layers, step by step, and proof that all ranks have the same.

Every rank runs its policy on the same counts and so comes to the same placement without talking. A digest of all
placements so far travels with the counts of each exchange; ranks that drifted apart stop with an error that names the
layer and the step. A placement is made when its layer's exchange of the step before is done, so the next layer's
exchange compares it before it is used; that of a model's only MoE layer, and what ``calibrate`` adds, is compared
in the exchange after.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from hecate.runtime.comm.agreement import agree
from hecate.runtime.comm.world import World
from hecate.runtime.placement.placement import Ints
from hecate.runtime.placement.planner import Placement, Quotas, Rates, Stage, Topology, transfers
from hecate.runtime.placement.policy import LayerView, Policy, Static

if TYPE_CHECKING:
    from hecate.runtime.state.layer import Layer


@dataclass
class LayerPlan:
    """What a layer remembers between steps.

    Attributes:
        loads: rows per expert in the last steps, oldest first.
        total_load: their sum since owners were last reconsidered.
        steps_seen: over how many steps.
        step: forwards of this layer so far.
        planned: the placement of the next forward, if it is known already.
        recent: placements in use and how they travel, newest last: a forward, and a backward of an earlier one.
    """

    loads: deque[Ints]
    total_load: Ints | int = 0
    steps_seen: int = 0
    step: int = 0
    planned: Placement | None = None
    recent: deque[tuple[Placement, list[tuple[Stage, Stage]]]] = field(default_factory=lambda: deque(maxlen=4))

    def forget(self) -> None:
        """Begin to add up the load anew."""
        self.total_load, self.steps_seen = 0, 0


class Placer:
    """Runs one policy for all layers of a model. One per compiled model.

    Attributes:
        policy: the policy.
        topology: ranks in nodes.
        rates: how fast the machine is; a policy that needs them has measured or given ones.
        digest: of all plans so far, 8 bytes.
        learning: whether the counts of a forward tell about the next ones; off while gradients are.
        stepped: an optimizer with experts of this model has stepped since the last training forward.
    """

    def __init__(self, policy: Policy, topology: Topology, world: World, rates: Rates | None = None) -> None:
        self.policy, self.topology, self.world = policy, topology, world
        self.rates = rates or Rates(flops=1.0, rank_bytes=1.0, node_bytes=1.0)
        self.digest = b"\0" * 8
        self.learning, self.stepped = True, False
        self._last: dict[str, tuple[int, Placement]] = {}

    @classmethod
    def static(cls, world: World) -> Placer:
        """Nothing is replicated, on one node."""
        return cls(Static(), Topology.even(world.size, world.size), world)

    def view(self, layer: Layer) -> LayerView:
        plan = layer.plan
        total = plan.total_load + np.zeros(layer.num_experts, dtype=np.int64)
        return LayerView(
            id=layer.id, owners=layer.owners, loads=tuple(plan.loads), long_load=total // max(1, plan.steps_seen),
            topology=self.topology, sizes=layer.sizes, rates=self.rates,
        )  # fmt: skip

    def plan_ahead(self, layer: Layer) -> None:
        """Decide the next forward's placement, if it is not decided yet."""
        plan = layer.plan
        if plan.planned is None:
            plan.planned = self._checked(layer, self.policy.place(self.view(layer)))
            self._sign(layer, plan.planned)

    def _checked(self, layer: Layer, placement: Placement) -> Placement:
        name = type(self.policy).__name__
        if placement.owners != layer.owners:
            raise RuntimeError(f"hecate: {name}.place returned other owners for {layer.name} than it has now")
        if placement.num_replicas and not self.policy.replicates:
            raise RuntimeError(f"hecate: {name}.place returned replicas, but {name}.replicates is not set")
        return placement

    def take(self, layer: Layer) -> Placement:
        """The placement of the forward that begins now."""
        self.plan_ahead(layer)
        plan = layer.plan
        placement = plan.planned
        assert placement is not None
        plan.planned = None
        plan.step += 1
        self._keep(plan, placement)
        return placement

    def calibrate(self, layer: Layer, placement: Placement, counts: Ints) -> Placement:
        """The policy's second thoughts, after the gate."""
        calibrated = self.policy.calibrate(self.view(layer), placement, counts)
        if not calibrated.includes(placement):
            raise RuntimeError(f"hecate: {type(self.policy).__name__}.calibrate dropped holders of {layer.name}")
        if calibrated is not placement:
            self._sign(layer, calibrated)
            self._keep(layer.plan, calibrated)
        return calibrated

    def assign(self, layer: Layer, placement: Placement, counts: Ints) -> Quotas:
        """This rank's part of the exchange."""
        return self.policy.assign(self.view(layer), placement, counts, self.world.rank)

    def observe(self, layer: Layer, counts: Ints) -> None:
        """Remember the rows ``[W, E]`` of a step."""
        if self.learning:
            plan, load = layer.plan, counts.sum(0)
            plan.loads.append(load)
            plan.total_load = plan.total_load + load
            plan.steps_seen += 1

    def find(self, layer: Layer, matrix: torch.Tensor) -> Placement:
        """The placement behind a graph's ``[E, W]`` tensor."""
        wanted = matrix.numpy()
        for placement, _ in reversed(layer.plan.recent):
            if np.array_equal(placement.matrix, wanted):
                return placement
        placement = Placement.from_matrix(wanted)
        self._keep(layer.plan, placement)
        return placement

    def transfers(self, layer: Layer, placement: Placement) -> tuple[Stage, Stage]:
        """How its replicas travel."""
        for known, stages in layer.plan.recent:
            if known is placement:
                if not stages:
                    stages.append(transfers(placement, self.topology))
                return stages[0]
        return transfers(placement, self.topology)

    @staticmethod
    def _keep(plan: LayerPlan, placement: Placement) -> None:
        if not any(known is placement for known, _ in plan.recent):
            plan.recent.append((placement, []))

    # --- the same on all ranks ---

    def _sign(self, layer: Layer, placement: Placement) -> None:
        self._last[layer.name] = layer.plan.step, placement
        if not self.policy.replicates:
            return
        experts, ranks = placement.pairs
        text = f"{layer.name} {layer.plan.step} {layer.owners.ranks}".encode()
        self.digest = hashlib.blake2b(
            self.digest + text + experts.tobytes() + ranks.tobytes(), digest_size=8
        ).digest()

    @property
    def signature(self) -> int:
        """The digest as a number that fits beside the counts."""
        return int.from_bytes(self.digest, "little", signed=True)

    def check(self, signatures: torch.Tensor) -> None:
        """Compare the signatures of all ranks, int64 ``[W]``.

        Raises:
            DisagreementError: on every rank, with the first layer whose plan differs.
        """
        if bool((signatures == signatures[0]).all()):
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
