"""The placements of one layer, step by step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import LayerSizes, Quotas, Stage, stages_of
from hecate.runtime.placement.policy import LayerView
from hecate.runtime.state.placer import Placer


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


class LayerPlacer:
    """Asks the model's policy about one layer.

    Attributes:
        id: the layer's number, a key for what a policy remembers.
        name: for messages.
        model: what all layers of the model share.
        owners: who owns what now.
        sizes: what its experts weigh and compute.
        plan: what it remembers between steps.
    """

    def __init__(self, model: Placer, *, id: int, name: str, owners: Owners) -> None:
        self.model, self.id, self.name, self.owners = model, id, name, owners
        self.sizes = LayerSizes(row_flops=0, row_bytes=0, expert_bytes=0)
        self.plan = LayerPlan(loads=deque(maxlen=model.policy.window))

    @property
    def view(self) -> LayerView:
        """The layer as the policy sees it."""
        plan = self.plan
        total = plan.total_load + np.zeros(self.owners.num_experts, dtype=np.int64)
        return LayerView(
            id=self.id, owners=self.owners, loads=tuple(plan.loads), long_load=total // max(1, plan.steps_seen),
            topology=self.model.topology, sizes=self.sizes, rates=self.model.rates,
        )  # fmt: skip

    def change_owners(self, owners: Owners) -> None:
        """Owners from now on. What was planned for the old ones is planned anew."""
        self.owners = owners
        self.plan.planned = None

    def plan_ahead(self) -> None:
        """Decide the next forward's placement, if it is not decided yet."""
        plan = self.plan
        if plan.planned is None:
            plan.planned = self._checked(self.model.policy.place(self.view))
            self._sign(plan.planned)

    def _checked(self, placement: Placement) -> Placement:
        name = type(self.model.policy).__name__
        if placement.owners != self.owners:
            raise RuntimeError(f"hecate: {name}.place returned other owners for {self.name} than it has now")
        if placement.num_replicas and not self.model.policy.replicates:
            raise RuntimeError(f"hecate: {name}.place returned replicas, but {name}.replicates is not set")
        return placement

    def _sign(self, placement: Placement) -> None:
        self.model.sign(self.name, self.plan.step, self.owners, placement)

    def take(self) -> Placement:
        """The placement of the forward that begins now."""
        self.plan_ahead()
        plan = self.plan
        placement = plan.planned
        assert placement is not None
        plan.planned = None
        plan.step += 1
        self._keep(placement)
        return placement

    def calibrate(self, placement: Placement, counts: Ints) -> Placement:
        """The policy's second thoughts, after the gate."""
        calibrated = self.model.policy.calibrate(self.view, placement, counts)
        if not calibrated.includes(placement):
            raise RuntimeError(f"hecate: {type(self.model.policy).__name__}.calibrate dropped holders of {self.name}")
        if calibrated is not placement:
            self._sign(calibrated)
            self._keep(calibrated)
        return calibrated

    def assign(self, placement: Placement, counts: Ints) -> Quotas:
        """This rank's part of the exchange."""
        return self.model.policy.assign(self.view, placement, counts, self.model.world.rank)

    def observe(self, counts: Ints) -> None:
        """Remember the rows ``[W, E]`` of a step."""
        if self.model.learning:
            plan, load = self.plan, counts.sum(0)
            plan.loads.append(load)
            plan.total_load = plan.total_load + load
            plan.steps_seen += 1

    def find(self, matrix: torch.Tensor) -> Placement:
        """The placement behind a graph's ``[E, W]`` tensor."""
        wanted = matrix.numpy()
        for placement, _ in reversed(self.plan.recent):
            if np.array_equal(placement.matrix, wanted):
                return placement
        placement = Placement.from_matrix(wanted)
        self._keep(placement)
        return placement

    def stages(self, placement: Placement) -> tuple[Stage, Stage]:
        """How its replicas travel."""
        for known, stages in self.plan.recent:
            if known is placement:
                if not stages:
                    stages.append(stages_of(placement, self.model.topology))
                return stages[0]
        return stages_of(placement, self.model.topology)

    def _keep(self, placement: Placement) -> None:
        recent = self.plan.recent
        if not any(known is placement for known, _ in recent):
            recent.append((placement, []))
