"""How calls are timed, and what is said of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from hecate.runtime.attention.pattern import Pattern

Call = Callable[[], Any]


Samples = dict[str, list[float]]


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


def ratios(samples: Samples, system: str, baseline: str) -> list[float]:
    """How many times as fast, in each round."""
    return [b / a for a, b in zip(samples[system], samples[baseline], strict=True)]


def said(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


def pattern_of(length: int, heads: int) -> Pattern:
    """An eighth of the blocks: every 16th block, and one in 32 as local ones."""
    return Pattern(block=64, local=max(1, length // 64 // 32), stride=heads, offset=0, patterns=heads)
