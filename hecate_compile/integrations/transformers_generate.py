"""``model.generate`` of a model whose parameters are sharded: a rank that is done goes on with the others.

Each forward communicates, and ranks' texts end at different tokens. transformers has ``synced_gpus`` for that and
sets it for DeepSpeed and FSDP alone. Nothing here imports transformers unless the user has.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch.distributed as dist
from torch import nn

from hecate.wrap.shard import shard_of

_adopted: set[type] = set()


def adopt() -> None:
    """Make ``generate`` keep ranks in step, if transformers' generation was imported; else do nothing."""
    if "transformers.generation.utils" not in sys.modules:
        return
    mixin: Any = sys.modules["transformers.generation.utils"].GenerationMixin
    if mixin in _adopted:
        return
    _adopted.add(mixin)
    generate = mixin.generate
    signature = inspect.signature(generate)

    @functools.wraps(generate)
    def generate_in_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        # The user's own argument wins.
        if given.get("synced_gpus") is None and _shares(self):
            kwargs["synced_gpus"] = True
        return generate(self, *args, **kwargs)

    mixin.generate = generate_in_step


def _shares(model: nn.Module) -> bool:
    """Return whether all ranks of the program share the model: transformers asks all of them if they are done."""
    shards = (shard_of(parameter) for parameter in model.parameters())
    shard = next((shard for shard in shards if shard is not None), None)
    return shard is not None and shard.world.group is not None and shard.world.size == dist.get_world_size()
