"""What a policy returns is checked before a step runs on it, and when it is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hecate.runtime.comm.collective import collective_named
from hecate.runtime.comm.world import SINGLE, World
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Quotas, assign_tokens
from hecate.runtime.placement.policy import Policy
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state.layer_plan import LayerPlacer
from hecate.runtime.state.placer import Placer
from tests.support.layers import add_layer

OWNERS = Owners((0, 0, 1, 2), 3)
WORLD = World(rank=1, size=3, group=None, device=torch.device("cpu"))
COUNTS = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 1, 2, 3]])


def placer(method: str, returned: Callable[..., Any], **attributes: Any) -> LayerPlacer:
    """One whose policy has another ``method``."""
    kind = type("Mine", (Policy,), {method: lambda self, *args: returned(*args)} | {"replicates": True} | attributes)
    return LayerPlacer(Placer(kind(), Topology.even(3, 3), WORLD), id=0, name="the layer", owners=OWNERS)


def holders(*ranks: tuple[int, ...]) -> Callable[..., Placement]:
    return lambda *_: Placement(OWNERS, ranks)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda layer: None, r"nothing \(is there a return statement\?\), not a Placement"),
        (lambda layer: [(0,)], "a list, not a Placement"),
        (lambda layer: Placement.owned(Owners((0, 1, 1, 2), 3)), "other owners than the layer has now"),
        (holders((0,), (0,), (1,)), "holders of 3 experts, not 4"),
        (
            holders((0,), (0,), (0, 2), (2,)),
            r"holders \[0, 2\] of expert 2, in which its owner, rank 1, must stand once",
        ),
        (holders((0, 0), (0,), (1,), (2,)), r"holders \[0, 0\] of expert 0"),
        (holders((0,), (0,), (1, 3), (2,)), "holders that are none of the ranks 0 to 2"),
    ],
)
def test_placements(returned: Callable[..., Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=rf"Mine\.place returned, for the layer, {message}"):
        placer("place", returned).take()


def test_replicas_without_the_attribute() -> None:
    wrong = placer("place", holders((0, 1), (0,), (1,), (2,)), replicates=False)
    with pytest.raises(RuntimeError, match=r"replicas, but Mine\.replicates is not set"):
        wrong.take()


def test_calibrate_must_keep_holders() -> None:
    before = Placement.with_replicas(OWNERS, [{1}, set(), set(), set()])
    wrong = placer("calibrate", lambda layer, placement, counts: Placement.owned(OWNERS))
    with pytest.raises(RuntimeError, match=r"Mine\.calibrate returned.*without some of the holders"):
        wrong.calibrate(before, COUNTS)


def right() -> Quotas:
    """Every row goes to its owner: what rank 1 sends and receives."""
    return Quotas(Placement.owned(OWNERS), 1, COUNTS[1].copy(), COUNTS.T[[2]])


def changed(name: str, index: Any, value: int) -> Quotas:
    numbers = getattr(right(), name).copy()
    numbers[index] = value
    return replace(right(), **{name: numbers})


@pytest.mark.parametrize(
    ("quotas", "message"),
    [
        (None, "nothing .*, not Quotas"),
        (replace(right(), rank=0), "Quotas of rank 0, or of another placement"),
        (replace(right(), placement=Placement.owned(Owners((0, 1, 1, 2), 3))), "Quotas of rank 1, or of another"),
        (replace(right(), sent=right().sent[:2]), r"sent \[2\] and received \[1, 3\], not \[4\] and \[1, 3\]"),
        (changed("sent", 2, 6), r"sends \[0, 6, 0\] for expert 2. Rank 1 has 7 rows for it, and ranks \[1\] hold"),
        (changed("sent", 3, -8), r"sends \[0, 0, -8\] for expert 3. Rank 1 has 8 rows for it"),
        (changed("received", (0, 0), 4), r"receives \[4, 7, 2\] of expert 2 for rank 1, which holds it"),
    ],
)
def test_quotas(quotas: Any, message: str) -> None:
    wrong = placer("assign", lambda *_: quotas)
    with pytest.raises(RuntimeError, match=rf"Mine\.assign returned, for the layer, {message}"):
        wrong.assign(Placement.owned(OWNERS), COUNTS)


def test_quotas_of_matrices() -> None:
    placement = Placement.with_replicas(OWNERS, [{1}, set(), set(), set()])
    quotas = assign_tokens(COUNTS, placement, Topology.even(3, 3), 1)
    again = Quotas.from_matrices(placement, 1, quotas.sends, quotas.receives)
    assert np.array_equal(again.sent, quotas.sent) and np.array_equal(again.received, quotas.received)
    for name, index, message in (
        ("sends", (3, 0), r"rank 1 sends \[9, 0, 8\] of expert 3, which ranks \[2\] hold"),
        ("receives", (0, 3), r"rank 1 receives \[9, 0, 0\] of expert 3, which ranks \[2\] hold"),
    ):
        matrices = {"sends": quotas.sends, "receives": quotas.receives}
        matrices[name][index] = 9
        with pytest.raises(ValueError, match=message):
            Quotas.from_matrices(placement, 1, **matrices)
    with pytest.raises(ValueError, match=r"sends \[2, 3\] and receives \[3, 4\], not \[4, 3\] and \[3, 4\]"):
        Quotas.from_matrices(placement, 1, quotas.sends[:2], quotas.receives)


def test_right_quotas_pass() -> None:
    found = placer("assign", lambda *_: right()).assign(Placement.owned(OWNERS), COUNTS)
    assert np.array_equal(found.sends, right().sends)


def test_the_next_step_is_planned_while_rows_are_on_their_way() -> None:
    """Behind the exchange to experts: its placement is compared in the next layer's exchange, before it is used."""
    layer = add_layer(name="planned", owners=Owners.contiguous(4, 1), world=SINGLE)
    exchange, ops = collective_named("exchange"), torch.ops.hecate
    rows, ticket = torch.randn(3, 2), [torch.tensor([[3], [3]]), torch.arange(3), torch.arange(3)]
    ops.place(rows, layer.id)
    started = exchange.start(rows, *ticket, layer.id, [], "forward exchange 0 0 0 planned")
    assert layer.placer.plan.planned is None
    torch.testing.assert_close(exchange.wait(started, rows, *ticket, layer.id, []), rows)
    planned = layer.placer.plan.planned
    assert planned is not None
    ops.exchange_back(rows, *ticket, 3, layer.id)
    assert layer.placer.plan.planned is planned
    # The host of a GPU launches the experts first.
    launches = replace(layer, world=replace(SINGLE, device=torch.device("cuda")))
    assert (launches.planning(homeward=False), launches.planning(homeward=True)) == (None, layer.placer.plan_ahead)


def test_what_a_step_asks_of_its_placement_is_worked_out_when_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning hides behind rows on their way, and a step's own start does not."""
    made = Placement.with_replicas(OWNERS, [{1}, set(), {0}, set()])
    layer = placer("place", lambda *_: made)
    layer.plan_ahead()
    stages = [f"placement.planner.stages.{name}" for name in ("_of_rank", "Parts.of")]
    for name in ("state.layer_plan.stages_of", *stages, "placement.placement.np.lexsort"):
        monkeypatch.setattr(f"hecate.runtime.{name}", lambda *_: pytest.fail("too late"))
    taken = layer.take()
    assert taken is made
    assert layer.find(torch.from_numpy(made.matrix.copy())) is made
    travels = layer.travels(made)
    assert [len(stage.experts) for stage in travels.stages] == [0, 2]
    assert (travels.leaving.tolist(), travels.places.tolist(), travels.replicas.tolist()) == ([2], [0], [0])
    (_, there), (_, slots) = travels.there, travels.slots
    assert (there.leave.tolist(), there.arrive.tolist()) == ([0], [1])
    assert there.send == there.receive == [1, 0, 0]
    assert (slots.leave.tolist(), slots.arrive.tolist(), travels.summed.tolist()) == ([0], [1], [0])
    _, parts = travels.parts
    assert (parts.order.tolist(), parts.begins.tolist(), parts.rounds, len(parts.passed_on)) == ([0], [0, 1], (1,), 0)
    assert made.slots_on(WORLD.rank).tolist() == [2, 0]


def test_what_was_worked_out_for_a_placement_is_kept_while_it_stays() -> None:
    """A policy may return an equal one in each step."""
    layer = placer("place", lambda *_: Placement.with_replicas(OWNERS, [{1}, set(), {0}, set()]))
    first = layer.take()
    assert layer.take() is first and layer.travels(first) is layer.travels(first)
    assert len(layer.plan.recent) == 1


def test_a_placement_is_found_by_its_matrix_as_long_as_a_backward_may_ask_for_it() -> None:
    """Of the forward, of what was added to it after the gate, and of the next, which is planned by then."""
    ways = [[{1}, set(), set(), set()], [set(), {2}, set(), set()], [set(), set(), {0}, set()]]
    made = [Placement.with_replicas(OWNERS, way) for way in ways]
    more = [Placement.with_replicas(OWNERS, [*way[:3], {0}]) for way in ways]
    layer = placer(
        "place",
        lambda *_: made[layer.plan.step],
        calibrate=lambda self, view, placement, _: more[made.index(placement)],
    )
    for step in range(2):
        layer.calibrate(layer.take(), COUNTS)
        layer.plan_ahead()
        for placement in (made[step], more[step]):
            assert layer.find(torch.from_numpy(placement.matrix.copy())) is placement
    other = Placement.with_replicas(OWNERS, [{2}, set(), set(), set()])
    assert layer.find(torch.from_numpy(other.matrix.copy())) == other
