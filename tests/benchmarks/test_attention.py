"""The benchmark of sparse attention at its smallest, and its tables from made-up samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.attention import __main__ as command
from benchmarks.attention import alone, decode, language, retrieval, step, timing
from benchmarks.attention.plot import plot
from tests.support.extent import ALL


def test_what_is_quick_runs_and_is_shown(tmp_path: Path) -> None:
    results = {
        "alone": timing.joined([alone.run([256], 1, with_flex=False, heads=2, width=8)]),
        "decode": timing.joined([decode.run([256], 1, width=8)] * 2),
    }
    text = "\n".join([*alone.table(results["alone"]), *decode.table(results["decode"])])
    assert "| 256 |" in text and "25.3" in text
    plot(results, tmp_path / "attention.png")
    assert (tmp_path / "attention.png").stat().st_size > 0


def test_flex_attention_gets_the_same_blocks() -> None:
    p = timing.pattern_of(1000, 4)
    mask = alone.block_mask(1000, p, torch.device("cpu"))
    n = p.blocks_of(1000)
    seen = [[[p.attends(h, i, j) for j in range(n)] for i in range(n)] for h in range(4)]
    assert mask.to_dense()[0].bool().tolist() == seen
    full, rows = mask.full_kv_num_blocks, torch.arange(n)
    assert full is not None and (mask.kv_num_blocks == 1).all() and (full[0] <= rows).all()


def test_ratios_are_of_rounds_and_spread_is_over_launches() -> None:
    first = {"s2": [1.0, 2.0, 1.0], "dense": [3.0, 4.0, 5.0], "attention of dense": [2.4, 3.2, 4.0]}
    second = {"s2": [1.0], "dense": [2.0], "attention of dense": [1.6]}
    found = timing.joined([{"length": 8192, "share": 0.125, "samples": one} for one in (first, second)])
    assert timing.ratios(found["samples"], "s2", "dense") == [3.0, 2.0]
    assert timing.seconds(found["samples"], "dense") == 3.0
    assert timing.said([3.0, 2.0, 5.0]) == "3.00 (2.00 - 5.00)" and timing.said([2.0]) == "2.00"
    assert "2.50 (2.00 - 3.00) times as fast" in step.table(found)[-1]
    assert "Attention is 80% of the dense step" in step.table(found)[-1]
    assert "the bound is 3.3" in step.table(found)[-1]


def test_the_recall_task_has_its_answers() -> None:
    x, y = retrieval.recall_batch(4, torch.Generator().manual_seed(0))
    for row in range(4):
        pairs = {int(key): int(value) for key, value in x[row, : -retrieval._ASKED] if key}
        assert len(pairs) == retrieval._NEEDLES
        assert [pairs[int(key)] for key in x[row, -retrieval._ASKED :, 0]] == y[row, -retrieval._ASKED :].tolist()


@pytest.mark.parametrize("name", retrieval.recall_kinds() if ALL else ("S2",))
def test_one_step_of_each_kind_of_recall(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {name: retrieval.recall_kinds()[name]}
    monkeypatch.setattr(retrieval, "recall_kinds", lambda: kinds)
    found = retrieval.run(1, 1)
    assert set(found) == {name} and len(found[name]) == 1
    assert name in retrieval.table(found)[-1]


def test_local_blocks_alone_are_alone() -> None:
    options = retrieval.recall_kinds()["local blocks alone"]
    assert options is not None
    p, n = options.pattern(4, 4), retrieval._LENGTH // 16
    seen = {(h, i, j) for h in range(4) for i in range(n) for j in range(n) if p.attends(h, i, j)}
    assert seen == {(h, i, i) for h in range(4) for i in range(n)}


def test_quality_stands_beside_its_bars() -> None:
    assert retrieval.beside_the_bar("S2", [1.0, 0.96], [1.0, 1.0]) == "0.960, at least 0.98"
    assert retrieval.beside_the_bar("local blocks alone", [0.1, 0.3], [0.5, 0.5]) == "0.600, below 0.7"
    assert set(retrieval._BARS) < set(retrieval.recall_kinds())
    assert retrieval.beside_the_bar("dense", [1.0], [1.0]) == ""
    found = {"dense": {5: 2.5, 10: 2.0}, "S2, all layers": {5: 2.5, 10: 2.02}}
    assert language.table(found)[-1] == "| S2, all layers | 2.500 | 2.020 | +1.0% |"


def test_a_file_of_samples_says_which_commit_made_each_part(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    path.write_text('{"torch": "2.0", "alone": [1]}')
    command.write(path, "decode", [[2]], "abc")
    command.write(path, "step", [{"length": 3}], command.described())
    kept = json.loads(path.read_text())
    assert set(kept) == {"decode", "step"} and kept["decode"]["launches"] == [[2]]
    assert kept["step"]["commit"] and kept["step"]["torch"] == torch.__version__


def test_systems_take_turns_in_being_first() -> None:
    order: list[str] = []
    timing.measure({name: lambda name=name: order.append(name) for name in "ab"}, 2)
    assert "".join(order) == "baabba"
