"""Find the first of several passes that changes a result. Knows nothing of models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank computed.

    Attributes:
        loss: of each step.
        gradients: by step and parameter; those that are not there are None in both.
        facts: what it says about the script, as text.
    """

    loss: Array
    gradients: dict[tuple[int, str], Array]
    facts: str = ""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two results are apart, relative to the second.

    Attributes:
        loss: worst of all ranks and steps.
        gradient: the largest error of an element, relative to the largest of that gradient on any rank.
        worst: the parameter that it is of, and the step.
        error: why there is no result.
    """

    loss: float = 0.0
    gradient: float = 0.0
    worst: str = ""
    error: str = ""

    def beyond(self, tolerance: float) -> bool:
        return bool(self.error) or not (self.loss <= tolerance and self.gradient <= tolerance)

    def __str__(self) -> str:
        if self.error:
            return f"no result: {self.error}"
        behind = f" ({self.worst})" if self.gradient > 0 and self.worst else ""
        return f"loss {self.loss:.1e}, gradients {self.gradient:.1e}{behind}"


def read_result(path: Path) -> RankResult:
    """What a worker wrote.

    Raises:
        ValueError: it wrote nothing that can be read.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = archive["names"].tolist()
            gradients = {}
            for key in archive.files:
                if key not in ("loss", "names", "facts"):
                    step, number = map(int, key.split("."))
                    gradients[step, names[number]] = archive[key]
            return RankResult(loss=archive["loss"], gradients=gradients, facts=str(archive["facts"]))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def compare(ours: Sequence[RankResult], theirs: Sequence[RankResult], *, gradients: bool = True) -> Difference:
    """How far results are from ``theirs``, over all ranks.

    Args:
        gradients: compare them too.
    """
    loss, gradient, worst = 0.0, 0.0, ""
    for mine, other in zip(ours, theirs, strict=True):
        part = np.abs(mine.loss - other.loss) / np.maximum(np.abs(other.loss), 1e-12)
        loss = max(loss, _or_infinite(part.max()))
    largest: dict[tuple[int, str], float] = {}
    for other in theirs:
        for key, value in other.gradients.items():
            largest[key] = max(largest.get(key, 0.0), float(np.abs(value).max(initial=0.0)))
    for mine, other in zip(ours, theirs, strict=True) if gradients else ():
        for key in sorted({*mine.gradients, *other.gradients}):
            error = _error(mine.gradients.get(key), other.gradients.get(key), largest.get(key, 0.0))
            if error > gradient:
                gradient, worst = error, f"{key[1]}, step {key[0]}"
    return Difference(loss=loss, gradient=gradient, worst=worst)


def _error(mine: Array | None, other: Array | None, largest: float) -> float:
    if mine is None or other is None or mine.shape != other.shape:
        return math.inf
    error = _or_infinite(np.abs(mine.astype(np.float64) - other).max(initial=0.0))
    if largest > 0 and math.isfinite(largest):
        return error / largest
    return 0.0 if error == 0 else math.inf


def _or_infinite(value: Any) -> float:
    """NaN compares as smaller than everything, so it must not get into a maximum."""
    return float(value) if np.isfinite(value) else math.inf


def first_wrong(count: int, wrong: Callable[[int], bool]) -> int:
    """The least k for which the first k of ``count`` passes together are wrong, by halves.

    ``wrong(count)`` is known to be true, ``wrong(0)`` false; neither is asked. Where it is true for some k and false
    for a larger one, the answer is still a k that is wrong behind one that is not.
    """
    good, bad = 0, count
    while bad - good > 1:
        middle = (good + bad) // 2
        if wrong(middle):
            bad = middle
        else:
            good = middle
    return bad
