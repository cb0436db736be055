"""All-to-alls as messages over gloo: what comes, who waits for whom, and how a rank gets out of one."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hecate.runtime.comm import collectives, messages
from hecate.runtime.comm.history import history_of
from hecate.runtime.comm.world import World
from tests.support.ranks import RanksFailed, run_ranks

SUM, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN
_SOON, _LATE = 0.01, 60


class Pretended:
    """A group that notes what is asked of it.

    Args:
        until: opened when its messages may come.
        fails: they do not come.
    """

    def __init__(self, rank: int, size: int, until: threading.Event | None = None, fails: bool = False) -> None:
        self._rank, self._size, self._until, self._fails = rank, size, until, fails
        self.asked: list[tuple[str, int, int]] = []
        self.tags: set[int] = set()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def recv(self, tensors: list[torch.Tensor], other: int, tag: int) -> Pretended:
        self.asked.append(("receive", other, len(tensors[0])))
        self.tags.add(tag)
        return self

    def send(self, tensors: list[torch.Tensor], other: int, tag: int) -> Pretended:
        self.asked.append(("send", other, len(tensors[0])))
        self.tags.add(tag)
        return self

    def wait(self) -> None:
        if self._until is not None:
            self._until.wait()
        if self._fails:
            raise RuntimeError("Connection closed by peer")


def exchange(group: Any, receive: list[int], send: list[int], tag: int = 7) -> messages.Messages:
    out, rows = torch.zeros(sum(receive), 2), torch.arange(2.0 * sum(send)).view(-1, 2)
    return messages.exchange(out.split(receive), rows.split(send), group, tag)


def test_all_is_asked_for_before_anything_is_sent_and_nothing_is_no_message() -> None:
    group = Pretended(1, 4)
    exchange(group, [3, 2, 0, 4], [0, 2, 5, 1]).wait()
    assert group.asked == [("receive", 0, 3), ("receive", 3, 4), ("send", 2, 5), ("send", 3, 1)]


def test_a_message_is_taken_by_its_own_collective_alone_and_by_none_that_expects_another_length() -> None:
    tags: list[set[int]] = []
    for tag, rows in ((7, 3), (8, 3), (7, 4)):
        group = Pretended(0, 2)
        exchange(group, [0, rows], [0, rows], tag).wait()
        assert len(group.tags) == 1, "who sends and who receives the same agree"
        tags.append(group.tags)
    assert len(set.union(*tags)) == 3
    assert all(0 <= tag < 2**31 - 2 for tag in set.union(*tags))


def test_own_rows_stay_here() -> None:
    out, rows = torch.zeros(3), torch.arange(4.0)
    messages.exchange(out.split([2, 1]), rows.split([3, 1]), Pretended(1, 2), 0).wait()
    assert out.tolist() == [0, 0, 3]
    with pytest.raises(RuntimeError, match="sends itself 1 rows and expects 2"):
        exchange(Pretended(1, 2), [2, 2], [3, 1])


def test_messages_that_never_come_are_left_and_hold_up_no_others() -> None:
    until = threading.Event()
    left = exchange(Pretended(0, 2, until), [1, 1], [1, 1])
    assert not left.wait(_SOON)
    assert exchange(Pretended(0, 2), [1, 1], [1, 1]).wait(_LATE)
    until.set()
    assert left.wait(_LATE)


def test_the_error_of_a_message_is_raised_where_it_is_waited_for() -> None:
    failing = exchange(Pretended(0, 2, fails=True), [1, 1], [1, 1])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed by peer"):
            failing.wait()


def test_a_thread_that_ends_takes_its_messenger_along() -> None:
    def messengers() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name == "hecate-messages"}

    before = messengers()
    found: list[threading.Thread] = []

    def work() -> None:
        exchange(Pretended(0, 2), [1, 1], [1, 1]).wait()
        found.extend(messengers() - before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (messenger,) = found
    messenger.join(60)
    assert not messenger.is_alive()


def on_ranks() -> str:
    """Random all-to-alls beside a sum over ranks, and one in which a rank has nothing and comes later."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, group=dist.group.WORLD, device=torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        splits = torch.randint(-2, 4, (size, size), generator=draw).clamp(min=0)
        rows = [(torch.rand(int(sent.sum()), 3, generator=draw) * 9).to(dtype) for sent in splits]
        got = collectives.all_to_all(rows[rank], splits[rank].tolist(), splits[:, rank].tolist(), world)
        parts = [all.split(sent.tolist())[rank] for all, sent in zip(rows, splits, strict=True)]
        assert torch.equal(got, torch.cat(parts))
        # Short ones go to everybody, of long ones each rank adds up a share.
        for length in (1, 3, 20_001):
            sums = [torch.arange(length) % 7 + 10 * number for number in range(size)]
            for op, want in ((SUM, sum(sums)), (MAX, sums[-1]), (MIN, sums[0])):
                total = sums[rank].to(dtype, copy=True)
                if dtype.is_floating_point or dtype is torch.int64:
                    collectives.all_reduce(total, world, op)
                    assert torch.equal(total, torch.as_tensor(want).to(dtype))
            whole = collectives.all_gather_even(sums[rank].to(dtype), world)
            assert torch.equal(whole, torch.stack(sums).to(dtype))
            given = torch.stack([sums[rank]] * 2).to(dtype).T
            collectives.broadcast(given, world)
            assert torch.equal(given, torch.stack([sums[0]] * 2).to(dtype).T)
    # Ranks run ahead of each other, each in its turn.
    for number in range(30):
        time.sleep(0.01 * (number // 10 == rank))
        got = collectives.all_to_all(torch.full((2 * size,), number), [2] * size, [2] * size, world)
        assert got.tolist() == [number] * (2 * size)
    with torch.inference_mode():
        got = collectives.all_to_all(torch.full((size,), rank), [1] * size, [1] * size, world)
        assert got.tolist() == list(range(size))
    nothing = collectives.all_to_all(torch.ones(2 * size, 0), [2] * size, [2] * size, world)
    assert nothing.shape == (2 * size, 0)
    assert collectives.all_gather_even(torch.zeros(0, 3), world).shape == (size, 0, 3)
    # The last rank has nothing for the others, and they have nothing for it.
    store = dist.distributed_c10d._get_default_store()
    if rank == size - 1:
        store.wait([f"done {other}" for other in range(size - 1)], timedelta(seconds=60))
    mine = [1] * (size - 1) + [0] if rank < size - 1 else [0] * size
    got = collectives.all_to_all(torch.full((sum(mine),), rank), mine, mine, world)
    assert got.tolist() == (list(range(size - 1)) if rank < size - 1 else [])
    store.set(f"done {rank}", "")
    dist.barrier()
    return "ok"


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_messages_equal_a_collective_and_wait_for_nobody_else() -> None:
    assert run_ranks(on_ranks, 3, timeout=240) == ["ok"] * 3


def die_amid_a_message() -> None:
    """The last rank is killed when the first bytes have come."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    rank, size, many = dist.get_rank(), dist.get_world_size(), 2**25
    world = World(rank=rank, size=size, group=dist.group.WORLD, device=torch.device("cpu"))
    collectives.all_to_all(torch.ones(size), [1] * size, [1] * size, world)
    splits = [0] * size
    splits[1 - rank] = many
    if rank == 0:
        collectives.all_to_all(torch.ones(many), splits, splits, world)
    out = torch.zeros(many)
    history = history_of(dist.group.WORLD)
    history.add("all_to_all", out, (splits, splits))
    messages.exchange(out.split(splits), torch.ones(many).split(splits), dist.group.WORLD, history.order)
    while not out[0]:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_amid_a_message_is_named() -> None:
    """gloo lets those wait to whom it was sending, until the group's timeout."""
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(die_amid_a_message, 2, timeout=240)
    assert "cannot end: rank 1 has not been heard of for" in str(failure.value)
    assert time.monotonic() - start < 60
