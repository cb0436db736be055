"""Which systems meet on which shapes, links and workloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.compare.shapes import LINKS, SHAPES
from benchmarks.compare.workloads import RECORDED, WORKLOADS

# Policies on Hecate's engine, systems as they ship, and bounds, which are no systems.
ON_ENGINE = (
    "static EP", "hecate", "hecate (auto)", "hecate (calibrate)", "hecate (LAER's memory)", "hecate (paper)",
    "FasterMoE", "SmartMoE", "FlexMoE", "LAER", "post-gate",
)  # fmt: skip
EXTERNAL = ("transformers EP", "FSDP2", "DDP")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A system on Hecate's engine that differs from another one in options, not in its policy.

    Attributes:
        of: the system whose policy it has.
        options: of ``hecate.Config``.
        shown: it is in the tables; others are only measured where ``--systems`` names them.
    """

    of: str
    options: Mapping[str, Any] = field(default_factory=dict)
    shown: bool = False


# A line here is all that another one needs.
VARIANTS: dict[str, Variant] = {
    "static EP (node-wise)": Variant(of="static EP", options={"dispatch": "nodes"}, shown=True),
    "hecate (node-wise)": Variant(of="hecate", options={"dispatch": "nodes"}, shown=True),
    "hecate (one chunk)": Variant(of="hecate", options={"chunks": 1}),
    "hecate (two chunks)": Variant(of="hecate", options={"chunks": 2}),
}
SHOWN = ON_ENGINE + tuple(name for name, variant in VARIANTS.items() if variant.shown)
# What the committed tables do not show: policies that were changed after they were measured, and whether the engine
# was, which makes every step another. Measuring all cells again (make bench-full) empties both.
CHANGED_POLICIES = (
    "hecate", "hecate (auto)", "hecate (calibrate)", "hecate (LAER's memory)", "SmartMoE", "FlexMoE", "post-gate",
)  # fmt: skip
ENGINE_CHANGED = True
# A bound is played by a system's model: with even routing, or with links on which nothing takes time.
BOUNDS = {"bound: balanced routing": "static EP", "bound: free links": "hecate"}
# What of a system's transfers can run beside its compute on CPUs with gloo (docs/benchmarks.md says where that
# stands in the code of each). All on the engine can.
OVERLAPS = {"transformers EP": "nothing", "FSDP2": "nothing", "DDP": "gradients"}
# Workloads in which every expert gets the same in every step.
EVEN = ("balanced",)
# Steps of a trace that every policy has seen before the first one that is timed.
FIRST = 100
# Of each cell, one after the other: what differs between launches shows only between launches.
LAUNCHES = 3


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One shape on one link, with all its workloads.

    Attributes:
        rounds: timed steps of each system in each workload of a launch.
        seconds: that a launch's ranks may take, if it matters; on a slow machine there are fewer rounds, but three
            at least.
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


# Hecate in other settings, which one cell has to show.
_SETTINGS = ("hecate (calibrate)", "hecate (LAER's memory)")
_MOST = tuple(name for name in SHOWN if name not in _SETTINGS)
# Cells of --full, and their workloads; every kind is in one of them.
_FULL = {
    "gpt-moe-s.a": ("natural", "zipf", "balanced"),
    "gpt-moe-s.b": ("natural", "zipf", "burst", "balanced"),
    "bert-moe.a": ("natural", "zipf", "balanced"),
    "bert-moe.b": ("natural", "zipf", "balanced"),
    "modern.a": ("zipf", "drift", "balanced"),
    "modern.b": ("zipf", "drift", "balanced"),
}


def short() -> list[Cell]:
    """One shape and link; three launches take 30 to 40 minutes with the self-test."""
    return [
        Cell(
            shape="gpt-moe-s", link="a", systems=_MOST + EXTERNAL + tuple(BOUNDS), rounds=5, seconds=690,
            workloads=_FULL["gpt-moe-s.a"],
        )
    ]  # fmt: skip


def full() -> list[Cell]:
    """Six cells, the short one's with all systems; three launches of all take about three and a half hours."""
    return [cell for cell in known() if cell.name in _FULL]


def known() -> list[Cell]:
    """Every shape on every link. Systems that are not Hecate's engine are slowest, and are on link a only."""
    return [
        Cell(
            shape=shape, link=link, rounds=5, seconds=600,
            systems=(SHOWN if (shape, link) == ("gpt-moe-s", "a") else _MOST)
            + (EXTERNAL if link == "a" else ()) + tuple(BOUNDS),
            workloads=_FULL.get(f"{shape}.{link}", fitting(shape)),
        )
        for shape in SHAPES
        for link in LINKS
    ]  # fmt: skip
