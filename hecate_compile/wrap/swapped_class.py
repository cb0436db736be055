"""Replace the class of one module by a subclass, under the same name, that does something differently."""

from __future__ import annotations

from typing import Any

from torch import nn

_MARK = "_hecate_swapped"


def swap_class(module: nn.Module, namespace: dict[str, Any]) -> type[nn.Module]:
    """Give ``module`` a class of its own with the attributes of ``namespace``, and return the class."""
    cls = type(module)
    same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    swapped: Any = type(cls.__name__, (cls,), namespace | same | {_MARK: True})
    module.__class__ = swapped
    return type(module)


def class_before(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module`` as its author wrote it."""
    return next(cls for cls in type(module).__mro__ if _MARK not in vars(cls))
