"""One rank of one trial of ``hecate bisect``: compile, run some steps, write loss and gradients.

A process of its own for each trial, so that one that crashes or hangs is a result like any other.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import typer

from hecate.commands.built import build
from hecate.commands.rank_batches import batch_of_rank, fingerprint_of
from hecate.commands.script_facts import ScriptFacts
from hecate.compilation import compile
from hecate.config import Config
from hecate.runtime.comm.start import start_process_group
from hecate.runtime.comm.world import backend_for, local_device, name_of

SEED = 0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a worker is told.

    Attributes:
        script: ``file.py:function``.
        out: folder for the results.
        disabled: passes to leave out.
        kind: "compiled". "bare": compiled, without options that make another model of it. "plain": as it is, without
            Hecate; gradients are then of this rank alone.
        steps: forwards and backwards, with the same weights.
        own_batches: the script gives every rank a batch of its own.
    """

    script: str
    out: str
    disabled: tuple[str, ...]
    kind: Literal["compiled", "bare", "plain"] = "compiled"
    steps: int
    own_batches: bool = False

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Trial:
        given = json.loads(text)
        return cls(**given | {"disabled": tuple(given["disabled"])})


def run_trial(trial: Trial, rank: int, ranks: int) -> None:
    """Write ``rank{rank}.npz``: ``loss`` ``[steps]``, ``names``, ``facts``, and gradients as ``STEP.NUMBER``."""
    torch.manual_seed(SEED)
    made = build(trial.script, "script")
    model, batches = made.model, made.batches
    # Compiled in seconds. A fault that only Inductor's graphs have needs a Config with that backend.
    config = made.config if made.config is not None else Config(backend="aot_eager")
    if not trial.own_batches:
        batches = tuple(batch_of_rank(batch, rank, ranks) for batch in batches)
    facts = ScriptFacts.of(model, config, " ".join(map(fingerprint_of, batches)))
    if trial.kind != "plain":
        model = compile(model, config_of(trial, config))
    losses: list[float] = []
    arrays: dict[str, Any] = {}
    names = [name for name, _ in model.named_parameters()]
    for step in range(trial.steps):
        model.zero_grad(set_to_none=True)
        # Dropout, if there is any, drops the same.
        torch.manual_seed(SEED + 1 + step)
        loss = _loss_of(model(**batches[step % len(batches)]), trial.script)
        loss.backward()
        losses.append(float(loss.detach()))
        for number, (_, parameter) in enumerate(model.named_parameters()):
            if parameter.grad is not None:
                arrays[f"{step}.{number}"] = parameter.grad.detach().to("cpu", torch.float32).numpy()
    target = Path(trial.out) / f"rank{rank}.npz"
    part = target.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(
            file, loss=np.asarray(losses), names=np.asarray(names, dtype=np.str_),
            facts=np.asarray(facts.as_text()), **arrays,
        )  # fmt: skip
    part.replace(target)


def config_of(trial: Trial, config: Config) -> Config:
    """What a trial compiles with."""
    bare = trial.kind == "bare"
    attention = None if bare else config.attention
    # It is attention= itself: without it there would be another model.
    disabled = [name for name in trial.disabled if attention is None or name != "shard_context"]
    return replace(
        config,
        disable_passes=tuple(dict.fromkeys((*config.disable_passes, *disabled))),
        attention=attention,
        mixed_precision=None if bare else config.mixed_precision,
        # What travels is rounded, and without passes other things travel.
        wire_dtype=None,
    )


def _loss_of(out: Any, script: str) -> torch.Tensor:
    loss = out if isinstance(out, torch.Tensor) else out["loss"] if isinstance(out, Mapping) else out.loss
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TypeError(f"the model of {script} must return a loss: a tensor of one element, out.loss or out['loss']")
    return loss


def main() -> None:
    """Under torchrun, or alone."""
    trial = Trial.from_text(sys.argv[1])
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if trial.kind == "plain" and "RANK" in os.environ and not dist.is_initialized():
        # A model may ask for its rank, and where it will be is not known yet: host and GPU both have a backend.
        start_process_group(name_of(local_device()), backend_for)
    try:
        run_trial(trial, rank, ranks)
    except typer.BadParameter as error:
        sys.exit(f"Error: {error.message}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
