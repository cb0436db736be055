"""Ratios of the page of a run and of TensorBoard: how even rows are, and how much travel is hidden."""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


def max_over_mean(rows: Floats) -> Floats:
    """Return maximum over mean of the last dimension; 1 where there are no rows, NaN where a rank is missing."""
    mean = rows.mean(-1)
    return np.where(mean == 0, 1.0, rows.max(-1) / np.where(mean == 0, 1, mean))


def hidden_part(travel: Floats, exposed: Floats) -> Floats:
    """Return the part of the collectives' time in which compute went on, from 0 to 1; NaN where nothing travelled."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(travel > 0, np.clip(1 - exposed / travel, 0, 1), np.nan)
