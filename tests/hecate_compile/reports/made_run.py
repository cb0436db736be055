"""Runs that nobody trained: the files of hecate.monitor, with load, time and memory as a test wants them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hecate.reports.run_files import RunHead, append_chunk, rank_path, start_folder

Array = np.ndarray[Any, Any]
LAYERS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


def make_run(
    root: Path,
    *,
    steps: int = 40,
    ranks: int = 2,
    experts: int = 8,
    start: int = 0,
    first_step: int = 0,
    chunk: int = 20,
    load_of: Callable[[Array], Array] | None = None,
    exposed_of: Callable[[Array], Array] | None = None,
    loss_of: Callable[[Array], Array] | None = None,
    seconds_of: Callable[[Array], Array] | None = None,
    memory_of: Callable[[Array], Array] | None = None,
    missing: tuple[int, ...] = (),
    spans: bool = True,
) -> Path:
    """Write a start of a run; returns its folder.

    Args:
        load_of: rows of experts ``[n, L, E]`` for step numbers ``[n]``; by default even.
        exposed_of: the part of the collectives' time that is not hidden, ``[n]``.
        missing: ranks that write nothing.
        spans: of the first step.
    """
    folder = start_folder(root, start)
    folder.mkdir(parents=True)
    RunHead(
        model="Made",
        policy="Hecate()",
        device="cpu",
        layers=LAYERS,
        experts=(experts,) * 2,
        nodes=tuple(rank // 2 for rank in range(ranks)),
        started=1.7e9,
    ).write(folder)
    owners = np.sort(np.arange(experts) % ranks)
    for rank in range(ranks):
        if rank in missing:
            continue
        with rank_path(folder, rank).open("ab") as file:
            for begin in range(first_step, first_step + steps, chunk):
                number = np.arange(begin, min(begin + chunk, first_step + steps))
                append_chunk(file, _chunk(number, rank, owners, begin == first_step, locals()))
    return folder


def _chunk(number: Array, rank: int, owners: Array, first: bool, given: dict[str, Any]) -> dict[str, Array]:
    count, layers = len(number), len(LAYERS)

    def call(name: str, otherwise: Array) -> Array:
        return given[name](number) if given[name] is not None else otherwise

    even = np.full((count, layers, len(owners)), 100)
    load = call("load_of", even).astype(np.uint32)
    rows = np.where(owners == rank, load, 0).sum(2).astype(np.int64)
    part = call("exposed_of", np.full(count, 0.2))[:, None]
    travel = np.full((count, layers + 1), 0.01, dtype=np.float32)
    arrays = {
        "step": number,
        "began": 1.7e9 + number.astype(np.float64),
        "seconds": call("seconds_of", np.full(count, 0.1)),
        "rows": rows,
        "row_bytes": rows * 64,
        "expert_bytes": np.full((count, layers), 4096),
        "travel": travel,
        "exposed": (travel * part).astype(np.float32),
        "memory": call("memory_of", np.full(count, 10**9)),
        "log.loss": call("loss_of", 3.0 / (1 + number)),
    }
    if first and given["spans"]:
        arrays["span_step"] = np.full(3, number[0])
        arrays["span_names"] = np.asarray(
            [
                ("forward", "gather_counts", LAYERS[0]),
                ("forward", "exchange", LAYERS[0]),
                ("backward", "made_up", "1 dense parameters"),
            ]
        )
        arrays["span_times"] = np.asarray(
            [[0, 0.001, 0.002, 0.001, 0.002], [0.01] * 5, [0.03, 0.03, 0.05, 0.04, 0.05]]
        )
    if rank == 0:
        arrays |= {"load": load, "holders": np.ones(load.shape, np.uint16)}
        arrays["holders"][:, :, 0] = 2
        if first:
            arrays |= {"owners_step": number[:1], "owners": np.tile(owners.astype(np.int32), (1, layers, 1))}
    return arrays
