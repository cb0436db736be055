"""Keep what averages over ranks off compiled models, whose experts differ from rank to rank.

DistributedDataParallel would copy rank 0's experts over the others' and average gradients of different experts:
wrapping a compiled model gives the model itself. Torch's averages of parameters refuse shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.distributed.algorithms.model_averaging import utils
from torch.nn.parallel import DistributedDataParallel

from hecate.compiled_model import compiled_model_of, is_compiled
from hecate.integrations import transformers_trainer
from hecate.runtime.ops.gradients import GradientSync
from hecate.wrap.shard import shard_of
from hecate.wrap.swapped_class import swap_class

_average_parameters = utils.average_parameters


def leave_unwrapped() -> None:
    """Make ``DistributedDataParallel(model)`` return ``model`` if that is compiled. Further calls change nothing."""
    wrapper: Any = DistributedDataParallel
    wrapper.__new__ = _new


def _new(cls: type, module: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(module, nn.Module):
        inner = [name for name, part in module.named_modules() if is_compiled(part)]
        if inner == [""]:
            transformers_trainer.adopt()
            if False in (kwargs.get("broadcast_buffers"), kwargs.get("forward_sync_buffers")):
                compiled_model_of(module, "compile").forward.between.buffers.enabled = False
            _say_where_module_is(module)
            return module
        if inner:
            raise RuntimeError(
                f"hecate: DistributedDataParallel around a {type(module).__name__} that contains a compiled model "
                f"({inner[0]}) would copy rank 0's experts over everybody else's. Give hecate.compile the whole "
                "module, or leave DistributedDataParallel out. With PEFT call get_peft_model before hecate.compile, "
                "and give a trainer no peft_config; with Lightning take "
                "Trainer(strategy=hecate.lightning.HecateStrategy(), devices=...)."
            )
    return object.__new__(cls)


def _say_where_module_is(model: nn.Module) -> None:
    """Let ``model.module`` raise, and say why: as its own ``module`` a model would be unwrapped without end."""
    if hasattr(model, "module"):
        return
    cls: Any = type(model)

    def __getattr__(self: nn.Module, name: str) -> Any:
        if name == "module":
            raise AttributeError(
                f"hecate: this {cls.__name__} is compiled, and DistributedDataParallel leaves such a model as it is. "
                "There is nothing to unwrap: use the model itself, or getattr(model, 'module', model)"
            )
        return cls.__getattr__(self, name)

    swap_class(model, {"__getattr__": __getattr__})


def no_sync(sync: GradientSync) -> Callable[[], AbstractContextManager[None]]:
    """Return the ``no_sync`` of wrapped models, for accumulation; see ``set_requires_gradient_sync``."""

    @contextmanager
    def no_sync() -> Iterator[None]:
        before = sync.switches.enabled
        sync.switches.enabled, sync.switches.owed = False, True
        try:
            yield
        finally:
            sync.switches.enabled = before

    return no_sync


def refuse_averages() -> None:
    """Make torch's averages of shards over ranks raise. Further calls change nothing."""
    utils.average_parameters = _average_whole


@functools.wraps(_average_parameters)
def _average_whole(params: Iterator[nn.Parameter], process_group: Any) -> None:
    given = list(params)
    for parameter in given:
        shard = shard_of(parameter)
        if shard is not None and shard.world.group is not None:
            raise RuntimeError(
                f"hecate: {shard.name} would be averaged over ranks, each of which has other {shard.part} of it. "
                "Leave PostLocalSGDOptimizer or the averager out: gradients are averaged already, and each expert is "
                "updated by its owner."
            )
    _average_parameters(iter(given), process_group)
