"""Words that tell other ranks how far this one has come."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hecate.runtime.kernels.launch import launch, runs_on, tl, tuned
from hecate.runtime.kernels.links import COUNT_BITS, Chunk, check_links, padded

# One: a few microseconds are not worth a trial.
CONFIGS = ({"num_warps": 4},)


def post_words(chunk: Chunk, boards: Sequence[Tensor], addresses: Tensor, rank: int) -> None:
    """Write each link's number and rows on the board of its other rank, and count the chunk as done.

    What this rank's earlier launches wrote or read is written and read before a word is seen.

    >>> boards = [torch.zeros(2, 2, dtype=torch.int64) for _ in range(2)]
    >>> addresses, done = torch.tensor([board.data_ptr() for board in boards]), torch.tensor([0, 4])
    >>> post_words(Chunk(torch.tensor([7, 8]), done, torch.tensor([0, 0]), 0), boards, addresses, 1)
    >>> [[(word >> COUNT_BITS, word % 2**COUNT_BITS) for word in board[1].tolist()] for board in boards]
    [[(0, 0), (1, 7)], [(0, 0), (5, 8)]]
    >>> done.tolist()
    [1, 5]

    Args:
        chunk: ``chunk.done`` is changed.
        boards: of each rank, int64 ``[places, W]``.
        addresses: where they begin, int64 ``[W]`` on the device.
        rank: who writes.

    Raises:
        TypeError: a number is not int64.
        ValueError: a shape or a device does not fit.
    """
    check_links("post_words", chunk)
    if not runs_on(chunk.counts.device):
        post_words_reference(chunk, boards, rank)
        return
    ranks = len(boards)
    launch(
        _post_words,
        lambda meta: 1,
        chunk.counts.device,
        addresses, chunk.counts, chunk.done, chunk.late, chunk.first, rank, ranks,
        PLACES=boards[rank].shape[0], RANKS=padded(ranks), BITS=COUNT_BITS,
    )  # fmt: skip


def post_words_reference(chunk: Chunk, boards: Sequence[Tensor], rank: int) -> None:
    """:func:`post_words` in plain torch, which reads the numbers on the host."""
    counts, done = chunk.counts.tolist(), chunk.done.tolist()
    for peer in torch.nonzero(chunk.links).flatten().tolist():
        number = done[peer] + 1
        boards[peer][number % boards[peer].shape[0], rank] = (number << COUNT_BITS) + counts[peer]
        chunk.done[peer] = number


@tuned(CONFIGS, key=[], varying=["first", "rank", "ranks"])
def _post_words(
    addresses, counts, done, late, first, rank, ranks,
    PLACES: tl.constexpr, RANKS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    p = tl.arange(0, RANKS)
    inside = p < ranks
    count = tl.load(counts + p, mask=inside, other=0)
    goes = inside & (tl.load(late + p, mask=inside, other=1) == 0) & ((count > first) | (first == 0))
    number = tl.load(done + p, mask=inside, other=0) + 1
    board = tl.load(addresses + p, mask=goes, other=0).to(tl.pointer_type(tl.int64))
    word = board + (number % PLACES) * ranks + rank
    # Release at the reach of the system: behind all that earlier kernels of this stream did.
    tl.atomic_xchg(word, (number << BITS) + count, mask=goes, sem="release", scope="sys")
    tl.store(done + p, number, mask=goes)
