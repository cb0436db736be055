"""Ranges joined to one index on the device, so that the host need not write a number for each row."""

import torch
from torch import Tensor

from hecate.runtime.kernels.launch import launch, runs_on, tl, tuned
from hecate.runtime.kernels.operands import check_index

# A single configuration: a few microseconds are not worth a trial.
CONFIGS = ({"BLOCK": 512, "num_warps": 4},)


def expand_segments(starts: Tensor, ends: Tensor, total: int) -> Tensor:
    """Join the ranges that begin at ``starts``; the first has ``ends[0]`` numbers, and the first g ``ends[g - 1]``.

    The host need not know how many numbers the ranges have: others after them are 0, and too many are cut off.

    >>> expand_segments(torch.tensor([7, 0, 3]), torch.tensor([2, 2, 5]), 7).tolist()
    [7, 8, 3, 4, 5, 0, 0]

    Args:
        starts, ends: int64 ``[G]``; ``ends``, where each range ends in the result, ascend.
        total: the length of the result, int64 ``[total]``, since the host would wait for the device to read it.
    """
    check_index("expand_segments", starts, starts.device)
    check_index("expand_segments", ends, starts.device, starts.shape[0])
    segments = starts.shape[0]
    if total < 0 or (total > 0 and segments == 0):
        raise ValueError(f"expand_segments: {total} numbers of {segments} ranges")
    if not runs_on(starts.device):
        return expand_segments_reference(starts, ends, total)
    out = torch.empty(total, dtype=torch.int64, device=starts.device)
    if total > 0:
        launch(
            _expand_segments,
            lambda meta: -(-total // meta["BLOCK"]),
            starts.contiguous(),
            ends.contiguous(),
            out,
            segments,
            total,
            # Halving an interval of so many leaves one place.
            segments.bit_length(),
        )
    return out


def expand_segments_reference(starts: Tensor, ends: Tensor, total: int) -> Tensor:
    """Join ranges as :func:`expand_segments` does, in plain torch."""
    position = torch.arange(total, dtype=torch.int64, device=starts.device)
    if total == 0:
        return position
    shifts = starts - ends + ends.diff(prepend=ends.new_zeros(1))
    which = torch.searchsorted(ends, position, right=True)
    found = shifts[which.clamp_max(len(ends) - 1)] + position
    return torch.where(which < len(ends), found, 0)


@tuned(CONFIGS, key=[], varying=["segments", "total", "steps"], unaligned=["starts", "ends"])
def _expand_segments(starts, ends, out, segments, total, steps, BLOCK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = position < total
    # The binary search finds the first range that ends behind the position, which is in [low, high] and never empty.
    low = tl.zeros((BLOCK,), dtype=tl.int32)
    high = tl.zeros((BLOCK,), dtype=tl.int32) + segments
    for _step in range(steps):
        middle = (low + high) // 2
        undecided = low < high
        end = tl.load(ends + middle, mask=undecided, other=0)
        behind = undecided & (end > position)
        before = undecided & (end <= position)
        low = tl.where(before, middle + 1, low)
        high = tl.where(behind, middle, high)
    first = tl.load(ends + low - 1, mask=mask & (low > 0), other=0)
    start = tl.load(starts + low, mask=mask & (low < segments), other=0)
    tl.store(out + position, tl.where(low < segments, start + position - first, 0), mask=mask)
