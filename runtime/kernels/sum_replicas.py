"""Gradients of replicas added to the slots to which they belong."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hecate.runtime.kernels.launch import launch, runs_on, tl, tuned
from hecate.runtime.kernels.operands import FLOATS, check_index, flat_rows
from hecate.runtime.placement.planner import rounds_of

CONFIGS = (
    {"BLOCK": 1024, "num_warps": 4},
    {"BLOCK": 512, "num_warps": 4},
    {"BLOCK": 2048, "num_warps": 8},
)


def sum_replicas(
    totals: Tensor, parts: Tensor, starts: Tensor, order: Tensor, rounds: Sequence[int] | None = None
) -> None:
    """Add to each slot its parts in place, in the given order, which makes the sum the same each time.

    >>> totals, parts = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0], [30.0]])
    >>> sum_replicas(totals, parts, torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]))
    >>> totals.tolist()
    [[41.0], [22.0]]

    Args:
        totals: ``[S, ...]``, contiguous. The kernel takes float32 alone.
        parts: ``[m, width]``, where width is that of a slot; rows may have gaps between them.
        starts: int64 ``[S + 1]``: the parts of slot s are ``order[starts[s]]`` to ``order[starts[s + 1] - 1]``.
        order: int64 ``[m]``, each part once.
        rounds: how many slots have more than 0 parts, more than 1, and so on up to the most that one has. The
            reference counts them if they are not given, for which the host waits for the device.
    """
    check_index("sum_replicas", starts, totals.device, totals.shape[0] + 1)
    check_index("sum_replicas", order, totals.device)
    width = totals.shape[1:].numel()
    if parts.shape != (order.shape[0], width):
        raise ValueError(f"sum_replicas: expected parts [{order.shape[0]}, {width}], got {list(parts.shape)}")
    if parts.device != totals.device:
        raise ValueError(f"sum_replicas: the parts are on {parts.device}, the totals are on {totals.device}")
    if not totals.is_contiguous():
        raise ValueError("sum_replicas: adds to contiguous totals only")
    if not (runs_on(totals.device) and totals.dtype == torch.float32 and parts.dtype in FLOATS):
        sum_replicas_reference(totals, parts, starts, order, rounds)
        return
    parts, slots = flat_rows(parts), totals.shape[0]
    if slots * width > 0 and order.shape[0] > 0:
        launch(
            _sum_replicas,
            lambda meta: slots * -(-width // meta["BLOCK"]),
            totals,
            parts,
            starts.contiguous(),
            order.contiguous(),
            width,
            parts.stride(0),
        )


def sum_replicas_reference(
    totals: Tensor, parts: Tensor, starts: Tensor, order: Tensor, rounds: Sequence[int] | None = None
) -> None:
    """Add parts as :func:`sum_replicas` does, in plain torch: the first ones of all slots, then the second ones."""
    begins, lengths = starts[:-1], starts.diff()
    flat = totals.view(totals.shape[0], totals.shape[1:].numel())
    for turn, count in enumerate(rounds_of(lengths.cpu().numpy()) if rounds is None else rounds):
        # Its length is known, so nothing is read on the host.
        slots = torch.nonzero_static(lengths > turn, size=count).flatten()
        chosen = order.index_select(0, begins.index_select(0, slots) + turn)
        # No slot occurs twice in a round.
        flat.index_add_(0, slots, parts.index_select(0, chosen).to(totals.dtype))


@tuned(CONFIGS, key=["width"], restore=["totals"])
def _sum_replicas(totals, parts, starts, order, width, stride, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    slot = (tl.program_id(0) // blocks).to(tl.int64)
    c = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(starts + slot)
    end = tl.load(starts + slot + 1)
    if begin < end:
        total = tl.load(totals + slot * width + c, mask=c < width, other=0.0)
        for turn in range(begin, end):
            part = tl.load(order + turn)
            total = total + tl.load(parts + part * stride + c, mask=c < width, other=0.0).to(tl.float32)
        tl.store(totals + slot * width + c, total, mask=c < width)
