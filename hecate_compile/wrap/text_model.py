"""Find the text model inside a model that takes images or sound, too.

It is traced alone, with all experts in it. What is around it (towers, positions of images, the head) runs as Python:
code that is another for each kind of batch, and a rank whose batch is text alone calls no tower.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hecate.private import children_of
from hecate.wrap.find_experts import ExpertsModule

# The attribute in which models of transformers, and their towers, say what they take: "text", or ("image", "text").
_TAKES = "input_modalities"


def find_text_model(model: nn.Module, experts: Sequence[ExpertsModule]) -> nn.Module | None:
    """Return the module that has all experts and stands beside the towers; None if there is none.

    A model with towers says that it takes more than text, and a child beside the one with the experts says what it
    takes, too.
    """
    wanted = {one.module for one in experts}
    found: nn.Module | None = None
    here: nn.Module | None = model
    while here is not None:
        children = [child for child in children_of(here).values() if child is not None]
        inner = next((child for child in children if wanted <= {*child.modules()}), None)
        if _takes_more_than_text(here) and any(_is_tower(child) for child in children if child is not inner):
            found = inner
        here = inner
    # A list of layers is not called.
    return None if isinstance(found, (nn.ModuleList, nn.ModuleDict)) else found


def towers_beside(text_model: nn.Module, model: nn.Module) -> set[nn.Module]:
    """Return the modules of towers, and of what leads from them to the text model."""
    around = next(module for module in model.modules() if text_model in children_of(module).values())
    beside = (child for child in children_of(around).values() if child is not None and child is not text_model)
    return {module for child in beside for module in child.modules()}


def _is_tower(module: nn.Module) -> bool:
    return any(hasattr(part, _TAKES) for part in module.modules())


def _takes_more_than_text(module: nn.Module) -> bool:
    takes = getattr(module, _TAKES, "text")
    return {takes} != {"text"} if isinstance(takes, str) else {*takes} != {"text"}
