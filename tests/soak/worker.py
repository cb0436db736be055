"""A run whose every number tells the step that it is of, so that a mixture or a loss is seen when it is loaded."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.runtime.placement.owners import Owners
from tests.soak.kill import Kill, Killer
from tests.support.models import build


def train(folder: str, notes: str, steps: int, seed: int, kill: dict[str, Any]) -> None:
    """Go on from the newest checkpoint for ``steps`` steps; save every second one, in turn here and in a thread.

    Args:
        folder: of the checkpoints.
        notes: folder for the log, a line for what was loaded and for what was reported as saved.
        kill: a :class:`Kill`, for the first start.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (Path(notes) / f"rank{rank}.pid").write_text(str(os.getpid()))
    # The second start is left alone.
    armed = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    killer = Killer(Kill(**kill), rank, size, Path(notes), armed=armed)
    model = hecate.compile(build("plain", layers=1), hecate.Config(backend="aot_eager", dense="shard"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loaded = hecate.load(folder, model, optimizer, required=False)
    start = loaded.step if loaded is not None else 0
    _note(notes, "loaded", start)
    if loaded is not None:
        for name, value in _values(model, optimizer):
            if not bool((value == start).all()):
                _note(notes, "wrong", start, f"{name} has {value.unique().tolist()[:4]}")
        if loaded.extra != {"step": start, "rank": rank} and loaded.ranks > rank:
            _note(notes, "wrong", start, f"extra {loaded.extra}")
    saving, compiled = None, compiled_model_of(model, "soak")
    for step in range(start + 1, start + steps + 1):
        draw = random.Random(seed * 1000 + step)
        if step % 3 == 0:
            for layer in compiled.layers:
                owners = Owners(tuple(draw.randrange(size) for _ in range(layer.num_experts)), size)
                compiled.owner_mover.move([(layer, owners)])
        _fill(model, optimizer, step)
        killer.at("step")
        time.sleep(0.01 * draw.random())
        if saving is not None and (step % 4 == 1 or saving[1].done()):
            saving[1].result()
            _note(notes, "saved", saving[0])
            saving = None
        extra = {"step": step, "rank": rank}
        if step % 4 == 0:
            saving = step, hecate.async_save(folder, model, optimizer, step=step, extra=extra, keep=3)
            killer.at("background")
        elif step % 4 == 2:
            hecate.save(folder, model, optimizer, step=step, extra=extra, keep=3)
            _note(notes, "saved", step)
    if saving is not None:
        saving[1].result()
        _note(notes, "saved", saving[0])
    _note(notes, "done", start + steps)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Everything that a checkpoint has, of this rank."""
    found = [(name, value) for name, value in hecate.get_model_state_dict(model).items()]
    state = hecate.get_optimizer_state_dict(model, optimizer)["state"]
    found += [(f"{name} {key}", value) for name, tensors in state.items() for key, value in tensors.items()]
    return [(name, _kept(value)) for name, value in found]


def _kept(value: Any) -> torch.Tensor:
    """Without rows that only pad."""
    part: torch.Tensor = value.as_subclass(torch.Tensor)
    pieces = getattr(value, "pieces", None)
    return part if pieces is None else torch.cat([part[p.start : p.start + p.rows] for p in pieces] or [part[:0]])


def _fill(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
        for tensors in hecate.get_optimizer_state_dict(model, optimizer)["state"].values():
            for value in tensors.values():
                value.as_subclass(torch.Tensor).fill_(step)


def _note(notes: str, what: str, step: int, more: str = "") -> None:
    """A line that is on the disk when this returns."""
    line = json.dumps({"what": what, "step": step, "rank": int(os.environ["RANK"]), "more": more}) + "\n"
    descriptor = os.open(Path(notes) / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)
