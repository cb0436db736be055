"""DistributedDataParallel around a compiled model: trainers put it there without asking.

It would copy rank 0's experts over everybody else's and average gradients of different experts, and there is nothing
left for it to do. So wrapping a compiled model gives the model itself, with the ``no_sync`` that wrapped ones have.
``broadcast_buffers=False`` is taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hecate.compiled_model import compiled_model_of, is_compiled
from hecate.integrations import transformers_trainer
from hecate.runtime.ops.gradients import GradientSync


def leave_unwrapped() -> None:
    """From now on ``DistributedDataParallel(model)`` is ``model``, if that is compiled. The first call does it."""
    wrapper: Any = DistributedDataParallel
    wrapper.__new__ = _new


def _new(cls: type, module: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(module, nn.Module):
        inner = [name for name, part in module.named_modules() if is_compiled(part)]
        if inner == [""]:
            transformers_trainer.adopt()
            if False in (kwargs.get("broadcast_buffers"), kwargs.get("forward_sync_buffers")):
                compiled_model_of(module, "compile").forward.buffers.enabled = False
            return module
        if inner:
            raise RuntimeError(
                f"hecate: DistributedDataParallel around a {type(module).__name__} that contains a compiled model "
                f"({inner[0]}) would copy rank 0's experts over everybody else's. Give hecate.compile the whole "
                "module, or leave DistributedDataParallel out. With Lightning that is "
                "Trainer(strategy=SingleDeviceStrategy(...)) in every rank."
            )
    return object.__new__(cls)


def no_sync(sync: GradientSync) -> Callable[[], AbstractContextManager[None]]:
    """What a wrapped model has for the micro-batches of an accumulation; see ``set_requires_gradient_sync``."""

    @contextmanager
    def no_sync() -> Iterator[None]:
        before = sync.enabled
        sync.enabled, sync.owed = False, True
        try:
            yield
        finally:
            sync.enabled = before

    return no_sync
