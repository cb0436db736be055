"""Waiting, not for ever, until other ranks have come far enough."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from hecate.runtime.kernels.launch import INTERPRETED, launch, runs_on, tl, tuned
from hecate.runtime.one_sided.links import COUNT_BITS, Chunk, check_links

# A single configuration: a program waits for one word.
CONFIGS = ({"num_warps": 1},)
# The reference polls often at first, then after a part of the time that it has waited, and lets others run meanwhile.
_PAUSE, _PART, _LONGEST_PAUSE = 20e-6, 1 / 16, 2e-3

Stop = Callable[[], bool]


def wait_words(board: Tensor, chunk: Chunk, *, seconds: float, stop: Stop | None = None) -> None:
    """Wait until each rank has told of the chunk, and read how many rows come; ranks that do not tell become late.

    Writes of others before their words are seen by this rank's later launches.

    >>> board = torch.tensor([[0, 0], [(1 << COUNT_BITS) + 7, 0]])
    >>> sends, receives, late = (torch.zeros(2, dtype=torch.int64) for _ in range(3))
    >>> wait_words(board, Chunk(sends, receives, torch.tensor([1, 1]), late, 0), seconds=0)
    >>> receives.tolist(), late.tolist()
    ([7, 0], [0, 1])

    Args:
        board: int64 ``[places, W]``, this rank's own.
        chunk: of which this rank has told the others. ``chunk.receives`` and ``chunk.late`` are changed.
        seconds: how long; each is looked at once in any case.
        stop: asked while the host waits; it waits no longer than until this is true. No kernel asks.

    Raises:
        TypeError: a number is not int64.
        ValueError: a shape or a device does not fit.
    """
    check_links("wait_words", chunk)
    if not runs_on(board.device):
        wait_words_reference(board, chunk, seconds, stop)
        return
    places, ranks = board.shape
    launch(
        _wait_words,
        lambda meta: ranks,
        board,
        *chunk.numbers,
        chunk.first,
        ranks,
        # The interpreter has no clock: there a poll stands for the longest pause.
        int(seconds / _LONGEST_PAUSE if INTERPRETED else seconds * 1e9),
        PLACES=places,
        BITS=COUNT_BITS,
        TIMED=not INTERPRETED,
    )


def has_come(board: Tensor, chunk: Chunk) -> Tensor:
    """Tell for each rank whether a wait would end now because its word has come, bool ``[W]``."""
    return _words(board, chunk) >> COUNT_BITS >= chunk.told


def _words(board: Tensor, chunk: Chunk) -> Tensor:
    return board.gather(0, (chunk.told % board.shape[0]).unsqueeze(0)).squeeze(0)


def wait_words_reference(board: Tensor, chunk: Chunk, seconds: float, stop: Stop | None = None) -> None:
    """Wait as :func:`wait_words` does, in plain torch, on the host."""
    links, begin, polls = chunk.links, time.monotonic(), 0
    while True:
        waited = time.monotonic() - begin
        came = has_come(board, chunk) | ~links
        if came.all() or waited >= seconds or (stop is not None and stop()):
            break
        time.sleep(min(max(_PAUSE, _PART * waited), _LONGEST_PAUSE) if polls else 0)
        polls += 1
    chunk.late.masked_fill_(~came, 1)
    rows = _words(board, chunk) & ((1 << COUNT_BITS) - 1)
    chunk.receives.copy_(torch.where(links & came, rows, chunk.receives))


@tuned(CONFIGS, key=[], varying=["first", "ranks", "limit"])
def _wait_words(
    board,
    sends,
    receives,
    told,
    late,
    first,
    ranks,
    limit,
    PLACES: tl.constexpr,
    BITS: tl.constexpr,
    TIMED: tl.constexpr,
):
    link = tl.program_id(0)
    longer = tl.maximum(tl.load(sends + link), tl.load(receives + link))
    if (tl.load(late + link) == 0) & ((longer > first) | (first == 0)):
        number = tl.load(told + link)
        place = board + (number % PLACES) * ranks + link
        # Adding 0 reads a word with acquire: writes before the word are seen after this.
        word = tl.atomic_add(place, 0, sem="acquire", scope="sys")
        begin = number * 0
        waited = number * 0
        if TIMED:
            begin = tl.extra.cuda.globaltimer()
        while ((word >> BITS) < number) & (waited < limit):
            word = tl.atomic_add(place, 0, sem="acquire", scope="sys")
            if TIMED:
                # These are nanoseconds of a clock that goes on when programs take turns.
                waited = tl.extra.cuda.globaltimer() - begin
            else:
                waited += 1
        if (word >> BITS) < number:
            tl.store(late + link, 1)
        else:
            tl.store(receives + link, word & ((1 << BITS) - 1))
