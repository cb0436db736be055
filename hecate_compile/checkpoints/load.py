"""``hecate.load``: choose the newest step of a folder that is whole, and load it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

from torch import nn
from torch.optim import Optimizer

from hecate.checkpoints.coordination import CheckpointError, Ranks, ranks_of
from hecate.checkpoints.optimizer_tensors import as_optimizers
from hecate.checkpoints.publish import manifest_of, published
from hecate.checkpoints.restore import Loaded, Restoring, UnusableError, damage_of
from hecate.checkpoints.safety.files import CorruptError, check_files
from hecate.checkpoints.save import wait_for_saves
from hecate.runtime.comm.warn import warn_together


class NoCheckpointError(CheckpointError):
    """The folder has no step that can be loaded."""


@overload
def load(
    directory: str | os.PathLike[str],
    model: nn.Module | None = ...,
    optimizer: Optimizer | Sequence[Optimizer] | None = ...,
    *,
    step: int | None = ...,
    required: Literal[True] = ...,
    strict: bool = ...,
    cast: bool = ...,
    same_options: bool = ...,
) -> Loaded: ...
@overload
def load(
    directory: str | os.PathLike[str],
    model: nn.Module | None = ...,
    optimizer: Optimizer | Sequence[Optimizer] | None = ...,
    *,
    step: int | None = ...,
    required: bool,
    strict: bool = ...,
    cast: bool = ...,
    same_options: bool = ...,
) -> Loaded | None: ...
def load(
    directory: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int | None = None,
    required: bool = True,
    strict: bool = True,
    cast: bool = False,
    same_options: bool = True,
) -> Loaded | None:
    """Go on from the newest step in ``directory`` that is whole. All ranks call it together.

    Every file is compared with its SHA-256 first. A step that was damaged is named in a warning, and the one before
    is used. Nothing in a checkpoint is run. With as many ranks as saved it, the run then goes on bit for bit as if it
    had not stopped; with another number, ranks get their part of the same tensors.

    Args:
        directory: as given to :func:`save`.
        model: filled in place; compiled, or any other.
        optimizer: likewise, as many as were saved, in the same order. Options such as the learning rate come from the
            checkpoint.
        step: load this step and no other.
        required: raise if there is nothing; else return None.
        strict: the checkpoint must have the model's parameters and buffers, and no others. Otherwise the tensors that
            both have are loaded.
        cast: load tensors of another dtype too.
        same_options: refuse a model that computes something else: by its configuration, or because adapters would lie
            over another frozen base, which is not in a checkpoint.

    Returns:
        The step, and the ``extra`` that was saved with it.

    Raises:
        NoCheckpointError: there is no such step, or none that is whole.
        MismatchError: names, shapes, dtypes, options or optimizers differ; nothing was changed.
        CheckpointError: a rank cannot read; says which.
        RuntimeError: another rank is in something else.
    """
    folder, optimizers = Path(directory), as_optimizers(optimizer)
    if optimizers and model is None:
        raise ValueError(
            "hecate.load: an optimizer's state is saved by the names of its model's parameters; give model"
        )
    wait_for_saves()
    ranks = ranks_of(model, "hecate.load")
    ranks.agree(directory=directory, step=step, strict=strict, cast=cast, same_options=same_options)
    skipped, touched = list[str](), False
    # The newest first, as rank 0 sees them.
    names: list[str] = ranks.on_first(
        lambda: [one.path.name for one in published(folder) if step is None or one.step == step]
    )
    for name in names:
        path = folder / name
        problem = _verify(path, ranks)
        if not problem:
            try:
                return Restoring(path, ranks, skipped).into(
                    model, optimizers, strict=strict, cast=cast, same_options=same_options
                )
            except UnusableError as error:
                problem, touched = str(error), touched or error.touched
        skipped.append(f"{path.name}: {problem}")
        warn_together(f"hecate.load: {path} is not used: {problem}", ranks.rank, stacklevel=2)
    if not required and not skipped:
        return None
    wanted = "no checkpoint" if step is None else f"no step {step}"
    lines = [f"hecate.load: {wanted} in {folder}", *(f"not used: {why}" for why in skipped)]
    if touched:
        lines.append("The model has a part of a step that could not be read to its end: do not train on.")
    raise NoCheckpointError("\n  ".join(lines))


def _verify(path: Path, ranks: Ranks) -> str:
    """Return why a checkpoint is not what was saved; "" if it is. Each rank reads a part, all return the same."""

    def look() -> str:
        try:
            check_files(path, dict(sorted(manifest_of(path).files.items())[ranks.rank :: ranks.size]))
        except (CorruptError, OSError) as error:
            return damage_of(error)
        return ""

    told = ranks.gather(ranks.together(look))
    return next(
        (f"{text} (seen by rank {rank})" if ranks.size > 1 else text for rank, text in enumerate(told) if text), ""
    )
