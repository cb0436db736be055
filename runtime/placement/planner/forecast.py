"""Expect: take the mean load of some of the last steps as that of the next one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.placement.owners import Ints


def expected_load(history: Sequence[NDArray[np.integer]], window: int) -> Ints:
    """Return the rounded mean of the last ``window`` steps, int64 ``[E]`` (paper, section 4: w = 5).

    An empty history, or a window below 1, raises ValueError.
    """
    if window < 1 or len(history) == 0:
        raise ValueError(f"expected_load: needs a window above 0 and a step to look at, got {window}, {len(history)}")
    recent = np.asarray(history[-window:], dtype=np.int64)
    return (recent.sum(0) + len(recent) // 2) // len(recent)


# Steps are alike if their distance is at most this many times its expectation by chance alone.
_CHANCE = 2


def steady_steps(history: Sequence[NDArray[np.integer]], window: int) -> int:
    """Return how many of the newest steps differ from the very newest by no more than chance; at least 1.

    Routing that moves is best told by the newest step alone; a mean only helps where few rows make counts noisy.
    """
    recent = np.asarray(history[-window:], dtype=np.int64)
    both = recent + recent[-1]
    # Two counts of the same mean are apart by chance: the square of their difference is their sum, on average.
    apart = ((recent - recent[-1]) ** 2 / np.maximum(both, 1)).sum(1)
    other = np.flatnonzero(apart > _CHANCE * np.count_nonzero(both, axis=1))
    return len(recent) - 1 - int(other[-1]) if len(other) else len(recent)
