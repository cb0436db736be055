"""The simulator with groups of ranks: their collectives by hand, and real compiled graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.policy import LayerView, Static
from hecate.simulator import Capture, ClusterSpec, Simulator, walk
from hecate.simulator.cluster import ClusterError
from hecate.simulator.program import Among, Start, Wait, program_of
from hecate.simulator.workloads import make
from tests.hecate_compile.simulator.test_step import SPEC, captured, routed

# Four nodes of two ranks.
EIGHT = replace(SPEC, nodes=4)


@pytest.fixture(scope="module")
def made() -> Capture:
    """Two groups of two nodes each."""
    return captured(spec=EIGHT, expert_group=4)


def _seconds(made: Capture, among: Among, spec: ClusterSpec = EIGHT) -> float:
    """Seconds of an all-reduce of 8e5 bytes that is waited for at once."""
    simulator = Simulator(made, spec)
    items = [Start(token=0, operator="average_gradients", layer=None, unit=8e5, among=among), Wait(0)]
    simulator.parts = [("forward", items)]
    return simulator.step(routed(made, "balanced", SPEC)).seconds


def test_an_all_reduce_over_everyone_enters_each_node_once(made: Capture) -> None:
    assert _seconds(made, "everyone") == pytest.approx(2 * 7 / 8 * 8e5 / EIGHT.node_bytes)
    # On CPUs it is added up inside nodes first.
    cpus = replace(EIGHT, cpus=True)
    assert _seconds(made, "everyone", cpus) == pytest.approx(2 * 3 / 4 * 8e5 / EIGHT.node_bytes)
    inside = replace(EIGHT, rank_bytes=1e3)
    assert _seconds(made, "everyone", inside) == pytest.approx(2 * 7 / 8 * 8e5 / 1e3)


def test_twins_of_all_ranks_of_a_node_share_its_link(made: Capture) -> None:
    assert _seconds(made, "twins") == pytest.approx(2 * (2 * 1 / 2 * 8e5) / EIGHT.node_bytes)


def test_hops_and_plans_are_charged(made: Capture) -> None:
    slow = replace(EIGHT, hop=1000.0, ring=10.0)
    # A tree of eight, or of two.
    assert _seconds(made, "everyone", slow) == pytest.approx(_seconds(made, "everyone") + 2 * (10 + 3 * 1000))
    assert _seconds(made, "twins", slow) == pytest.approx(_seconds(made, "twins") + 2 * (10 + 1000))
    layers = routed(made, "balanced", SPEC)
    plain, planned = (
        Simulator(made, spec).step(layers).seconds for spec in (EIGHT, replace(EIGHT, plan=5e3, plan_rank=1e3))
    )
    # Each of two layers waits for counts once, in groups of four.
    assert planned == pytest.approx(plain + 2 * (5e3 + 4 * 1e3))


def test_graphs_of_groups_say_who_averages(made: Capture) -> None:
    symbols: dict[Any, Any] = {}
    programs = [program_of(graph, symbols) for graph in made.graphs]
    among = [one.among for one in programs[1] if isinstance(one, Start) and one.operator == "average_gradients"]
    assert made.groups == 2 and among.count("twins") == len(made.layers) and "everyone" in among
    seconds = Simulator(made, EIGHT).step(routed(made, "balanced", SPEC)).seconds
    assert seconds > Simulator(captured(), SPEC).step(routed(made, "balanced", SPEC)).seconds


def test_a_group_is_whole_nodes_or_part_of_one() -> None:
    assert (EIGHT.of_group(4).nodes, EIGHT.of_group(4).gpus) == (2, 2)
    assert (EIGHT.of_group(1).nodes, EIGHT.of_group(1).gpus) == (1, 1)
    with pytest.raises(ClusterError, match="neither whole nodes of 2 nor equal parts"):
        replace(EIGHT, nodes=3).of_group(3)
    with pytest.raises(ClusterError, match="its 8 ranks do not make whole groups of 3"):
        EIGHT.of_group(3)


class _Moves(Static):
    """A policy that notes the loads from which it chooses owners, and turns owners by one rank."""

    reshard_every = 2

    def __init__(self) -> None:
        self.seen: list[LayerView] = []

    def choose_owners(self, layers: Sequence[LayerView]) -> list[Owners]:
        self.seen += layers
        return [Owners(tuple((rank + 1) % 4 for rank in view.owners.ranks), 4) for view in layers]


def test_groups_are_walked_alone_and_share_their_owners() -> None:
    counts = make("zipf", steps=5, layers=1, ranks=8, experts=8, rows=100)
    groups = np.stack(np.split(counts, 2, axis=2))
    policy, owners = _Moves(), [Owners.contiguous(8, 4)]
    known: dict[str, Any] = {"topology": SPEC.topology, "rates": SPEC.rates, "sizes": captured(layers=1).sizes}
    for step, found in walk(policy, groups, owners, **known):
        first, second = (one[0].placement.owners for one in found)
        assert first == second == Owners(tuple((r + step // 2) % 4 for r in owners[0].ranks), 4)
        for group, (layer,) in enumerate(found):
            assert (layer.computed.sum(1) == groups[group, step, 0].sum(0)).all()
    # From the mean load of both, in the first group alone.
    assert len(policy.seen) == 2
    wanted = counts[:2, 0].sum((0, 1)) // 2 // 2
    assert np.abs(policy.seen[0].long_load - wanted).max() <= 1
    alone, beside = (
        [found[-1][0].rows.tolist() for _, found in walk(Static(), some, owners, **known)]
        for some in (groups[1:], groups)
    )
    assert alone == beside
