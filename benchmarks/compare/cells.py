"""Which systems meet on which shapes, links and workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.compare.shapes import LINKS, SHAPES
from benchmarks.compare.workloads import RECORDED, WORKLOADS

# Policies on Hecate's engine, systems as they ship, and bounds, which are no systems.
ON_ENGINE = (
    "static EP", "hecate", "hecate (calibrate)", "hecate (LAER's memory)", "hecate (paper)", "FasterMoE", "SmartMoE",
    "FlexMoE", "LAER", "post-gate",
)  # fmt: skip
# Hecate with options of which it finds the best itself; in no table unless asked for.
VARIANTS = ("hecate (one chunk)", "hecate (two chunks)")
EXTERNAL = ("transformers EP", "FSDP2", "DDP")
# What the committed tables do not show: policies that were changed after they were measured, and whether the engine
# was, which makes every step another. Measuring all cells again (make bench-full) empties both.
CHANGED_POLICIES = (
    "hecate", "hecate (calibrate)", "hecate (LAER's memory)", "SmartMoE", "FlexMoE", "post-gate",
)  # fmt: skip
ENGINE_CHANGED = True
# A bound is played by a system's model: with even routing, or with links on which nothing takes time.
BOUNDS = {"bound: balanced routing": "static EP", "bound: free links": "hecate"}
# Steps of a trace that every policy has seen before the first one that is timed.
FIRST = 100


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape on one link, with all its workloads.

    Attributes:
        rounds: timed steps of each system in each workload.
        seconds: that its ranks may take, if it matters; on a slow machine there are fewer rounds, but three at least.
    """

    shape: str
    link: str
    systems: tuple[str, ...]
    workloads: tuple[str, ...]
    rounds: int
    seconds: float | None = None
    first: int = FIRST

    @property
    def name(self) -> str:
        return f"{self.shape}.{self.link}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def change(self, systems: str | None, workloads: str | None, rounds: int | None) -> Cell:
        """With the options of the command line.

        Raises:
            SystemExit: there is no such system or workload, or static EP is missing, to which all are compared.
        """
        cell = self if rounds is None else replace(self, rounds=rounds)
        if systems is not None:
            cell = replace(cell, systems=_names(systems, (*ON_ENGINE, *VARIANTS, *EXTERNAL, *BOUNDS), "system"))
            if ON_ENGINE[0] not in cell.systems:
                raise SystemExit(f"compare: {ON_ENGINE[0]} must be among the systems")
        if workloads is not None:
            wanted = _names(workloads, WORKLOADS, "workload")
            # Not every shape has every workload.
            cell = replace(cell, workloads=tuple(w for w in wanted if w in fitting(cell.shape)))
        return cell


def _names(text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = set(names) - set(known)
    if unknown or not names:
        said = f"no {what} {', '.join(sorted(unknown))}" if unknown else f"no {what} given"
        raise SystemExit(f"compare: {said}; there are {', '.join(known)}")
    return names


def fitting(shape: str) -> tuple[str, ...]:
    """The workloads of a shape: the traces were recorded with 32 experts."""
    return tuple(w for w in WORKLOADS if SHAPES[shape].experts == 32 or w not in RECORDED)


def short() -> list[Cell]:
    """One shape and link, at most 15 minutes with the self-test."""
    left_out = ("hecate (calibrate)", "hecate (LAER's memory)")
    systems = tuple(name for name in ON_ENGINE if name not in left_out) + EXTERNAL + tuple(BOUNDS)
    return [
        Cell(
            shape="gpt-moe-s", link="a", systems=systems, workloads=("natural", "zipf", "balanced"), rounds=5,
            seconds=750,
        )
    ]  # fmt: skip


def full() -> list[Cell]:
    """Everything, the short cell's included."""
    return [
        Cell(
            shape=shape, link=link, systems=ON_ENGINE + EXTERNAL + tuple(BOUNDS), rounds=9,
            workloads=fitting(shape),
        )
        for shape in SHAPES
        for link in LINKS
    ]  # fmt: skip
