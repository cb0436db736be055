"""hecate.record: what is in the file, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hecate
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
    first, _ = run_ranks("tests.hecate_compile.reports.test_record_routing:record_on_ranks", 2, path=str(path))
    with np.load(path) as trace:
        counts = trace["counts"]
        assert counts.shape == (3, 2, 2, 8) and counts.dtype == np.uint32
        assert counts.sum(2).tolist() == first["seen"]
        assert trace["layers"].tolist() == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
        assert trace["owners"].tolist() == [[0] * 4 + [1] * 4] * 2


def test_refusals_and_a_block_that_raises(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = hecate.compile(build("mixtral"), hecate.Config(backend="aot_eager"))
    for wrong in (tmp_path / "nowhere" / "x.npz", tmp_path):
        with pytest.raises(OSError, match=f"rank 0 cannot write {wrong}"), hecate.record(model, wrong):
            raise AssertionError("the block must not run")
    with pytest.raises(ValueError, match="was not compiled"), hecate.record(build("mixtral"), tmp_path / "x.npz"):
        pass
    with pytest.raises(ZeroDivisionError), hecate.record(model, tmp_path / "x.npz"):
        run_step(model, batch(0))
        with pytest.raises(ValueError, match="recorded already"), hecate.record(model, tmp_path / "y.npz"):
            pass
        raise ZeroDivisionError
    with np.load(tmp_path / "x.npz") as trace:
        assert trace["counts"].shape == (1, 2, 1, 8)
    assert not (tmp_path / "y.npz").exists()
