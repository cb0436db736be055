"""From raw samples to numbers. Every number is the median of what the launches say, each worked out by itself.

What a launch says of time is a sum over its rounds, because a run takes as long as all of its steps do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.compare.cells import EVEN
from benchmarks.compare.variants import BOUNDS, VARIANTS
from benchmarks.compare.waits import KINDS

BASE, OURS, PAPER = "static EP", "hecate", "hecate (paper)"
# Others that are compared with Hecate in another setting, too: with as much memory as LAER's layout takes, and with
# rows that cross to each node once.
LIKE = {"LAER": "hecate (LAER's memory)", "static EP (node-wise)": "hecate (node-wise)"}
# The time objective in all settings, which is not compared with itself.
OWN = (
    OURS,
    "hecate (auto)",
    "hecate (calibrate)",
    "hecate (LAER's memory)",
    *(name for name, one in VARIANTS.items() if one.of == OURS),
)
# Other settings that the summary has beside it: the default, and with rows that cross to each node once.
SETTINGS = ("hecate (auto)", "hecate (node-wise)")
FREE = "bound: free links"
Samples = Sequence[dict[str, Any]]


class Spread(NamedTuple):
    """Of what launches say.

    Attributes:
        least, middle, most: smallest, median and largest.
        launches: how many there are.
    """

    least: float
    middle: float
    most: float
    launches: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(min(values), statistics.median(values), max(values), len(values))

    def __str__(self) -> str:
        # One launch has no range.
        return f"{self.middle:.2f}" + (f" ({self.least:.2f} - {self.most:.2f})" if self.launches > 1 else "")


def seconds_of(sample: dict[str, Any]) -> float:
    """A step, and its share of what moved between steps."""
    seconds: float = sample["seconds"] + sample["moves"]
    return seconds


def over_launches(cell: dict[str, Any], workload: str, number: Callable[[dict[str, Samples]], float]) -> Spread:
    """``number`` of the samples of each launch, by system."""
    return Spread.of([number(launch["samples"][workload]) for launch in cell["launches"]])


def workloads_of(cell: dict[str, Any]) -> list[str]:
    """The workloads that every launch has."""
    first, *others = (launch["samples"] for launch in cell["launches"])
    return [workload for workload in first if all(workload in samples for samples in others)]


def systems_of(cell: dict[str, Any], workload: str) -> list[str]:
    """The systems of a workload."""
    return list(cell["launches"][0]["samples"][workload])


def times_as_long(cell: dict[str, Any], workload: str, system: str, other: str) -> Spread:
    """How many times as long ``system`` takes as ``other`` for the same steps."""
    return over_launches(cell, workload, lambda found: _seconds(found[system]) / _seconds(found[other]))


def _seconds(samples: Samples) -> float:
    """Of a step, on average."""
    return statistics.mean(map(seconds_of, samples))


def line_of(cell: dict[str, Any], workload: str, system: str) -> dict[str, Any]:
    """One line of a table."""

    def middle(number: Callable[[dict[str, Any]], float]) -> float:
        return over_launches(cell, workload, lambda samples: statistics.median(map(number, samples[system]))).middle

    first = cell["launches"][0]["samples"][workload][system][0]
    line: dict[str, Any] = {
        "system": system,
        "seconds": over_launches(cell, workload, lambda found: _seconds(found[system])),
        "speed-up": times_as_long(cell, workload, BASE, system),
        "sent": middle(lambda sample: max(sample["sent"])),
        "bytes": memory_of(cell, workload, system),
        "moves": middle(lambda sample: sample["moves"]),
        "cpu": over_launches(cell, workload, lambda found: _busiest(found[system], lambda s: s["cpu"])).middle,
        "beside": over_launches(cell, workload, lambda found: _busiest(found[system], _beside)).middle,
    }
    if "planning" in first:
        line["planning"] = [_planning(cell, workload, system, when) for when in ("before", "after")]
    if "rows" in first:
        line["imbalance"] = middle(lambda sample: imbalance(sample["rows"]))
        line["waits"] = waits_of(cell, workload, system)
    if system in OWN and FREE in systems_of(cell, workload):
        line["bound"] = times_as_long(cell, workload, FREE, system).middle
    return line


def lines_of(cell: dict[str, Any], workload: str) -> list[dict[str, Any]]:
    """The table of one workload, fastest first, bounds last."""
    lines = [line_of(cell, workload, system) for system in systems_of(cell, workload)]
    return sorted(lines, key=lambda line: (line["system"] in BOUNDS, line["seconds"].middle))


def memory_of(cell: dict[str, Any], workload: str, system: str) -> float:
    """Bytes of the rank that has most."""

    def most(launch: dict[str, Any]) -> float:
        # Slots of all layers, from the forward to their backward, and the gradients of those of one.
        held = [h for sample in launch["samples"][workload][system] for h in sample.get("held", ())]
        states: float = launch["bytes"][system]
        return states + max((sum(layers) + max(layers) for layers in held), default=0)

    return statistics.median(map(most, cell["launches"]))


def _busiest(samples: Samples, seconds: Callable[[dict[str, Any]], Sequence[float]]) -> float:
    """Seconds, by rank, of the rank whose median is largest."""
    return max(statistics.median(rank) for rank in zip(*map(seconds, samples), strict=True))


def _planning(cell: dict[str, Any], workload: str, system: str, when: str) -> float:
    """CPU seconds of a policy's calls in a step, of the rank with most."""

    def number(samples: dict[str, Samples]) -> float:
        return _busiest(samples[system], lambda sample: sample["planning"][when])

    return over_launches(cell, workload, number).middle


def _beside(sample: dict[str, Any]) -> list[float]:
    """CPU time of all threads of a rank but the one with a quota."""
    return [whole - own for whole, own in zip(sample["process"], sample["cpu"], strict=True)]


def imbalance(rows: Sequence[Sequence[int]]) -> float:
    """Rows of the busiest rank over the mean, averaged over layers; ``rows`` is ``[rank][layer]``."""
    layers = list(zip(*rows, strict=True))
    return statistics.mean(max(layer) / max(1e-9, statistics.mean(layer)) for layer in layers)


def waits_of(cell: dict[str, Any], workload: str, system: str) -> dict[str, float] | None:
    """Shares of a step in which the median rank's compute stood still, by what it waited for; None if unknown."""
    if "waits" not in cell["launches"][0]["samples"][workload][system][0]:
        return None

    def share(kind: str) -> float:
        def number(samples: dict[str, Samples]) -> float:
            return statistics.median(statistics.median(s["waits"][kind]) / s["seconds"] for s in samples[system])

        return over_launches(cell, workload, number).middle

    return {kind: share(kind) for kind in KINDS}


def compared(cells: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Cell and workload of every line of the summary."""
    for name, cell in cells.items():
        for workload in workloads_of(cell) if cell["launches"] else ():
            if OURS in systems_of(cell, workload):
                yield name, workload


class Mean(NamedTuple):
    """Another system beside Hecate, over all lines that have both.

    Attributes:
        skewed, even: geometric means of how many times as long it takes, where routing is skewed or even; None
            without such lines.
        lines: how many there are of each.
        memory: geometric mean of how many times as much memory it has.
    """

    other: str
    ours: str
    skewed: float | None
    even: float | None
    lines: tuple[int, int]
    memory: float


def means(cells: dict[str, Any]) -> list[Mean]:
    """Every other system beside Hecate, and those of :data:`LIKE` beside Hecate in their setting, too."""
    ratios: dict[tuple[str, str], dict[bool, list[float]]] = {}
    memory: dict[tuple[str, str], list[float]] = {}
    for name, workload in compared(cells):
        cell = cells[name]
        there = systems_of(cell, workload)
        pairs = [(system, OURS) for system in there if system not in BOUNDS and system not in OWN]
        pairs += [pair for pair in LIKE.items() if {*pair} <= {*there}]
        for other, ours in pairs:
            by_kind = ratios.setdefault((other, ours), {True: [], False: []})
            by_kind[workload in EVEN].append(times_as_long(cell, workload, other, ours).middle)
            more = memory_of(cell, workload, other) / memory_of(cell, workload, ours)
            memory.setdefault((other, ours), []).append(more)
    found = [
        Mean(
            other,
            ours,
            _geometric(by_kind[False]),
            _geometric(by_kind[True]),
            (len(by_kind[False]), len(by_kind[True])),
            statistics.geometric_mean(memory[other, ours]),
        )
        for (other, ours), by_kind in ratios.items()
    ]
    return sorted(found, key=lambda mean: mean.skewed or mean.even or 0.0)


def _geometric(values: Sequence[float]) -> float | None:
    return statistics.geometric_mean(values) if values else None
