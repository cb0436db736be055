"""The protocol of one-sided writes, whatever order ranks and their memory come in; in plain torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from torch import Tensor

from hecate.runtime.comm.world import find_world
from hecate.runtime.one_sided.links import COUNT_BITS, Rows
from hecate.runtime.one_sided.transport import ExchangeFailed, Transport
from hecate.runtime.one_sided.windows import local_windows, symmetric_windows
from tests.runtime.one_sided.protocol import SEGMENT, WIDTH, Case, Exchanges, Lost, cases, run, skewed
from tests.support import one_sided
from tests.support.extent import ALL
from tests.support.one_sided import walk
from tests.support.ranks import run_ranks
from tests.support.unordered_memory import Ranks, Stuck

CPU = torch.device("cpu")
SOME_ROWS = torch.arange(12, dtype=torch.float32).view(6, 2)


@settings(max_examples=1000 if ALL else 25, deadline=None)
@given(cases())
@example(skewed([0]))
@example(skewed([9, 0, 0, 0, 0, 0, 0, 0]))
def test_rows_come_there_and_back_in_any_order_of_things(case: Case) -> None:
    run(case, CPU)


@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
def test_ranks_are_never_further_ahead_than_there_are_places(world_size: int) -> None:
    """One rank is a hundred times slower than the others, so that they do come so far ahead."""
    speeds = (0.01,) + (1.0,) * (world_size - 1)
    found = set()
    for seed in range(2):
        counts = np.full((3, world_size, world_size), 5, dtype=np.int64)
        found.add(run(Case(counts, seed=seed, speeds=speeds), CPU).ahead)
    assert max(found) == (1 if world_size == 1 else 2)


# --- what must not be left out ---


def forgiving(more: int) -> type[Transport]:
    """A transport that takes words of so many chunks before."""

    class Forgiving(Transport):
        def steps(self, *args: Any, **options: Any) -> Any:
            for name, chunk in super().steps(*args, **options):
                chunk.told.add_({"wait": -more, "take": more}.get(name, 0))
                yield name, chunk

    return Forgiving


UNEVEN = [5, 1, 9]
BROKEN: dict[str, tuple[list[int], dict[str, Any]]] = {
    "nobody waits": (UNEVEN, {"kind": forgiving(1000)}),
    "one place too few": (UNEVEN, {"places": 1}),
    # Ranks that take an old count for a new one would only wait for each other.
    "signals of an earlier exchange": ([5, 5, 5], {"kind": forgiving(2)}),
    "no release": (UNEVEN, {"releases": False}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_protocol_is_found(name: str) -> None:
    """Rows are lost, if something is left out, in an order of things that the intact protocol stands."""
    counts, options = BROKEN[name]
    for seed in range(50):
        case = skewed(counts, seed=seed)
        try:
            run(case, CPU, **options)
        except (Stuck, ExchangeFailed):
            # That may come of it as well, and is not what this is about.
            continue
        except Lost:
            run(case, CPU)
            return
    raise AssertionError("nothing was lost")


# --- what ends badly, ends ---


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_rank_that_never_comes_is_named(world_size: int) -> None:
    """Others wait for it once, and exchange their own rows as if it had none."""
    absent, case = world_size - 2, skewed([5, 1, 0, 2, 3, 9, 1, 1][:world_size])
    exchanges = Exchanges(case, CPU)
    ranks = Ranks(world_size, segment=SEGMENT, seed=1, device=CPU)
    ranks.run([exchanges.program(t, rank) for rank, t in enumerate(ranks.transports)], absent={absent})
    others = [rank for rank in range(world_size) if rank != absent]
    for rank in others:
        with pytest.raises(ExchangeFailed, match=rf"rank {rank} waited in vain for ranks \[{absent}\]"):
            ranks.transports[rank].check()
        for number, counts in enumerate(case.counts):
            parts = [
                exchanges.rows(number, s)[exchanges.order(number, s)[0]].split(counts[s].tolist())[rank]
                for s in others
            ]
            came, here = torch.cat(parts), exchanges.order(number, rank)[1]
            known = here < len(came)
            assert torch.equal(exchanges.arrived[number, rank][known], came[here[known]])
            assert exchanges.arrived[number, rank][~known].isnan().all()
    # Nobody wrote to it more than there is room for.
    assert int(ranks._views[others[0]].signals[absent].amax()) >> COUNT_BITS <= 2


def exchanged(
    sends: Sequence[list[int]],
    rows: list[Tensor],
    out: list[Tensor],
    *,
    most: int,
    expects: Sequence[list[int] | None] = (None, None),
) -> Ranks:
    """Two ranks after one exchange of ``rows`` into ``out``."""
    ranks = Ranks(2, segment=SEGMENT, seed=0, device=CPU)
    wanted = [None if counts is None else torch.tensor(counts) for counts in expects]
    ranks.run(
        [
            t.steps(
                Rows(rows[r]), torch.tensor(sends[r]), Rows(out[r]), most=most, wire=torch.float32, expects=wanted[r]
            )
            for r, t in enumerate(ranks.transports)
        ]
    )
    return ranks


def test_more_rows_than_the_host_was_told_of_are_noticed() -> None:
    """Whoever knows a bound only, and is wrong, loses rows and is told so; on both ends."""
    for most, room, fails in ((5, 5, []), (9, 5, []), (4, 5, [0, 1]), (5, 4, [1])):
        out = [torch.zeros(1, WIDTH), torch.zeros(room, WIDTH)]
        ranks = exchanged(([0, 5], [1, 0]), [torch.ones(5, WIDTH), torch.ones(1, WIDTH)], out, most=most)
        for rank, transport in enumerate(ranks.transports):
            if rank in fails:
                with pytest.raises(ExchangeFailed, match="1 rows more"):
                    transport.check()
            else:
                transport.check()
                assert out[rank].all()


def test_rows_of_another_exchange_are_noticed() -> None:
    """Rank 1 has left an exchange out, and its rows of the next are taken for those of this one."""
    sends, rows, out = ([0, 5], [1, 0]), [torch.ones(5, WIDTH)] * 2, [torch.zeros(5, WIDTH) for _ in range(2)]
    ranks = exchanged(sends, rows, out, most=5, expects=([0, 3], [5, 0]))
    with pytest.raises(ExchangeFailed, match="rank 0 had 2 rows more, or fewer, than it was told of"):
        ranks.transports[0].check()
    ranks.transports[1].check()


def test_a_bounded_room_takes_fewer_rows() -> None:
    """Sizes that the host need not know: rows come into the front of what there is room for."""
    rows, out = [SOME_ROWS, SOME_ROWS + 100], [torch.full((9, 2), torch.nan) for _ in range(2)]
    exchanged(([1, 3], [0, 2]), rows, out, most=6)
    assert torch.equal(out[0][:1], rows[0][:1]) and out[0][1:].isnan().all()
    assert torch.equal(out[1][:5], torch.cat([rows[0][1:4], rows[1][:2]])) and out[1][5:].isnan().all()


def test_what_cannot_be_is_refused() -> None:
    transport = Transport(local_windows(1, SEGMENT, CPU)[0], seconds=1.0)
    long, sends = torch.zeros(1, SEGMENT), torch.tensor([1])
    with pytest.raises(ValueError, match="a row of 512 bytes does not fit into segments of 128"):
        walk(transport.steps(Rows(long), sends, Rows(long), most=1, wire=torch.float32))
    with pytest.raises(ValueError, match=r"rows \[6, 2\] leave, \[1, 128\] arrive"):
        walk(transport.steps(Rows(SOME_ROWS), sends, Rows(long), most=1, wire=torch.float32))
    with pytest.raises(ValueError, match="at most 268435455 can go"):
        walk(transport.steps(Rows(SOME_ROWS), sends, Rows(SOME_ROWS), most=1 << COUNT_BITS, wire=torch.float32))
    with pytest.raises(TypeError, match=r"rows of torch.int64 do not travel as torch.float32"):
        walk(transport.steps(Rows(SOME_ROWS.long()), sends, Rows(SOME_ROWS), most=1, wire=torch.float32))
    with pytest.raises(ValueError, match="contiguous rows only"):
        walk(transport.steps(Rows(SOME_ROWS), sends, Rows(torch.zeros(2, 6).t()), most=1, wire=torch.float32))


# --- on a GPU ---

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_on_streams_of_one_process(world_size: int) -> None:
    """Nothing is read on the host between the first launch and the last; what a rank waits for is launched before."""
    device = torch.device("cuda")
    case = skewed([300, 1, 0, 70][:world_size], exchanges=5)
    exchanges = Exchanges(case, device)
    transports = [Transport(windows, seconds=60.0) for windows in local_windows(world_size, 4096, device)]
    streams = [torch.cuda.Stream(device) for _ in transports]
    torch.cuda.synchronize()
    programs = [exchanges.program(transport, rank) for rank, transport in enumerate(transports)]
    # All have the same number of steps.
    going = True
    while going:
        for stream, program in zip(streams, programs, strict=True):
            with torch.cuda.stream(stream):
                going = next(program, None) is not None
    torch.cuda.synchronize()
    for rank, transport in enumerate(transports):
        transport.check()
        exchanges.check(rank)


def exchange_between_processes() -> bool:
    """On one rank of several that share a GPU."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = Transport(symmetric_windows(find_world(None, device), 4096), seconds=60.0)
    for seed in range(20):
        random = np.random.default_rng(seed)
        counts = random.integers(0, 300, (size, size)) * (random.random((size, size)) < 0.7)
        rows = [
            torch.arange(int(c.sum()) * 64, dtype=torch.float32, device=device).view(-1, 64) + 1000 * r
            for r, c in enumerate(counts)
        ]
        found = one_sided.all_to_all(transport, rows[rank], counts[rank].tolist(), counts[:, rank].tolist())
        expected = torch.cat([rows[source].split(counts[source].tolist())[rank] for source in range(size)])
        transport.check()
        assert torch.equal(found, expected), seed
    dist.barrier()
    return True


@pytest.mark.gpu
@pytest.mark.distributed
@needs_gpu
@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_that_share_a_gpu(world_size: int) -> None:
    """Each in a time slice of its own, so waits are long."""
    assert run_ranks(exchange_between_processes, world_size, timeout=240) == [True] * world_size
