"""transformers.Trainer saves on rank 0 alone. A compiled model is saved by all ranks together.

The weights are those of ``save_pretrained``, in which some models have other names for their experts than in memory.
The trainer of transformers 5.23 loads them by the names in memory, and leaves out what it does not find; here they
are read by :func:`hecate.load_pretrained`. To go on from, there is a folder ``hecate`` beside them, with weights and
optimizer state for any number of ranks. Nothing here imports transformers unless the user has.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from torch import nn

from hecate.checkpoints.load import load as load_checkpoint
from hecate.checkpoints.load_pretrained import load_pretrained
from hecate.checkpoints.save import save as save_checkpoint
from hecate.compiled_model import is_compiled
from hecate.wrap.swapped_class import class_before

_adopted: set[type] = set()


def adopt() -> None:
    """From now on trainers save and load compiled models right. Does nothing before there is a Trainer."""
    if "transformers.trainer" not in sys.modules:
        return
    trainer: Any = sys.modules["transformers.trainer"].Trainer
    if trainer in _adopted:
        return
    _adopted.add(trainer)
    save, load, load_best = trainer.save_model, trainer._load_from_checkpoint, trainer._load_best_model
    save_optimizer, load_optimizer = trainer._save_optimizer_and_scheduler, trainer._load_optimizer_and_scheduler

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, so that ``from_pretrained`` reads it. All ranks call it together."""
        if not is_compiled(self.model):
            save(self, output_dir, _internal_call)
            return
        state = self.model.state_dict()
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = model if model is not None else self.model
        if is_compiled(model) and _own_folder(resume_from_checkpoint).is_dir():
            load_checkpoint(_own_folder(resume_from_checkpoint), model)
        elif not _load_pretrained(model, resume_from_checkpoint):
            load(self, resume_from_checkpoint, model)

    def load_best_model(self: Any) -> None:
        if not _load_pretrained(self.model, self.state.best_model_checkpoint):
            load_best(self)

    def save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        save_optimizer(self, output_dir)
        if is_compiled(self.model):
            save_checkpoint(_own_folder(output_dir), self.model, self.optimizer, step=self.state.global_step)

    def load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        load_optimizer(self, checkpoint)
        if checkpoint is None or not is_compiled(self.model):
            return
        if _own_folder(checkpoint).is_dir():
            load_checkpoint(_own_folder(checkpoint), self.model, self.optimizer)
        elif self.args.world_size > 1 and os.path.exists(os.path.join(checkpoint, "optimizer.pt")):
            # Else it was saved without optimizer state, which the trainer allows.
            raise FileNotFoundError(
                f"hecate: {_own_folder(checkpoint)} is not there, and optimizer.pt has one rank's experts alone. "
                "All ranks must see the folder; what other versions saved can be loaded as weights, by "
                "from_pretrained."
            )

    trainer.save_model = save_model
    trainer._load_from_checkpoint = load_from_checkpoint
    trainer._load_best_model = load_best_model
    trainer._save_optimizer_and_scheduler = save_optimizer_and_scheduler
    trainer._load_optimizer_and_scheduler = load_optimizer_and_scheduler


def _load_pretrained(model: nn.Module, folder: str) -> bool:
    """Load what ``save_pretrained`` wrote, if ``model`` is one that has it and is compiled."""
    kind: Any = class_before(model)
    if not is_compiled(model) or not hasattr(kind, "from_pretrained") or not hasattr(model, "config"):
        return False
    load_pretrained(model, folder)
    return True


def _own_folder(checkpoint: str) -> Path:
    """Where weights and optimizer state are as ``hecate.save`` writes them, for any number of ranks."""
    return Path(checkpoint) / "hecate"
