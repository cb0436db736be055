"""What moves between steps is in the time, once."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.compare import systems
from benchmarks.compare.moves import Moves, moments_seconds
from benchmarks.compare.waits import KINDS, seconds_waited
from benchmarks.compare.workloads import OWNERS_CHANGE, counts_of, timed_steps
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import CostModel, LayerSizes, Rates
from hecate.runtime.placement.policy import Policy, Static
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state.layer_plan import LayerPlacer
from hecate.runtime.state.placer import Placer

W, E, MOVE = 2, 4, 0.02
OWNERS = Owners.contiguous(E, W)
SWAPPED = Owners((1, 0, 0, 1), W)
COSTS = CostModel(
    topology=Topology((0, 0, 1, 1)),
    sizes=LayerSizes(row_flops=1, row_bytes=1, expert_bytes=100),
    rates=Rates(flops=1, rank_bytes=100, node_bytes=10),
)


class Turns(Static):
    """Owners change at every second chance."""

    reshard_every = 5

    def choose_owners(self, layers: Any) -> list[Owners]:
        time.sleep(MOVE)
        if not self.reshard_every:
            # Nothing pays for its move if it does not last.
            return [layer.owners for layer in layers]
        return [SWAPPED if layer.owners == OWNERS else OWNERS for layer in layers]


class Engine:
    """Moves take a known time, and are counted."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        world: Any = SimpleNamespace(rank=0, size=W)
        self.placer = Placer(Static(), Topology.even(W, W), world)
        self.layers = [Layer(LayerPlacer(self.placer, id=0, name="one", owners=OWNERS), world)]
        self.owner_mover, self.moved = self, 0

    def move(self, wanted: Any) -> bool:
        changed = [(layer, owners) for layer, owners in wanted if layer.owners != owners]
        for layer, owners in changed:
            time.sleep(MOVE)
            layer.placer.change_owners(owners)
            self.moved += 1
        return bool(changed)


class Layer:
    def __init__(self, placer: LayerPlacer, world: Any) -> None:
        self.placer, self.world, self.num_experts = placer, world, E

    @property
    def owners(self) -> Owners:
        return self.placer.owners


def system(engine: Engine, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> systems.EngineSystem:
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(systems.routing, "prepare", lambda model, tokens: [])
    shape: Any = SimpleNamespace(tokens=4)
    stand_in: Any = engine
    return systems.EngineSystem(stand_in, shape, policy)


def test_owners_move_at_their_steps_and_only_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    one, other = system(engine, Turns(), monkeypatch), system(engine, Static(), monkeypatch)
    # As after a first step: from then on the engine is told to move nothing by itself.
    one.optimizer.state[one.model.weight]["step"] = torch.tensor(1.0)
    one.begin()
    assert one.policy.reshard_every == 0
    counts = np.ones((40, 1, W, E), dtype=np.int64)
    one.catch_up(counts, 4)
    assert one.moves()["moves"] == 0.0 and engine.moved == 0
    one.catch_up(counts, 17)
    # At steps 5, 10 and 15, over 18 steps. Choosing is not charged to a policy that is not Hecate's.
    assert engine.moved == 3 and engine.layers[0].owners == SWAPPED and one.policy.reshard_every == 0
    assert one.moves()["moves"] == pytest.approx(3 * MOVE / 18, rel=0.5)
    before = one.moves()
    other.catch_up(counts, 17)
    assert engine.moved == 4 and engine.layers[0].owners == OWNERS and other.moves()["moves"] == 0.0
    # Back to where it left them, which nobody would do in training.
    one.catch_up(counts, 19)
    assert engine.moved == 5 and engine.layers[0].owners == SWAPPED
    assert one.moved.owners == pytest.approx(before["moves"] * 18)
    one.begin()
    one.catch_up(counts, 0)
    assert engine.layers[0].owners == OWNERS and one.moves()["moves"] == 0.0


def test_moments_of_new_replicas_travel_from_the_nearest_copy() -> None:
    owners = Owners((0, 1, 2, 3), 4)
    none, near = Placement.owned(owners), Placement.with_replicas(owners, [{1}, set(), set(), set()])
    # 2 moments of 100 bytes, over 100 bytes/s inside a node and 10 between nodes.
    assert moments_seconds(none, near, COSTS) == pytest.approx(2.0)
    far = Placement.with_replicas(owners, [{2}, set(), set(), set()])
    assert moments_seconds(none, far, COSTS) == pytest.approx(20.0)
    # The second in a node comes from the first one there.
    both = Placement.with_replicas(owners, [{2, 3}, set(), set(), set()])
    assert moments_seconds(far, both, COSTS) == pytest.approx(2.0)
    assert moments_seconds(both, far, COSTS) == moments_seconds(near, near, COSTS) == 0.0
    # Owners' moves are measured.
    changed = Placement.owned(Owners((1, 0, 2, 3), 4))
    assert moments_seconds(none, changed, COSTS) == 0.0


def test_moves_are_spread_over_the_steps_of_the_workload() -> None:
    assert Moves(owners=3.0, moments=1.0, steps=8).per_step() == {"moves": 0.5, "moments": 0.125}
    assert Moves().per_step() == {"moves": 0.0, "moments": 0.0}


def test_timed_steps_are_of_all_parts_of_a_trace() -> None:
    counts = counts_of("zipf", systems.shapes.SHAPES["gpt-moe-s"], 8)
    for seed in range(20):
        early, middle, late = steps = timed_steps("zipf", counts, 10, 3, seed)
        assert 10 <= early < 115 and 95 < middle < 215 and 195 < late < 300
        assert steps == timed_steps("zipf", counts, 10, 3, seed)
    assert len({tuple(timed_steps("zipf", counts, 10, 3, seed)) for seed in range(20)}) > 15


def test_no_timed_step_is_right_before_owners_may_change() -> None:
    counts = np.ones((300, 1, W, E), dtype=np.int64)
    steps = [step for seed in range(50) for step in timed_steps("zipf", counts, 10, 5, seed)]
    assert not any((step + 1) % every == 0 for step in steps for every in OWNERS_CHANGE)
    every = [policy.reshard_every for policy in systems.policies(systems.shapes.SHAPES["gpt-moe-s"]).values()]
    assert all(any(period % known == 0 for known in OWNERS_CHANGE) for period in every if period)


def test_bursts_are_timed_while_they_last() -> None:
    counts = counts_of("burst", systems.shapes.SHAPES["gpt-moe-s"], 8)
    load = counts.sum(2)
    for seed in range(10):
        for step in timed_steps("burst", counts, 10, 3, seed):
            assert (load[step].max(-1) > 8 * np.median(load[step], -1)).any()


def test_planning_is_timed_once_and_by_when_it_is() -> None:
    class Busy(Static):
        def place(self, layer: Any) -> Any:
            spin(0.01)

        def calibrate(self, layer: Any, placement: Any, counts: Any) -> Any:
            self.place(layer)
            spin(0.01)

    def spin(seconds: float) -> None:
        begun = time.thread_time()
        while time.thread_time() - begun < seconds:
            pass

    policy: Any = Busy()
    planning = systems.Planning(policy)
    policy.place(None)
    policy.calibrate(None, None, None)
    assert planning.seconds == {"before": pytest.approx(0.01, rel=0.3), "after": pytest.approx(0.02, rel=0.3)}
    planning.begin()
    assert planning.seconds == {"before": 0.0, "after": 0.0}


def test_waits_are_by_what_a_collective_carries() -> None:
    spans = [
        ("forward", "exchange", 0.0, 9.0, 1.0, 1.5),
        ("forward", "exchange_back", 0.0, 9.0, 2.0, 2.25),
        ("backward", "average_gradients", 0.0, 9.0, 0.0, 0.0),
    ]
    assert seconds_waited(spans) == dict.fromkeys(KINDS, 0.0) | {"rows": 0.75}
