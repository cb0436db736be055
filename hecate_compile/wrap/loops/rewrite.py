"""Change the loops of a model's experts, in the methods that have them."""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from collections.abc import Iterator, Sequence
from types import FunctionType

from torch import nn

from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.loops.counts import Counts
from hecate.wrap.loops.functions import compiled, has_private_names, wrapped_again
from hecate.wrap.loops.turns import Loops
from hecate.wrap.swapped_class import swap_class

log = logging.getLogger("hecate")


def make_loops_traceable(model: nn.Module, found: Sequence[ExpertsModule]) -> tuple[str, ...]:
    """Change such code in the methods of experts modules and of those that they are in.

    Returns:
        Where they are, as ``file:line``.
    """
    near = {name for experts in found for name in (experts.name, experts.name.rpartition(".")[0])}
    done: dict[tuple[FunctionType, bool], tuple[FunctionType, list[int]] | None] = {}
    places: dict[str, None] = {}
    for name, module in list(model.named_modules()):
        if name not in near:
            continue
        changed = {}
        for key, function in _methods(module):
            listed = isinstance(module._modules.get("experts"), (nn.ModuleList, nn.ModuleDict))
            if (function, listed) not in done:
                try:
                    done[function, listed] = _rewritten(function, listed)
                except Exception:
                    # What is not changed is traced as it is, or named when that fails.
                    log.warning("hecate: could not look at the loops of %s", function.__qualname__, exc_info=True)
                    done[function, listed] = None
            rewritten = done[function, listed]
            if rewritten is not None:
                changed[key], lines = rewritten
                file = inspect.unwrap(function).__code__.co_filename
                places |= dict.fromkeys(f"{file}:{line}" for line in lines)
        if changed:
            swap_class(module, changed)
    return tuple(places)


def _methods(module: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    seen: set[str] = set()
    for cls in type(module).__mro__:
        if cls.__module__.partition(".")[0] == "torch":
            return
        for key, value in vars(cls).items():
            if isinstance(value, FunctionType) and key not in seen:
                yield key, value
            seen.add(key)


def _rewritten(function: FunctionType, listed: bool) -> tuple[FunctionType, list[int]] | None:
    """The function with its loops changed, and their lines; None if there are none.

    Args:
        listed: whether ``self.experts`` is a list of modules.
    """
    inner = vars(function).get("__wrapped__")
    if isinstance(inner, FunctionType):
        found = _rewritten(inner, listed)
        again = None if found is None else wrapped_again(function, inner, found[0])
        return None if found is None or again is None else (again, found[1])
    try:
        source, start = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    ast.increment_lineno(tree, start - 1)
    loops = Loops(definition, listed)
    definition = Counts(loops.lines).visit(loops.visit(definition))
    if not loops.lines or has_private_names(definition):
        return None
    return compiled(definition, function), loops.lines
