"""Routing that is replayed: committed traces, made-up ones, workloads by name, and files that are none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay import CLUSTERS, SIZES, WARM_UP, main, play_cell, rivals
from hecate.runtime.placement.hecate_policy import Hecate
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Rates
from hecate.runtime.placement.policy import LayerView, Policy, Static
from hecate.runtime.placement.topology import Topology
from hecate.simulator.replay import replay
from hecate.simulator.workloads import BURST_STEPS, STEPS_BETWEEN_MOVES, WORKLOADS, load_trace, make
from tests.support.extent import ALL

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "benchmarks" / "traces"


def test_natural_routing_is_balanced_with_two_replicas_per_rank() -> None:
    counts, owners = load_trace(TRACES / "natural.npz")
    ranks = counts.shape[2]
    assert ranks == 8
    topology, options = Topology.even(ranks, ranks), {"rates": CLUSTERS["a"], "sizes": [SIZES] * counts.shape[1]}
    played = [replay(counts * 16, owners, policy, topology, **options) for policy in (Static(), Hecate(replicas=2))]
    static, balanced = (one.imbalance.mean() for one in played)
    assert balanced <= 1.05 and static > 1.2, "the trace is not balanced by itself"


def test_the_committed_traces_are_small() -> None:
    files = list(TRACES.glob("*.npz"))
    assert len(files) >= 2
    assert sum(path.stat().st_size for path in files) <= 2**20
    for path in files:
        assert len(load_trace(path)[0]) >= 200


def test_owners_follow_a_load_that_stays() -> None:
    """Two warm experts on one rank: re-sharding parts them, once."""
    counts = np.ones((30, 1, 4, 8), dtype=np.int64)
    counts[..., :2] = 50
    policy = Hecate(replicas=0, reshard_every=10)
    rates = Rates(flops=1e12, rank_bytes=1e10, node_bytes=1e10)
    result = replay(counts, np.arange(8)[None] // 2, policy, Topology.even(4, 4), rates=rates, sizes=[SIZES])
    assert result.imbalance[9, 0] > 3.7
    assert result.imbalance[10:, 0].max() < 2.0, "one warm expert is the least that a rank can have"
    assert 0 < result.moved <= 8


class Stays(Policy):
    """A replica of expert 0 on rank 1 from step 2 on, and one on rank 2 from step 4 on; owners change at step 6."""

    replicates, reshard_every = True, 6
    step = 0

    def place(self, layer: LayerView) -> Placement:
        more = {rank for rank, since in ((1, 2), (2, 4)) if self.step >= since}
        self.step += 1
        return Placement.with_replicas(layer.owners, [more, *[set() for _ in layer.owners.ranks[1:]]])

    def choose_owners(self, layers: Sequence[LayerView]) -> list[Owners]:
        return [Owners((1, 0, 2, 3), 4)]


def test_what_moves_between_steps_is_in_the_time() -> None:
    """Ranks 0 and 1 are a node; three expert sizes move, over a node's link or a rank's."""
    counts = np.full((8, 1, 4, 4), 10, dtype=np.int64)
    rates = Rates(flops=1e12, rank_bytes=2e9, node_bytes=1e9)
    size, options = 3 * SIZES.expert_bytes, {"rates": rates, "sizes": [SIZES]}
    inside, across = size / 2e9, size / 1e9
    played = replay(counts, np.arange(4)[None], Stays(), Topology.even(4, 2), keeps_states=True, **options)
    # At step 6 rank 1, which owns expert 0 now, had it already; rank 0 has what rank 1 had.
    assert played.moves[:, 0] == pytest.approx([0, 0, inside, 0, across, 0, inside, 0])
    forgets = replay(counts, np.arange(4)[None], Stays(), Topology.even(4, 2), **options)
    assert forgets.moves[:, 0] == pytest.approx([0, 0, 0, 0, 0, 0, inside, 0])
    assert played.mean_seconds() == pytest.approx(played.seconds.mean() + (2 * inside + across) / 8)


@pytest.mark.skipif(not ALL, reason="half a minute to play all policies: with HECATE_TESTS=all")
def test_hecate_is_first_in_a_cell_when_everybody_pays_for_moves() -> None:
    found = play_cell("gpt-moe-s.a", {"static": Static(), "hecate": Hecate(), **rivals(2)}, workloads=("natural",))
    seconds = {name: result.mean_seconds(WARM_UP) for name, result in found["natural"].items()}
    assert min(seconds, key=seconds.__getitem__) == "hecate", seconds
    assert seconds["SmartMoE"] < seconds["static"], "with a cost check a move pays"


def test_the_tool_prints_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    trace, png = tmp_path / "trace.npz", tmp_path / "heat.png"
    counts = rng.multinomial(500, np.full(8, 1 / 8), size=(12, 2, 4)).astype(np.uint16)
    np.savez_compressed(trace, counts=counts, layers=np.array(["a", "b"]), owners=np.tile(np.arange(8) // 2, (2, 1)))
    monkeypatch.setattr("sys.argv", ["replay", str(trace), "--nodes", "2", "--png", str(png)])
    main()
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("static", "hecate, paper", "hecate, time"))
    assert png.read_bytes().startswith(b"\x89PNG")


def test_wrong_files_and_options_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "notes.npz"
    text.write_text("not a trace")
    for arguments, said in (
        ([str(text)], "is not a trace that hecate.record wrote: it is no npz archive"),
        ([str(tmp_path / "missing.npz")], "is not a trace"),
        ([str(TRACES / "natural.npz"), "--nodes", "3"], "--nodes must divide"),
    ):
        monkeypatch.setattr("sys.argv", ["replay", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert said in f"{ended.value} {capsys.readouterr().err}"


# --- workloads are what their names say ---

SHAPE = dict(steps=100, layers=3, ranks=8, experts=64, rows=4096)


def owned_imbalance(counts: np.ndarray) -> np.ndarray:
    """Rows of the busiest rank over the mean under expert parallelism, ``[step, layer]``."""
    ranks = counts.sum(2).reshape(*counts.shape[:2], 8, -1).sum(-1)
    return ranks.max(-1) / ranks.mean(-1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_rank_has_its_rows_and_the_seed_decides(name: str) -> None:
    counts = make(name, **SHAPE)
    assert counts.shape == (100, 3, 8, 64) and counts.dtype == np.int64
    assert (counts.sum(-1) == 4096).all() and (counts >= 0).all()
    assert (counts == make(name, **SHAPE)).all()
    assert name == "balanced" or (counts != make(name, **SHAPE, seed=1)).any()


def test_skews() -> None:
    assert owned_imbalance(make("balanced", **SHAPE)).max() == 1.0
    assert 3.5 < owned_imbalance(make("zipf", **SHAPE)).mean() < 5.5
    assert (owned_imbalance(make("one_hot", **SHAPE)) == 8.0).all()
    burst = owned_imbalance(make("burst", **SHAPE))
    assert np.median(burst) < 1.1 and burst.max() > 3


def test_drift_moves_one_hot_expert_at_a_time() -> None:
    load = make("drift", **SHAPE).sum(2)[:, 0].astype(float)
    change = np.abs(np.diff(load, axis=0)).sum(1) / load.sum(1)[1:]
    moves = change[STEPS_BETWEEN_MOVES - 1 :: STEPS_BETWEEN_MOVES]
    still = np.delete(change, np.arange(STEPS_BETWEEN_MOVES - 1, len(change), STEPS_BETWEEN_MOVES))
    assert moves.max() > 2 * still.max()
    assert still.max() < 0.1


def test_bursts_are_short() -> None:
    hot = make("burst", **SHAPE).sum(2)[:, 0].max(-1) > 8 * 4096 / 4
    assert 0 < hot.sum() <= BURST_STEPS * 3


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no workload 'flat'; there are balanced, zipf"):
        make("flat", **SHAPE)
