"""One rank of one trial of ``hecate bisect``, in a process of its own: one that hangs is a result like any other."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
import torch
import torch.distributed as dist
import typer
from torch import nn

from hecate.commands.built import Batch, build
from hecate.compilation import compile
from hecate.config import Config
from hecate.runtime.comm.start import start_process_group
from hecate.runtime.comm.world import backend_for, local_device, name_of

Array = np.ndarray[Any, Any]

SEED = 0
# "bare": compiled, without options that make another model of it. "plain": without Hecate, gradients of one rank.
Kind = Literal["compiled", "bare", "plain"]


@dataclass(frozen=True)
class Trial:
    """The orders of a worker: steps of ``script``, all with the same weights, and a folder for results."""

    script: str
    out: str
    disabled: tuple[str, ...]  # Passes to leave out.
    kind: Kind
    steps: int
    own_batches: bool = False  # The script gives every rank a batch of its own.


@dataclass(frozen=True)
class RankResult:
    """The results of one rank: losses by step, gradients by ``STEP.NAME``, and facts that decide how to compare."""

    loss: Array
    gradients: dict[str, Array]
    facts: dict[str, Any]

    def write(self, path: Path) -> None:
        arrays: dict[str, Any] = dict(self.gradients)
        np.savez(path, loss=self.loss, facts=np.asarray(json.dumps(self.facts)), **arrays)

    @classmethod
    def read(cls, path: Path) -> RankResult:
        """Read the file of a rank; raise ValueError if nothing was written that can be read."""
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = dict(archive)
            return cls(loss=arrays.pop("loss"), facts=json.loads(str(arrays.pop("facts"))), gradients=arrays)
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest distance of two results, relative to the second; ``error`` says why there is no result."""

    loss: float = 0.0
    gradient: float = 0.0  # Of an element, relative to the largest of that gradient on any rank.
    worst: str = ""  # ``STEP.NAME`` of that gradient.
    error: str = ""

    def beyond(self, tolerance: float) -> bool:
        return bool(self.error) or not (self.loss <= tolerance and self.gradient <= tolerance)

    def __str__(self) -> str:
        step, _, name = self.worst.partition(".")
        return f"loss {self.loss:.1e}, gradients {self.gradient:.1e}" + (f" ({name}, step {step})" if name else "")


# Infinite numbers may be in both.
@np.errstate(invalid="ignore")
def compare(ours: Sequence[RankResult], theirs: Sequence[RankResult], *, gradients: bool = True) -> Difference:
    """Return how far ``ours`` are from ``theirs``, over all ranks; only by losses without ``gradients``."""
    pairs = list(zip(ours, theirs, strict=True))
    loss = max(_largest((mine.loss - other.loss) / np.maximum(np.abs(other.loss), 1e-12)) for mine, other in pairs)
    errors: dict[str, float] = {}
    for key in sorted({key for pair in pairs for one in pair for key in one.gradients}) if gradients else ():
        values = [(mine.gradients.get(key), other.gradients.get(key)) for mine, other in pairs]
        error = max(
            math.inf if mine is None or other is None or mine.shape != other.shape else _largest(mine - other)
            for mine, other in values
            if not (mine is None and other is None)
        )
        # A rank with almost nothing is not more exact than the others.
        scale = max((_largest(other) for _, other in values if other is not None), default=0.0)
        errors[key] = 0.0 if error == 0 else error / scale if 0 < scale < math.inf else math.inf
    worst = max(errors, key=errors.__getitem__, default="")
    found = errors.get(worst, 0.0)
    return Difference(loss=loss, gradient=found, worst=worst if found else "")


def _largest(values: Array) -> float:
    """Return the largest absolute value; NaN, which compares as smaller than everything, counts as infinite."""
    return float(np.nan_to_num(np.abs(values.astype(np.float64)), nan=math.inf, posinf=math.inf).max(initial=0.0))


def run_trial(trial: Trial, rank: int, ranks: int) -> None:
    """Run a trial on this rank, and write ``rank{rank}.npz``."""
    torch.manual_seed(SEED)
    made = build(trial.script, "script")
    # aot_eager compiles in seconds. A fault that only Inductor's graphs have needs a Config with that backend.
    model, config = made.model, made.config or Config(backend="aot_eager")
    batches = [one if trial.own_batches else batch_of_rank(one, rank, ranks) for one in made.batches]
    facts = facts_of(model, config, batches)
    if trial.kind != "plain":
        model = compile(model, config_of(trial, config))
    losses: list[float] = []
    gradients: dict[str, Array] = {}
    for step in range(trial.steps):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(SEED + 1 + step)
        before = _random_states()
        loss = _loss_of(model(**batches[step % len(batches)]), trial.script)
        facts["random"] = _random_states() != before
        loss.backward()
        losses.append(float(loss.detach()))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[f"{step}.{name}"] = parameter.grad.detach().to("cpu", torch.float32).numpy()
    RankResult(np.asarray(losses), gradients, facts).write(Path(trial.out) / f"rank{rank}.npz")


def facts_of(model: nn.Module, config: Config, batches: list[Batch]) -> dict[str, Any]:
    """Return facts that decide how results compare: the coarsest type, options, a fingerprint of the batches."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if config.mixed_precision is not None and config.mixed_precision.param_dtype is not None:
        kinds.add(config.mixed_precision.param_dtype)
    coarsest = max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)
    plain = [{key: value.tolist() for key, value in one.items() if torch.is_tensor(value)} for one in batches]
    return {
        "dtype": str(coarsest).removeprefix("torch."),
        "rounding": torch.finfo(coarsest).eps,
        "options": [
            name for name in ("attention", "mixed_precision", "wire_dtype") if getattr(config, name) is not None
        ],
        "batches": hashlib.sha256(repr(plain).encode()).hexdigest(),
    }


def config_of(trial: Trial, config: Config) -> Config:
    """Return the options that a trial compiles with."""
    bare = trial.kind == "bare"
    attention = None if bare else config.attention
    # shard_context is attention= itself: without it there would be another model.
    disabled = [name for name in trial.disabled if attention is None or name != "shard_context"]
    return replace(
        config,
        disable_passes=tuple(dict.fromkeys((*config.disable_passes, *disabled))),
        attention=attention,
        mixed_precision=None if bare else config.mixed_precision,
        # It rounds rows and gradients that travel, and without passes others travel.
        wire_dtype=None,
    )


def batch_of_rank(batch: Batch, rank: int, ranks: int) -> Batch:
    """Return this rank's part of the rows, repeated to their old number; of one row, its tokens in another order.

    Ranks that compute the same would hide missing communication: a mean of equal numbers is each of them.
    """
    tensors = {key: value for key, value in batch.items() if torch.is_tensor(value) and value.ndim}
    if ranks == 1 or not tensors:
        return batch
    rows = _most_common(value.shape[0] for value in tensors.values())
    if rows > 1:
        parts = torch.arange(rows, device="cpu").tensor_split(min(rows, ranks))
        part = parts[rank % len(parts)]
        chosen = part.repeat(-(-rows // len(part)))[:rows]
        return dict(batch) | {
            key: value[chosen.to(value.device)] for key, value in tensors.items() if value.shape[0] == rows
        }
    # Positions stay; tensors as long as the ids are about tokens, and sizes of images are not.
    tokens = {key: value for key, value in tensors.items() if value.ndim > 1 and "position" not in key}
    whole = {key: value for key, value in tokens.items() if not value.is_floating_point()}
    if not whole:
        return batch
    length = batch["input_ids"].shape[1] if "input_ids" in whole else _most_common(v.shape[1] for v in whole.values())
    return dict(batch) | {key: value.roll(rank, 1) for key, value in whole.items() if value.shape[1] == length}


def _most_common(numbers: Iterable[int]) -> int:
    return Counter(numbers).most_common(1)[0][0]


def _random_states() -> list[Any]:
    """Return the states of generators, which change when a forward draws random numbers."""
    states = [torch.get_rng_state().tolist()]
    if local_device().type != "cpu":
        states.append(torch.get_device_module(local_device()).get_rng_state().tolist())
    return states


def _loss_of(out: Any, script: str) -> torch.Tensor:
    held = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    loss = out if isinstance(out, torch.Tensor) else held
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TypeError(f"the model of {script} must return a loss: a tensor of one element, out.loss or out['loss']")
    return loss


def main() -> None:
    """Run the trial of the command line, under torchrun or alone."""
    trial = Trial(**json.loads(sys.argv[1]))
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if trial.kind == "plain" and "RANK" in os.environ and not dist.is_initialized():
        # A model may ask for its rank, and its device is not known yet: host and GPU both get a backend.
        start_process_group(name_of(local_device()), backend_for)
    try:
        run_trial(trial, rank, ranks)
    # Files tell a refused script from a failure, which have the same exit code of the launcher.
    except typer.BadParameter as error:
        (Path(trial.out) / f"refused{rank}").write_text(error.message)
        sys.exit(f"Error: {error.message}")
    except Exception as error:
        (Path(trial.out) / f"failed{rank}").write_text(f"{type(error).__name__}: {error}")
        raise
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
