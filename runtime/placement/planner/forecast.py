"""Expect: take the mean load of the last steps as that of the next one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.placement.owners import Ints


def expected_load(history: Sequence[NDArray[np.integer]], window: int) -> Ints:
    """The rounded mean of the last ``window`` steps (paper, section 4: w = 5).

    Args:
        history: rows per expert in past steps, oldest first, ``[E]`` for each; may be shorter than the window.

    Returns:
        int64 ``[E]``.

    Raises:
        ValueError: an empty history, or a window below 1.
    """
    if window < 1 or len(history) == 0:
        raise ValueError(f"expected_load: needs a window above 0 and a step to look at, got {window}, {len(history)}")
    recent = np.asarray(history[-window:], dtype=np.int64)
    return (recent.sum(0) + len(recent) // 2) // len(recent)
