"""A start finds its own ranks, whatever an earlier one left in the store."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hecate.runtime.comm.start import agree_on_start, start_process_group, store_of
from hecate.runtime.comm.world import find_world
from tests.support.ranks import run_ranks


def _store(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))


def _start(port: int, size: int, delays: dict[int, float]) -> list[str]:
    texts = [""] * size

    def rank(number: int) -> None:
        time.sleep(delays.get(number, 0))
        texts[number] = agree_on_start(_store(port), number, size, timedelta(seconds=20))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


def test_every_start_has_a_text_of_its_own() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seen = set()
    # Other numbers of ranks, and each of them late once: what is in the store is always of an earlier start.
    for size, late in ((3, 0), (3, 1), (2, 0), (3, 2), (1, 0), (3, 1)):
        texts = _start(server.port, size, {late: 0.15})
        assert len(set(texts)) == 1 and texts[0] not in seen
        seen.add(texts[0])


def test_a_rank_that_does_not_come_is_named() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _start(server.port, 3, {})
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not start"):
        agree_on_start(_store(server.port), 0, 3, timedelta(seconds=0.2))
    with pytest.raises(TimeoutError, match="rank 0 did not start"):
        agree_on_start(_store(server.port), 1, 3, timedelta(seconds=0.2))


def of_the_user() -> dict[str, bool]:
    """A program that starts torch.distributed itself, in a store that an earlier start may have used."""
    dist.init_process_group()
    own = find_world(None, torch.device("cpu")).group
    assert own is not None
    if dist.get_rank() == 0:
        store_of(own).set("told", "")
    dist.barrier()
    default = dist.distributed_c10d._get_default_store()
    return {"ours": store_of(own).check(["told"]), "theirs": default.check(["told"])}


@pytest.mark.distributed
def test_keys_of_a_group_beside_the_users_are_of_this_start() -> None:
    for found in run_ranks(of_the_user, 2):
        assert found == {"ours": True, "theirs": False}


def tell(port: int | None) -> list[str]:
    """Each rank its name; ``port`` for a store of rank 0, where there is none of torchrun's."""
    if port is not None:
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    found: list[str] = []

    def backend_for(names: list[str]) -> str:
        found.extend(names)
        return "gloo"

    start_process_group(f"I am rank {os.environ['RANK']}", backend_for)
    dist.barrier()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("own_store", [False, True])
def test_ranks_tell_each_other_before_there_is_a_group(own_store: bool) -> None:
    port = None
    if own_store:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    told = [f"I am rank {rank}" for rank in range(3)]
    assert run_ranks(tell, 3, port=port) == 3 * [told]
