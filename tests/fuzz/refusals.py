"""What Hecate refuses in the middle of a life, by a message, on all ranks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.wrap.expert_shards import is_member_shard
from hecate.wrap.shard import shard_of


@dataclass(frozen=True)
class Refusal:
    """An attempt, the words of the answer, and whether a life's model is one that refuses."""

    attempt: Callable[[Any], object]
    words: str
    applies: Callable[[Any], bool] = lambda life: True


def _sharded(life: Any) -> bool:
    return any(p.requires_grad and shard_of(p) is not None for p in life.model.parameters())


def _has_parts(life: Any) -> bool:
    """Whether a rank has a part of a parameter; experts in a list are whole on one rank."""
    shards = [shard_of(p) for p in life.model.parameters() if p.requires_grad]
    return any(shard is not None and not is_member_shard(shard) for shard in shards)


def _communicates(life: Any) -> bool:
    return life.drawn.options["policy"] != "replicate"


def _meets_first(life: Any) -> bool:
    """Whether ranks meet before anything else: a collective before that leaves a rank behind, and the run ends."""
    options, buffers = life.drawn.options, life.dress.balanced or life.dress.statistics
    # A policy may have replicas, which come before the counts in which ranks meet.
    gathers = (
        options["policy"] in ("gather", "anything")
        or options.get("dense") == "shard"
        or options.get("disable_passes")
    )
    # So does the question whether hooks are given what accumulation has left local.
    owed = compiled_model_of(life.model, "a refusal").sync.switches.owed
    return _communicates(life) and not (buffers or gathers or owed or options.get("reshard_every"))


def _step(life: Any, kind: Any, **options: Any) -> None:
    """A step of an optimizer that is refused before it changes anything."""
    for loss in life.losses(life.batches()):
        loss.backward()
    kind([p for p in life.model.parameters() if p.ndim >= 2], **options).step()


def _hook_on_one_rank(life: Any) -> None:
    module = next(m for n, m in life.model.named_modules() if "norm" in n and not [*m.children()])
    hook = module.register_forward_hook(lambda module, inputs, output: output) if life.rank == 0 else None
    batch = life.batches()[life.rank]
    life.buffers.before_forward(training=True)
    try:
        life.model(input_ids=batch, labels=batch)
    finally:
        if hook is not None:
            hook.remove()


def _wrong_shape(life: Any) -> None:
    state = life.model.state_dict()
    name = next(name for name, value in state.items() if value.ndim >= 2)
    life.model.load_state_dict({**state, name: torch.zeros(3, 5, 7, 9)})


REFUSALS = {
    "a copy": Refusal(lambda life: copy.deepcopy(life.model), "cannot be copied or pickled"),
    "a pickle": Refusal(lambda life: pickle.dumps(life.model), "cannot be copied or pickled"),
    "torch's average": Refusal(
        lambda life: torch.optim.swa_utils.AveragedModel(life.model), "cannot be copied or pickled"
    ),
    "compiled twice": Refusal(lambda life: hecate.compile(life.model, life.drawn.config()), "compiled already"),
    "compiled inside": Refusal(
        lambda life: hecate.compile(nn.ModuleDict({"inner": life.model}), life.drawn.config()), "compiled already"
    ),
    "data parallelism around": Refusal(
        lambda life: nn.parallel.DistributedDataParallel(nn.Sequential(life.model)), "contains a compiled model"
    ),
    "no checkpoint": Refusal(lambda life: hecate.load(Path("/nothing/here"), life.model), "/nothing/here"),
    "a wrong shape": Refusal(_wrong_shape, "size mismatch"),
    "Adafactor": Refusal(lambda life: _step(life, torch.optim.Adafactor), "whole parameters", _has_parts),
    "LBFGS": Refusal(lambda life: _step(life, torch.optim.LBFGS), "whole parameters", _sharded),
    # Ranks disagree, or one of them is in the forward already.
    "a hook on one rank": Refusal(_hook_on_one_rank, "hook", _meets_first),
}
