"""Alerts on a run: experts without rows, a router that sends everything to few, overlap that was lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hecate.reports.run_data import Floats, RunData

# Alerts are about the newest 1 / _PART of a run, and about no fewer than _FEWEST steps.
_PART, _FEWEST = 4, 10
# An expert may have no rows in fewer steps than this.
_FEWEST_OF_DEAD = 3
# A router whose load is as if this part of the experts had all rows evenly has collapsed.
COLLAPSED = 0.25
# Ranks are balanced if the busiest has at most so many times the mean.
BALANCED = 1.3
# Overlap is lost if less than this part is hidden of what was in the best quarter ...
LOST = 0.7
# ... and if what is not hidden is this part of a step.
EXPOSED = 0.05
SLOW = 3.0
GROWN = 1.2


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A finding that needs a look, with numbers, and advice what to do."""

    kind: Literal["dead", "collapse", "imbalance", "overlap", "slow", "memory", "nan"]
    text: str
    advice: str


def find_alerts(run: RunData) -> list[Alert]:
    """Return all alerts, the gravest first."""
    found: list[Alert] = []
    for check in (_not_numbers, _collapse, _dead, _overlap, _imbalance, _memory, _slow):
        found += check(run)
    return found


def effective_experts(load: Any) -> Floats:
    """Return how many experts with equal load would be as uneven: exp of the entropy, ``[..., E] -> [...]``."""
    total = load.sum(-1, keepdims=True)
    part = load / np.where(total == 0, 1, total)
    found: Floats = np.exp(-(part * np.log(np.where(part > 0, part, 1))).sum(-1))
    return found


def gone_since(values: Floats) -> int | None:
    """Return the index from which on values are not finite; None if they still are, or it is too early to tell.

    NaN also means "not logged", so most values before must have been logged.
    """
    finite = np.flatnonzero(np.isfinite(values))
    first = int(finite[-1]) + 1 if finite.size else 0
    gone = len(values) - first
    # A series that was never finite was NaN from the start.
    logged = finite.size / first if first else 1.0
    return first if gone and gone >= _newest_length(len(values)) and logged > 0.5 else None


def _newest_length(steps: int) -> int:
    return min(steps, max(_FEWEST, steps // _PART))


def _newest(run: RunData) -> slice:
    return slice(-_newest_length(run.steps), None)


def _names(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (f" and {len(numbers) - 12} more" if len(numbers) > 12 else "")


def _not_numbers(run: RunData) -> Iterator[Alert]:
    for name, values in run.logged.items():
        since = gone_since(values)
        alone = run.step[:since][np.isinf(values[:since])].tolist()
        when = [f"at step {_names(alone)}"] if alone else []
        when += [f"from step {int(run.step[since])} on"] if since is not None else []
        if when:
            yield Alert(
                kind="nan",
                text=f"{name} is not a finite number {' and '.join(when)}",
                advice="Go back to a checkpoint before it; a lower learning rate or gradient clipping may help. "
                "hecate bisect finds out whether a graph pass is the cause.",
            )


def _collapse(run: RunData) -> Iterator[Alert]:
    for index, (name, experts) in enumerate(zip(run.head.layers, run.head.experts, strict=True)):
        load = run.load[_newest(run), index, :experts].sum(0).astype(np.float64)
        if experts < 4 or not load.any():
            continue
        used = float(effective_experts(load))
        if used < COLLAPSED * experts:
            yield Alert(
                kind="collapse",
                text=f"{name}: the load is as uneven as if {used:.1f} of {experts} experts had all rows; expert "
                f"{int(load.argmax())} has {load.max() / load.sum():.0%}",
                advice="The router is collapsing. A load-balancing loss or a router bias prevents that; Hecate only "
                "shares the work.",
            )


def _dead(run: RunData) -> Iterator[Alert]:
    part = run.load[_newest(run)]
    if len(part) < _FEWEST_OF_DEAD:
        return
    for index, (name, experts) in enumerate(zip(run.head.layers, run.head.experts, strict=True)):
        load = part[:, index, :experts].sum(0)
        dead = np.flatnonzero(load == 0).tolist()
        if load.any() and dead:
            yield Alert(
                kind="dead",
                text=f"{name}: no rows for expert {_names(dead)} in the last {len(part)} steps",
                advice="They do not learn. Look at the router's initialization and at the load-balancing loss.",
            )


def _overlap(run: RunData) -> Iterator[Alert]:
    hidden, size = run.hidden, max(1, run.steps // _PART)
    if run.steps < 2 * _FEWEST or not np.isfinite(hidden).any():
        return
    quarters = [hidden[begin : begin + size] for begin in range(0, run.steps - size + 1, size)]
    means = [float(np.nanmean(quarter)) for quarter in quarters if np.isfinite(quarter).any()]
    # With NCCL most steps are not measured.
    known = np.flatnonzero(np.isfinite(hidden))[-len(hidden[_newest(run)]) :]
    exposed = np.where(np.isnan(run.exposed[known]), 0, run.exposed[known]).max(1)
    share = float(np.median(exposed / np.maximum(run.seconds[known], 1e-9)))
    if len(means) > 1 and means[-1] < LOST * max(means) and share > EXPOSED:
        yield Alert(
            kind="overlap",
            text=f"of the collectives' time {means[-1]:.0%} is hidden behind compute, {max(means):.0%} in the best "
            f"quarter; the compute stands still for {share:.0%} of a step",
            advice="Look at the timeline below. Shorter batches leave less compute to hide behind; a slower link or "
            "another job on the machine has the same effect.",
        )


def _imbalance(run: RunData) -> Iterator[Alert]:
    after, before = run.after[_newest(run)], run.before[_newest(run)]
    if run.head.world_size == 1:
        return
    for index, name in enumerate(run.head.layers):
        mine = after[:, index]
        if not np.isfinite(mine).any():
            continue
        median = float(np.nanmedian(mine))
        if median > BALANCED:
            yield Alert(
                kind="imbalance",
                text=f"{name}: the busiest rank has {median:.2f} times the mean rows; with owners alone it would be "
                f"{float(np.nanmedian(before[:, index])):.2f}",
                advice="Replicas did not pay, or there is no memory for them: see replicas and replica_memory in "
                "hecate.Config, and try hecate replay on a trace of hecate.record.",
            )


def _memory(run: RunData) -> Iterator[Alert]:
    size = run.steps // _PART
    if size < _FEWEST:
        return
    # The first quarter compiles, so the second one is the measure.
    second, last = run.memory[size : 2 * size], run.memory[-size:]
    for rank in range(run.head.world_size):
        if not np.isfinite(last[:, rank]).all() or not second[:, rank].max():
            continue
        grown = float(last[:, rank].max() / second[:, rank].max())
        if grown > GROWN:
            yield Alert(
                kind="memory",
                text=f"rank {rank} holds {grown:.2f} times the memory of the run's second quarter",
                advice="Look for tensors that are kept from step to step, such as losses with their graphs.",
            )


def _slow(run: RunData) -> Iterator[Alert]:
    if run.steps < 2 * _FEWEST:
        return
    # The first steps compile.
    later = run.seconds[3:]
    slow = np.flatnonzero(later > SLOW * np.nanmedian(later)) + 3
    if len(slow) > run.steps // 50:
        yield Alert(
            kind="slow",
            text=f"{len(slow)} of {run.steps} steps took more than {SLOW:g} times the median, such as "
            f"{_names([int(run.step[index]) for index in slow])}",
            advice="If checkpoints are saved or evaluations run in them, all is well. Otherwise look for recompiles "
            "(TORCH_LOGS=recompiles) and for data that comes late.",
        )
