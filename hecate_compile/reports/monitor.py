"""Watch a run while it trains: :func:`hecate.monitor`. ``hecate report`` draws its files (``run_files``)."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import IO

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hecate.checkpoints.publish import FileLock
from hecate.compiled_model import CompiledModel, compiled_model_of
from hecate.reports.run_files import (
    CHUNK_SECONDS,
    CHUNK_STEPS,
    RunHead,
    append_chunk,
    next_step,
    rank_path,
    start_folder,
    start_numbers,
)
from hecate.reports.step_log import Number, StepLog, TensorBoardLog
from hecate.runtime.comm.agreement import gather_json
from hecate.runtime.comm.history import doing
from hecate.runtime.comm.warn import warn_alone
from hecate.runtime.comm.world import World


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

    It can be used without ``with``, and :meth:`Monitor.close` at the end. A step is a forward with gradients and all
    until the next forward: its backward, the optimizer, waiting for data. Every rank writes what only it knows, rank
    0 also what all know; only the call itself communicates. A run that is killed loses its last seconds. A second
    call for the same folder, after a restart for instance, adds a new start; the report puts them together. An error
    while it logs, such as a full disk, ends the monitor with a warning, and never the training.

    Args:
        path: made if it is not there. On several machines without a shared disk each keeps the files of its ranks.
        first_step: number of the first step; by default the one after the last in the folder. Give it where a run
            starts again from an earlier checkpoint: the report then has the steps that ran again once.
        timeline_every: steps between two whose collectives are kept one by one. With NCCL times are read in these
            steps only, because the host has to wait for the GPU.
        tensorboard: rank 0 writes scalars for TensorBoard too, into ``path/start.../tensorboard``.

    Raises:
        ValueError: the model was not compiled; it is monitored already; a wrong number.
        OSError: a rank cannot write, or another monitor writes into the folder; on all ranks.
        ImportError: ``tensorboard=True`` without the package tensorboard.
    """
    state = compiled_model_of(model, "monitor")
    if state.forward.between.watcher is not None:
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
        nodes=state.nodes.node_of,
        groups=state.mesh.groups,
        started=time.time(),
    )
    place = _open(Path(path), head, first_step, state.world, tensorboard=tensorboard)
    return Monitor(state, place, timeline_every)


@dataclass(frozen=True)
class _Place:
    """The folder and files of one start of a run; ``opened`` closes them, and lets others have the run's folder."""

    folder: Path
    file: IO[bytes]
    first_step: int
    tensorboard: TensorBoardLog | None
    opened: ExitStack


class Monitor:
    """A monitor of a run, as :func:`hecate.monitor` returns it.

    Attributes:
        folder: the folder to which this start of the run is written.
    """

    def __init__(self, state: CompiledModel, place: _Place, timeline_every: int) -> None:
        self.folder = place.folder
        self._state, self._place = state, place
        self._steps = StepLog(state, place.first_step, timeline_every)
        self._flushed = time.monotonic()
        self._failed = False
        state.forward.between.watcher = self._before_forward

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def log(self, **values: Number) -> None:
        """Add numbers to the step that runs, under their names: ``log(loss=loss)``.

        Call it between a step's forward and the next one that trains. Tensors with one element are read later, so
        that nothing waits for the GPU here. Ranks may log different values; the report shows their mean. After an
        error has ended the monitor it does nothing.

        Raises:
            RuntimeError: no training forward has run yet, or the monitor is closed.
            TypeError: something that is no number.
            ValueError: a tensor with more than one element.
        """
        for name, value in values.items():
            _check_number(name, value)
        if self._failed:
            return
        logged = self._steps.logged
        if self._place.file.closed or logged is None:
            why = "the monitor is closed" if self._place.file.closed else "no training forward has run"
            raise RuntimeError(f"hecate.monitor: log() belongs to a step, and {why}")
        for name, value in values.items():
            # A copy: the user may add to it in place before it is read.
            logged[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value

    def close(self) -> None:
        """Write the remaining steps, and log no more. A second call does nothing."""
        if self._place.file.closed:
            return
        with self._harmless():
            self._steps.end()
            self._flush()
            self._place.file.close()
        self._let_go()

    def _before_forward(self) -> None:
        with self._harmless():
            self._steps.end()
            if torch.is_grad_enabled():
                if self._steps.count >= CHUNK_STEPS or time.monotonic() - self._flushed > CHUNK_SECONDS:
                    self._flush()
                self._steps.begin()

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if self._steps.count:
            chunk = self._steps.take()
            append_chunk(self._place.file, chunk)
            if self._place.tensorboard is not None:
                self._place.tensorboard.write(chunk)

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """End the monitor alone if the block fails: it must not stop the training, nor hide an error of that."""
        try:
            yield
        except Exception as error:
            self._failed = True
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
        """Take the monitor off the model, and close its files and folder."""
        self._state.forward.between.watcher = None
        # On a full disk the rest of the buffers does not fit either.
        with suppress(Exception):
            self._place.opened.close()


def _check_number(name: str, value: object) -> None:
    if isinstance(value, DTensor):
        # Reading it later would communicate, and ranks do not write at the same time.
        raise TypeError(f"hecate.monitor: {name} is a DTensor; log {name}.full_tensor()")
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"hecate.monitor: {name} has {value.numel()} elements, one number is logged")
        if value.is_complex() or value.is_meta:
            kind = "complex" if value.is_complex() else "on the meta device"
            raise TypeError(f"hecate.monitor: {name} is {kind}, expected a number")
    elif not isinstance(value, Real):
        raise TypeError(f"hecate.monitor: {name} is a {type(value).__name__}, expected a number or a tensor with one")


def _open(root: Path, head: RunHead, first_step: int | None, world: World, *, tensorboard: bool) -> _Place:
    """Open the folder of this start and this rank's file in it. A collective; if a rank cannot write, all raise."""
    with ExitStack() as opened:
        number, first, problem = 0, 0, None
        if world.rank == 0:
            try:
                if tensorboard and importlib.util.find_spec("tensorboard") is None:
                    raise ImportError("tensorboard=True needs TensorBoard: pip install tensorboard")
                root.mkdir(parents=True, exist_ok=True)
                opened.callback(_locked(root).release)
                number = max(start_numbers(root), default=-1) + 1
                first = next_step(root, head) if first_step is None else first_step
                start_folder(root, number).mkdir()
            except Exception as error:
                problem = error
        number, first = _agreed([number, first], problem, root, world)
        folder = start_folder(root, number)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The first rank of each machine writes it: every machine may have a disk of its own.
            if int(os.environ.get("LOCAL_RANK", world.rank)) == 0:
                head.write(folder, world.rank)
            file = opened.enter_context(rank_path(folder, world.rank).open("ab"))
            log = None
            if tensorboard and world.rank == 0:
                log = TensorBoardLog(folder / "tensorboard", head.world_size // head.groups)
                opened.callback(log.close)
        except Exception as error:
            problem = error
        _agreed([], problem, folder, world)
        return _Place(folder, file, first, log, opened.pop_all())


def _locked(root: Path) -> FileLock:
    try:
        return FileLock(root / ".monitor")
    except TimeoutError:
        raise OSError(f"another monitor writes into {root}; close it, or take another folder") from None


def _agreed(numbers: list[int], problem: Exception | None, folder: Path, world: World) -> list[int]:
    """Return rank 0's numbers. A rank with a problem calls this too, since the others wait; then all raise."""
    text = "" if problem is None else f"{type(problem).__name__}: {problem}"
    mine = {"numbers": numbers, "problem": text, "package": isinstance(problem, ImportError)}
    with doing("hecate.monitor"):
        everyone = gather_json(mine, world)
    for rank, told in enumerate(everyone):
        if told["problem"]:
            kind = ImportError if told["package"] else OSError
            raise kind(f"hecate.monitor: rank {rank} cannot write into {folder}. {told['problem']}") from problem
    agreed: list[int] = everyone[0]["numbers"]
    return agreed
