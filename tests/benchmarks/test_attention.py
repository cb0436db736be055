"""The benchmark of sparse attention at its smallest, and its tables from made-up samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import attention


def test_all_parts_run_and_are_shown(tmp_path: Path) -> None:
    alone = attention.alone([256], 1, with_flex=False, heads=2, width=8)
    decode = attention.decode([256], 1, width=8)
    text = "\n".join([*attention.table_of_alone(alone), *attention.table_of_decode(decode)])
    assert "| 256 |" in text and "25.3" in text
    attention.plot({"alone": alone, "decode": decode}, tmp_path / "attention.png")
    assert (tmp_path / "attention.png").stat().st_size > 0


def test_ratios_are_of_rounds() -> None:
    samples = {"s2": [1.0, 2.0, 1.0], "dense": [3.0, 4.0, 5.0]}
    assert attention.ratios(samples, "s2", "dense") == [3.0, 2.0, 5.0]
    assert attention.said([3.0, 2.0, 5.0]) == "3.00 (2.00 - 5.00)"
    found = {"length": 8192, "share": 0.125, "samples": samples | {"attention of dense": [2.4, 3.2, 4.0]}}
    assert "Attention is 80% of the dense step" in attention.table_of_step(found)[-1]
    assert "the bound is 3.3" in attention.table_of_step(found)[-1]


def test_the_recall_task_has_its_answers() -> None:
    x, y = attention.recall_batch(4, torch.Generator().manual_seed(0))
    for row in range(4):
        pairs = {int(key): int(value) for key, value in x[row, : -attention._ASKED] if key}
        assert len(pairs) == attention._NEEDLES
        assert [pairs[int(key)] for key in x[row, -attention._ASKED :, 0]] == y[row, -attention._ASKED :].tolist()


@pytest.mark.parametrize("name", attention.recall_kinds())
def test_one_step_of_each_kind_of_recall(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {name: attention.recall_kinds()[name]}
    monkeypatch.setattr(attention, "recall_kinds", lambda: kinds)
    found = attention.retrieval(1, 1)
    assert 0 <= found[name][0] <= 1
    assert name in attention.table_of_retrieval(found)[-1]
