"""Which systems meet on which shapes, links and workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.compare.shapes import LINKS, SHAPES
from benchmarks.compare.variants import BOUNDS, IN_NODES, VARIANTS
from benchmarks.compare.workloads import RECORDED, WORKLOADS

# Policies on Hecate's engine, systems as they ship, and bounds, which are no systems.
ON_ENGINE = (
    "static EP",
    "hecate",
    "hecate (auto)",
    "hecate (calibrate)",
    "hecate (LAER's memory)",
    "hecate (paper)",
    "FasterMoE",
    "SmartMoE",
    "FlexMoE",
    "LAER",
    "post-gate",
)
EXTERNAL = ("transformers EP", "FSDP2", "DDP")
# Whatever can be measured.
NAMES = (*ON_ENGINE, *VARIANTS, IN_NODES, *EXTERNAL, *BOUNDS)
# Policies that were changed after the committed tables were measured; make bench-full empties it.
CHANGED_POLICIES: tuple[str, ...] = ()
# What of a system's transfers can run beside its compute on CPUs with gloo (docs/benchmarks.md says where that
# stands in the code of each). All on the engine can.
OVERLAPS = {"transformers EP": "nothing", "FSDP2": "nothing", "DDP": "gradients", IN_NODES: "rows, in its node"}
# Workloads in which every expert gets the same in every step.
EVEN = ("balanced",)
# The first step of a trace that may be timed; in earlier ones no policy knows anything yet.
FIRST = 10
# Of each cell, one after the other: what differs between launches shows only between launches.
LAUNCHES = 3


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape on one link, with all its workloads.

    Attributes:
        rounds: timed steps of each system in each workload of a launch.
        first: step of a trace before which none is timed.
    """

    shape: str
    link: str
    systems: tuple[str, ...]
    workloads: tuple[str, ...]
    rounds: int = 3
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
            cell = replace(cell, systems=_names(systems, NAMES, "system"))
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


# Cells of --full, and their workloads; every kind is in one of them.
_FULL = {
    "gpt-moe-s.a": ("natural", "auxiliary", "zipf", "balanced"),
    "gpt-moe-s.b": ("natural", "zipf", "burst", "balanced"),
    "bert-moe.a": ("natural", "zipf", "balanced"),
    "bert-moe.b": ("natural", "zipf", "balanced"),
    "modern.a": ("zipf", "drift", "balanced"),
}


# Hecate in other settings, and the cells that show them.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "hecate (calibrate)": (),
    "hecate (LAER's memory)": ("gpt-moe-s.a", "modern.a"),
}


def systems_on(shape: str, link: str) -> tuple[str, ...]:
    """What is measured there. Systems that are not on Hecate's engine are slowest, and are on link a only."""
    top_k, cell = SHAPES[shape].top_k, f"{shape}.{link}"
    variants = (name for name, one in VARIANTS.items() if one.top_k is not None and one.top_k <= top_k)
    everywhere = (name for name in ON_ENGINE if cell in _SETTINGS.get(name, (cell,)))
    return (*everywhere, *variants, IN_NODES, *(EXTERNAL if link == "a" else ()), *BOUNDS)


def short() -> list[Cell]:
    """One shape and link."""
    return [cell for cell in known() if cell.name == "gpt-moe-s.a"]


def full() -> list[Cell]:
    """Five cells, the short one among them."""
    return [cell for cell in known() if cell.name in _FULL]


def known() -> list[Cell]:
    """Every shape on every link."""
    return [
        Cell(
            shape=shape,
            link=link,
            systems=systems_on(shape, link),
            workloads=_FULL.get(f"{shape}.{link}", fitting(shape)),
        )
        for shape in SHAPES
        for link in LINKS
    ]
