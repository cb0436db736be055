"""Windows that processes of one machine share: the protocol of one-sided writes in real memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hecate.runtime.comm.world import find_world
from hecate.runtime.one_sided import windows as comm_windows
from hecate.runtime.one_sided.links import Rows
from hecate.runtime.one_sided.transport import Transport
from hecate.runtime.one_sided.windows import shared_windows
from tests.support.one_sided import all_to_all, walk
from tests.support.ranks import message_of, run_ranks

CPU = torch.device("cpu")


def exchange(rounds: int) -> dict[str, Any]:
    """On one rank: exchanges of any sizes, and then the ways in which it ends badly."""
    world = find_world(None, CPU)
    names: list[str] = []
    make = comm_windows._make_file

    def make_file(path: Path, size: int) -> None:
        make(path, size)
        names.extend(path.name for path in Path("/dev/shm").glob(f"hecate-{os.getpid()}-*"))

    comm_windows._make_file = make_file
    windows = shared_windows(world, 256)
    transport = Transport(windows, seconds=400.0)
    for seed in range(rounds):
        random = np.random.default_rng(seed)
        # A place holds 8 rows of 32 bytes, so there are up to four chunks of a link.
        counts = random.integers(0, 30, (world.size, world.size)) * (random.random((world.size, world.size)) < 0.7)
        rows = [torch.arange(int(c.sum()) * 8).view(-1, 8).float() + 1000 * r for r, c in enumerate(counts)]
        found = all_to_all(transport, rows[world.rank], counts[world.rank].tolist(), counts[:, world.rank].tolist())
        parts = [rows[source].split(counts[source].tolist())[world.rank] for source in range(world.size)]
        assert torch.equal(found, torch.cat(parts)), seed
    transport.check()

    # Another kind of processor on one rank is refused on all of them.
    machine = platform.machine
    platform.machine = lambda: "aarch64" if world.rank == 1 else machine()
    refused = message_of(lambda: shared_windows(world, 256))
    platform.machine = machine
    # Too much memory, too.
    too_much = message_of(lambda: shared_windows(world, 2**50))

    # The last rank does not come to one more.
    last, alone = world.size - 1, "no error"
    if world.rank != last:
        late = Transport(shared_windows(world, 256), seconds=0.6)
        one = torch.ones(world.size, dtype=torch.int64)
        rows, room = (Rows(torch.ones(world.size, 4)) for _ in range(2))
        walk(late.steps(rows, one, room, most=1, wire=torch.float32))
        alone = message_of(late.check)
    else:
        shared_windows(world, 256)
    dist.barrier()
    left = [path.name for path in Path("/dev/shm").glob(f"hecate-{os.getpid()}-*")]
    return {"refused": refused, "too much": too_much, "alone": alone, "names": names, "left": left}


@pytest.mark.distributed
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="plain stores are not in order")
def test_processes_share_memory() -> None:
    for rank, found in enumerate(run_ranks(exchange, 3, rounds=100)):
        assert "Rank 1: aarch64 processors do not keep the order of plain stores" in found["refused"]
        assert 'ranks cannot share memory, use transport="collectives". Rank 0:' in found["too much"]
        assert found["alone"] == (
            "no error" if rank == 2 else f"ExchangeFailed: hecate: rank {rank} waited in vain for ranks [2]"
        )
        assert len(found["names"]) == 2 and found["left"] == []
