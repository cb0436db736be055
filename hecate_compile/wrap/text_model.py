"""Find the text model inside a model that takes images or sound, too.

It is traced alone, with all experts; what is around it (towers, positions of images, the head) runs as Python. That
code is another one for each kind of batch, and a rank whose batch is text alone calls no tower.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hecate.private import children_of
from hecate.wrap.find_experts import ExpertsModule

# What models of transformers take, and their towers: "text", or names as in ("image", "text").
_TAKES = "input_modalities"


def find_text_model(model: nn.Module, experts: Sequence[ExpertsModule]) -> nn.Module | None:
    """Return the module beside the towers that has all experts; None for a model without towers, or if there is none.

    A model with towers says that it takes more than text, and has a module beside its text model that says what it
    takes, too.
    """
    found: nn.Module | None = None
    here = model
    while (inner := _child_with(here, experts)) is not None:
        if not _takes_text_alone(here) and any(_is_tower(child) for child in children_of(here).values() if child is not inner):
            found = inner
        here = inner
    return None if isinstance(found, (nn.ModuleList, nn.ModuleDict)) else found


def _child_with(module: nn.Module, experts: Sequence[ExpertsModule]) -> nn.Module | None:
    """Return the child in which all experts are."""
    wanted = {one.module for one in experts}
    return next((child for child in children_of(module).values() if child is not None and wanted <= {*child.modules()}), None)


def _is_tower(module: nn.Module | None) -> bool:
    return module is not None and any(hasattr(part, _TAKES) for part in module.modules())


def _takes_text_alone(module: nn.Module) -> bool:
    takes = getattr(module, _TAKES, "text")
    return {takes} == {"text"} if isinstance(takes, str) else {*takes} == {"text"}
