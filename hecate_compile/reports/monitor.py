"""Watch a run while it trains: :func:`hecate.monitor`. ``hecate report`` draws what it wrote (``run_files``)."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hecate.compiled_model import CompiledModel, compiled_model_of
from hecate.reports.folder_lock import FolderLock
from hecate.reports.run_files import (
    CHUNK_SECONDS,
    CHUNK_STEPS,
    Array,
    RunHead,
    append_chunk,
    next_step,
    rank_path,
    start_folder,
    start_numbers,
)
from hecate.reports.tensorboard_log import TensorBoardLog
from hecate.runtime.comm import collectives
from hecate.runtime.comm.queue import Span
from hecate.runtime.comm.waiting import doing
from hecate.runtime.comm.warn import warn_alone
from hecate.runtime.comm.world import World

Number = float | int | torch.Tensor


def monitor(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    first_step: int | None = None,
    timeline_every: int = 50,
    tensorboard: bool = False,
) -> Monitor:
    """Log every training step of ``model`` into the folder ``path``; ``hecate report path`` draws it.

        with hecate.monitor(model, "runs/x") as monitor:
            for batch in batches:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                monitor.log(loss=loss)

    Or without ``with``, and :meth:`Monitor.close` at the end. A step is a forward with gradients and all until the
    next forward: its backward, the optimizer, waiting for data. Every rank writes what only it knows, rank 0 also
    what all know; only the call itself communicates. A run that is killed loses its last seconds. A second call for
    the same folder, after a restart for instance, adds a new start; the report puts them together. What goes wrong
    while it logs, such as a full disk, ends the monitor with a warning, and never the training.

    Args:
        path: made if it is not there. On several machines without a shared disk each keeps the files of its ranks.
        first_step: number of the first step; by default it goes on behind the last one in the folder. Give it where
            a run starts again from an earlier checkpoint: the report then has the steps that ran again once.
        timeline_every: steps between two whose collectives are kept one by one. With NCCL times are read in these
            steps only, because the host has to wait for the GPU.
        tensorboard: rank 0 writes scalars for TensorBoard too, into ``path/start.../tensorboard``.

    Raises:
        ValueError: the model was not compiled; it is monitored already; a wrong number.
        OSError: a rank cannot write, or another monitor writes into the folder; on all ranks.
        ImportError: ``tensorboard=True`` without the package tensorboard.
    """
    state = compiled_model_of(model, "monitor")
    if state.forward.before is not None:
        raise ValueError("hecate.monitor: this model is monitored already; close the other monitor first")
    if timeline_every < 1 or (first_step or 0) < 0:
        raise ValueError(
            f"hecate.monitor: timeline_every={timeline_every}, first_step={first_step}; expected at least 1 and 0"
        )
    layers = tuple(dict.fromkeys(state.layers))
    head = RunHead(
        model=type(model).__name__,
        policy=state.policy_without_placement or repr(state.placer.policy),
        device=state.world.device.type,
        layers=tuple(layer.name for layer in layers),
        experts=tuple(layer.num_experts for layer in layers),
        nodes=tuple(state.placer.topology.node_of),
        started=time.time(),
    )  # fmt: skip
    place = _open(Path(path), head, first_step, state.world, tensorboard=tensorboard)
    return Monitor(state, place, timeline_every=timeline_every)


@dataclass(frozen=True)
class _Place:
    """Where a start of a run is written.

    Attributes:
        folder, file: of this start, and of this rank in it.
        first_step: number of its first step.
        lock: keeps other runs out; rank 0 has it.
        tensorboard: rank 0 may have it.
    """

    folder: Path
    file: IO[bytes]
    first_step: int
    lock: FolderLock | None
    tensorboard: TensorBoardLog | None


@dataclass
class _Step:
    """A step of which the end is not known yet.

    Attributes:
        began, clock: its begin, as Unix time and on the clock of spans.
    """

    number: int
    began: float
    clock: float
    logged: dict[str, Number] = field(default_factory=dict)


@dataclass
class _Rows:
    """Lines of the next chunk, one list for each column."""

    columns: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, **values: Any) -> None:
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value)


class Monitor:
    """What :func:`hecate.monitor` returns.

    Attributes:
        folder: where this start of the run is written.
    """

    def __init__(self, state: CompiledModel, place: _Place, *, timeline_every: int) -> None:
        self.folder = place.folder
        self._state, self._file, self._lock = state, place.file, place.lock
        self._timeline_every = timeline_every
        self._layers = tuple(dict.fromkeys(state.layers))
        self._place = {layer.name: index for index, layer in enumerate(self._layers)}
        self._most = max((layer.num_experts for layer in self._layers), default=0)
        self._next = place.first_step
        self._step: _Step | None = None
        self._rows, self._spans = _Rows(), _Rows()
        self._owners = _Rows()
        self._known_owners: tuple[Any, ...] = ()
        self._logged: list[dict[str, Number]] = []
        self._flushed = time.monotonic()
        self._tensorboard = place.tensorboard
        self._failed = False
        state.forward.before = self._before_forward

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def log(self, **values: Number) -> None:
        """Add numbers to the step that runs, under their names: ``log(loss=loss)``.

        Call it between a step's forward and the next one that trains. Tensors with one element are read later, so
        that nothing waits for the GPU here. Ranks may log different values; the report shows their mean. Once the
        monitor has given up it does nothing.

        Raises:
            RuntimeError: no training forward has run yet, or the monitor is closed.
            TypeError: something that is no number.
            ValueError: a tensor with more than one element.
        """
        for name, value in values.items():
            _check_number(name, value)
        if self._failed:
            return
        if self._file.closed or (self._step is None and not self._logged):
            why = "the monitor is closed" if self._file.closed else "no training forward has run"
            raise RuntimeError(f"hecate.monitor: log() belongs to a step, and {why}")
        # An evaluation ends a step, but what is logged behind it is still of that step.
        logged = self._step.logged if self._step is not None else self._logged[-1]
        for name, value in values.items():
            # A copy: the user may add to it in place before it is read.
            logged[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def close(self) -> None:
        """Write what is left. What runs afterwards is not logged. A second call does nothing."""
        if self._file.closed:
            return
        with self._harmless():
            self._end_step()
            self._flush()
            self._file.close()
        self._let_go()

    # --- around a step ---

    def _before_forward(self) -> None:
        with self._harmless():
            self._end_step()
            if torch.is_grad_enabled():
                if len(self._logged) >= CHUNK_STEPS or time.monotonic() - self._flushed > CHUNK_SECONDS:
                    self._flush()
                self._step = _Step(number=self._next, began=time.time(), clock=time.perf_counter())
                if self._is_drawn(self._step):
                    self._state.world.queue.ask_for_times()
                self._next += 1

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Who watches must not stop what is watched, nor hide its error: whatever fails ends the monitor alone."""
        try:
            yield
        except Exception as error:
            self._failed, self._step = True, None
            self._let_go()
            rank = self._state.world.rank
            disk = isinstance(error, OSError)
            what = f"cannot write to {self.folder} any more" if disk else "the monitor failed"
            warn_alone(
                f"hecate.monitor: rank {rank}: {what}, and logs nothing from here on. {type(error).__name__}: "
                f"{error}",
                stacklevel=2,
            )

    def _let_go(self) -> None:
        """Of the model, of the files and of the folder."""
        self._state.forward.before = None
        # What is left in their buffers may not fit either.
        with suppress(OSError):
            self._file.close()
        if self._tensorboard is not None:
            with suppress(Exception):
                self._tensorboard.close()
        if self._lock is not None:
            self._lock.release()

    def _end_step(self) -> None:
        """Take down the step that ran until now. The layers and the queue still have it."""
        step, self._step = self._step, None
        if step is None:
            return
        layers, alone = self._layers, self._state.world.size == 1
        for layer in layers:
            layer.read_rows()
        self._rows.add(
            step=step.number, began=step.began, seconds=time.perf_counter() - step.clock,
            rows=[-1 if alone else layer.rows for layer in layers],
            row_bytes=[layer.bytes_sent for layer in layers],
            expert_bytes=[layer.expert_bytes_sent for layer in layers],
            memory=_memory(self._state.world.device),
        )  # fmt: skip
        self._logged.append(step.logged)
        self._take_spans(step)
        if self._state.world.rank == 0:
            self._take_placements(step)

    def _is_drawn(self, step: _Step) -> bool:
        return step.number % self._timeline_every == 0

    def _take_spans(self, step: _Step) -> None:
        queue, drawn = self._state.world.queue, self._is_drawn(step)
        travel = np.full(len(self._layers) + 1, np.nan, dtype=np.float32)
        exposed = travel.copy()
        if drawn or not queue.on_stream:
            travel[:], exposed[:] = 0, 0
            for span in queue.spans:
                # What nobody waited for has no times.
                if span.ready:
                    where = self._place.get(span.subject, -1)
                    travel[where] += span.seconds
                    exposed[where] += span.exposed
                    if drawn:
                        self._take_span(span, step)
        self._rows.add(travel=travel, exposed=exposed)

    def _take_span(self, span: Span, step: _Step) -> None:
        times = (span.started, span.begun, span.ended, span.waited, span.ready)
        self._spans.add(
            span_step=step.number,
            span_names=(span.part, span.operator, span.subject),
            span_times=[moment - step.clock for moment in times],
        )

    def _take_placements(self, step: _Step) -> None:
        loads: list[Any] = []
        holders = np.ones((len(self._layers), self._most), dtype=np.uint16)
        for index, layer in enumerate(self._layers):
            counts = layer.counts
            # On a GPU they are read when the chunk is written: the host must not wait for it here.
            loads.append(counts.numpy().sum(0) if counts is not None and counts.device.type == "cpu" else counts)
            placement = layer.placer.plan.current
            if placement is not None and placement.num_replicas:
                held = np.bincount(placement.pairs[0], minlength=layer.num_experts)
                holders[index, : layer.num_experts] = held
        self._rows.add(load=loads, holders=holders)
        owners = tuple(layer.owners for layer in self._layers)
        # Owners are replaced, never changed.
        if len(owners) != len(self._known_owners) or any(
            one is not other for one, other in zip(owners, self._known_owners, strict=True)
        ):
            self._known_owners = owners
            lines = np.full((len(owners), self._most), -1, dtype=np.int32)
            for index, one in enumerate(owners):
                lines[index, : one.num_experts] = one.array
            self._owners.add(owners_step=step.number, owners=lines)

    # --- chunks ---

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        columns, steps = self._rows.columns, len(self._logged)
        if not steps:
            return
        layers = len(self._layers)
        arrays: dict[str, Array] = {name: np.asarray(columns[name], dtype=dtype) for name, dtype in _PLAIN.items()}
        for name in ("rows", "row_bytes", "expert_bytes"):
            arrays[name] = np.asarray(columns[name], dtype=np.int64).reshape(steps, layers)
        for name in ("travel", "exposed"):
            arrays[name] = np.stack(columns[name])
        if "load" in columns:
            arrays["load"] = self._loads(columns["load"])
            arrays["holders"] = np.stack(columns["holders"])
            if self._state.world.size == 1:
                arrays["rows"] = arrays["load"].sum(2, dtype=np.int64)
        if self._owners.columns:
            arrays["owners_step"] = np.asarray(self._owners.columns["owners_step"], dtype=np.int64)
            arrays["owners"] = np.stack(self._owners.columns["owners"])
        if self._spans.columns:
            arrays["span_step"] = np.asarray(self._spans.columns["span_step"], dtype=np.int64)
            arrays["span_names"] = np.asarray(self._spans.columns["span_names"], dtype=np.str_)
            arrays["span_times"] = np.asarray(self._spans.columns["span_times"], dtype=np.float64)
        for name in sorted({name for line in self._logged for name in line}):
            arrays[f"log.{name}"] = np.asarray([float(line.get(name, np.nan)) for line in self._logged])
        self._rows, self._spans, self._owners, self._logged = _Rows(), _Rows(), _Rows(), []
        append_chunk(self._file, arrays)
        if self._tensorboard is not None:
            self._tensorboard.write(arrays)

    def _loads(self, lines: Sequence[Sequence[Any]]) -> Array:
        loads = np.zeros((len(lines), len(self._layers), self._most), dtype=np.uint32)
        for step, line in enumerate(lines):
            for index, load in enumerate(line):
                if load is not None:
                    load = load.sum(0).cpu().numpy() if isinstance(load, torch.Tensor) else load
                    loads[step, index, : len(load)] = load
        return loads


_PLAIN: dict[str, Any] = {"step": np.int64, "began": np.float64, "seconds": np.float64, "memory": np.int64}


def _memory(device: torch.device) -> int:
    """Bytes: on a GPU the most that tensors took so far, else what this process has in memory; 0 if unknown."""
    peak = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    if peak is not None:
        return int(peak(device))
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _check_number(name: str, value: object) -> None:
    if isinstance(value, DTensor):
        # To read it later would communicate, and ranks do not write at the same time.
        raise TypeError(f"hecate.monitor: {name} is a DTensor; log {name}.full_tensor()")
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"hecate.monitor: {name} has {value.numel()} elements, one number is logged")
        if value.is_complex() or value.is_meta:
            kind = "complex" if value.is_complex() else "on the meta device"
            raise TypeError(f"hecate.monitor: {name} is {kind}, expected a number")
    elif not isinstance(value, Real):
        raise TypeError(f"hecate.monitor: {name} is a {type(value).__name__}, expected a number or a tensor with one")


_CANNOT_WRITE, _TAKEN, _NO_TENSORBOARD = 1, 2, 3


def _open(root: Path, head: RunHead, first_step: int | None, world: World, *, tensorboard: bool) -> _Place:
    """The folder of this start and this rank's file in it. A collective; if a rank cannot write, all raise.

    Whatever goes wrong on one rank, it goes on to the collectives: the others wait there.
    """
    why: Exception | None = None
    failed, number, first, lock = 0, 0, first_step or 0, None
    # Step 1: rank 0 takes the folder, and tells the others which start this is.
    if world.rank == 0:
        try:
            if tensorboard and importlib.util.find_spec("tensorboard") is None:
                failed = _NO_TENSORBOARD
            else:
                root.mkdir(parents=True, exist_ok=True)
                lock = FolderLock(root)
                number = max(start_numbers(root), default=-1) + 1
                if first_step is None:
                    first = next_step(root, head)
                start_folder(root, number).mkdir()
        except BlockingIOError:
            failed = _TAKEN
        except Exception as error:
            failed, why = _CANNOT_WRITE, error
    told = torch.tensor([failed, number, first], dtype=torch.int64, device=world.control_device)
    with doing("hecate.monitor"):
        collectives.broadcast(told, world)
    failed, number, first = told.tolist()
    if failed == _NO_TENSORBOARD:
        raise ImportError("hecate.monitor: tensorboard=True needs TensorBoard: pip install tensorboard")
    if failed == _TAKEN:
        raise OSError(f"hecate.monitor: another monitor writes into {root}; close it, or take another folder")
    if failed:
        _release(lock)
        raise OSError(f"hecate.monitor: rank 0 cannot write into {root}. {why or ''}".rstrip()) from why
    # Step 2: every rank opens its own file.
    folder = start_folder(root, number)
    file: IO[bytes] | None = None
    log: TensorBoardLog | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The first rank of each machine, of which every one may have a disk of its own.
        if int(os.environ.get("LOCAL_RANK", world.rank)) == 0:
            head.write(folder, world.rank)
        file = rank_path(folder, world.rank).open("ab")
        if tensorboard and world.rank == 0:
            log = TensorBoardLog(folder / "tensorboard", world.size)
    except Exception as error:
        why = error
    failures = torch.tensor([why is not None], dtype=torch.int64, device=world.control_device)
    with doing("hecate.monitor"):
        collectives.all_reduce(failures, world)
    if int(failures) or file is None:
        if file is not None:
            file.close()
        if log is not None:
            log.close()
        _release(lock)
        raise OSError(f"hecate.monitor: {why or 'another rank'} cannot write into {folder}") from why
    return _Place(folder, file, first, lock, log)


def _release(lock: FolderLock | None) -> None:
    if lock is not None:
        lock.release()
