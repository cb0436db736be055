"""How many graphs a plain torch.compile makes of a model, in one process, for the same calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo import pgo
from torch._dynamo.utils import counters

# As many as it wants, and one more for other hooks, which it would otherwise not notice.
_OPTIONS: dict[str, Any] = dict(
    recompile_limit=1000, accumulated_recompile_limit=10_000, skip_nnmodule_hook_guards=False
)


def _breaks() -> int:
    """Return how often Dynamo met what it cannot trace; inside of a loop it leaves the whole function to Python."""
    return counters["graph_break"].total() + counters["unimplemented"].total()


class PlainCompiled:
    """A model under a plain torch.compile, with ``graphs`` so far, and whether it ``broke`` into several."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.broke = model, False
        # Which sizes Dynamo has seen change, by lines of code, which the compiled model has, too.
        self._seen: Any = None
        self.compile()

    def compile(self) -> None:
        """Begin without graphs."""
        self.graphs = 0
        # Dynamo keeps graphs with their code, which the reference of the same class shares.
        self.model.compile(backend=self._backend, isolate_recompiles=True)

    def _backend(self, gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return gm.forward

    @contextmanager
    def running(self, like: nn.Module) -> Iterator[nn.Module]:
        """Yield the model with the weights of ``like``."""
        with torch.no_grad():
            self.model.load_state_dict(like.state_dict())
        others, pgo._CODE_STATE = pgo._CODE_STATE, self._seen
        breaks = _breaks()
        try:
            with torch._dynamo.config.patch(_OPTIONS):
                yield self.model
        finally:
            self._seen, pgo._CODE_STATE = pgo._CODE_STATE, others
            self.broke = self.broke or _breaks() > breaks
