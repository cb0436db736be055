"""explain, stats and graph dumps at one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hecate
from hecate.passes import PASSES
from hecate.reports.stats import LayerStats, Stats
from tests.support.models import batch, build


@pytest.fixture
def model() -> torch.nn.Module:
    torch._dynamo.reset()
    return hecate.compile(build("mixtral"), hecate.Config(backend="aot_eager"))


def test_explain_before_and_after_the_first_forward(model: torch.nn.Module) -> None:
    text = str(hecate.explain(model))
    assert "nothing compiled yet" in text
    assert "Hecate(objective='time', replicas='auto'" in text
    assert "model.layers.0.mlp.experts" in text and "num_experts = 8" in text
    model(input_ids=batch(0), labels=batch(0))
    explanation = hecate.explain(model)
    assert len(explanation.graphs) == 1
    text = str(explanation)
    positions = [text.index(function.__name__) for function in PASSES]
    assert positions == sorted(positions), "passes are printed in order"


def test_stats(model: torch.nn.Module) -> None:
    assert hecate.stats(model).layers == ()
    ids = batch(0)
    model(input_ids=ids, labels=ids)["loss"].backward()
    stats = hecate.stats(model)
    assert [layer.name for layer in stats.layers] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    for layer in stats.layers:
        assert sum(layer.expert_rows) == ids.numel() * 2 == layer.rows[0]
        assert layer.bytes_sent == (0,)
        assert layer.imbalance == 1.0
    assert "hottest expert" in str(stats)


def test_timeline_of_a_single_rank_is_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no collective has run: there is one rank"):
        hecate.save_timeline(model, tmp_path / "x.json")


def layer_stats(name: str, rows: tuple[int, int]) -> LayerStats:
    nothing = (0, 0)
    return LayerStats(
        name=name, rows=rows, expert_rows=rows, bytes_sent=nothing, node_bytes_sent=nothing, replicas=0,
        expert_bytes_sent=nothing,
    )  # fmt: skip


def test_imbalance() -> None:
    layer, empty = layer_stats("x", (6, 2)), layer_stats("y", (0, 0))
    assert layer.imbalance == 1.5
    assert empty.imbalance == 1.0
    assert Stats(layers=(layer, empty)).imbalance == 1.25


@pytest.mark.parametrize("how", ["option", "environment"])
def test_dump(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    if how == "environment":
        monkeypatch.setenv("HECATE_DUMP", str(tmp_path))
    config = hecate.Config(backend="aot_eager", dump=tmp_path if how == "option" else None)
    model = hecate.compile(build("mixtral"), config)
    model(input_ids=batch(0), labels=batch(0))
    files = sorted(path.name for path in (tmp_path / "rank0").iterdir())
    assert len(files) == 3 * len(PASSES)
    assert files[0].startswith("graph000.01.drop_causal_masks")
