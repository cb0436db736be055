"""Make transformers.Trainer, which saves on rank 0 alone, save a compiled model on all ranks together.

The weights are those of ``save_pretrained``, and are read by :func:`hecate.load_pretrained`: the trainer of
transformers 5.23 leaves out experts that have other names in memory. A folder ``hecate`` beside them has weights and
optimizer state for any number of ranks. Where ranks share that state, ``optimizer.pt`` has a note in its place, since
a trainer without Hecate would take one rank's part for the whole.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from hecate.checkpoints.adapters import has_adapters
from hecate.checkpoints.hub.load_pretrained import load_pretrained
from hecate.checkpoints.load import load as load_checkpoint
from hecate.checkpoints.optimizer_tensors import take_whole_state
from hecate.checkpoints.save import save as save_checkpoint
from hecate.compiled_model import is_compiled
from hecate.private import (
    TRAINER_LOAD,
    TRAINER_LOAD_BEST,
    TRAINER_LOAD_OPTIMIZER,
    TRAINER_SAVE,
    TRAINER_SAVE_OPTIMIZER,
)
from hecate.wrap.swapped_class import class_before

_adopted: set[type] = set()
# The content of optimizer.pt where several ranks share an optimizer's state.
NOTE = (
    "The optimizer's state is in the folder hecate beside this file, in parts for any number of ranks. Go on from it "
    "with a model that hecate.compile was given, also in one process; or leave the optimizer's state out."
)


def adopt() -> None:
    """Make trainers save and load compiled models right, if transformers' Trainer was imported; else do nothing."""
    if "transformers.trainer" not in sys.modules:
        return
    trainer: Any = sys.modules["transformers.trainer"].Trainer
    if trainer in _adopted:
        return
    _adopted.add(trainer)
    save, load, load_best = trainer.save_model, getattr(trainer, TRAINER_LOAD), getattr(trainer, TRAINER_LOAD_BEST)
    save_optimizer = getattr(trainer, TRAINER_SAVE_OPTIMIZER)
    load_optimizer = getattr(trainer, TRAINER_LOAD_OPTIMIZER)

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, so that ``from_pretrained`` reads it; a collective."""
        if not is_compiled(self.model):
            save(self, output_dir, _internal_call)
            return
        state = self.model.state_dict()
        if self.args.should_save:
            getattr(self, TRAINER_SAVE)(output_dir or self.args.output_dir, state_dict=state)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = model if model is not None else self.model
        if is_compiled(model) and _own_folder(resume_from_checkpoint).is_dir():
            load_checkpoint(_own_folder(resume_from_checkpoint), model)
        elif not _load_pretrained(model, resume_from_checkpoint):
            # Adapters are loaded by PEFT, on all ranks.
            load(self, resume_from_checkpoint, model)

    def load_best_model(self: Any) -> None:
        if not _load_pretrained(self.model, self.state.best_model_checkpoint):
            load_best(self)

    def save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        if not is_compiled(self.model):
            save_optimizer(self, output_dir)
            return
        with _in_place_of_its_optimizer(self, _Note() if self.args.world_size > 1 else self.optimizer):
            save_optimizer(self, output_dir)
        save_checkpoint(_own_folder(output_dir), self.model, self.optimizer, step=self.state.global_step)

    def load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None or not is_compiled(self.model):
            load_optimizer(self, checkpoint)
            return
        # The trainer loads the scheduler's file, which is beside optimizer.pt.
        read = _Note()
        with _in_place_of_its_optimizer(self, read):
            load_optimizer(self, checkpoint)
        if _own_folder(checkpoint).is_dir():
            load_checkpoint(_own_folder(checkpoint), self.model, self.optimizer)
        elif read.state is not None:
            # Without it the model was saved without optimizer state, which the trainer allows.
            take_whole_state(self.model, self.optimizer, read.state, os.path.join(checkpoint, "optimizer.pt"))

    trainer.save_model = save_model
    setattr(trainer, TRAINER_LOAD, load_from_checkpoint)
    setattr(trainer, TRAINER_LOAD_BEST, load_best_model)
    setattr(trainer, TRAINER_SAVE_OPTIMIZER, save_optimizer_and_scheduler)
    setattr(trainer, TRAINER_LOAD_OPTIMIZER, load_optimizer_and_scheduler)


class _Note:
    """A stand-in for an optimizer while a trainer writes or reads ``optimizer.pt``."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None  # In the file; None where there is none.

    def state_dict(self) -> dict[str, Any]:
        """Return a state that no optimizer takes for its own: it has no groups of parameters."""
        return {"state": {}, "param_groups": [], "hecate": NOTE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


@contextmanager
def _in_place_of_its_optimizer(trainer: Any, optimizer: Any) -> Iterator[None]:
    before = trainer.optimizer
    trainer.optimizer = optimizer
    try:
        yield
    finally:
        trainer.optimizer = before


def _load_pretrained(model: nn.Module, folder: str) -> bool:
    """Load a folder of ``save_pretrained``; return False if ``model`` has none, is not compiled or has adapters."""
    kind: Any = class_before(model)
    is_pretrained = hasattr(kind, "from_pretrained") and hasattr(model, "config")
    if not is_compiled(model) or not is_pretrained or has_adapters(model):
        return False
    load_pretrained(model, folder)
    return True


def _own_folder(checkpoint: str) -> Path:
    """Return the folder of ``hecate.save`` in a checkpoint: weights and optimizer state for any number of ranks."""
    return Path(checkpoint) / "hecate"
