"""A transport is one class: rows that travel through files train a model as any other does."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hecate.runtime.comm.queue import Job
from hecate.runtime.comm.world import World
from hecate.runtime.ops.by_collectives import ByCollectives
from hecate.runtime.state.layer import Layer, Ticket
from hecate.wrap import shard_model
from tests.hecate_compile.test_parity import measure
from tests.support.ranks import run_ranks

_HERE = "tests.hecate_compile.test_carrier"


class ByFiles(ByCollectives):
    """Rows from rank to rank as files in a folder; counts and replicas by collectives."""

    def __init__(self, folder: Path, world: World) -> None:
        self.folder, self.world, self.turns = folder, world, itertools.count()

    def dispatch(self, layer: Layer, rows: Tensor, ticket: Ticket) -> Job:
        splits, send_index, receive_index = ticket
        send, _ = splits.tolist()
        layer.count_rows_sent(rows, send)
        leaving, order = rows[send_index], receive_index.clone()
        return Job(layer.world.queue, lambda: self._swap(leaving, send)[order], label=layer.placer.label("exchange"))

    def combine(self, layer: Layer, rows: Tensor, ticket: Ticket, num_rows: int) -> Job:
        splits, send_index, receive_index = ticket
        _, send = splits.tolist()
        layer.count_rows_sent(rows, send)
        leaving, order = torch.empty_like(rows).index_copy_(0, receive_index, rows), send_index.clone()
        home = rows.new_zeros((num_rows, *rows.shape[1:]))
        label = layer.placer.label("exchange_back")
        return Job(layer.world.queue, lambda: home.index_copy_(0, order, self._swap(leaving, send)), label=label)

    def _swap(self, rows: Tensor, send: Sequence[int]) -> Tensor:
        """Rows to each rank, and from each, in the order of ranks."""
        turn, rank = next(self.turns), self.world.rank
        for other, part in enumerate(rows.split(list(send))):
            written = self.folder / f"writing-{rank}-{other}"
            torch.save(part.clone(), written)
            written.rename(self.folder / f"{turn}-{rank}-{other}")
        return torch.cat([_read(self.folder / f"{turn}-{other}-{rank}") for other in range(self.world.size)])


def _read(path: Path, seconds: float = 60.0) -> Tensor:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} never came"
        time.sleep(0.001)
    rows: Tensor = torch.load(path)
    return rows


def train_through_files(folder: str) -> dict[str, Any]:
    """On one rank."""
    dist.init_process_group("gloo")
    shard_model.CARRIERS["collectives"] = lambda config, topology, world: ByFiles(Path(folder), world)
    return measure("qwen3_moe", layers=1, policy="anything", backend="aot_eager")


@pytest.mark.distributed
def test_rows_that_travel_through_files_equal_one_process() -> None:
    with tempfile.TemporaryDirectory(prefix="hecate-files-") as folder:
        for found in run_ranks(f"{_HERE}:train_through_files", 2, folder=folder):
            assert found["loss"] < 1e-5 and found["gradient"] < 1e-5, found["worst"]
            assert found["rewritten"]["exchange_rows"] == 1 and min(found["replicas"]) > 0
        names = [path.name.split("-") for path in Path(folder).iterdir()]
    turns = {int(turn) for turn, _, _ in names}
    # In each step rows go there and back, and their gradients.
    assert len(names) == 4 * len(turns) and len(turns) % 4 == 0 and len(turns) >= 8
