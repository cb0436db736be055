"""What ranks hold is what the simulator says."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.activations import Size, measure, predict
from benchmarks.bytes_alive import Ledger, Watch
from tests.support.extent import ALL
from tests.support.ranks import run_ranks

# Experts are small: buffers in which they travel are predicted to be there longer than they are.
_SMALL = Size(ranks=2, layers=1, hidden=64, ffn=32, experts=8, sequences=4, sequence=128)


def run(system: str, size: dict[str, Any]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    return measure(system, "zipf", Size(**size))


def test_the_ledger_counts_memory_once_and_while_it_is_there() -> None:
    known = torch.zeros(1000)
    ledger = Ledger([known])
    with Watch(ledger):
        first = known + 1
        assert first.view(10, 100)[2:].numel() == 800
        known.add_(1)
        second = first[:500] * 2
        del first
        third = second.sum()
    peak = ledger.peak()
    assert (peak.all, peak.activations, peak.gathered) == (4000 + 2000, 4000 + 2000, 0)
    ledger.name([second, None], "gradients")
    peak = ledger.peak()
    assert (peak.gradients, peak.activations, peak.most_activations) == (2000, 4000, 4000)
    assert float(third) == 500 * 2


def test_the_ledger_looks_into_operators_of_hecate() -> None:
    """A start returns a number; what it copied counts, and is let go with the wait."""
    import hecate

    assert hecate.compile
    ledger = Ledger([])
    with Watch(ledger):
        torch.ops.hecate.row_slots(torch.tensor([2, 4], dtype=torch.int32), 4)
    # The result, and the numbers of the rows, which no operator returns.
    assert ledger.peak().all >= 4 * 8 + 4 * 4


@pytest.mark.distributed
@pytest.mark.parametrize("system", ["static EP", "hecate"] if ALL else ["static EP"])
def test_the_prediction_is_what_ranks_hold(system: str) -> None:
    found = run_ranks(run, 2, system=system, size=asdict(_SMALL))
    said = predict(system, _SMALL, ["zipf"])["zipf"]
    assert found[0]["rows"] == said["rows"]
    for key in ("states", "peak", "most_activations"):
        measured = np.asarray([one[key] for one in found])
        assert said[key] == pytest.approx(measured, rel=0.1), key
    # What is to be predicted is not the same on both ranks, unless rows are.
    ratio = max(said["most_activations"]) / min(said["most_activations"])
    assert ratio > 1.2 if system == "static EP" else ratio < 1.05
