"""``hecate.save`` and ``hecate.async_save``."""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.optim import Optimizer

from hecate.checkpoints import publish
from hecate.checkpoints.adapters import base_digests, frozen_base, has_adapters
from hecate.checkpoints.coordination import CheckpointError, Ranks, describe, ranks_of
from hecate.checkpoints.optimizer_tensors import as_optimizers, optimizer_name, optimizer_tensors
from hecate.checkpoints.run_state import (
    function_options,
    modules_with_extra_state,
    placement_state,
    random_state,
    speaks_for_group,
)
from hecate.checkpoints.safety.files import FileRecord, record_files
from hecate.checkpoints.safety.plain_data import check_plain, write_plain
from hecate.checkpoints.safety.tensor_index import INDEX, write_index
from hecate.checkpoints.state_dicts import (
    LogicalTensor,
    get_model_state_dict,
    persistent_buffers,
)
from hecate.compiled_model import compiled_model_of, is_compiled

# It has one thread, so that steps are published in the order in which they were saved.
_background: ThreadPoolExecutor | None = None
_under_way: list[Future[Path]] = []


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint when it was taken."""

    tensors: dict[str, Any]  # Nested dicts of tensors, for DCP.
    run: dict[str, Any]  # Plain data, equal on all ranks.
    own: dict[str, Any]  # Plain data of this rank.


def save(
    directory: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
) -> Path:
    """Save a step of a run. All ranks call it together, between two steps; all see the same ``directory``.

    When it returns, the step is on the disk and verified; until then nothing in ``directory`` has changed that
    :func:`load` would see. Besides weights and optimizer state it has the random number generators, the owners of
    experts and what the planner knows. It is read by any number of ranks, with any owners, also by one process with
    the plain model, and its tensors by ``torch.distributed.checkpoint.load``.

    Args:
        directory: of the run; each step becomes a folder in it.
        model: compiled, or any other.
        optimizer: one, or several in a fixed order.
        step: a number for people and for :func:`load`.
        extra: whatever else this rank must know to go on, as plain data: ``scheduler.state_dict()``, a position in
            the data. Numbers, texts, tensors, arrays, and containers of them. Each rank saves its own.
        keep: how many steps stay in ``directory``, this one included; by default all.

    Returns:
        The folder of the step.

    Raises:
        CheckpointError: on every rank, if any cannot write; the steps of before are untouched.
        RuntimeError: another rank is in something else.
        ValueError: a wrong argument, or optimizer state that cannot be split over ranks.
        TypeError: ``extra`` has something that is not plain data; names where.
    """
    _check(step, keep, extra)
    ranks = _meet(directory, model, step, "hecate.save")
    snapshot = ranks.together(lambda: _take(model, as_optimizers(optimizer), step, extra, first=ranks.first))
    return _write(Path(directory), snapshot, ranks, step, keep)


def async_save(
    directory: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int,
    extra: Any = None,
    keep: int | None = None,
) -> Future[Path]:
    """Copy a step to the host's memory and return; a thread saves it as :func:`save` does.

    Training may go on at once. The step is saved when the future is done on some rank. An error is raised by
    ``result()``, and if nobody asked for that, by the next save. Ask for the result of the last save before
    ``destroy_process_group``.
    """
    global _background
    _check(step, keep, extra)
    ranks = _meet(directory, model, step, "hecate.async_save")

    def taken() -> Snapshot:
        return _take(model, as_optimizers(optimizer), step, extra, first=ranks.first)

    snapshot = ranks.together(lambda: _copied(taken()))
    if _background is None:
        _background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hecate-save")
    future = _background.submit(_write, Path(directory), snapshot, ranks, step, keep)
    _under_way.append(future)
    return future


def _meet(directory: str | os.PathLike[str], model: nn.Module | None, step: int, function: str) -> Ranks:
    """Check with all ranks that they save the same step of the same model, and that parameters have not drifted."""
    wait_for_saves()
    ranks = ranks_of(model, function)
    ranks.agree(directory=directory, step=step)
    if model is not None and is_compiled(model):
        for check in compiled_model_of(model, function).forward.between.drift:
            check.before_save()
    return ranks


def wait_for_saves() -> None:
    """Wait for saves under way, and raise what one of them failed with."""
    while _under_way:
        _under_way.pop(0).result()


def _warn_of_failures() -> None:
    for future in _under_way:
        if future.done() and (error := future.exception()) is not None:
            warnings.warn(f"hecate.async_save failed: {describe(error)}", stacklevel=1)


atexit.register(_warn_of_failures)


def _check(step: int, keep: int | None, extra: Any) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"hecate.save: step={step!r}, expected a whole number of at least 0")
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise ValueError(f"hecate.save: keep={keep!r}, expected a whole number of at least 1, or None")
    check_plain(extra, "extra")


def _take(model: nn.Module | None, optimizers: list[Optimizer], step: int, extra: Any, *, first: bool) -> Snapshot:
    tensors: dict[str, Any] = {}
    run: dict[str, Any] = {"step": step, "torch": torch.__version__, "optimizers": []}
    own: dict[str, Any] = {}
    device = torch.device("cpu")
    if model is not None:
        tensors["model"] = get_model_state_dict(model)
        for name in () if first else persistent_buffers(model):
            # DCP writes any rank's copy of a tensor that several have, and buffers may differ until the next forward.
            tensors["model"].pop(name, None)
        if has_adapters(model):
            # The base can be had from where it came from, and is many times as large.
            run["left_out"] = sorted(frozen_base(model))
            own["base"] = base_digests(model, tensors["model"], run["left_out"], first=first)
            for name in run["left_out"]:
                tensors["model"].pop(name, None)
        device = next((tensor.device for tensor in tensors["model"].values()), device)
        run["extra_state"] = {n: module.get_extra_state() for n, module in modules_with_extra_state(model).items()}
        run["placement"], run["options"] = placement_state(model), function_options(model)
        own["placement"] = run["placement"] if speaks_for_group(model) else None
    elif optimizers:
        raise ValueError(
            "hecate.save: an optimizer's state is saved by the names of its model's parameters; give model"
        )
    for number, optimizer in enumerate(optimizers):
        assert model is not None
        found = optimizer_tensors(model, optimizer)
        tensors[optimizer_name(number)] = {"state": found.tensors}
        run["optimizers"].append({"groups": found.groups, "plain": found.plain})
    check_plain(run, "the run's state")
    return Snapshot(tensors, run, own | {"random": random_state(device), "extra": extra})


def _copied(snapshot: Snapshot) -> Snapshot:
    def copied(value: Any) -> Any:
        if isinstance(value, LogicalTensor):
            return value.with_part(value.part.to("cpu", copy=True))
        if isinstance(value, torch.Tensor):
            return value.detach().to("cpu", copy=True)
        if isinstance(value, dict):
            return {key: copied(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(copied(item) for item in value)
        return value

    return Snapshot(copied(snapshot.tensors), copied(snapshot.run), copied(snapshot.own))


def _write(folder: Path, snapshot: Snapshot, ranks: Ranks, step: int, keep: int | None) -> Path:
    draft = Path(ranks.on_first(lambda: str(publish.open_draft(folder, step))))
    try:
        ranks.together(lambda: _check_shared(draft))
        names = _write_files(draft, snapshot, ranks)
        records = ranks.together(lambda: {name: asdict(r) for name, r in record_files(draft, names).items()})
        files = {name: FileRecord(**r) for part in ranks.gather(records) for name, r in part.items()}
        final = ranks.on_first(
            lambda: str(publish.publish(draft, step=step, ranks=ranks.size, files=files, keep=keep))
        )
    except BaseException:
        # If rank 0 is gone, the next run removes the draft.
        if ranks.first:
            publish.discard(draft)
        raise
    return Path(final)


def _check_shared(draft: Path) -> None:
    if not draft.is_dir():
        raise FileNotFoundError(f"{draft.parent} is not the folder that rank 0 writes to: all ranks must share it")


class Writer(dcp.FileSystemWriter):
    """Writes tensors as DCP does, and says where they lie."""

    def storage_meta(self) -> StorageMeta:
        # Without the path, which is that of a draft.
        return StorageMeta(save_id=self.save_id)

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        # In torch 2.11 what ``save`` returns says not where tensors lie.
        metadata.storage_data = {one.index: one.storage_data for of_rank in results for one in of_rank}
        super().finish(metadata, results)


def _write_files(draft: Path, snapshot: Snapshot, ranks: Ranks) -> list[str]:
    """Write this rank's part, and return the names of its files."""
    before = f"__{ranks.rank}_"
    writer = Writer(draft, sync_files=True)
    try:
        with warnings.catch_warnings():
            # A single process may save, too.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            metadata = dcp.save(
                snapshot.tensors, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None
            )
    except CheckpointException as error:
        # On a full disk torch's writer of tensors says no more than that a position is not the expected one.
        ranks.together(lambda: _require_space(draft))
        rank, (problem, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"hecate.save: rank {rank}: {describe(problem)}") from error
    plain = ranks.together(lambda: _write_plain_files(draft, snapshot, ranks, metadata))
    mine = [path.name for path in draft.iterdir() if path.name.startswith(before)]
    return [*mine, *plain, *([".metadata"] if ranks.first else [])]


def _write_plain_files(draft: Path, snapshot: Snapshot, ranks: Ranks, metadata: Metadata) -> list[str]:
    """Write whatever is no tensor, see to it that it is on the disk, and return the names of its files."""
    _require_space(draft)
    parts = {f"rank{ranks.rank}": snapshot.own} | ({"run": snapshot.run} if ranks.first else {})
    for stem, value in parts.items():
        write_plain(value, draft / f"{stem}.json")
    names = [path.name for path in draft.iterdir() if path.stem in parts]
    if ranks.first:
        write_index(metadata, draft / INDEX)
        names.append(INDEX)
    for name in names:
        publish.sync(draft / name)
    return names


def _require_space(draft: Path) -> None:
    """Raise OSError if the disk is full: the files that follow are so small that only the rename might fail of it."""
    if shutil.disk_usage(draft).free < 2**20:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(draft.parent))
