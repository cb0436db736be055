"""Numbers that data decide: they are taken into graphs of experts, and break the graph in code that cannot be traced.

The number of rows of an expert must be in a graph. In a vision tower's ``tolist()`` that is in the way.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from hecate.private import LearnedByDynamo, dynamo_config, parameters_of
from hecate.wrap.expert_shards import is_expert_shard
from hecate.wrap.find_experts import STACK
from hecate.wrap.shard import shard_of

# Options with which Dynamo takes such numbers into graphs.
CAPTURED = dict(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
_LEFT = dict.fromkeys(CAPTURED, False)


class WithoutNumbersIfNeeded:
    """Dynamo's way to compile one frame, and if a number is in its way, once more with graph breaks at numbers.

    Code of experts is not taken apart: it would be compiled for all numbers of rows.
    """

    def __init__(
        self, convert: Callable[..., Any], model: nn.Module, learned: LearnedByDynamo, *, fullgraph: bool
    ) -> None:
        functools.update_wrapper(self, convert)
        # By that name Dynamo finds the backend of a graph.
        self._torchdynamo_orig_backend = convert
        # Weak: the model holds this.
        self._model = weakref.ref(model)
        self._learned, self._fullgraph = learned, fullgraph

    def __call__(self, *given: Any) -> Any:
        # Whatever else a rank compiles, its graphs of this model are those of the other ranks.
        with self._learned.in_use():
            try:
                return self._torchdynamo_orig_backend(*given)
            except Exception as error:
                reason = _number_in_the_way(error)
                captured = dynamo_config.capture_scalar_outputs
                if self._fullgraph or not captured or reason is None or self._is_of_experts(reason):
                    raise
            with dynamo_config.patch(_LEFT):
                return self._torchdynamo_orig_backend(*given)

    def _is_of_experts(self, error: GuardOnDataDependentSymNode) -> bool:
        model = self._model()
        lines = [(frame.filename, frame.lineno or 0) for frame in getattr(error, "real_stack", None) or ()]
        code = list(_code_of_experts(model)) if model is not None else []
        return any(file == where and line in around for file, line in lines for where, around in code)


def _number_in_the_way(error: BaseException) -> GuardOnDataDependentSymNode | None:
    """Return the error that stopped a compiler, from wherever it or Dynamo put it; None for another error."""
    here: BaseException | None = error
    while here is not None and not isinstance(here, GuardOnDataDependentSymNode):
        here = getattr(here, "inner_exception", None) or here.__cause__
    return here


def _code_of_experts(model: nn.Module) -> Iterator[tuple[str, range]]:
    """Yield files and lines of the classes of modules that have experts, as parameters or as a list."""
    holders = {
        module
        for module in model.modules()
        if STACK in module.__dict__ or any(is_expert_shard(shard_of(p)) for p in parameters_of(module).values())
    }
    owners = holders | {module for module in model.modules() if not holders.isdisjoint(module.children())}
    for cls in {cls for module in owners for cls in type(module).__mro__ if issubclass(cls, nn.Module)}:
        if cls.__module__.partition(".")[0] not in ("torch", "hecate"):
            try:
                source, first = inspect.getsourcelines(cls)
            except (OSError, TypeError):
                continue
            yield inspect.getfile(cls), range(first, first + len(source))
