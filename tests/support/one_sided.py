"""An all-to-all as ``torch.distributed`` has it, over one-sided exchanges: to test these with what uses the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hecate.runtime.one_sided.links import Rows
from hecate.runtime.one_sided.transport import Transport


def all_to_all(transport: Transport, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    """What :func:`hecate.runtime.comm.collectives.all_to_all` does, with rows ``[R, width]``."""
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    sends, expects = (torch.tensor(counts, device=rows.device) for counts in (send, receive))
    most = max(*send, *receive)
    walk(transport.steps(Rows(rows), sends, Rows(out), most=most, wire=rows.dtype, expects=expects))
    return out


def walk(steps: Iterator[object]) -> None:
    """Do all steps of an exchange."""
    for _ in steps:
        pass
