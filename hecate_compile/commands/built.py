"""The result of a user's function for a command: a model, batches, and how to compile it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer
from torch import nn

from hecate.commands.load_name import load_name, users_code
from hecate.config import Config

Batch = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model that is not compiled yet, at least one batch of one rank, and perhaps how to compile the model."""

    model: nn.Module
    batches: tuple[Batch, ...]
    config: Config | None = None

    @classmethod
    def of(cls, given: Any, name: str) -> Built:
        """Take what the function ``name`` returned; BadParameter if it is no model and batch."""
        wrong = typer.BadParameter(
            f"{name} must return a model and a batch: (nn.Module, dict of tensors); a list of batches, one for each "
            f"step, may be there instead of one, and a hecate.Config behind it. It returned {_kind(given)}"
        )
        if not isinstance(given, tuple) or len(given) not in (2, 3) or not isinstance(given[0], nn.Module):
            raise wrong
        batches = [given[1]] if isinstance(given[1], Mapping) else given[1]
        if not isinstance(batches, (list, tuple)) or not batches or not all(isinstance(b, Mapping) for b in batches):
            raise wrong
        config = given[2] if len(given) == 3 else None
        if config is not None and not isinstance(config, Config):
            raise wrong
        return cls(model=given[0], batches=tuple(batches), config=config)


def build(name: str, what: str = "model") -> Built:
    """Call ``file.py:function``; BadParameter if there is none, it fails, or it returns something else."""
    function = load_name(name, what, "function")
    if not callable(function):
        raise typer.BadParameter(f"{what} {name!r}: a {type(function).__name__}, expected a function")
    with users_code(f"{what} {name!r}", name.rpartition(":")[0]):
        given = function()
    return Built.of(given, name)


def _kind(given: Any) -> str:
    if isinstance(given, tuple):
        return f"({', '.join(type(one).__name__ for one in given)})"
    return type(given).__name__
