"""Run a layer as its author wrote it, with all its experts on every rank, where no graph can have them.

Which layer that is, and in which modes; :mod:`hecate.wrap.whole_runs` has what happens when it is called.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hecate.runtime.comm.agreement import gather_json
from hecate.runtime.comm.warn import warn_together
from hecate.runtime.ops.gradients import GradientSync
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.graph_breaks import Place
from hecate.wrap.loops.rewrite import AS_WRITTEN
from hecate.wrap.swapped_class import class_before, swap_class
from hecate.wrap.whole_runs import Gathering, WholeRun

# Attributes of a module: in which modes its methods are as they were written, training or not; the experts that it
# reads, by the modes in which it runs as Python; a forward of its own; and how experts are gathered.
_MODES, _READS = "_hecate_modes_as_written", "_hecate_reads_whole"
_OWN, _GATHERING = "_hecate_own_forward", "_hecate_gathering"
_NOWHERE = "", -1


@dataclass(frozen=True, kw_only=True)
class InPython:
    """Modules that run as Python, with all experts on every rank; ``reason`` is of several lines.

    Attributes:
        training: False if training stays in graphs, and they evaluate so.
    """

    modules: tuple[str, ...]
    experts: tuple[str, ...]
    reason: str
    training: bool


class WholeLayers:
    """The layers of one model that run as Python.

    Attributes:
        found: what they are.
    """

    def __init__(
        self,
        model: nn.Module,
        experts: Sequence[ExpertsModule],
        sync: GradientSync,
        how: Gathering,
    ) -> None:
        # Weak: the model holds this.
        self._model, self._experts, self._sync, self._how = weakref.ref(model), tuple(experts), sync, how
        self.found: tuple[InPython, ...] = ()
        modules = dict(model.named_modules())
        # From the inside out, the modules whose forward may read the experts; the model itself is none.
        self._around = {each.name: [modules[name] for name in _names_around(each)] for each in self._experts}

    def begin(self, layer: str, places: Sequence[Place], reason: str, *, meets: bool = True) -> bool:
        """Let a layer, and those like it, run as Python from now on; return False if none is found.

        A collective, unless ``meets`` is False, where nothing runs.

        What cannot be traced where the model is evaluated may well be where it is trained, not the other way round.

        Args:
            layer: the name of experts that were read; if they run as Python, the module around what does is next.
            places: if there is no name, lines of model code that cannot be traced, from the outside in.
        """
        found = [(*(self._with_experts(layer) if layer else self._with_code(places)), reason)]
        if meets and self._how.world.group is not None:
            # Ranks were stopped together, but not all of them in code of the layer.
            found = gather_json(found[0], self._how.world)
        name, depth, reason = max(found, key=lambda one: one[1])
        if depth < 0:
            return False
        around, model = self._around, self._model()
        assert model is not None, "it is the model that is called"
        kind = class_before(around[name][depth])
        alike = [
            e for e in self._experts if len(around[e.name]) > depth and class_before(around[e.name][depth]) is kind
        ]
        for module in dict.fromkeys(around[e.name][depth] for e in alike):
            # A part of a model may be in another mode than the whole.
            modes = {False, model.training, module.training}
            self._sync.switches.layers_in_python |= True in modes
            _run_whole(module, [e for e in alike if around[e.name][depth] is module], modes)
            # Not in the class, which Dynamo may keep for longer than the model.
            module.__dict__[_GATHERING] = self._how
        for experts in alike:
            for module in around[experts.name][:depth]:
                _as_written(module, {False, model.training, module.training})
        names = {module: name for name, module in model.named_modules()}
        begun = InPython(
            modules=tuple(dict.fromkeys(names[around[e.name][depth]] for e in alike)),
            experts=tuple(e.name for e in alike),
            reason=reason,
            training=model.training,
        )
        # A module around those that were begun before runs them, too.
        self.found = (*(one for one in self.found if one.experts != begun.experts), begun)
        warn_together(
            f"hecate: the code around {', '.join(begun.experts)} runs as Python, with all experts on every "
            f"rank (right, but slow): {reason}",
            self._how.world.rank,
            stacklevel=2,
        )
        return True

    def _with_experts(self, name: str) -> tuple[str, int]:
        around = enumerate(self._around.get(name, ()))
        return next(((name, depth) for depth, module in around if not _runs_whole(module)), _NOWHERE)

    def _with_code(self, places: Sequence[Place]) -> tuple[str, int]:
        for place in reversed(places):
            for name, modules in self._around.items():
                for depth, module in enumerate(modules):
                    if not _runs_whole(module) and _has_line(module, place):
                        return name, depth
        return _NOWHERE


def _runs_whole(module: nn.Module) -> bool:
    return module.training in module.__dict__.get(_READS, ())


def _has_line(module: nn.Module, place: Place) -> bool:
    """Return whether a line, a file and its number, is in the forward of a module as its author wrote it."""
    code = getattr(inspect.unwrap(class_before(module).forward), "__code__", None)
    file, number = place
    return code is not None and code.co_filename == file and number in {line for *_, line in code.co_lines()}


def _names_around(experts: ExpertsModule) -> Iterator[str]:
    if not experts.members and experts.name:
        yield experts.name
    name = experts.name
    while name := name.rpartition(".")[0]:
        yield name


def _run_whole(module: nn.Module, experts: Sequence[ExpertsModule], modes: Set[bool]) -> None:
    """Let a module run as Python, with ``experts`` gathered, where it is or is not in training."""
    _as_written(module, modes)
    if _READS not in module.__dict__:
        # What wraps a forward often puts it there.
        if "forward" in module.__dict__:
            module.__dict__[_OWN] = module.__dict__.pop("forward")
        swap_class(module, {"forward": _forward_of(type(module))})
        module.__dict__[_READS] = {}
    module.__dict__[_READS] |= dict.fromkeys(modes, tuple(experts))


def _as_written(module: nn.Module, modes: Set[bool]) -> None:
    """Undo what was changed in a module's loops for a trace: they call experts that have no rows."""
    if _MODES not in module.__dict__:
        module.__dict__[_MODES] = frozenset()
        before = getattr(type(module), AS_WRITTEN, {})
        if before:
            swap_class(module, {key: _either(method, getattr(type(module), key)) for key, method in before.items()})
    module.__dict__[_MODES] |= modes


def _either(written: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (written if self.training in self.__dict__[_MODES] else traced)(self, *args, **kwargs)

    return method


def _forward_of(cls: type[nn.Module]) -> Callable[..., Any]:
    @torch.compiler.disable
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        whole = WholeRun(self, self.__dict__[_GATHERING])
        return whole(self.__dict__[_READS][self.training], partial(call, self), args, kwargs)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__.get(_OWN)
        return cls.forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (run if self.training in self.__dict__[_READS] else call)(self, *args, **kwargs)

    return forward
