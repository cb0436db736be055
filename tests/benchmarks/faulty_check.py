"""The check for GPUs with kernels and systems of which the middle one goes wrong, in the way that is asked for.

python -m tests.benchmarks.faulty_check HOW and what benchmarks.gpu_check takes
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import nn

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import measure, training
from benchmarks.gpu_check.case import SUMS, Case
from benchmarks.gpu_check.place import PRETENDED, Place, Shape

KERNELS, SYSTEMS = ("first", "bad", "last"), ("reference", "wrong", "other")


def hang() -> None:
    # What it started would go on for longer than any test.
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    time.sleep(600)


def spoil() -> None:
    """As a kernel does that reads where it must not: nothing works in this process behind it."""
    mock.patch.object(type(PRETENDED), "wait", _refuse).start()
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _refuse(place: Place) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


FAULTS: dict[str, Callable[[], object]] = {
    "hang": hang,
    "exit": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "spoil": spoil,
}
# What the report says of each, at the end of a line.
SAID = {
    "hang": "no end in its share of the time",
    "exit": "exit code 0",
    "kill": "ended by SIGKILL",
    "spoil": "CUDA error: an illegal memory access was encountered",
}


def cases(name: str, sizes: object, device: torch.device) -> Iterator[Case]:
    def one() -> torch.Tensor:
        return torch.ones(2)

    yield Case(torch.float32, one, one, None, SUMS, note="sound", bytes=8)
    if name == "bad":
        FAULTS[sys.argv[1]]()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(4, 4)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.table(input_ids[:, :4].float()).square().mean()}


class Bad(training.System):
    def prepare(self, backend: str) -> None:
        FAULTS[sys.argv[1]]()


def build(shape: Shape, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return Model()


if __name__ == "__main__":
    # This process is a stand-in, and what is put into the check's modules ends with it.
    mock.patch.object(measure, "cases_of", cases).start()
    mock.patch.object(training, "build", build).start()
    training.SYSTEMS.clear()
    training.SYSTEMS |= dict(zip(SYSTEMS, (training.System, Bad, training.System), strict=True))
    mock.patch.object(training, "REFERENCE", "reference").start()
    mock.patch.dict(command.KERNELS, dict.fromkeys(KERNELS), clear=True).start()
    sys.exit(command.main(sys.argv[2:]))
