"""Made-up routing: counts of the same form as a recorded trace, ``[step, layer, rank, expert]``.

| name | what happens |
|---|---|
| ``balanced`` | every expert gets the same |
| ``zipf`` | a few experts are hot, and stay so; the default skew gives a rank 4 to 5 times the mean with 8 ranks |
| ``drift`` | zipf, and every few steps a hot expert changes places with a cold one |
| ``burst`` | balanced, and now and then one expert gets half of all rows for a few steps |
| ``one_hot`` | all rows go to one expert |

Rows per rank and step are the same everywhere, as they are with real batches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import numpy as np

Counts = np.ndarray[Any, np.dtype[np.int64]]
Weights = np.ndarray[Any, np.dtype[np.float64]]

STEPS_BETWEEN_MOVES, BURST_STEPS, BURST_EVERY = 10, 5, 40


def make(
    name: str, *, steps: int, layers: int, ranks: int, experts: int, rows: int, skew: float = 1.5, seed: int = 0
) -> Counts:
    """Make the counts of a workload with ``rows`` (tokens times choices) a rank; ValueError for an unknown name."""
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    rng = np.random.default_rng(seed)
    counts = np.empty((steps, layers, ranks, experts), dtype=np.int64)
    for layer in range(layers):
        weights = WORKLOADS[name](rng, steps, experts, skew)
        for step in range(steps):
            counts[step, layer] = rng.multinomial(rows, weights[step] / weights[step].sum(), size=ranks)
    if name == "balanced":
        counts[:] = np.arange(experts) < rows % experts
        counts += rows // experts
    return counts


def load_trace(path: Path) -> tuple[Counts, np.ndarray[Any, Any]]:
    """Read counts ``[step, layer, rank, expert]`` and owners ``[layer, expert]`` of a trace, or raise ValueError."""
    try:
        # numpy would take any other file for pickled data, and advise to trust it.
        if path.is_file() and not is_zipfile(path):
            raise ValueError("it is no npz archive, or it is cut off")
        with np.load(path) as archive:
            counts, owners = archive["counts"].astype(np.int64), archive["owners"]
            groups = int(archive.get("groups", 1))
    except (OSError, KeyError, ValueError, TypeError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path} is not a trace that hecate.record wrote: {error}") from None
    if counts.ndim != 4 or len(counts) == 0:
        raise ValueError(f"{path}: counts have shape {list(counts.shape)}, expected [step, layer, rank, expert]")
    layers, ranks, experts = counts.shape[1:]
    if groups > 1:
        raise ValueError(
            f"{path}: the trace is of {groups} groups of ranks, and one group is replayed or simulated. The first "
            f"has counts[:, :, :{ranks // groups}]"
        )
    if owners.shape != (layers, experts) or not ((owners >= 0) & (owners < ranks)).all():
        raise ValueError(f"{path}: owners are not one of {ranks} ranks for each of {experts} experts in each layer")
    return counts, owners


def fit(counts: Counts, *, layers: int, ranks: int, rows: int) -> Counts:
    """Fit a trace to another number of layers and ranks, and to ``rows`` rows of every rank, layer and step.

    Missing layers and ranks repeat those there are, some steps later. Raises ValueError for a rank without rows.
    """
    steps, old_layers, old_ranks, _ = counts.shape
    layer, rank = np.arange(layers), np.arange(ranks)
    later = 7 * (layer // old_layers)[:, None] + 3 * (rank // old_ranks)[None, :]
    step = (np.arange(steps)[:, None, None] + later) % steps
    return scale(counts[step, (layer % old_layers)[:, None], (rank % old_ranks)[None, :]], rows)


def scale(counts: Counts, rows: int) -> Counts:
    """Scale counts to a sum of ``rows``: int64 ``[..., E] -> [..., E]``; ValueError for a line without rows."""
    total = counts.sum(-1, keepdims=True)
    if not total.all():
        raise ValueError("the trace has a rank without rows")
    exact = counts * rows / total
    whole = np.floor(exact).astype(np.int64)
    missing = rows - whole.sum(-1, keepdims=True)
    # The largest remainders get the rows that are missing.
    turn = np.argsort(np.argsort(-(exact - whole), axis=-1, kind="stable"), axis=-1, kind="stable")
    return whole + (turn < missing)


def _balanced(rng: np.random.Generator, steps: int, experts: int, skew: float) -> Weights:
    return np.ones((steps, experts))


def _zipf(rng: np.random.Generator, steps: int, experts: int, skew: float) -> Weights:
    weights = 1.0 / np.arange(1, experts + 1) ** skew
    return np.tile(rng.permutation(weights), (steps, 1))


def _drift(rng: np.random.Generator, steps: int, experts: int, skew: float) -> Weights:
    weights = _zipf(rng, steps, experts, skew)
    for step in range(STEPS_BETWEEN_MOVES, steps, STEPS_BETWEEN_MOVES):
        order = np.argsort(-weights[step])
        hot, cold = rng.choice(order[: max(1, experts // 8)]), rng.choice(order[experts // 2 :])
        weights[step:, [hot, cold]] = weights[step:, [cold, hot]]
    return weights


def _burst(rng: np.random.Generator, steps: int, experts: int, skew: float) -> Weights:
    weights = np.ones((steps, experts))
    for begin in range(int(rng.integers(1, BURST_EVERY)), steps, BURST_EVERY):
        weights[begin : begin + BURST_STEPS, rng.integers(experts)] = experts - 1
    return weights


def _one_hot(rng: np.random.Generator, steps: int, experts: int, skew: float) -> Weights:
    weights = np.zeros((steps, experts))
    weights[:, rng.integers(experts)] = 1.0
    return weights


WORKLOADS: dict[str, Callable[[np.random.Generator, int, int, float], Weights]] = {
    "balanced": _balanced,
    "zipf": _zipf,
    "drift": _drift,
    "burst": _burst,
    "one_hot": _one_hot,
}
