"""hecate.record: what is in the file, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hecate
from hecate.cli import app
from hecate.runtime.placement.planner import LayerSizes
from hecate.simulator.replay import load_recorded
from tests.support.models import batch, build
from tests.support.parity import run_step
from tests.support.ranks import run_ranks


def record_on_ranks(path: str) -> dict[str, Any]:
    model = hecate.compile(build("mixtral"), hecate.Config(backend="aot_eager"))
    seen = []
    with hecate.record(model, path):
        for step in range(3):
            run_step(model, batch(step))
            seen.append([layer.expert_rows for layer in hecate.stats(model).layers])
        with torch.no_grad():
            model(input_ids=batch(9))
    run_step(model, batch(4))
    return {"seen": seen}


@pytest.mark.distributed
def test_a_trace_holds_what_stats_showed(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    first, _ = run_ranks(record_on_ranks, 2, path=str(path))
    with np.load(path) as trace:
        counts = trace["counts"]
        assert counts.shape == (3, 2, 2, 8) and counts.dtype == np.uint32
        assert counts.sum(2).tolist() == first["seen"]
        assert trace["layers"].tolist() == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
        assert trace["owners"].tolist() == [[0] * 4 + [1] * 4] * 2
    recorded = load_recorded(path)
    # Three matrices of 32 x 16 in float32, and a row of 32.
    assert recorded.sizes == (LayerSizes(row_flops=2 * 3 * 32 * 16, row_bytes=128, expert_bytes=4 * 3 * 32 * 16),) * 2
    assert recorded.topology.node_of == (0, 0) and recorded.rates.flops > 0
    # The same file on the command line.
    ran = CliRunner().invoke(app, ["replay", str(path), "--policy", "static", "--policy", "paper", "--nodes", "2"])
    assert ran.exit_code == 0 and "3 steps, 2 layers, 2 ranks on 2 node(s), 8 experts" in ran.output
    assert re.search(r"static .* 1\.00", ran.output) and "paper" in ran.output


def test_traces_that_cannot_be_replayed(tmp_path: Path) -> None:
    old = Path(__file__).parents[3] / "benchmarks" / "traces" / "natural.npz"
    for trace, options, said in (
        (old, [], "does not say what model it is of"),
        (tmp_path / "none.npz", [], "is not a trace"),
        (old, ["--policy", "fastest"], "does not say"),
    ):
        ran = CliRunner().invoke(app, ["replay", str(trace), *options])
        # The box around the message breaks its lines.
        assert ran.exit_code == 2 and said in re.sub(r"\s*│\n│\s*", " ", ran.output), ran.output


def test_a_bug_in_a_replay_is_no_bad_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise ValueError("a bug in a policy")

    whole = {"owners": np.zeros((1, 4), np.int64), "nodes": np.zeros(2, np.int64)}
    np.savez(tmp_path / "x.npz", counts=np.ones((1, 1, 2, 4)), sizes=np.ones((1, 5)), rates=np.ones(5), **whole)
    monkeypatch.setattr("hecate.commands.replay.replay_trace", fail)
    ran = CliRunner().invoke(app, ["replay", str(tmp_path / "x.npz")])
    assert isinstance(ran.exception, ValueError) and "a bug in a policy" in str(ran.exception)


def test_refusals_and_a_block_that_raises(tmp_path: Path) -> None:
    model = hecate.compile(build("plain", layers=1), hecate.Config(backend="aot_eager"))
    for wrong in (tmp_path / "nowhere" / "x.npz", tmp_path):
        with pytest.raises(OSError, match=f"rank 0 cannot write {wrong}"), hecate.record(model, wrong):
            raise AssertionError("the block must not run")
    with (
        pytest.raises(ValueError, match="was not compiled"),
        hecate.record(build("plain"), tmp_path / "x.npz"),
    ):
        pass
    with pytest.raises(ZeroDivisionError), hecate.record(model, tmp_path / "x.npz"):
        run_step(model, batch(0))
        with pytest.raises(ValueError, match="recorded already"), hecate.record(model, tmp_path / "y.npz"):
            pass
        raise ZeroDivisionError
    with np.load(tmp_path / "x.npz") as trace:
        assert trace["counts"].shape == (1, 1, 1, 8)
    assert not (tmp_path / "y.npz").exists()
