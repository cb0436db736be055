"""accelerate's save_state and load_state, unchanged, on a compiled model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hecate
from tests.support.adversaries import Restless
from tests.support.extent import ALL
from tests.support.models import batch, build
from tests.support.parity import rank_and_size, state_error
from tests.support.ranks import run_ranks

_HERE = "tests.hecate_compile.integrations.test_accelerate"


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="hecate-") as path:
        yield path


class Run:
    def __init__(self, seed: int) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
        model = hecate.compile(
            build("plain", seed=seed, layers=1, experts=4),
            hecate.Config(backend="aot_eager", policy=Restless(reshard_every=1)),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)

    def steps(self, *numbers: int) -> None:
        rank, size = rank_and_size()
        for number in numbers:
            mine = batch(number).chunk(size)[rank]
            self.accelerator.backward(self.model(input_ids=mine, labels=mine)["loss"])
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()


def save(folder: str) -> dict[str, Any]:
    first = Run(seed=0)
    first.steps(0, 1, 2)
    first.accelerator.save_state(f"{folder}/two")
    first.steps(3, 4)
    second = Run(seed=1)
    second.steps(9)
    second.accelerator.load_state(f"{folder}/two")
    second.steps(3, 4)
    second.accelerator.save_state(f"{folder}/end")
    return {
        "weights": state_error(second.model.state_dict(), first.model.state_dict()),
        "rates": [one.optimizer.param_groups[0]["lr"] for one in (first, second)],
    }


def go_on(folder: str) -> float:
    """On another number of ranks."""
    run, end = Run(seed=2), Run(seed=3)
    run.accelerator.load_state(f"{folder}/two")
    run.steps(3, 4)
    end.accelerator.load_state(f"{folder}/end")
    return state_error(run.model.state_dict(), end.model.state_dict())


@pytest.mark.distributed
def test_save_state_and_load_state(folder: str) -> None:
    for found in run_ranks(f"{_HERE}:save", 2, folder=folder):
        assert found["weights"] == 0
        assert found["rates"] == pytest.approx([0.01 * 0.7**5] * 2)
    assert (Path(folder) / "two" / "model.safetensors").exists()
    for difference in run_ranks(f"{_HERE}:go_on", 3 if ALL else 1, folder=folder):
        assert difference < 1e-5
