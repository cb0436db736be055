"""Models of transformers, not imported here: recorders that Dynamo would break at, and ``generate`` of shards."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from hecate.compiled_model import compiled_model_of
from hecate.private import RECORDED_OUTPUTS, compiled_call, set_compiled_call
from hecate.wrap.shard import Shard, shard_of

_adopted: set[type] = set()
# In a module that generates, inside a compiled model: which model that is.
_KEY = "_hecate_generates_for"


def install_recorders(model: nn.Module) -> None:
    """Install the output recorders of transformers models now: in the first forward that asks it breaks the graph."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    for module in model.modules():
        if isinstance(module, PreTrainedModel) and getattr(module, RECORDED_OUTPUTS, None):
            maybe_install_capturing_hooks(module)


def generate_together(model: nn.Module) -> None:
    """Make ``generate`` of a model, and of what is inside it, keep ranks in step; without transformers do nothing.

    Each forward communicates, and ranks' texts end at different tokens. transformers sets ``synced_gpus`` for
    that with DeepSpeed and FSDP alone. A model of PEFT generates with the model inside it.
    """
    if "transformers.generation.utils" not in sys.modules:
        return
    mixin: Any = sys.modules["transformers.generation.utils"].GenerationMixin
    for part in model.modules():
        if part is not model and isinstance(part, mixin):
            part.__dict__[_KEY] = weakref.ref(model)
    if mixin in _adopted:
        return
    _adopted.add(mixin)
    generate = mixin.generate
    signature = inspect.signature(generate)

    @functools.wraps(generate)
    def generate_in_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        shard = _shard_in(self)
        if shard is None:
            return generate(self, *args, **kwargs)
        given = signature.bind_partial(self, *args, **kwargs).arguments
        # The user's own argument wins. transformers asks all ranks of the program if they are done.
        ranks = shard.world.everyone
        everyone = ranks.group is not None and ranks.size == dist.get_world_size()
        if everyone and given.get("synced_gpus") is None:
            kwargs["synced_gpus"] = True
        with _calls_compiled(self):
            return generate(self, *args, **kwargs)

    mixin.generate = generate_in_step


@contextmanager
def _calls_compiled(part: nn.Module) -> Iterator[None]:
    """Compile the calls of a module inside a compiled model, which would read shards where nothing is traced."""
    model = part.__dict__.get(_KEY, lambda: None)()
    if model is None or compiled_call(part) is not None:
        yield
        return
    set_compiled_call(part, compiled_model_of(model, "generate").forward.of(part))
    try:
        yield
    finally:
        set_compiled_call(part, None)


def _shard_in(model: nn.Module) -> Shard | None:
    shards = (shard_of(parameter) for parameter in model.parameters())
    return next((shard for shard in shards if shard is not None), None)
