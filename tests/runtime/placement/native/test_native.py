"""The compiled planner returns the numbers of the Python one, and is compiled once, or does without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from hecate.runtime.placement import native, planner
from hecate.runtime.placement.native import build, calls
from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import (
    CostModel,
    LayerSizes,
    Quotas,
    Rates,
    Recipe,
    assign_tokens,
    near_recipes,
    split_fastest,
)
from hecate.runtime.placement.planner.balance import balance, balance_in_nodes, owners_only
from hecate.runtime.placement.topology import Topology
from tests.support.extent import ALL

_CASES = 10_000 if ALL else 1_000


def _topology(random: Random, world_size: int) -> Topology:
    if random.random() < 0.1:
        # Ranks of a node are not neighbours.
        return Topology(tuple(rank % min(2, world_size) for rank in range(world_size)))
    if random.random() < 0.8:
        return Topology.even(world_size, random.choice([1, 2, 3, 4, 8, world_size]))
    nodes = [0]
    while len(nodes) < world_size:
        nodes.append(nodes[-1] + (random.random() < 0.4))
    return Topology(tuple(nodes))


def _counts(random: Random, world_size: int, experts: int) -> Ints:
    rng = np.random.default_rng(random.randrange(10**9))
    weights = (rng.permutation(experts) + 1.0) ** -random.choice([0, 0.5, 1, 2, 4])
    rows = random.choice([0, 1, 7, 100, 4096, 10**6])
    counts = rng.multinomial(rows, weights / weights.sum(), size=world_size)
    return counts * rng.integers(0, 2, size=(world_size, 1)) if random.random() < 0.3 else counts


def _is_as_python_has_it(costs: CostModel, placement: Placement, counts: Ints, rank: int) -> bool:
    found = native.assign_fastest(costs, placement, counts, rank)
    split = split_fastest(counts.sum(0).tolist(), placement, costs)
    expected = assign_tokens(counts, placement, costs.topology, rank, "balanced", split)
    return np.array_equal(found.sent, expected.sent) and np.array_equal(found.received, expected.received)


def _case(random: Random) -> tuple[CostModel, Placement, Ints, int]:
    world_size, experts = random.choice([1, 2, 3, 4, 6, 8, 12, 32, 64]), random.choice([1, 2, 5, 8, 16, 64])
    owners = Owners(tuple(random.randrange(world_size) for _ in range(experts)), world_size)
    part = random.choice([0, 0.05, 0.2, 0.6, 1])
    replicas = [{rank for rank in range(world_size) if random.random() < part} for _ in range(experts)]
    # All that may be slow is the slowest in some of them, so that each way to split wins.
    rates = Rates(
        flops=10 ** random.uniform(9, 14),
        rank_bytes=10 ** random.uniform(7, 12),
        node_bytes=10 ** random.uniform(6, 11),
    )
    sizes = LayerSizes(row_flops=10 ** random.uniform(3, 8), row_bytes=1536, expert_bytes=1e6)
    costs = CostModel(topology=_topology(random, world_size), sizes=sizes, rates=rates)
    counts = _counts(random, world_size, experts)
    return costs, Placement.with_replicas(owners, replicas), counts, random.randrange(world_size)


def _way_of(costs: CostModel, placement: Placement, rows: list[int]) -> str:
    """Which of the three ways to split is taken, if they differ, on several nodes."""
    if costs.topology.num_nodes == 1 or not costs.topology.in_order or not placement.num_replicas:
        return "other"
    splits = {
        "owners": owners_only(rows, placement),
        "nodes": balance_in_nodes(rows, placement, costs.topology),
        "even": balance(rows, placement, costs.topology),
    }
    taken = split_fastest(rows, placement, costs)
    found = [way for way, split in splits.items() if split == taken]
    return found[0] if len(found) == 1 else "other"


def _same_segments(quotas: Quotas, chunks: int) -> bool:
    for chunk in range(chunks):
        found, expected = (room.segments_of(quotas, chunk, chunks) for room in (native, planner))
        pairs = [(found.splits, expected.splits), *zip(found.leaving, expected.leaving, strict=True)]
        pairs += zip(found.arriving, expected.arriving, strict=True)
        if not all(np.array_equal(one, other) for one, other in pairs):
            return False
    return True


def test_compiled_quotas_are_those_of_python() -> None:
    assert build.library() is not None, "no C++ compiler, which the tests need"
    random, ways, fastest = Random(0), set(), Counter[str]()
    for _ in range(_CASES):
        case = costs, placement, counts, _ = _case(random)
        assert _is_as_python_has_it(*case), case
        assert _same_segments(native.assign_fastest(*case), random.choice([1, 1, 2, 3])), case
        ways.add((costs.topology.num_nodes > 1, placement.num_replicas > 0, costs.topology.in_order))
        fastest[_way_of(costs, placement, counts.sum(0).tolist())] += 1
    # Each way to split is the fastest in some.
    assert len(ways) == 6 and min(fastest[way] for way in ("owners", "nodes", "even")) > 1, fastest


def _plans(costs: CostModel, owners: Owners, load: Ints, slots: int, random: Random) -> Iterator[tuple[Any, Any]]:
    """What both planners say, the compiled one first: placements, recipes, slots, owners, seconds."""
    fills, turn = random.choice([None, True, False]), random.randrange(100)
    choice = planner.materialize_fastest(load, owners, costs, slots=slots, fills=fills)
    found = native.search(load, owners, costs, slots=slots, fills=fills)
    yield found, (choice.placement, choice.recipe, choice.slots)
    choice = planner.materialize_frugally(load, owners, costs, slots=slots)
    found = native.search(load, owners, costs, slots=slots, frugal=True)
    yield found, (choice.placement, choice.recipe, choice.slots)
    recipe = choice.recipe or Recipe(random.randrange(4), costs.topology.num_nodes > 1, random.random() < 0.5)
    near = near_recipes(recipe, costs.topology, turn, random.choice([0, 1, 3]))
    of_near: dict[str, Any] = dict(slots=slots, recipes=near)
    yield native.choose(load, owners, costs, **of_near), planner.materialize_again(load, owners, costs, **of_near)
    if owners.world_size > 1 and turn < 25:
        of_one: dict[str, Any] = dict(slots=slots, recipe=random.choice([None, recipe]))
        swapped = planner.swap_owners(load, owners, costs, **of_one)
        yield native.swapped_owners(load, owners, costs, **of_one), swapped
        yield native.predict(load, swapped, costs, **of_one), planner.seconds_of(load, swapped, costs, **of_one)


def test_compiled_placements_are_those_of_python() -> None:
    random, replicated, moved = Random(0), 0, 0
    for _ in range(_CASES // 4):
        costs, placement, counts, _ = _case(random)
        hidden, transfers = random.choice([0.0, 1e-4, 4e-3, 1.0]), random.choice([2, 3])
        sizes = replace(costs.sizes, expert_bytes=10 ** random.uniform(3, 7), expert_transfers=transfers)
        costs = replace(costs, sizes=sizes, rates=replace(costs.rates, hidden_seconds=hidden))
        load, owners, slots = counts.sum(0), placement.owners, random.choice([0, 1, 2, 3, 4, 6])
        for found, expected in _plans(costs, owners, load, slots, random):
            assert found == expected, (costs, owners, load, slots)
            replicated += isinstance(found, tuple) and found[0].num_replicas > 0
            moved += isinstance(found, Owners) and found != owners
    assert replicated > _CASES // 8 and moved > _CASES // 100


def test_without_a_compiler_python_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "library", lambda: None)
    random = Random(1)
    for _ in range(20):
        costs, placement, counts, rank = _case(random)
        assert _is_as_python_has_it(costs, placement, counts, rank)
        assert _same_segments(native.assign_fastest(costs, placement, counts, rank), 2)
        assert all(found == expected for found, expected in _plans(costs, placement.owners, counts.sum(0), 2, random))
    assert native.join_segments(np.array([7, 0, 3]), np.array([2, 0, 3]), 5).tolist() == [7, 8, 3, 4, 5]


def test_segments_are_joined() -> None:
    assert native.join_segments(np.array([7, 0, 3]), np.array([2, 0, 3]), 5).tolist() == [7, 8, 3, 4, 5]
    lines = np.array([[7, 0], [3, 0]]), np.array([[2, 5], [3, 5]])
    assert native.join_segments(lines[0][:, 0], lines[1][:, 0], 5).tolist() == [7, 8, 3, 4, 5]
    assert native.join_segments(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0).tolist() == []


def test_it_is_compiled_once_and_may_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load = build.library.__wrapped__
    assert load() is not None
    (built,) = (tmp_path / "hecate").iterdir()
    before = built.stat().st_mtime_ns
    assert load() is not None and built.stat().st_mtime_ns == before
    monkeypatch.setattr(build, "_ALLOWED", False)
    assert load() is None


def test_only_a_whole_file_of_ones_own_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = build.library.__wrapped__
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    assert load() is not None
    (built,) = (tmp_path / "first" / "hecate").iterdir()
    # What is left of one after the machine went down is made anew.
    part = tmp_path / "second" / "hecate" / built.name
    part.parent.mkdir(parents=True)
    part.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    assert load() is not None and part.stat().st_size == built.stat().st_size
    built.chmod(0o666)
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "hecate").symlink_to(tmp_path / "second" / "hecate")
    for folder in ("first", "third"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / folder))
        with pytest.warns(UserWarning, match="is a link, or others may write to it"):
            assert load() is None


def test_what_the_compiler_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.warns(UserWarning, match=r"runs as Python, because compiling it failed: no such option"):
        assert build.library.__wrapped__() is None
    assert [*(tmp_path / "cache" / "hecate").iterdir()] == []
