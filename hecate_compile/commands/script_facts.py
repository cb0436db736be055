"""What a script asks for that decides how its results can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from hecate.config import Config

# Of numbers with 24 bits or more; coarser ones differ by some roundings.
TOLERANCE = 1e-4
_ROUNDINGS = 8


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """About a model and its config.

    Attributes:
        dtype: the coarsest that the model computes in.
        attention, mixed_precision, wire_dtype: whether the config has them.
        random: what draws random numbers in a forward.
        batches: a fingerprint of this rank's.
    """

    dtype: str = "float32"
    attention: bool = False
    mixed_precision: bool = False
    wire_dtype: bool = False
    random: tuple[str, ...] = ()
    batches: str = ""

    @classmethod
    def of(cls, model: nn.Module, config: Config, batches: str) -> ScriptFacts:
        kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        if config.mixed_precision is not None and config.mixed_precision.param_dtype is not None:
            kinds.add(config.mixed_precision.param_dtype)
        coarsest = max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)
        return cls(
            dtype=str(coarsest).removeprefix("torch."), attention=config.attention is not None,
            mixed_precision=config.mixed_precision is not None, wire_dtype=config.wire_dtype is not None,
            random=tuple(_random(model)), batches=batches,
        )  # fmt: skip

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> ScriptFacts:
        given = json.loads(text)
        return cls(**given | {"random": tuple(given["random"])})

    @property
    def tolerance(self) -> float:
        """The largest relative error that rounding explains."""
        return max(TOLERANCE, _ROUNDINGS * torch.finfo(getattr(torch, self.dtype)).eps)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Options without which the model is compared with the plain one, which does not have them."""
        return tuple(name for name in ("attention", "mixed_precision") if getattr(self, name))


def _random(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        p = getattr(module, "p", 0)
        if "Dropout" in type(module).__name__ and module.training and isinstance(p, (int, float)) and p > 0:
            yield name or type(module).__name__
    config: Any = getattr(model, "config", None)
    # Functional dropout, as attention of transformers has it, is no module.
    for key, value in config.to_dict().items() if hasattr(config, "to_dict") and model.training else ():
        if ("dropout" in key or "jitter" in key) and isinstance(value, float) and value > 0:
            yield f"config.{key}"
