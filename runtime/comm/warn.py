"""Warnings while ranks wait for each other: one that is made an error (``python -W error``) must not part them."""

from __future__ import annotations

import logging
import warnings


def warn_together(text: str, rank: int, *, stacklevel: int = 1) -> None:
    """Warn on rank 0 of a finding of all ranks; every rank calls this, and raises it where warnings are errors."""
    if rank == 0:
        warnings.warn(text, stacklevel=stacklevel + 1)
        return
    with warnings.catch_warnings(record=True):
        warnings.warn(text, stacklevel=stacklevel + 1)


def warn_alone(text: str, *, stacklevel: int = 1) -> None:
    """Warn of a finding of this rank alone; where warnings are errors log it, for the other ranks would wait."""
    try:
        warnings.warn(text, stacklevel=stacklevel + 1)
    except Warning:
        logging.getLogger("hecate").warning(text)
