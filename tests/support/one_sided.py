"""An all-to-all as ``torch.distributed`` has it, over one-sided exchanges: to test these with what uses the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hecate.runtime.one_sided.links import Chunk, Rows, row_bytes
from hecate.runtime.one_sided.transport import Transport


def all_to_all(transport: Transport, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    """What :func:`hecate.runtime.comm.collectives.all_to_all` does."""
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    walk(steps_of_all_to_all(transport, rows, out, send, receive))
    return out


def walk(steps: Iterator[object]) -> None:
    """Do all steps of an exchange."""
    for _ in steps:
        pass


def steps_of_all_to_all(
    transport: Transport, rows: Tensor, out: Tensor, send: list[int], receive: list[int]
) -> Iterator[tuple[str, Chunk]]:
    """:func:`all_to_all` step by step, into a contiguous ``out``."""
    pieces, width = _pieces(rows, transport.windows.segment), rows.shape[1:].numel()
    leaving, arriving = (Rows(part.reshape(part.shape[0] * pieces, width // pieces)) for part in (rows, out))
    sends, expects = (
        torch.from_numpy(np.array(counts, dtype=np.int64) * pieces).to(rows.device) for counts in (send, receive)
    )
    most = max(*send, *receive) * pieces
    return transport.steps(leaving, sends, arriving, most=most, wire=rows.dtype, expects=expects)


def _pieces(rows: Tensor, segment: int) -> int:
    """Into how many equal pieces a row is cut so that each fits into a segment: an expert may be long."""
    size = row_bytes(rows, rows.dtype)
    if size <= segment:
        return 1
    width = rows.shape[1:].numel()
    return next(pieces for pieces in range(-(-size // segment), width + 1) if width % pieces == 0)
