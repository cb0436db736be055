"""Fill a model from a checkpoint that was verified."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from hecate.checkpoints.adapters import are_digests, base_differences, base_digests
from hecate.checkpoints.coordination import CheckpointError, MismatchError, Ranks, describe
from hecate.checkpoints.manifest import read_manifest
from hecate.checkpoints.optimizer_tensors import (
    OptimizerTensors,
    compare_groups,
    optimizer_name,
    prepare_optimizer,
    set_options,
    set_plain,
)
from hecate.checkpoints.run_state import (
    differences,
    forget_last_forward,
    function_options,
    modules_with_extra_state,
    new_random_state,
    restore_owners,
    restore_planner,
    set_extra_states,
    set_random_state,
)
from hecate.checkpoints.safety.files import CorruptError
from hecate.checkpoints.safety.plain_data import read_plain
from hecate.checkpoints.safety.tensor_index import TensorReader, read_index
from hecate.checkpoints.state_dicts import LogicalTensor, get_model_state_dict, sites_of
from hecate.compiled_model import compiled_model_of, is_compiled

# Values for fields that run.json lacks, because they are younger than the checkpoint, or no model was saved.
_DEFAULTS: dict[str, Any] = {"extra_state": {}, "placement": None, "options": {}, "left_out": []}
# The same for those that rank0.json and the others lack.
_OWN_DEFAULTS: dict[str, Any] = {"base": {}, "placement": None}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A step that :func:`load` found.

    Attributes:
        step: as given to :func:`save`.
        path: folder of the step.
        ranks: how many saved it.
        extra: what this rank saved; on a rank that did not exist then, what rank 0 saved.
        extras: what every rank saved, by rank.
        skipped: newer steps that could not be used, and why.
    """

    step: int
    path: Path
    ranks: int
    extra: Any
    extras: tuple[Any, ...] = field(repr=False)
    skipped: tuple[str, ...] = ()


class UnusableError(Exception):
    """A checkpoint that verifies and is not what hecate.save writes. If ``touched``, the model has a part of it."""

    def __init__(self, text: str, touched: bool) -> None:
        super().__init__(text)
        self.touched = touched


def damage_of(error: Exception) -> str:
    """Describe what is wrong with a checkpoint; raise what is wrong with this rank instead."""
    # With missing rights, no more descriptors or no network an older step would be no better.
    if isinstance(error, OSError) and error.errno != errno.EIO:
        raise error
    return str(error) if isinstance(error, CorruptError) else describe(error)


class Restoring:
    """A checkpoint that was verified, while it is read into a model."""

    def __init__(self, path: Path, ranks: Ranks, skipped: Sequence[str]) -> None:
        self.path, self.ranks, self.skipped, self.touched = path, ranks, tuple(skipped), False
        self.manifest = self._usable(lambda: read_manifest(path))
        self.metadata: Metadata = self._usable(
            lambda: read_index(path, self.manifest.files, format=self.manifest.format)
        )
        self.run: dict[str, Any] = self._usable(self._read_run)
        self.own: list[dict[str, Any]] = self._usable(self._read_own)

    def _usable(self, read: Callable[[], Any]) -> Any:
        """Return what ``read`` gives; if it fails on any rank, the checkpoint is given up on all."""

        def look() -> tuple[Any, str]:
            try:
                return read(), ""
            except Exception as error:
                # Any error: what was compared fits, so this is not of hecate.save. The next overwrites all of it.
                return None, damage_of(error)

        result, problem = self.ranks.together(look)
        told = [f"{text} (rank {rank})" for rank, text in enumerate(self.ranks.gather(problem)) if text]
        if told:
            raise UnusableError(told[0], self.touched)
        return result

    def _read_run(self) -> dict[str, Any]:
        run = self._read_plain("run.json")
        try:
            run = _DEFAULTS | run
            fits = run["step"] == self.manifest.step and isinstance(run["extra_state"], dict)
            fits = fits and all({"groups", "plain"} <= one.keys() for one in run["optimizers"])
        except (KeyError, TypeError, AttributeError):
            fits = False
        if not fits:
            raise CorruptError("run.json does not hold what hecate.save writes")
        return run

    def _read_own(self) -> list[dict[str, Any]]:
        out = []
        for rank in range(self.manifest.ranks):
            found = self._read_plain(f"rank{rank}.json")
            own = _OWN_DEFAULTS | found if isinstance(found, dict) else {}
            if not {"random", "extra"} <= own.keys() or not are_digests(own["base"]):
                raise CorruptError(f"rank{rank}.json does not hold what hecate.save writes")
            out.append(own)
        return out

    def _read_plain(self, name: str) -> Any:
        if name not in self.manifest.files:
            raise CorruptError(f"{name} is missing")
        return read_plain(self.path / name)

    # --- into a model ---

    def into(
        self, model: nn.Module | None, optimizers: list[Optimizer], *, strict: bool, cast: bool, same_options: bool
    ) -> Loaded:
        problems = self._usable(
            lambda: self._differences(model, optimizers, strict=strict, cast=cast, same_options=same_options)
        )
        told = [line for lines in self.ranks.gather(problems) for line in lines]
        if model is not None and same_options and not told:
            told = self._differences_of_base(model, cast=cast)
        if told:
            shown = "".join(f"\n  {line}" for line in list(dict.fromkeys(told))[:12])
            raise MismatchError(f"hecate.load: {self.path} is of another model or optimizer:{shown}")
        if model is not None:
            self.touched = True
            self._fill(model, optimizers)
        own = self.own[self.ranks.rank] if self.ranks.rank < len(self.own) else None
        self._usable(lambda: self._random_numbers(own, model))
        return Loaded(
            step=self.manifest.step,
            path=self.path,
            ranks=self.manifest.ranks,
            extra=(own if own is not None else self.own[0])["extra"],
            extras=tuple(one["extra"] for one in self.own),
            skipped=self.skipped,
        )

    def _saved(self, prefix: str) -> dict[str, TensorStorageMetadata]:
        return {
            name.removeprefix(prefix): found
            for name, found in self.metadata.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(found, TensorStorageMetadata)
        }

    def _differences(
        self, model: nn.Module | None, optimizers: list[Optimizer], *, strict: bool, cast: bool, same_options: bool
    ) -> list[str]:
        """List what does not fit, before anything is changed."""
        if model is None:
            return []
        left_out = set(self.run["left_out"])
        state = {name: tensor for name, tensor in get_model_state_dict(model).items() if name not in left_out}
        out = _compare(self._saved("model."), state, strict=strict, cast=cast)
        if strict:
            own, kept = set(modules_with_extra_state(model)), set(self.run["extra_state"])
            out += [f"the extra state of {name!r} is not in the checkpoint" for name in sorted(own - kept)]
            out += [f"the model has no extra state in {name!r}" for name in sorted(kept - own)]
        if same_options:
            # Checkpoints that do not name attention are of models with full attention.
            lines = differences({"hecate.attention": None} | self.run["options"], function_options(model))
            out += [f"{line}; same_options=False loads it all the same" for line in lines]
        if optimizers and len(optimizers) != len(self.run["optimizers"]):
            out.append(f"{len(self.run['optimizers'])} optimizers were saved, and {len(optimizers)} are given")
        elif optimizers:
            for optimizer, saved in zip(optimizers, self.run["optimizers"], strict=True):
                out += compare_groups(model, optimizer, saved["groups"])
        return out

    def _differences_of_base(self, model: nn.Module, *, cast: bool) -> list[str]:
        """List how the base under adapters differs from what it was when they were saved. A collective."""
        saved = [own["base"] for own in self.own]
        if not any(saved):
            return []

        def here() -> dict[str, list[Any]]:
            state = get_model_state_dict(model)
            names = {name for rank in saved for name in rank if name in state}
            return base_digests(model, state, names, first=self.ranks.first)

        now = self.ranks.gather(self.ranks.together(here))
        return self._usable(lambda: base_differences(saved, now, cast=cast))

    def _fill(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        placement = self._placement_of(model)
        forget_last_forward(model)
        self._usable(lambda: restore_owners(model, placement))
        saved = self._saved("model.")
        state = get_model_state_dict(model)
        tensors: dict[str, Any] = {
            "model": {name: t for name, t in state.items() if isinstance(t, torch.Tensor) and name in saved}
        }
        prepared: list[OptimizerTensors] = []
        for number, optimizer in enumerate(optimizers):
            room = self._usable(partial(prepare_optimizer, model, optimizer, self._saved_state(number)))
            tensors[optimizer_name(number)] = {"state": room.tensors}
            prepared.append(room)
        self._read(tensors)
        if is_compiled(model):
            # What a checkpoint had of a frozen base was trained before, and is in the next one, too.
            read = {id(site.parameter) for site in sites_of(model) if site.name in saved}
            compiled_model_of(model, "load").backend.written.update(read)
        for room, optimizer, kept in zip(prepared, optimizers, self.run["optimizers"], strict=False):
            self._usable(partial(set_plain, model, optimizer, kept["plain"]))
            self._usable(partial(set_options, optimizer, kept["groups"], room.groups))
        self._usable(lambda: set_extra_states(model, self.run["extra_state"]))
        if optimizers:
            self._usable(lambda: restore_planner(model, placement))

    def _placement_of(self, model: nn.Module) -> dict[str, Any] | None:
        """Return what the planner of this rank's group knew, or else that of the first group."""
        group = compiled_model_of(model, "load").mesh.ranks if is_compiled(model) else (0,)
        of_group = self.own[group[0]]["placement"] if group[0] < len(self.own) else None
        found: dict[str, Any] | None = of_group if of_group is not None else self.run["placement"]
        return found

    def _saved_state(self, number: int) -> dict[str, dict[str, TensorStorageMetadata]]:
        out: dict[str, dict[str, TensorStorageMetadata]] = {}
        for path, found in self._saved(f"{optimizer_name(number)}.state.").items():
            name, _, key = path.rpartition(".")
            out.setdefault(name, {})[key] = found
        return out

    def _read(self, tensors: dict[str, Any]) -> None:
        problem: BaseException | None = None
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(
                    tensors,
                    storage_reader=TensorReader(self.path, self.metadata),
                    process_group=self.ranks.group,
                    no_dist=self.ranks.group is None,
                )
        except CheckpointException as error:
            problem = next(iter(error.failures.values()))[0]
            if isinstance(problem, OSError) and problem.errno != errno.EIO:
                raise CheckpointError(f"hecate.load: rank {next(iter(error.failures))}: {problem}") from error
        if problem is not None:
            raise UnusableError(describe(problem), self.touched) from problem

    def _random_numbers(self, own: Mapping[str, Any] | None, model: nn.Module | None) -> None:
        device = next((p.device for p in model.parameters()), torch.device("cpu")) if model else torch.device("cpu")
        if own is None:
            new_random_state(self.manifest.step, self.ranks.rank)
        else:
            set_random_state(own["random"], device)


def _compare(
    saved: Mapping[str, TensorStorageMetadata], state: Mapping[str, Any], *, strict: bool, cast: bool
) -> list[str]:
    out: list[str] = []
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    if strict:
        out += [f"{name} is not in the checkpoint" for name in tensors if name not in saved]
        out += [f"{name} is not in the model" for name in saved if name not in tensors]
    for name, tensor in tensors.items():
        if (found := saved.get(name)) is None:
            continue
        shape = tensor.whole if isinstance(tensor, LogicalTensor) else tensor.shape
        if tuple(found.size) != tuple(shape):
            out.append(f"{name} has the shape {list(found.size)} in the checkpoint and {list(shape)} in the model")
        elif found.properties.dtype != tensor.dtype and not cast:
            out.append(
                f"{name} is {found.properties.dtype} in the checkpoint and {tensor.dtype} in the model; cast=True "
                "converts it"
            )
    return out
