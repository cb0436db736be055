"""One rank of one trial of ``hecate bisect``: compile, run some steps, write loss and gradients.

A process of its own for each trial, so that one that crashes or hangs is a result like any other.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hecate.api import compile
from hecate.commands.load_name import load_name
from hecate.config import Config

SEED = 0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a worker is told.

    Attributes:
        script: ``file.py:function``.
        out: folder for the results.
        disabled: passes to leave out.
        plain: run the model as it is, without Hecate; gradients are then of this rank alone.
        steps: forwards and backwards, with the same weights.
    """

    script: str
    out: str
    disabled: tuple[str, ...]
    plain: bool
    steps: int

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Trial:
        given = json.loads(text)
        return cls(**given | {"disabled": tuple(given["disabled"])})


@dataclass(frozen=True, kw_only=True)
class _Made:
    model: nn.Module
    batches: Sequence[Mapping[str, Any]]
    config: Config


def run_trial(trial: Trial, rank: int) -> None:
    """Write ``rank{rank}.npz``: ``loss`` ``[steps]``, ``names``, and the gradients there are as ``STEP.NUMBER``."""
    torch.manual_seed(SEED)
    made = _made(load_name(trial.script, "script", "function")(), trial.script)
    model = made.model
    if not trial.plain:
        disabled = (*made.config.disable_passes, *trial.disabled)
        model = compile(model, replace(made.config, disable_passes=tuple(dict.fromkeys(disabled))))
    losses: list[float] = []
    arrays: dict[str, Any] = {}
    names = [name for name, _ in model.named_parameters()]
    for step in range(trial.steps):
        model.zero_grad(set_to_none=True)
        # Dropout, if there is any, drops the same.
        torch.manual_seed(SEED + 1 + step)
        loss = _loss_of(model(**made.batches[step % len(made.batches)]), trial.script)
        loss.backward()
        losses.append(float(loss.detach()))
        for number, (_, parameter) in enumerate(model.named_parameters()):
            if parameter.grad is not None:
                arrays[f"{step}.{number}"] = parameter.grad.detach().to("cpu", torch.float32).numpy()
    target = Path(trial.out) / f"rank{rank}.npz"
    part = target.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, loss=np.asarray(losses), names=np.asarray(names, dtype=np.str_), **arrays)
    part.replace(target)


def _made(given: Any, script: str) -> _Made:
    """What the user's function returned.

    Raises:
        TypeError: it is no model and batch.
    """
    wrong = TypeError(
        f"{script} must return a model and a batch, (nn.Module, dict of tensors), or a list of batches, one for each "
        f"step, and if wanted a hecate.Config behind them; it returned {type(given).__name__}"
    )
    if not isinstance(given, tuple) or len(given) not in (2, 3) or not isinstance(given[0], nn.Module):
        raise wrong
    batches = [given[1]] if isinstance(given[1], Mapping) else given[1]
    if not isinstance(batches, (list, tuple)) or not batches or not all(isinstance(b, Mapping) for b in batches):
        raise wrong
    # Compiled in seconds. A fault that only Inductor's graphs have needs a Config with that backend.
    config = given[2] if len(given) == 3 else Config(backend="aot_eager")
    if not isinstance(config, Config):
        raise wrong
    return _Made(model=given[0], batches=batches, config=config)


def _loss_of(out: Any, script: str) -> torch.Tensor:
    loss = out if isinstance(out, torch.Tensor) else out["loss"] if isinstance(out, Mapping) else out.loss
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TypeError(f"the model of {script} must return a loss: a tensor of one element, out.loss or out['loss']")
    return loss


def main() -> None:
    """Under torchrun, or alone."""
    trial = Trial.from_text(sys.argv[1])
    rank = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if trial.plain and "RANK" in os.environ and not dist.is_initialized():
        # A model may ask for its rank.
        dist.init_process_group()
    run_trial(trial, rank)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
