"""Make accelerate's save_state and load_state work with compiled models, without importing it.

Its own files have the optimizer state of rank 0's experts alone. Beside them a folder ``hecate0`` (``hecate1`` for
the next model) has model and optimizers, for any number of ranks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from hecate.checkpoints.load import load as load_checkpoint
from hecate.checkpoints.save import save as save_checkpoint
from hecate.compiled_model import is_compiled
from hecate.private import prepared, set_prepared

_adopted: set[type] = set()


def adopt() -> None:
    """Make accelerators save and load compiled models right, if accelerate was imported; else do nothing."""
    if "accelerate.accelerator" not in sys.modules:
        return
    accelerator: Any = sys.modules["accelerate.accelerator"].Accelerator
    if accelerator in _adopted:
        return
    _adopted.add(accelerator)
    save, load = accelerator.save_state, accelerator.load_state

    @functools.wraps(save)
    def save_state(self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        ours = _compiled(self)
        # Accelerate writes the weights, too, for readers of that file.
        with _without(self, ours, models=False):
            folder = save(self, output_dir, *args, **kwargs)
        for number, (model, optimizers) in enumerate(ours):
            save_checkpoint(Path(folder) / f"hecate{number}", model, optimizers, step=self.step)
        return folder

    @functools.wraps(load)
    def load_state(self: Any, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        ours = _compiled(self)
        found: list[str] = []
        hook = self.register_load_state_pre_hook(lambda models, folder: found.append(folder))
        try:
            with _without(self, ours, models=True):
                result = load(self, input_dir, *args, **kwargs)
        finally:
            hook.remove()
        for number, (model, optimizers) in enumerate(ours):
            load_checkpoint(Path(found[0]) / f"hecate{number}", model, optimizers)
        return result

    accelerator.save_state, accelerator.load_state = save_state, load_state


def _compiled(accelerator: Any) -> list[tuple[nn.Module, list[Any]]]:
    found = []
    models, prepared_optimizers = prepared(accelerator)
    for model in models:
        if is_compiled(model):
            own = {id(parameter) for parameter in model.parameters()}
            optimizers = [
                optimizer
                for optimizer in prepared_optimizers
                if any(id(p) in own for group in optimizer.param_groups for p in group["params"])
            ]
            found.append((model, optimizers))
    return found


@contextmanager
def _without(accelerator: Any, ours: list[tuple[nn.Module, list[Any]]], *, models: bool) -> Iterator[None]:
    """Hide the optimizers of compiled models from accelerate in the block, and with ``models`` these, too."""
    before = prepared(accelerator)
    hidden = {id(one) for model, optimizers in ours for one in (*([model] if models else []), *optimizers)}
    set_prepared(accelerator, *([one for one in ones if id(one) not in hidden] for ones in before))
    try:
        yield
    finally:
        set_prepared(accelerator, *before)
