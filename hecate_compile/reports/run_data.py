"""The data of a run that :func:`hecate.monitor` wrote, all ranks and starts put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hecate.reports.run_files import (
    CHUNK_SECONDS,
    CHUNK_STEPS,
    Array,
    RankFile,
    RunError,
    RunHead,
    rank_path,
    read_rank,
    starts_in,
)

Floats = np.ndarray[Any, np.dtype[np.float64]]


def max_over_mean(rows: Floats) -> Floats:
    """Return maximum over mean of the last dimension; 1 where there are no rows, NaN where a rank is missing."""
    mean = rows.mean(-1)
    return np.where(mean == 0, 1.0, rows.max(-1) / np.where(mean == 0, 1, mean))


def hidden_part(travel: Floats, exposed: Floats) -> Floats:
    """Return the part of the collectives' time in which compute went on, from 0 to 1; NaN where nothing travelled."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(travel > 0, np.clip(1 - exposed / travel, 0, 1), np.nan)


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """The collectives of one rank in one step: part, operator and subject, str ``[m, 3]``, and times ``[m, 5]``.

    Times are started, begun, ended, waited, ready, in seconds from the step's begin.
    """

    rank: int
    step: int
    names: Array
    times: Floats


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Series over n steps of a run, for L layers, W ranks and E experts; values that a rank did not write are NaN.

    Attributes:
        head, notes: the head of the last start that has steps, and what is missing, in words.
        step, seconds: numbers of the steps, and seconds on the slowest rank, ``[n]``.
        load, holders, owners: rows, number of holders and owner (-1 for none) of each expert, ``[n, L, E]``. The
            owners in several groups, which have the same place there, count as one.
        rows, owner_rows: rows that each rank computed, and would have if owners computed all, ``[n, L, W]``.
        row_bytes, expert_bytes, memory: bytes that each rank sent and held, ``[n, W]``.
        travel, exposed: seconds of collectives, and in which the compute stood still for them, ``[n, W]``.
        layer_travel, layer_exposed: the same for each layer, means over ranks, ``[n, L]``.
        logged: the user's numbers, means over ranks, ``[n]`` each.
        timelines: those of the last step that has any, one for each rank that has it.
    """

    head: RunHead
    notes: tuple[str, ...]
    step: Array
    seconds: Floats
    load: Array
    holders: Array
    owners: Array
    rows: Floats
    owner_rows: Floats
    row_bytes: Floats
    expert_bytes: Floats
    travel: Floats
    exposed: Floats
    layer_travel: Floats
    layer_exposed: Floats
    memory: Floats
    logged: Mapping[str, Floats]
    timelines: tuple[RankTimeline, ...]

    @property
    def steps(self) -> int:
        return len(self.step)

    @property
    def before(self) -> Floats:
        """Rows of the busiest rank over the mean, if owners computed all: ``[n, L]``."""
        return max_over_mean(self.owner_rows)

    @property
    def after(self) -> Floats:
        """Rows of the busiest rank over the mean, as ranks computed them: ``[n, L]``."""
        return max_over_mean(self.rows)

    @property
    def hidden(self) -> Floats:
        """The part of the collectives' time in which compute went on, over all ranks: ``[n]``."""
        return hidden_part(np.nansum(self.travel, 1), np.nansum(self.exposed, 1))

    @property
    def layer_hidden(self) -> Floats:
        """The part of the collectives' time in which compute went on, for each layer: ``[n, L]``."""
        return hidden_part(self.layer_travel, self.layer_exposed)

    @property
    def replicas(self) -> Array:
        """Copies of experts on ranks that do not own them, ``[n, L]``."""
        here = self.owners >= 0
        return np.where(here, self.holders.astype(np.int64) - 1, 0).sum(2)


def load_run(root: Path) -> RunData:
    """Read a run's folder, with a note of damaged files; RunError if there is no run, or nothing to read in it."""
    parts: list[_Start] = []
    notes: list[str] = []
    problems: list[RunError] = []
    last: RunHead | None = None
    for folder in reversed(starts_in(root)):
        try:
            head = RunHead.read(folder)
        except RunError as error:
            problems.append(error)
            notes.append(f"{folder.name} is left out: {error}")
            continue
        part = _read_start(folder, head, notes, problems)
        if part is None:
            continue
        if last is None:
            last = head
        elif (head.layers, head.experts, head.world_size) != (last.layers, last.experts, last.world_size):
            notes.append(f"{folder.name} and earlier starts are of another model or number of ranks, and left out")
            break
        parts.append(part)
    if last is None or not parts:
        if problems:
            raise problems[0]
        raise RunError(
            f"{root} has no steps yet: a chunk is written every {CHUNK_STEPS} steps or {CHUNK_SECONDS:g} seconds, "
            "and at the end"
        )
    return _assemble(last, list(reversed(parts)), notes)


@dataclass(frozen=True)
class _Start:
    """A start of a run: the steps of rank 0, and the values of other ranks for them."""

    name: str
    ranks: dict[int, RankFile]

    @property
    def first(self) -> Mapping[str, Array]:
        return self.ranks[0].arrays

    def lines(self, read: RankFile, name: str) -> Array:
        """Return a series of a rank, as long as that of rank 0: NaN in steps that the rank did not write."""
        values = read.arrays[name][: self.ranks[0].steps]
        missing = self.ranks[0].steps - len(values)
        return np.concatenate([values, np.full((missing, *values.shape[1:]), np.nan)]) if missing else values


def _read_start(folder: Path, head: RunHead, notes: list[str], problems: list[RunError]) -> _Start | None:
    ranks = {}
    for rank in range(head.world_size):
        path = rank_path(folder, rank)
        if not path.exists():
            continue
        try:
            read = read_rank(path, head)
        except RunError as error:
            problems.append(error)
            read = RankFile(problem=str(error))
        if read.problem:
            notes.append(f"{folder.name}: rank {rank}: {read.problem}")
        if read.steps:
            ranks[rank] = read
    if 0 not in ranks or not {"load", "holders", "owners"} <= ranks[0].arrays.keys():
        notes.append(f"{folder.name}: rank 0 wrote no step, so it is left out")
        return None
    missing = [rank for rank in range(head.world_size) if rank not in ranks]
    if missing:
        notes.append(f"{folder.name}: nothing of ranks {missing}; what only they know is missing")
    steps = ranks[0].steps
    notes += [
        f"{folder.name}: rank {rank} wrote {read.steps} of {steps} steps; what only it knows is missing in the others"
        for rank, read in ranks.items()
        if read.steps < steps
    ]
    return _Start(folder.name, ranks)


def _assemble(head: RunHead, starts: list[_Start], notes: list[str]) -> RunData:
    kept = []
    for index, start in enumerate(starts):
        steps = start.first["step"]
        # Steps that ran again after a restart count as they ran the last time.
        later = min((other.first["step"][0] for other in starts[index + 1 :]), default=np.inf)
        kept.append(np.flatnonzero(steps < later))
        again = len(steps) - len(kept[-1])
        if again:
            notes.append(
                f"{start.name}: {again} of its {len(steps)} steps, from step {steps[-again]} on, ran again in a "
                "later start, and count as they ran the last time"
            )
    size = head.world_size

    def of_ranks(name: str, shape: tuple[int, ...]) -> Floats:
        """Return a column of all ranks, ``[n, ..., W]``."""
        parts = []
        for start, keep in zip(starts, kept, strict=True):
            part = np.full((len(keep), *shape, size), np.nan)
            for rank, read in start.ranks.items():
                part[..., rank] = start.lines(read, name)[keep]
            parts.append(part)
        return np.concatenate(parts)

    def of_first(name: str) -> Array:
        return np.concatenate([start.first[name][keep] for start, keep in zip(starts, kept, strict=True)])

    def of_group(name: str, group: int) -> Array:
        """Return a column of a group's first rank, zero in steps that it did not write."""
        rank, parts = group * (size // head.groups), []
        for start, keep in zip(starts, kept, strict=True):
            read, like = start.ranks.get(rank), start.first[name]
            found = np.zeros_like(like) if read is None else np.nan_to_num(start.lines(read, name)).astype(like.dtype)
            parts.append(found[keep])
        return np.concatenate(parts)

    layers = (len(head.layers),)
    loads = [of_group("load", group) for group in range(head.groups)]
    changes = [(start.first["step"][keep], start.first) for start, keep in zip(starts, kept, strict=True)]
    owners = np.concatenate([owners_at(steps, of["owners_step"], of["owners"]) for steps, of in changes])
    travel, exposed = of_ranks("travel", (layers[0] + 1,)), of_ranks("exposed", (layers[0] + 1,))
    names = sorted({name for start in starts for read in start.ranks.values() for name in read.arrays})
    return RunData(
        head=head,
        notes=tuple(notes),
        step=of_first("step"),
        seconds=without_nan(np.nanmax, of_ranks("seconds", ()), 1),
        load=sum(loads[1:], loads[0]),
        # One owner in each group, which count as one, and the replicas of all.
        holders=sum(
            (of_group("holders", group).astype(np.int64).clip(1) - 1 for group in range(1, head.groups)),
            of_first("holders"),
        ),
        owners=owners,
        rows=of_ranks("rows", layers),
        owner_rows=np.concatenate([owner_rows(load, owners, size // head.groups) for load in loads], 2),
        row_bytes=of_ranks("row_bytes", layers).sum(1),
        expert_bytes=of_ranks("expert_bytes", layers).sum(1),
        travel=travel.sum(1),
        exposed=exposed.sum(1),
        layer_travel=without_nan(np.nanmean, travel[:, :-1], 2),
        layer_exposed=without_nan(np.nanmean, exposed[:, :-1], 2),
        memory=of_ranks("memory", ()),
        logged={name[4:]: _logged(name, starts, kept) for name in names if name.startswith("log.")},
        timelines=_timelines(starts, kept),
    )


def without_nan(function: Any, values: Array, axis: int) -> Floats:
    """Call a function that leaves NaN out, without numpy's warning where there is nothing else."""
    empty = np.isnan(values).all(axis)
    found: Floats = np.where(empty, np.nan, function(np.where(np.expand_dims(empty, axis), 0, values), axis=axis))
    return found


def owners_at(steps: Array, since: Array, owners: Array) -> Array:
    """Return the owners in each step, ``[n, L, E]``, from changes ``[k, L, E]`` and the steps that these are of."""
    found: Array = owners[np.clip(np.searchsorted(since, steps, side="right") - 1, 0, None)]
    return found


def owner_rows(load: Array, owners: Array, size: int) -> Floats:
    """Return the rows that each of ``size`` ranks would have if owners computed all: ``[n, L, E] -> [n, L, W]``."""
    steps, layers, _ = load.shape
    rows = np.zeros((steps, layers, size))
    for rank in range(size):
        rows[..., rank] = np.where(owners == rank, load, 0).sum(2)
    return rows


def _logged(name: str, starts: list[_Start], kept: list[Array]) -> Floats:
    parts = []
    for start, keep in zip(starts, kept, strict=True):
        values = np.full((len(keep), len(start.ranks)), np.nan)
        for column, read in enumerate(start.ranks.values()):
            if name in read.arrays:
                values[:, column] = start.lines(read, name)[keep]
        parts.append(without_nan(np.nanmean, values, 1))
    return np.concatenate(parts)


def _timelines(starts: list[_Start], kept: list[Array]) -> tuple[RankTimeline, ...]:
    for start, keep in zip(reversed(starts), reversed(kept), strict=True):
        found = [(rank, read.arrays) for rank, read in start.ranks.items() if len(read.arrays.get("span_step", ()))]
        steps = set(start.first["step"][keep].tolist())
        known = steps.intersection(step for _, arrays in found for step in arrays["span_step"].tolist())
        if known:
            return tuple(_timelines_of(max(known), found))
    return ()


def _timelines_of(step: int, found: list[tuple[int, Mapping[str, Array]]]) -> Iterator[RankTimeline]:
    for rank, arrays in found:
        here = arrays["span_step"] == step
        if here.any():
            yield RankTimeline(
                rank=rank, step=step, names=arrays["span_names"][here], times=arrays["span_times"][here]
            )
