"""How calls are timed, and what is said of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from hecate.runtime.attention.pattern import Pattern

Call = Callable[[], Any]
# Seconds of each round, of one launch.
Samples = dict[str, list[float]]
# The same of each launch.
Launches = dict[str, list[list[float]]]


# Where results have samples.
_SAMPLES = ("forward", "both", "samples")


def measure(systems: dict[str, Call], rounds: int) -> Samples:
    """Seconds of each call; the first round warms up."""
    samples: Samples = {name: [] for name in systems}
    for number in range(rounds + 1):
        order = list(systems.items())
        # Whoever comes second finds other caches.
        for name, call in order if number % 2 else reversed(order):
            start = time.process_time()
            call()
            if number:
                samples[name].append(time.process_time() - start)
    return samples


def joined(launches: Sequence[Any]) -> Any:
    """One result of several, which differ in their samples."""
    first = launches[0]
    if isinstance(first, list):
        return [joined(rows) for rows in zip(*launches, strict=True)]
    return {
        key: {name: [one[key][name] for one in launches] for name in value} if key in _SAMPLES else value
        for key, value in first.items()
    }


def ratios(samples: Launches, system: str, baseline: str) -> list[float]:
    """How many times as fast, in each launch: the median over its rounds."""
    return [
        statistics.median(b / a for a, b in zip(*rounds, strict=True))
        for rounds in zip(samples[system], samples[baseline], strict=True)
    ]


def seconds(samples: Launches, system: str) -> float:
    """Median over launches of the median over rounds."""
    return statistics.median(statistics.median(rounds) for rounds in samples[system])


def said(values: list[float]) -> str:
    """The median over launches, with the lowest and the highest."""
    spread = f" ({min(values):.2f} - {max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.2f}{spread}"


def pattern_of(length: int, heads: int) -> Pattern:
    """An eighth of the blocks: every 16th block, and one in 32 as local ones."""
    return Pattern(block=64, local=max(1, length // 64 // 32), stride=heads, offset=0, patterns=heads)
