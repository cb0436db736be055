"""What transformers and PEFT count a model's parameters with counts whole ones, and not this rank's shards."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hecate.wrap.shard import shard_of

# Of modules that may have been imported: functions whose first argument is a model, by a path of attributes.
_COUNTS = {
    "transformers.modeling_utils": ("PreTrainedModel", "num_parameters"),
    "transformers.trainer": ("get_model_param_count",),
    "peft.peft_model": ("PeftModel", "get_nb_trainable_parameters"),
}
_adopted: set[str] = set()


def adopt() -> None:
    """Make these functions count whole parameters, in modules that were imported."""
    for name, (*path, function) in _COUNTS.items():
        if name in sys.modules and name not in _adopted:
            holder = functools.reduce(getattr, path, sys.modules[name])
            setattr(holder, function, _of_whole(getattr(holder, function)))
            _adopted.add(name)


def _of_whole(count: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(count)
    def count_whole(model: Any, *args: Any, **kwargs: Any) -> Any:
        with _whole_parameters(model):
            return count(model, *args, **kwargs)

    return count_whole


@contextmanager
def _whole_parameters(model: nn.Module) -> Iterator[None]:
    """Let ``parameters()`` and ``named_parameters()`` give whole parameters without data for shards."""
    if all(shard_of(parameter) is None for parameter in model.parameters()):
        yield
        return
    named_parameters = model.named_parameters

    def whole(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in named_parameters(*args, **kwargs):
            shard = shard_of(parameter)
            if shard is not None:
                empty = torch.empty(shard.full_shape, dtype=parameter.dtype, device="meta")
                parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            yield name, parameter

    model.__dict__["named_parameters"] = whole
    try:
        yield
    finally:
        del model.__dict__["named_parameters"]
