"""Traces of one compiled model: how many graphs Dynamo may keep, when there are new ones, and their end.

Dynamo keeps graphs with their code: all models of a class, also those that are gone, would share one count.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hecate.graph.assertions import traced_assertions
from hecate.graph.backend import Backend, GraphRecord
from hecate.graph.numbers_in_graphs import WithoutNumbersIfNeeded
from hecate.private import (
    LIMIT_WARNING,
    DeletedGuardManagerWrapper,
    LearnedByDynamo,
    call_with_hooks,
    compiled_entries,
    convert_frame,
    dynamo_config,
    forget_guards,
    forget_symbols,
    optimize,
    set_compiled_call,
)
from hecate.runtime.comm import collectives
from hecate.runtime.comm.agreement import agree, meet
from hecate.wrap.changes import Changes, Hooks, ModuleHooks, PlacedHook

# Graphs of one model, and of one function in it where tracing breaks. Lengths become symbols when they first change,
# so there is one for each way of calling the model: grad modes, arguments that are given or not, sizes of one.
LIMIT = 64
# Torch 2.11 has one count for all models.
_OWN_COUNT = "isolate_recompiles" in inspect.signature(torch.compile).parameters

# Sets of hooks whose graphs are kept, those that were used last.
_KEPT = 8

# In graphs that hold the choices of routers, like a hook that is traced into them.
_HELD = PlacedHook("choices of experts", "held", (), (), alive=lambda: True)

_HOOKS_TOGETHER = (
    "Hooks are traced into the model, whose graphs communicate: put them on and take them off on all ranks, between "
    "the same forwards, not under `if rank == 0`. What they have seen may be used on one rank alone. Blocks of "
    "hecate.record_routing and hecate.replay_routing are entered and left on all ranks, too."
)


@dataclass(eq=False)
class _Trace:
    """A callable with graphs of its own, and the modes in which it has been called: with gradients, for training."""

    call: Callable[..., Any]
    modes: set[tuple[bool, bool]] = field(default_factory=set)
    graphs: list[GraphRecord] = field(default_factory=list)


class Traces:
    """Calls a model through torch.compile, and has it traced anew where Dynamo would not notice that it must be.

    ``refused`` is why torch wanted one more graph than there may be, or None; such code then runs as plain Python.
    With a ``text_model`` that alone is traced, and what is around it runs as Python.
    """

    # The number of counts that torch adds up.
    _made = 0

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        changes: Changes,
        *,
        fullgraph: bool,
        text_model: nn.Module | None = None,
        learned: LearnedByDynamo | None = None,
    ) -> None:
        # Weak: the model holds this.
        self._model, self._backend, self._fullgraph = weakref.ref(model), backend, fullgraph
        self._text_model = weakref.ref(text_model) if text_model is not None else None
        # A model's own: whatever else a rank compiles, its graphs are those of the other ranks.
        self._learned = learned if learned is not None else LearnedByDynamo()
        self.communicates = backend.communicates and backend.world.group is not None
        self._changes, self._parts = changes, dict[nn.Module, Traces]()
        self._hooks, self._settled, self._again, self._compared = ModuleHooks(changes), False, False, 0
        self.refused: str | None = None
        self._here = self._hooks.now(model)
        # By the hooks that are in them, the last used last.
        self._traces: dict[Hooks, _Trace] = {self._here: self._trace()}

    @property
    def model(self) -> nn.Module:
        """The module that is called."""
        model = self._model()
        assert model is not None, "it is the model that is called"
        return model

    def of(self, part: nn.Module) -> Traces:
        """Return those of a module inside the model, for who calls it instead of the model."""
        if part not in self._parts:
            inside = self._text_model() if self._text_model is not None else None
            text_model = inside if inside is not part and inside in {*part.modules()} else None
            options: Any = dict(fullgraph=self._fullgraph, text_model=text_model, learned=self._learned)
            self._parts[part] = Traces(part, self._backend, self._changes, **options)
        return self._parts[part]

    def before_forward(self, *, holds_choices: bool = False) -> None:
        """Turn to graphs with the hooks that there are now. A collective if these changed: ranks compare them.

        Those that hold the choices of routers are others, too.
        """
        hooks = self._hooks.now(self.model)
        if holds_choices:
            hooks = (*hooks, _HELD)
        # An equal identity may be that of another function, where the one that had it is gone.
        if hooks is self._here or (hooks == self._here and _alive(self._here)):
            return
        if self.communicates:
            group = self._backend.world.group
            assert group is not None
            # Hooks are compared by their names, which are the same on all ranks.
            names, before = list(map(str, hooks)), {*map(str, self._here)}
            changed = next((name for name in names if name not in before), "other hooks, or fewer")
            meet(f"the model is to be traced anew ({changed})", group, advice=_HOOKS_TOGETHER)
            agree(names, "the hooks on modules", _HOOKS_TOGETHER, self._backend.world)
        # Hooks that nobody has any more do not come back.
        for known in [known for known in self._traces if not _alive(known)]:
            self._drop(known)
        if not self._all_have(hooks in self._traces):
            self._drop(hooks)
            self._traces[hooks] = self._trace()
        # Put last, as the one used last, and under hooks that are alive.
        self._traces[hooks] = self._traces.pop(hooks)
        self._here = hooks
        for known in list(self._traces)[:-_KEPT]:
            self._drop(known)

    def _drop(self, hooks: Hooks) -> None:
        trace = self._traces.pop(hooks, None)
        if trace is not None:
            gone = set(map(id, trace.graphs))
            self._backend.graphs[:] = [graph for graph in self._backend.graphs if id(graph) not in gone]

    def _all_have(self, have: bool) -> bool:
        """Return whether no rank must trace: objects may be gone on some ranks and not on others."""
        world = self._backend.world
        if not self.communicates:
            return have
        found = torch.tensor([have], dtype=torch.int64, device=world.control_device)
        collectives.all_reduce(found, world, dist.ReduceOp.MIN)
        return bool(found)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._again:
            # Nobody is to be shown graphs that do not run.
            self._backend.graphs.clear()
            self._again = False
        _limit.met, before = None, self._backend.compared
        trace, made = self._traces[self._here], len(self._backend.graphs)
        try:
            with traced_assertions():
                return trace.call(*args, **kwargs)
        finally:
            trace.graphs += self._backend.graphs[made:]
            if made < len(self._backend.graphs):
                # A parameter that begins to be trained is traced anew, so none of them goes by unnoticed.
                self._note_written()
            self.refused = _limit.met or self.refused
            self._compared = self._backend.compared - before

    def _note_written(self) -> None:
        self._backend.written.update(
            id(parameter) for parameter in self.model.parameters() if parameter.requires_grad
        )

    def is_first(self, *, training: bool) -> bool:
        """Return whether this mode is new, so that all ranks compile, and compare their graphs."""
        return self._mode(training) not in self._traces[self._here].modes

    def _mode(self, training: bool) -> tuple[bool, bool]:
        return training, self.model.training

    def after_forward(self, *, training: bool) -> None:
        """Trace the model once more if its graph broke in the first forward with gradients, and might not again."""
        # A lock or a warning that happens once splits the first graph, and no later one. A rank that comes back to
        # the first graphs would average gradients in other portions than one whose batch has a new shape.
        if training and not self._settled:
            self._settled = True
            if self.communicates and self._compared > 1:
                self.start_anew()
                return
        self._traces[self._here].modes.add(self._mode(training))

    def start_anew(self) -> None:
        """Let the next call trace the model again, and forget all graphs so far."""
        self._traces, self._again = {self._here: self._trace()}, True

    def limits(self) -> dict[str, int]:
        """Return Dynamo's options while the model runs. A larger limit that the user has set stands."""
        config = dynamo_config
        limit = max(LIMIT, config.recompile_limit)
        everybody = config.accumulated_recompile_limit + limit * Traces._made
        return {
            "recompile_limit": limit if _OWN_COUNT else everybody,
            "accumulated_recompile_limit": everybody,
        }

    def _trace(self) -> _Trace:
        model = self.model
        Traces._made += 1
        symbols: list[Any] = []
        entry = self._backend.entry(symbols)
        own: dict[str, Any] = {"isolate_recompiles": True} if _OWN_COUNT else {}
        # torch.compile does the same, but does not show the callback that Dynamo calls for each frame.
        dynamo: Any = optimize(backend=entry, nopython=self._fullgraph, **own)
        dynamo.callback = WithoutNumbersIfNeeded(dynamo.callback, model, self._learned, fullgraph=self._fullgraph)
        text_model = self._text_model() if self._text_model is not None else None
        if text_model is None:
            trace = _Trace(dynamo(call_with_hooks(model)))
        else:
            trace = _Trace(_calling(model, text_model, dynamo(call_with_hooks(text_model))))
        # Dynamo would keep its graphs for as long as there is the model's class.
        weakref.finalize(trace, _forget, entry, symbols).atexit = False
        return trace


def _calling(model: nn.Module, text_model: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls the model as Python, and in it ``compiled`` for its text model."""
    plain = call_with_hooks(model)

    def call(*args: Any, **kwargs: Any) -> Any:
        set_compiled_call(text_model, compiled)
        try:
            return plain(*args, **kwargs)
        finally:
            # Between forwards nothing compiled may run.
            set_compiled_call(text_model, None)

    return call


def _alive(hooks: Hooks) -> bool:
    return all(hook.alive() is not None for hook in hooks)


def _forget(entry: Callable[..., Any], symbols: list[Any]) -> None:
    """Free the graphs that were made by the backend ``entry``, as Dynamo does when something dies that they need."""
    freed = []
    for seen in list(convert_frame.input_codes.seen):
        code = seen()
        for graph in compiled_entries(code) if code is not None else ():
            manager = graph.guard_manager
            if graph.backend is entry and manager.extra_state is not None:
                gone = DeletedGuardManagerWrapper("its model is gone, or was traced anew")
                manager.extra_state.invalidate(graph, gone)
                freed.append(manager)
    forget_guards(freed)
    forget_symbols(symbols)


class _Limit(logging.Filter):
    """Notices in torch's log, the only place, that it makes no more graphs of some code, which ``met`` then names."""

    met: str | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and str(record.msg).startswith(LIMIT_WARNING):
            _, most, code, reason, *_ = record.args
            guard = " ".join(str(reason).partition("\nUser stack trace")[0].split())
            self.met = f"{code} has {most}, and the last of them does not fit because of {guard}"
        return True


_limit = _Limit()
logging.getLogger(convert_frame.__name__).addFilter(_limit)
