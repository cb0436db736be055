"""One call of a layer that runs as Python, with all that it reads gathered.

    forward     gather, ``[E_r, ...] -> [E, ...]``; the layer's code; what any rank has read is told; let go
    backward    gather what was read once more; the code's backward; the mean of the gradients to the owners; let go

Every rank does all of it, whatever its tokens choose. As in FSDP no layer keeps what was gathered for its backward:
what autograd saves of it is a note where to find it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from hecate.private import (
    in_backward,
    is_traceable_wrapper_subclass,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    version_of,
    when_backward_ends,
)
from hecate.private import saved_tensors_hooks as hooks_around
from hecate.runtime.comm import collectives
from hecate.runtime.comm.world import World
from hecate.runtime.ops.dense import DenseShard
from hecate.runtime.state.step_mode import CurrentStep
from hecate.wrap.expert_shards import is_expert_shard
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.first_forward import agree_on_next
from hecate.wrap.shard import LOST_CHANGE, shard_of
from hecate.wrap.whole_parts import Kept, Part, Whole, parts_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Gathering:
    """How the layers of a model gather.

    Attributes:
        dtype: what parameters are gathered in; None for their own.
        began: to be called in the backward of each layer, before code in it runs again.
    """

    world: World
    dtype: torch.dtype | None
    step: CurrentStep
    began: Callable[[], None]


# Calls whose code runs now, from the outside in, and those whose backward does: code in them may run once more.
_entered: list[WholeRun] = []
_in_backward: list[WholeRun] = []


def read_whole(shard: torch.Tensor, expert: int | None = None) -> torch.Tensor | None:
    """Return a gathered parameter, or one expert's, while a layer that has it runs; else None."""
    run = _has(shard)
    return run.read(id(shard), expert) if run is not None else None


def any_entered() -> bool:
    """Return whether a layer runs as Python now."""
    return bool(_entered)


def _has(shard: torch.Tensor) -> WholeRun | None:
    runs = [*_entered, *reversed(_in_backward)] if in_backward() else _entered
    return next((run for run in runs if id(shard) in run.tensors), None)


class WholeRun:
    """A call of a layer, from when it is entered to the end of its backward.

    Attributes:
        tensors: what is gathered, by the identity of its shard, while the layer's code or its backward runs.
    """

    def __init__(self, layer: nn.Module, how: Gathering) -> None:
        self._layer, self._how = weakref.ref(layer), how
        self._wholes: dict[int, Whole] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        # Of each, what experts read in one go: taken one by one, each would have a gradient of the size of all.
        self._experts: dict[int, tuple[torch.Tensor, ...]] = {}
        # Tensors whose gradients say that the backward is through, and how many of them have none yet.
        self._last, self._left = 0, 0
        self._hooks: list[RemovableHandle] = []

    def __call__(self, experts: Sequence[ExpertsModule], forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        again = self._begin(experts)
        _entered.append(self)
        try:
            try:
                with self._saving():
                    out = forward(*args, **kwargs)
                self._refuse_lost_changes()
            finally:
                _entered[:] = [other for other in _entered if other is not self]
            if self._how.world.size == 1 or not self._wholes or not torch.is_grad_enabled():
                return out
            return self._join(out, tree_leaves((args, kwargs)), again=again)
        finally:
            self.tensors, self._experts = {}, {}

    def read(self, shard: int, expert: int | None) -> torch.Tensor:
        """Return a gathered parameter, or one expert's."""
        self._wholes[shard].read.add(-1 if expert is None else expert)
        tensor = self.tensors[shard]
        if expert is None:
            return tensor
        if not torch.is_grad_enabled():
            return tensor[expert]
        if shard not in self._experts:
            self._experts[shard] = tensor.unbind(0)
        return self._experts[shard][expert]

    def _begin(self, experts: Sequence[ExpertsModule]) -> bool:
        """Gather what no layer around this one has; return whether a checkpoint runs such a call again."""
        layer = self._layer()
        assert layer is not None, "it is called"
        if not in_backward():
            # A backward that failed does not end.
            for run in list(_in_backward):
                run.leave()
            if self._how.step.is_first and any(_has(whole.shard) is None for whole in parts_of(layer, experts)):
                agree_on_next(f"the call of a {self._name} that runs as Python", self._how.world)
        before = next((run for run in reversed(_in_backward) if run._layer() is layer), None)
        # Looked up anew: load_state_dict(assign=True) makes new parameters.
        for whole in parts_of(layer, experts):
            known, place = _has(whole.shard), id(whole.shard)
            if place not in self._wholes and (known is None or known is before):
                self._wholes[place] = whole
                # What another call of the layer has not read, this one may.
                found = before.tensors.get(place) if before is not None else None
                gathered = self.tensors[place] = self._gather(whole) if found is None else found
                whole.version = 0 if gathered.is_inference() else version_of(gathered)
        return before is not None

    def _gather(self, whole: Whole) -> torch.Tensor:
        record, shard = shard_of(whole.shard), whole.shard
        floats, dtype = shard.is_floating_point(), self._how.dtype
        if isinstance(record, DenseShard):
            (tensor,) = torch.ops.hecate.gather_dense([shard], [record.id], dtype if floats else None)
            return tensor
        assert is_expert_shard(record)
        if record.layer.world.size == 1:
            return shard
        travels = shard.to(dtype) if floats and dtype is not None else shard
        own = record.by_expert(travels)
        return record.as_written(torch.ops.hecate.gather_experts(own, record.layer.num_experts, record.layer.id))

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Let autograd save notes instead of what was gathered."""
        if self._how.world.size == 1 or not self.tensors or not torch.is_grad_enabled():
            yield
            return
        # Of several pairs of hooks torch calls the inner one alone; a checkpoint's must see the rest.
        keep, give = hooks_around() or (None, None)
        places = {(t.untyped_storage().data_ptr(), t.dtype): shard for shard, t in self.tensors.items()}

        def pack(tensor: torch.Tensor) -> Any:
            plain = not is_traceable_wrapper_subclass(tensor) and tensor.layout is torch.strided
            if plain and not tensor.is_conj() and not tensor.is_neg():
                shard = places.get((tensor.untyped_storage().data_ptr(), tensor.dtype))
                if shard is not None:
                    return Part(shard, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            return keep(tensor) if keep is not None else Kept(tensor, version_of(tensor))

        def unpack(saved: Any) -> torch.Tensor:
            if isinstance(saved, Part):
                # A backward may begin elsewhere than in what the layer returned.
                if saved.shard not in self.tensors:
                    self.enter()
                with torch.no_grad():
                    return self.tensors[saved.shard].as_strided(saved.size, saved.stride, saved.offset)
            if give is not None:
                return give(saved)
            # Torch does not look where there are hooks.
            if version_of(saved.tensor) != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor {list(saved.tensor.shape)} of a layer that hecate runs as Python. "
                    "torch.autograd.set_detect_anomaly(True) names the operation."
                )
            return saved.tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _refuse_lost_changes(self) -> None:
        for place, tensor in self.tensors.items():
            whole = self._wholes[place]
            if tensor is not whole.shard and not tensor.is_inference() and version_of(tensor) != whole.version:
                raise RuntimeError(
                    f"hecate: a {self._name} that runs as Python has changed {whole.key} in place. {LOST_CHANGE}"
                )

    def _tell(self, trained: Sequence[bool], kind: str) -> list[bool]:
        """Note what other ranks have read, as what no rank has read gets no gradient. A collective.

        Args:
            trained: of each result, whether it needs a gradient on this rank.
            kind: what the layer returns, for messages.

        Returns:
            Whether it does on any.

        Raises:
            TypeError: on all ranks, if some have no results, or other numbers of them.
        """
        wholes = self._wholes.values()
        if self._how.step.is_first:
            agree_on_next(f"the end of the call of a {self._name} that runs as Python", self._how.world)
        flags = [expert in whole.read for whole in wholes for expert in range(-1, whole.num_experts)]
        # Results by themselves: ranks may differ in how many they have.
        most, fewest, *read = self._maxima([len(trained), -len(trained), *flags])
        if most == 0:
            raise TypeError(
                f"hecate: a {self._name}, a layer with experts that runs as Python, returns {kind}, in which no "
                "tensor is found: return tensors, tuples, lists or dicts of them, or register the class with "
                "torch.utils._pytree."
            )
        if most != -fewest:
            raise TypeError(
                f"hecate: a {self._name}, a layer with experts that runs as Python, returns {len(trained)} tensors "
                f"of floating point on this rank, and from {-fewest} to {most} on all: its results must have one "
                "structure everywhere, as every rank's backward must come to those of all."
            )
        parts = torch.tensor(read, device="cpu").split([1 + whole.num_experts for whole in wholes])
        for whole, part in zip(wholes, parts, strict=True):
            whole.read.update((part.nonzero().flatten() - 1).tolist())
        return [bool(flag) for flag in self._maxima(trained)]

    def _maxima(self, mine: Sequence[int]) -> list[int]:
        found = torch.tensor(mine, dtype=torch.int64, device=self._how.world.control_device)
        collectives.all_reduce(found, self._how.world, dist.ReduceOp.MAX)
        return [int(value) for value in found.tolist()]

    @property
    def _name(self) -> str:
        return type(self._layer()).__name__

    def _join(self, out: Any, inputs: Sequence[Any], *, again: bool) -> Any:
        """Return ``out``, whose backward gives what was read gradients: zeros where this rank has read nothing."""
        leaves, spec = tree_flatten(out)
        floats = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        trained = [leaf.requires_grad for leaf in floats]
        # A rank whose tokens met nothing that is trained must call what others call.
        anywhere = trained if again else self._tell(trained, type(out).__name__)
        results = [leaf for leaf, needed in zip(floats, anywhere, strict=True) if needed] or floats
        given = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        gathered = {shard: self.tensors[shard] for shard, whole in self._wholes.items() if whole.read}
        # Autograd runs what was computed last first, so the layer is done when these have gradients.
        experts = {shard: tensor for shard, tensor in gathered.items() if tensor.requires_grad}
        self._expect(list(experts.items()) or [(None, x) for x in given])
        joined = _Join.apply(self, len(results), *results, *gathered.values(), *given)
        instead = dict(zip(map(id, results), joined, strict=True))
        return tree_unflatten([instead.get(id(leaf), leaf) for leaf in leaves], spec)

    def _expect(self, last: Sequence[tuple[int | None, torch.Tensor]]) -> None:
        self._last, itself = len(last), weakref.ref(self)

        def has_gradient(shard: int | None, gradient: torch.Tensor) -> torch.Tensor:
            # The tensors' hooks, which autograd holds, do not hold this.
            here = itself()
            return gradient if here is None else here._with_inner(shard, gradient)

        for shard, tensor in last:
            hook = tensor.register_hook(partial(has_gradient, shard))
            # What the layer was given may outlive it.
            if tensor.is_leaf:
                self._hooks.append(hook)

    def _with_inner(self, shard: int | None, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient with that of backwards inside this one, as reentrant checkpoints have them."""
        leaf = self.tensors.get(shard) if shard is not None else None
        if leaf is not None and leaf.grad is not None:
            gradient, leaf.grad = gradient + leaf.grad, None
        self._left -= 1
        if self._left == 0:
            self.leave()
        return gradient

    def enter(self) -> None:
        """Gather what was read once more, for a backward. A collective."""
        if self in _in_backward:
            return
        read = {shard: whole for shard, whole in self._wholes.items() if whole.read}
        with torch.no_grad():
            self.tensors = {shard: self._gather(whole).detach() for shard, whole in read.items()}
        for shard, whole in read.items():
            # Code that runs once more must save what it has saved.
            self.tensors[shard].requires_grad_(whole.shard.requires_grad)
            stack = whole.stack() if whole.stack is not None else None
            if stack is not None:
                stack.note_read(whole.key, whole.read)
        self._left = self._last
        _in_backward.append(self)
        # Backwards inside this one, as reentrant checkpoints have them, are as many as a rank's data want.
        self._how.began()
        # A backward may be for some of them only.
        when_backward_ends(self.leave)

    def leave(self) -> None:
        """Let go of what was gathered for a backward."""
        for hook in self._hooks:
            hook.remove()
        self.tensors, self._experts = {}, {}
        _in_backward[:] = [run for run in _in_backward if run is not self]

    def zeros(self) -> list[torch.Tensor | None]:
        """Return gradients of what was read, without memory of their own."""
        return [t.new_zeros(()).expand(t.shape) if t.requires_grad else None for t in self.tensors.values()]


class _Join(torch.autograd.Function):
    """Copies of a layer's results that need, in a graph, what was gathered for it."""

    @staticmethod
    def forward(ctx: Any, run: WholeRun, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # A result that the loss does not need leaves what made it without a gradient.
        ctx.set_materialize_grads(False)
        ctx.run, ctx.inputs = run, len(tensors)
        # Something to be saved, so that checkpointing around the layer runs it again here, on all ranks.
        ctx.save_for_backward(tensors[0].new_empty(0))
        # Not views, which autograd lets nobody change in place.
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # In this order: what is run again finds what is gathered.
        ctx.run.enter()
        _ = ctx.saved_tensors
        found = [*gradients, *ctx.run.zeros()]
        return (None, None, *found, *[None] * (ctx.inputs - len(found)))
