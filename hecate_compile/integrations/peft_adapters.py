"""PEFT's adapters in compiled models, not imported here: what merges them needs whole parameters."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from hecate.wrap.lora_experts import has_adapters_of_experts
from hecate.wrap.shard import shard_of
from hecate.wrap.stack_experts import member_of
from hecate.wrap.swapped_class import swap_class

_MERGES = ("merge_adapter", "merge_and_unload", "unload")


def refuse_merges_of_parts(model: nn.Module) -> None:
    """Make PEFT's merges raise, before they change anything, where ranks have parts of what is adapted."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return
    for tuner in model.modules():
        if isinstance(tuner, tuners.BaseTuner):
            swap_class(tuner, {name: _checked(name, getattr(type(tuner), name), tuners) for name in _MERGES})


def _checked(name: str, method: Any, tuners: Any) -> Any:
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        for path, layer in self.named_modules():
            if isinstance(layer, tuners.BaseTunerLayer) and _in_parts(layer):
                raise RuntimeError(
                    f"hecate: {name} after hecate.compile: the adapter of {path} is in parts, as what it adapts is. "
                    "Write the adapter by model.save_pretrained(folder) on all ranks, and merge it in a model that "
                    "was not compiled: PeftModel.from_pretrained(base, folder).merge_and_unload()."
                )
        return method(self, *args, **kwargs)

    return checked


def _in_parts(layer: Any) -> bool:
    base = layer.get_base_layer()
    shards = (shard_of(parameter) for parameter in layer.parameters())
    return (
        has_adapters_of_experts(base)
        or any(shard is not None and shard.world.group is not None for shard in shards)
        or member_of(base) is not None
    )
