"""The placements of one layer, step by step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import LayerSizes, Quotas, Travels, stages_of
from hecate.runtime.placement.policy import LayerView
from hecate.runtime.state.placer import Placer


@dataclass
class InUse:
    """A placement that a graph may ask for."""

    placement: Placement
    travels: Travels | None = None  # of its replicas, once that was asked


@dataclass
class LayerPlan:
    """A layer's memory between steps."""

    loads: deque[Ints]  # rows per expert in the last steps, oldest first
    # Their sum since owners were last reconsidered, and over how many steps.
    total_load: Ints | int = 0
    steps_seen: int = 0
    step: int = 0  # forwards of this layer so far
    planned: Placement | None = None  # of the next forward, if it is known already
    # That of the last forward, with replicas that were added after the gate; None before the first.
    current: Placement | None = None
    # Placements in use, newest last: the next forward's, this one's, and a backward's of an earlier one.
    recent: deque[InUse] = field(default_factory=lambda: deque(maxlen=4))

    def forget(self) -> None:
        self.total_load, self.steps_seen = 0, 0


class LayerPlacer:
    """Asks the model's policy about one layer, and checks its answers."""

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
            id=self.id,
            owners=self.owners,
            loads=tuple(plan.loads),
            long_load=total // max(1, plan.steps_seen),
            topology=self.model.topology,
            sizes=self.sizes,
            rates=self.model.rates,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the layer's memory between steps, for checkpoints, without owners."""
        plan = self.plan
        return {
            "loads": list(plan.loads),
            "total_load": plan.total_load,
            "steps_seen": plan.steps_seen,
            "step": plan.step,
            "planned": None if plan.planned is None else plan.planned.holders,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, under the same owners."""
        plan = self.plan = LayerPlan(loads=deque(state["loads"], maxlen=self.model.policy.window))
        plan.total_load, plan.steps_seen, plan.step = state["total_load"], state["steps_seen"], state["step"]
        if state["planned"] is not None:
            holders = tuple(tuple(ranks) for ranks in state["planned"])
            self._plan(Placement(self.owners, holders))

    def label(self, operator: str) -> str:
        """Name a collective of the layer's latest forward, in words that are the same on all ranks."""
        step = self.plan.step
        # Without exchanges nothing is placed, and forwards are not counted.
        return f"{operator} of {self.name}, step {step - 1}" if step else f"{operator} of {self.name}"

    def change_owners(self, owners: Owners) -> None:
        """Set the owners from now on. A plan for the old owners is made anew."""
        self.owners = owners
        self.plan.planned = None

    @property
    def can_wait_for_backward(self) -> bool:
        """Tell whether the next step may be planned in this one's backward."""
        # Another layer's exchange must compare the plan before it is used. Without a backward the next forward plans.
        return self.model.learning and not self.model.places_first(self.name)

    def plan_ahead(self) -> None:
        """Decide the next forward's placement, if it is not decided yet."""
        if self.plan.planned is None:
            self._plan(self.model.policy.place(self.view))

    def _plan(self, placement: Placement) -> None:
        """Make a placement the next forward's, if a step can run on it."""
        self._checked(placement, "place")
        self.model.sign(self.name, self.plan.step, self.owners, placement)
        placement = self.plan.planned = self._keep(placement)
        # Tables that the step needs are made here, beside other work, and not where the step waits for them.
        placement.slots_on(self.model.world.rank)
        if self.model.policy.replicates:
            self.travels(placement).prepare()

    def _checked(self, placement: Placement, method: str) -> Placement:
        """Return the policy's placement if a step can run on it, else raise an error that names the policy."""
        if not isinstance(placement, Placement):
            raise self._wrong(method, f"{_kind(placement)}, not a Placement")
        if placement.owners != self.owners:
            raise self._wrong(method, "other owners than the layer has now")
        if len(placement.holders) != self.owners.num_experts:
            raise self._wrong(method, f"holders of {len(placement.holders)} experts, not {self.owners.num_experts}")
        experts, ranks = placement.pairs
        owned = np.bincount(experts[ranks == placement.owner_array[experts]], minlength=len(placement.holders))
        if (owned != 1).any():
            expert = int(np.argmax(owned != 1))
            raise self._wrong(
                method,
                f"holders {list(placement.holders[expert])} of expert {expert}, in which its owner, rank "
                f"{self.owners.ranks[expert]}, must stand once. Placement.with_replicas adds the owners",
            )
        if len(ranks) and not (ranks.min() >= 0 and ranks.max() < self.owners.world_size):
            raise self._wrong(method, f"holders that are none of the ranks 0 to {self.owners.world_size - 1}")
        if placement.num_replicas and not self.model.policy.replicates:
            raise self._wrong(method, f"replicas, but {type(self.model.policy).__name__}.replicates is not set")
        return placement

    def _wrong(self, method: str, what: str) -> RuntimeError:
        policy = type(self.model.policy).__name__
        return RuntimeError(f"hecate: {policy}.{method} returned, for {self.name}, {what}.")

    def take(self) -> Placement:
        """Return the placement of the forward that begins now."""
        self.plan_ahead()
        plan = self.plan
        placement = plan.planned
        assert placement is not None
        plan.planned = None
        plan.step += 1
        plan.current = placement
        return placement

    def calibrate(self, placement: Placement, counts: Ints) -> Placement:
        """Let the policy add holders after the gate, and return the placement with them."""
        calibrated = self._checked(self.model.policy.calibrate(self.view, placement, counts), "calibrate")
        if not calibrated.includes(placement):
            raise self._wrong("calibrate", "a placement without some of the holders that it was given")
        if calibrated is not placement:
            self.model.sign(self.name, self.plan.step, self.owners, calibrated)
            calibrated = self.plan.current = self._keep(calibrated)
        return calibrated

    def assign(self, placement: Placement, counts: Ints) -> Quotas:
        """Return this rank's part of the exchange."""
        rank = self.model.world.rank
        quotas = self.model.policy.assign(self.view, placement, counts, rank)
        self._check_quotas(quotas, placement, counts, rank)
        return quotas

    def _check_quotas(self, quotas: Quotas, placement: Placement, counts: Ints, rank: int) -> None:
        """Check that every row of this rank goes to one holder of its expert, and only such rows arrive."""
        if not isinstance(quotas, Quotas):
            raise self._wrong("assign", f"{_kind(quotas)}, not Quotas")
        if quotas.rank != rank or (quotas.placement is not placement and quotas.placement != placement):
            raise self._wrong("assign", f"Quotas of rank {quotas.rank}, or of another placement")
        slots, world_size = placement.slots_on(rank), len(counts)
        if quotas.sent.shape != placement.leaving.shape or quotas.received.shape != (len(slots), world_size):
            shapes = f"sent {list(quotas.sent.shape)} and received {list(quotas.received.shape)}"
            wanted = f"{list(placement.leaving.shape)} and {[len(slots), world_size]}"
            raise self._wrong("assign", f"{shapes}, not {wanted}")
        starts = placement.starts[:-1]
        sent = np.add.reduceat(quotas.sent, starts)
        if (wrong := (sent != counts[rank]) | (np.minimum.reduceat(quotas.sent, starts) < 0)).any():
            expert = int(np.argmax(wrong))
            raise self._wrong(
                "assign",
                f"sends {quotas.sends[expert].tolist()} for expert {expert}. Rank {rank} has "
                f"{int(counts[rank, expert])} rows for it, and ranks {list(placement.holders[expert])} hold it",
            )
        if (wrong := ((quotas.received < 0) | (quotas.received > counts.T[slots])).any(1)).any():
            slot = int(np.argmax(wrong))
            raise self._wrong(
                "assign",
                f"receives {quotas.received[slot].tolist()} of expert {int(slots[slot])} for rank {rank}, which "
                f"holds it. Ranks have {counts[:, slots[slot]].tolist()} rows for it",
            )

    def observe(self, counts: Ints) -> None:
        """Remember the rows ``[W, E]`` of a step, if they tell about the next ones."""
        if self.model.learning:
            self.remember(counts)

    def remember(self, counts: Ints) -> None:
        """Remember the rows ``[W, E]`` of a forward that is over and is known to tell about the next ones."""
        plan, load = self.plan, counts.sum(0)
        plan.loads.append(load)
        plan.total_load = plan.total_load + load
        plan.steps_seen += 1

    def find(self, matrix: torch.Tensor) -> Placement:
        """Return the placement of a graph's ``[E, W]`` tensor."""
        wanted = matrix.numpy()
        key: bytes = wanted.tobytes()
        for known in reversed(self.plan.recent):
            if known.placement.key == key:
                return known.placement
        return self._keep(Placement.from_matrix(wanted))

    def travels(self, placement: Placement) -> Travels:
        """Return how a placement's replicas travel, with this rank's part in that."""
        known = next((known for known in self.plan.recent if known.placement is placement), None)
        if known is not None and known.travels is not None:
            return known.travels
        travels = Travels(placement, self.model.world.rank, stages_of(placement, self.model.topology))
        if known is not None:
            known.travels = travels
        return travels

    def _keep(self, placement: Placement) -> Placement:
        """Return the placement, or an equal one in use with all that was worked out for it, as the newest in use."""
        recent, key = self.plan.recent, placement.key
        known = next((known for known in recent if known.placement.key == key), None)
        if known is None:
            known = InUse(placement)
        else:
            recent.remove(known)
        recent.append(known)
        return known.placement


def _kind(value: object) -> str:
    return "nothing (is there a return statement?)" if value is None else f"a {type(value).__name__}"
