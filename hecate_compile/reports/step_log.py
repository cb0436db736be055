"""The log of a run's steps for :func:`hecate.monitor`, as columns of ``run_files`` and for TensorBoard."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hecate.compiled_model import CompiledModel
from hecate.reports.run_data import hidden_part, max_over_mean, owner_rows, owners_at
from hecate.reports.run_files import COLUMNS, LOGGED, Array

Number = float | int | torch.Tensor


@dataclass
class _Step:
    """A step that has not ended: begun at Unix time and ``clock`` of spans, which are kept if it is ``drawn``."""

    number: int
    began: float
    clock: float
    drawn: bool
    logged: dict[str, Number] = field(default_factory=dict)


class StepLog:
    """The log of steps since the last :meth:`take`; each ``timeline_every`` steps collectives are kept one by one."""

    def __init__(self, state: CompiledModel, first_step: int, timeline_every: int) -> None:
        self._world, self._next, self._timeline_every = state.world, first_step, timeline_every
        self._group = state.mesh.group
        self._layers = tuple(dict.fromkeys(state.layers))
        self._place = {layer.name: index for index, layer in enumerate(self._layers)}
        self._most = max((layer.num_experts for layer in self._layers), default=0)
        self._known_owners: tuple[Any, ...] | None = None
        self._step: _Step | None = None
        self._columns: dict[str, list[Any]] = {}
        self._logged: list[dict[str, Number]] = []

    @property
    def count(self) -> int:
        """The number of steps that have ended."""
        return len(self._logged)

    @property
    def logged(self) -> dict[str, Number] | None:
        """The user's numbers for the step that runs, or for the last one; None if there is none."""
        if self._step is not None:
            return self._step.logged
        return self._logged[-1] if self._logged else None

    def begin(self) -> None:
        """Begin the next step, with a forward with gradients."""
        drawn = self._next % self._timeline_every == 0
        self._step = _Step(self._next, time.time(), time.perf_counter(), drawn)
        if drawn:
            self._world.queue.ask_for_times()
        self._next += 1

    def end(self) -> None:
        """Log the step that ran until now, from its numbers in the layers and the queue."""
        step, self._step = self._step, None
        if step is None:
            return
        layers, alone = self._layers, self._group.size == 1
        for layer in layers:
            layer.read_rows()
        self._add(
            step=step.number,
            began=step.began,
            seconds=time.perf_counter() - step.clock,
            rows=[0 if alone else layer.rows for layer in layers],
            row_bytes=[layer.bytes_sent for layer in layers],
            expert_bytes=[layer.expert_bytes_sent for layer in layers],
            memory=_memory(self._world.device),
        )
        self._logged.append(step.logged)
        self._add_spans(step)
        if self._group.rank == 0:
            self._add_load()
            self._add_owners(step)

    def take(self) -> dict[str, Array]:
        """Return the arrays of a chunk, and forget them."""
        columns, logged, self._columns, self._logged = self._columns, self._logged, {}, []
        if "load" in columns:
            columns["load"] = [self._as_lines(line, 0) for line in columns["load"]]
        arrays = {name: np.asarray(lines, COLUMNS[name][0]) for name, lines in columns.items()}
        if self._group.size == 1:
            arrays["rows"] = arrays["load"].sum(2, dtype=np.int64)
        for name in sorted({name for line in logged for name in line}):
            arrays[f"log.{name}"] = np.asarray([float(line.get(name, np.nan)) for line in logged], LOGGED[0])
        return arrays

    def _add(self, **values: Any) -> None:
        for name, value in values.items():
            self._columns.setdefault(name, []).append(value)

    def _add_spans(self, step: _Step) -> None:
        queue = self._world.queue
        # With NCCL times are read in steps that are drawn only.
        measured = step.drawn or not queue.on_stream
        travel = np.full(len(self._layers) + 1, 0.0 if measured else np.nan)
        exposed = travel.copy()
        # Collectives that nobody waited for have no times.
        for span in (span for span in queue.spans if measured and span.ready):
            where = self._place.get(span.subject, -1)
            travel[where] += span.seconds
            exposed[where] += span.exposed
            if step.drawn:
                times = (span.started, span.begun, span.ended, span.waited, span.ready)
                self._add(
                    span_step=step.number,
                    span_names=(span.part, span.operator, span.subject),
                    span_times=[moment - step.clock for moment in times],
                )
        self._add(travel=travel, exposed=exposed)

    def _add_load(self) -> None:
        loads: list[Any] = []
        holders: list[Any] = []
        for layer in self._layers:
            counts = layer.counts
            # On a GPU counts are read when the chunk is taken: the host must not wait for the GPU here.
            loads.append(counts.numpy().sum(0) if counts is not None and counts.device.type == "cpu" else counts)
            placement = layer.placer.plan.current
            holders.append(None)
            if placement is not None and placement.num_replicas:
                holders[-1] = np.bincount(placement.pairs[0], minlength=layer.num_experts)
        self._add(load=loads, holders=self._as_lines(holders, 1))

    def _add_owners(self, step: _Step) -> None:
        owners = tuple(layer.owners for layer in self._layers)
        # Owners are replaced, never changed.
        if self._known_owners is None or any(a is not b for a, b in zip(owners, self._known_owners, strict=True)):
            self._known_owners = owners
            self._add(owners_step=step.number, owners=self._as_lines([one.array for one in owners], -1))

    def _as_lines(self, layers: Sequence[Any], otherwise: int) -> Array:
        """Return values of each layer's experts as one array ``[L, E]``, filled up where there are none."""
        lines = np.full((len(self._layers), self._most), otherwise, np.int64)
        for line, values in zip(lines, layers, strict=True):
            if values is not None:
                values = values.sum(0).cpu().numpy() if isinstance(values, torch.Tensor) else values
                line[: len(values)] = values
        return lines


def _memory(device: torch.device) -> int:
    """Return bytes: on a GPU the most that tensors took so far, else those of this process; 0 if unknown."""
    peak = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    if peak is not None:
        return int(peak(device))
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class TensorBoardLog:
    """Scalars for TensorBoard, written by rank 0 a chunk of steps at a time; ImportError without TensorBoard.

    Loads and replicas are those of its group, of ``world_size`` ranks.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        # This imports TensorBoard, which is not installed with Hecate.
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))
        self._world_size = world_size
        # Owners of the chunks so far, and the step from which on each holds.
        self._since: Array = np.zeros(0, np.int64)
        self._owners: Array = np.zeros((0, 0, 0), np.int32)

    def write(self, arrays: Mapping[str, Array]) -> None:
        """Write a chunk, as ``run_files`` describes it."""
        series = {name[4:]: array for name, array in arrays.items() if name.startswith("log.")}
        series |= {
            "hecate/step_seconds": arrays["seconds"],
            "hecate/memory_bytes": arrays["memory"],
            "hecate/hidden": hidden_part(arrays["travel"].sum(1), arrays["exposed"].sum(1)),
        }
        if "owners" in arrays:
            self._since = np.append(self._since[-1:], arrays["owners_step"])
            self._owners = np.concatenate([*([self._owners[-1:]] if self._owners.size else []), arrays["owners"]])
        if "load" in arrays:
            holders = arrays["holders"]
            series["hecate/replicas"] = holders.astype(np.int64).sum((1, 2)) - holders[0].size
            if holders.shape[1]:
                owners = owners_at(arrays["step"], self._since, self._owners)
                rows = owner_rows(arrays["load"], owners, self._world_size)
                series["hecate/imbalance_of_owners"] = max_over_mean(rows).mean(1)
        for tag, values in series.items():
            for step, moment, value in zip(arrays["step"].tolist(), arrays["began"].tolist(), values, strict=True):
                if np.isfinite(value):
                    self._writer.add_scalar(tag, float(value), step, walltime=moment)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
