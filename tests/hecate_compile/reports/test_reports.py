"""explain, stats and graph dumps at one rank."""

from __future__ import annotations

import inspect
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import hecate
from hecate.graph.lowering import NotRun, capturing
from hecate.passes import PASSES
from hecate.reports.stats import LayerStats, Stats
from hecate.reports.tables import Section, as_bytes, as_time, rates_text, sections_as_text
from hecate.reports.travel import travels
from hecate.runtime.comm.measure_rates import NO_LINK
from hecate.runtime.comm.queue import Span
from hecate.simulator.capture import fake_ranks
from tests.hecate_compile.test_errors import MixingMoE
from tests.support.models import PlainLanguageModel, PlainMoE, batch, build


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """After a step; before it there is less to tell."""
    made = hecate.compile(build("mixtral"), hecate.Config(backend="aot_eager"))
    text = str(hecate.explain(made))
    assert "nothing compiled yet" in text
    assert "Hecate(objective='time', replicas='auto'" in text
    assert "model.layers.0.mlp.experts" in text and "num_experts = 8" in text
    assert hecate.stats(made).layers == ()
    made(input_ids=batch(0), labels=batch(0))["loss"].backward()
    return made


def test_passes_are_printed_in_order(model: torch.nn.Module) -> None:
    explanation = hecate.explain(model)
    assert len(explanation.graphs) == 1
    positions = [str(explanation).index(function.__name__) for function in PASSES]
    assert positions == sorted(positions)


def test_stats(model: torch.nn.Module) -> None:
    ids, stats = batch(0), hecate.stats(model)
    assert [layer.name for layer in stats.layers] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    for layer in stats.layers:
        assert sum(layer.expert_rows) == ids.numel() * 2 == layer.rows[0]
        assert layer.bytes_sent == (0,)
        assert layer.imbalance == 1.0
    assert "hottest expert" in str(stats)


def test_timeline_of_a_single_rank_is_refused(model: torch.nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no collective has run: there is one rank"):
        hecate.save_timeline(model, tmp_path / "x.json")


def test_imbalance() -> None:
    sent: Any = dict.fromkeys(("bytes_sent", "node_bytes_sent", "expert_bytes_sent"), (0, 0))
    layer, empty = (LayerStats(name="x", rows=r, expert_rows=r, replicas=0, **sent) for r in ((6, 2), (0, 0)))
    assert layer.imbalance == 1.5
    assert empty.imbalance == 1.0
    assert Stats(layers=(layer, empty)).imbalance == 1.25


@pytest.mark.parametrize("how", ["option", "environment"])
def test_dump(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "environment":
        monkeypatch.setenv("HECATE_DUMP", str(tmp_path))
    config = hecate.Config(backend="aot_eager", dump=tmp_path if how == "option" else None)
    model = hecate.compile(build("mixtral", layers=1), config)
    model(input_ids=batch(0), labels=batch(0))
    files = sorted(path.relative_to(tmp_path / "rank0").as_posix() for path in (tmp_path / "rank0").rglob("*.*"))
    assert files[0] == "graph0/00_model.py" and "index.html" in files
    names = {function.__name__ for function in PASSES}
    rewrote = {record.name for record in hecate.explain(model).graphs[0].passes if record.rewritten}
    dumped = {match[1] for file in files if (match := re.fullmatch(r"graph0/\d\d_(\w+)\.diff", file))}
    assert dumped == rewrote < names, "a pass that changed nothing writes nothing"
    text = (tmp_path / "rank0" / "graph0" / "00_model.py").read_text()
    assert re.search(r"# modeling_mixtral\.py:\d+ in forward: ", text), "the line of model code"


@pytest.mark.parametrize(
    ("name", "value"), [("HECATE_DUMP_MB", "much"), ("HECATE_DUMP_MB", "-1"), ("HECATE_DUMP_RANKS", "1")]
)
def test_a_wrong_variable_is_refused_before_anything_changes(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    model = build("plain", layers=1)
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=f"{name}='{value}', expected"):
        hecate.compile(model, hecate.Config(backend="aot_eager"))
    assert list(model.state_dict()) == before
    monkeypatch.delenv(name)
    hecate.compile(model, hecate.Config(backend="aot_eager"))


def test_explain_has_units_and_plain_data(model: torch.nn.Module) -> None:
    explanation = hecate.explain(model)
    data = json.loads(json.dumps(explanation.to_dict()))
    assert [layer["experts"] for layer in data["layers"]] == [8, 8]
    assert all(region["rewritten"] and not region["reason"] for region in data["regions"])
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    assert sum(one["whole_bytes"] for one in data["parameters"]) == whole
    assert [one["name"] for one in data["graphs"][0]["passes"]["captured"]] == [f.__name__ for f in PASSES]
    text, page = str(explanation), explanation._repr_html_()
    assert re.search(r"experts +│ +4 │ +\d+(\.\d+)? kB │", text)
    done = "rewritten; rows travel with more ranks"
    assert done in text and done in page and page.count("<table>") == page.count("</table>") >= 4


def test_a_layer_that_is_left_alone_names_the_line_and_the_fix() -> None:
    torch.manual_seed(0)
    model = hecate.compile(PlainLanguageModel(MixingMoE), hecate.Config(backend="aot_eager"))
    with pytest.warns(UserWarning, match="gathers all its experts"):
        model(batch(0), batch(0))
    explanation = hecate.explain(model)
    assert len(explanation.regions) == 2 and not any(region.rewritten for region in explanation.regions)
    path = Path(inspect.getfile(MixingMoE))
    lines = path.read_text().splitlines()
    for region in explanation.regions:
        file, _, number = region.line.rpartition(":")
        assert Path(file).resolve() == path.resolve()
        assert "h.sum(0" in lines[int(number) - 1], "the line that mixes rows"
        assert "keep rows apart" in region.reason and "each row by itself" in region.fix
    text = str(explanation)
    assert text.count("keep rows apart") == 1 == text.count("  to do: "), "told once, of both layers"
    assert re.search(r"left alone: blocks\.0\S*, blocks\.1\S*: ", text)


class BreakingMoE(PlainMoE):
    """A layer behind which tracing breaks."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = super().forward(hidden)
        torch._dynamo.graph_break()
        return out


def test_a_layer_is_told_of_in_the_graph_that_has_it() -> None:
    model = hecate.compile(PlainLanguageModel(BreakingMoE, experts=2), hecate.Config(backend="aot_eager"))
    model(batch(0), batch(0))
    explanation = hecate.explain(model)
    assert len(explanation.graphs) > 1
    assert [(region.layer, region.rewritten) for region in explanation.regions] == [
        ("blocks.0", True),
        ("blocks.1", True),
    ]
    assert len({region.graph for region in explanation.regions}) == 2


def test_bytes_and_times_have_a_unit() -> None:
    sizes = [as_bytes(number) for number in (0, 999, 999.6, 1000, 1.5e6, 129.73e9, 12.34e12)]
    assert sizes == ["0 B", "999 B", "1.00 kB", "1 kB", "1.50 MB", "130 GB", "12.3 TB"]
    times = [as_time(seconds) for seconds in (0, 2.5e-7, 1.234e-5, 9.999e-4, 0.0123, 61)]
    assert times == ["0 ms", "0.25 us", "12.3 us", "1.00 ms", "12.3 ms", "61 s"]


def test_tables_are_as_wide_as_the_terminal(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    assert max(map(len, str(hecate.explain(model)).splitlines())) <= 110


def test_heads_of_narrow_tables_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    columns = ("part", "of", "what travels", "times", "bytes", "predicted", "behind", "took", "exposed")
    row = ("backward", "model.layers.0.mlp.experts", "sparse_reduce_scatter", "1", "24.6 kB", *["123 us"] * 4)
    text = sections_as_text([Section(title="schedule", columns=columns, rows=(row,))])
    assert all(word in text for column in columns for word in column.split())
    assert max(map(len, text.splitlines())) <= 100


def test_rates_have_units() -> None:
    text = rates_text(hecate.Rates(flops=129734994732.95604, rank_bytes=2e9, node_bytes=1e9, hidden_seconds=0.0123))
    assert text == (
        "130 GFLOP/s, links 2 GB/s of a rank and 1 GB/s of a node, memory 10 GB/s, 12.3 ms hidden in a layer"
    )
    alone = hecate.Rates(flops=1e9, rank_bytes=2e9, node_bytes=NO_LINK)
    assert rates_text(alone) == "1 GFLOP/s, links 2 GB/s of a rank, memory 10 GB/s", "one node has no link"


def test_the_schedule_is_told_before_the_first_step() -> None:
    rates = hecate.Rates(flops=1e12, rank_bytes=1e12, node_bytes=1e12)
    with fake_ranks(2):
        model = hecate.compile(build("mixtral", layers=1), hecate.Config(backend="aot_eager", rates=rates))
        with capturing(), suppress(NotRun):
            model(input_ids=batch(0), labels=batch(0))
    explanation = hecate.explain(model)
    found = {(one.part, one.operator): one for one in explanation.travels if one.subject.endswith("0.mlp.experts")}
    exchange = found["forward", "exchange"]
    # A link this fast takes less than a microsecond, and bytes are whole all the same.
    assert 0 < exchange.predicted < 1e-6
    assert exchange.predicted_bytes == pytest.approx(exchange.predicted * 1e12, rel=0.05)
    assert exchange.predicted_bytes > 1000 and exchange.took is None
    assert any(part == "backward" for part, _ in found)
    text = str(explanation)
    assert "schedule, as predicted" in text and "exposed" not in text and " us" in text


def test_travels_add_up_and_what_has_not_run_has_no_time() -> None:
    notes = ["forward exchange 0.002 0.001 2000 a.experts"] * 2 + ["backward exchange 0.001 0.0 9 a.experts"]
    spans = [Span.of(note) for note in notes]
    for span in spans[:2]:
        span.begun, span.ended, span.waited, span.ready = 1.0, 1.5, 1.25, 1.75
    forward, backward = travels(spans)
    assert (forward.count, forward.predicted, forward.took, forward.exposed) == (2, 0.004, 1.0, 1.0)
    assert forward.predicted_bytes == 4000
    assert (backward.took, backward.exposed) == (None, None)
