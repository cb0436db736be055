"""Words that tell other ranks how far this one has come."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hecate.runtime.kernels.launch import INTERPRETED, launch, runs_on, tl, tuned
from hecate.runtime.one_sided.links import COUNT_BITS, Chunk, check_links, padded

# A single configuration: a few microseconds are not worth a trial.
CONFIGS = ({"num_warps": 1},)
# A word has one writer, so it need not be exchanged: GPUs that reach each other over PCIe may have no atomics there.
_RELEASE = """{
.reg .pred goes;
setp.ne.s32 goes, $3, 0;
@goes st.release.sys.global.b64 [$1], $2;
mov.u32 $0, 0;
}"""


def post_words(chunk: Chunk, boards: Sequence[Tensor], addresses: Tensor, rank: int) -> None:
    """Tell each rank of the chunk: write its number and the rows of the link on that rank's board.

    Writes and reads of this rank's earlier launches are done before a word is seen.

    >>> boards = [torch.zeros(2, 2, dtype=torch.int64) for _ in range(2)]
    >>> addresses, told = torch.tensor([board.data_ptr() for board in boards]), torch.tensor([0, 4])
    >>> none, sends = torch.tensor([0, 0]), torch.tensor([7, 8])
    >>> post_words(Chunk(sends, none, told, none, 0), boards, addresses, 1)
    >>> [[(word >> COUNT_BITS, word % 2**COUNT_BITS) for word in board[1].tolist()] for board in boards]
    [[(0, 0), (1, 7)], [(0, 0), (5, 8)]]
    >>> told.tolist()
    [1, 5]

    Args:
        chunk: ``chunk.told`` is changed.
        boards: of each rank, int64 ``[places, W]``.
        addresses: where they begin, int64 ``[W]`` on the device.
        rank: the writer.

    Raises:
        TypeError: a number is not int64.
        ValueError: a shape or a device does not fit.
    """
    check_links("post_words", chunk)
    if not runs_on(chunk.sends.device):
        post_words_reference(chunk, boards, rank)
        return
    ranks = len(boards)
    launch(
        _post_words,
        lambda meta: 1,
        addresses,
        *chunk.numbers,
        chunk.first,
        rank,
        ranks,
        PLACES=boards[rank].shape[0],
        RANKS=padded(ranks),
        BITS=COUNT_BITS,
        RELEASE=None if INTERPRETED else _RELEASE,
    )


def post_words_reference(chunk: Chunk, boards: Sequence[Tensor], rank: int) -> None:
    """Post words as :func:`post_words` does, in plain torch, which reads the numbers on the host."""
    sends, told = chunk.sends.tolist(), chunk.told.tolist()
    for peer in torch.nonzero(chunk.links).flatten().tolist():
        number = told[peer] + 1
        boards[peer][number % boards[peer].shape[0], rank] = (number << COUNT_BITS) + sends[peer]
        chunk.told[peer] = number


@tuned(CONFIGS, key=[], varying=["first", "rank", "ranks"])
def _post_words(
    addresses,
    sends,
    receives,
    told,
    late,
    first,
    rank,
    ranks,
    PLACES: tl.constexpr,
    RANKS: tl.constexpr,
    BITS: tl.constexpr,
    RELEASE: tl.constexpr,
):
    p = tl.arange(0, RANKS)
    inside = p < ranks
    count = tl.load(sends + p, mask=inside, other=0)
    longer = tl.maximum(count, tl.load(receives + p, mask=inside, other=0))
    goes = inside & (tl.load(late + p, mask=inside, other=1) == 0) & ((longer > first) | (first == 0))
    number = tl.load(told + p, mask=inside, other=0) + 1
    word = tl.load(addresses + p, mask=goes, other=0) + ((number % PLACES) * ranks + rank) * 8
    value = (number << BITS) + count
    # Release at the scope of the system: after all work of earlier kernels of this stream.
    if RELEASE is not None:
        # Threads that have the same word store the same.
        tl.inline_asm_elementwise(
            RELEASE, "=r,l,l,r", [word, value, goes.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.atomic_xchg(word.to(tl.pointer_type(tl.int64)), value, mask=goes, sem="release", scope="sys")
    tl.store(told + p, number, mask=goes)
