"""Stack the parameters of experts that are modules of their own, in an ``nn.ModuleList`` or ``nn.ModuleDict``.

Graphs read a stack ``[E_r, ...]`` of every kind of parameter: ``self.experts[e](rows)`` runs the same code on
``stacked[e]``. Users keep the parameters that they had, ``experts.3.w1.weight``: rows of the stack on the rank that
owns the expert, and empty on the others. They are the truth, and :meth:`ExpertStack.tie` brings the stack after them.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hecate.private import accumulation_hooks, children_of, gradient_hooks, parameters_of, set_hooks_of_tensor
from hecate.wrap.carry_over import call_hooks, carry_over_stacked
from hecate.wrap.expert_shards import ExpertShard, MemberShard, is_expert_shard, is_member_shard
from hecate.wrap.find_experts import STACK, ExpertsModule
from hecate.wrap.shard import no_longer_the_shard, note_shard, refill, shard_of

_MEMBER = "_hecate_member"


@dataclass(frozen=True, eq=False)
class Member:
    """The place from which a module inside an expert reads its parameters."""

    stack: ExpertStack
    expert: int  # which of the list's members the module is in
    keys: dict[str, str]  # the module's own key of each parameter, and that in the stack


def member_of(module: nn.Module) -> Member | None:
    """Return the record of a module inside an expert that was stacked; None for every other module."""
    found: Member | None = module.__dict__.get(_MEMBER)
    return found


def stack_of(experts: ExpertsModule) -> ExpertStack | None:
    """Return the stack of experts in a list; None for experts that share parameters ``[E, ...]``."""
    found: ExpertStack | None = experts.module.__dict__.get(STACK)
    return found


def stack_experts(found: Sequence[ExpertsModule], left_out: Collection[str]) -> None:
    """Make a stack of whole parameters ``[E, ...]`` for every list; :func:`split_stacks` gives members their rows.

    Lists that are named in ``left_out`` belong to code that does not call experts without rows.
    """
    for experts in found:
        if experts.members:
            experts.module.__dict__[STACK] = ExpertStack(experts, experts.name in left_out)


def split_stacks(found: Sequence[ExpertsModule]) -> None:
    """Make parameters of experts in lists views of the stacks, which are shards by now."""
    for experts in found:
        stack = stack_of(experts)
        if stack is not None:
            stack.begin()


def tie_stacks(found: Sequence[ExpertsModule]) -> None:
    """Bring every stack after the parameters of its members; see :meth:`ExpertStack.tie`."""
    for experts in found:
        stack = stack_of(experts)
        if stack is not None:
            stack.tie()


class ExpertStack(nn.Module):
    """The parameters ``[E_r, ...]`` that graphs read for experts in a list; no child of the model.

    A gradient is dealt out to the members as soon as it is there, as views, and the stack keeps none. Where the
    model's code ``leaves_out`` experts without rows, those that no rank has a row for get none.
    """

    def __init__(self, experts: ExpertsModule, leaves_out: bool) -> None:
        super().__init__()
        self.name, self.leaves_out = experts.name, leaves_out
        self._read, self._read_in_python = dict[str, set[int]](), set[str]()
        self.labels = [label for label, m in children_of(experts.module).items() if m in set(experts.members)]
        # By key, expert by expert: the module that has the parameter, and its name there.
        self.sites: dict[str, list[tuple[nn.Module, str]]] = {}
        self.names = {key: name for name, key in experts.names.items()}
        for name, key in experts.names.items():
            path, _, own = name.rpartition(".")
            self.sites[key] = [(member.get_submodule(path), own) for member in experts.members]
            parts = self.members(key)
            with torch.no_grad():
                stacked = nn.Parameter(torch.stack([p.detach() for p in parts]), any(p.requires_grad for p in parts))
            carry_over_stacked(parts, stacked)
            parameters_of(self)[key] = stacked
            for expert, (module, own) in enumerate(self.sites[key]):
                # Its memory is free from now on.
                parts[expert].data = parts[expert].new_empty(0)
                module.__dict__.setdefault(_MEMBER, Member(self, expert, {})).keys[own] = key

    def members(self, key: str) -> list[nn.Parameter]:
        """Return the parameters of all experts that are stacked under ``key``, by expert."""
        # Looked up anew: load_state_dict(assign=True) makes new parameters.
        found = [parameters_of(module)[own] for module, own in self.sites[key]]
        return [parameter for parameter in found if parameter is not None]

    def owned(self, key: str) -> list[nn.Parameter]:
        """Return the parameters under ``key`` of this rank's experts."""
        members = self.members(key)
        return [members[expert] for expert in self.at(key)[1].experts]

    def begin(self) -> None:
        """Make the members' parameters views of the stack, which was sharded."""
        for key in self.sites:
            self._note(key)
            self._view(key)
            _add_hooks(self.at(key)[0], weakref.ref(self), key)

    def tie(self) -> None:
        """Bring the stack after its members, wherever these were moved, cast, assigned, frozen or thawed."""
        for key in self.sites:
            (stacked, shard), members = self.at(key), self.members(key)
            trained = any(parameter.requires_grad for parameter in members)
            if trained != stacked.requires_grad:
                stacked.requires_grad_(trained)
            if not _is_tied(stacked, members, shard):
                self._note(key)
                own = [members[expert].detach() for expert in shard.experts]
                for part, expert in zip(own, shard.experts, strict=True):
                    if part.shape != shard.full_shape[1:]:
                        raise no_longer_the_shard(self._name(key, expert))
                like = members[0].detach()
                fresh = torch.stack(own) if own else like.new_empty((0, *shard.full_shape[1:]))
                refill(stacked, fresh, None)
                self._view(key)

    def gradient(self, key: str) -> torch.Tensor | None:
        """Return the gradients of this rank's experts as one ``[E_r, ...]``; None if none has any.

        Those that were dealt out are its views.
        """
        stacked, own = self.at(key)[0], self.owned(key)
        if not any(parameter.grad is not None for parameter in own):
            return None
        dealt = _dealt(stacked, own)
        if dealt is not None:
            return dealt
        whole = torch.zeros_like(stacked, requires_grad=False)
        for row, parameter in enumerate(own):
            if parameter.grad is not None:
                whole[row] = parameter.grad
        return whole

    def note_read(self, key: str, experts: Iterable[int]) -> None:
        """Note experts whose parameter Python has read, until its gradient comes."""
        self._read.setdefault(key, set()).update(experts)
        self._read_in_python.add(key)

    def left_out(self, key: str, gradient: torch.Tensor) -> set[int]:
        """Return the experts that no rank has called, which have no gradient so far, and get none.

        Args:
            gradient: what this backward brings, ``[E_r, ...]``.
        """
        if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
            return set()
        (_, shard), read = self.at(key), self._read.pop(key, set() if key in self._read_in_python else None)
        unused, layer = {expert for expert, p in enumerate(self.members(key)) if p.grad is None}, shard.layer
        if read is not None:
            unused -= read
        elif not self.leaves_out:
            return set()
        elif layer.counts is None:
            # Where experts are gathered nobody counts rows, and an owner alone sees that there were none.
            unused &= {*shard.experts}
        else:
            unused &= layer.without_rows()
        # Another forward may have been counted since.
        used = {expert for row, expert in enumerate(shard.experts) if expert in unused and gradient[row].any()}
        return unused - used

    def deal(self, key: str, gradient: torch.Tensor, given: Sequence[bool]) -> None:
        """Give experts their row of ``gradient``, ``[E_r, ...]``, and an empty one to those that other ranks own.

        Without the empty ones, ranks would clip and unscale different sets. ``given`` says which experts have any.
        """
        _, shard = self.at(key)
        rows = {expert: row for row, expert in enumerate(shard.experts)}
        nothing = gradient.new_empty((0, *shard.full_shape[2:]))
        for expert, parameter in enumerate(self.members(key)):
            if given[expert]:
                row = rows.get(expert)
                parameter.grad = nothing if row is None else gradient[row]

    def refilled(self, key: str, gradient: torch.Tensor | None, given: Sequence[bool]) -> None:
        """Make the members' parameters views of a stack that has other rows now, with those of ``gradient``."""
        for parameter in self.members(key):
            parameter.grad = None
        self._view(key)
        if gradient is not None:
            self.deal(key, gradient, given)

    def at(self, key: str) -> tuple[nn.Parameter, ExpertShard]:
        """Return the stack of ``key``, with its record."""
        stacked = parameters_of(self)[key]
        shard = shard_of(stacked)
        assert stacked is not None and is_expert_shard(shard)
        return stacked, shard

    def _note(self, key: str) -> None:
        """Give the members their records."""
        _, shard = self.at(key)
        for expert, parameter in enumerate(self.members(key)):
            record = MemberShard(self._name(key, expert), shard.layer, shard.full_shape[1:], expert=expert)
            note_shard(parameter, record)

    def _name(self, key: str, expert: int) -> str:
        return f"{self.name}.{self.labels[expert]}.{self.names[key]}".lstrip(".")

    def _view(self, key: str) -> None:
        stacked, shard = self.at(key)
        rows = {expert: row for row, expert in enumerate(shard.experts)}
        # Detached, a view counts the stack's versions: autograd notices that a saved stack was written through it.
        whole = stacked.detach()
        for expert, parameter in enumerate(self.members(key)):
            row, gradient = rows.get(expert), parameter.grad
            values = stacked.new_empty((0, *shard.full_shape[2:])) if row is None else whole[row]
            fits = gradient is not None and gradient.shape == values.shape and gradient.dtype == values.dtype
            refill(parameter, values, gradient if fits else None)


def _add_hooks(stacked: nn.Parameter, stack: weakref.ref[ExpertStack], key: str) -> None:
    """Deal out the gradients of ``stacked``, and call the hooks that users put on the members."""

    # Of the backward that is under way.
    left_out = set[int]()

    # A hook that held its own parameter would keep it for ever. Where the model is gone, a loss may still be there.
    def before(gradient: torch.Tensor) -> torch.Tensor:
        here = stack()
        if here is None:
            return gradient
        (stacked, shard), members = here.at(key), here.members(key)
        left_out.clear()
        left_out.update(here.left_out(key, gradient))
        # What the members have is added to, in place where they have views of one tensor.
        stacked.grad = here.gradient(key)
        own = [(row, members[expert]) for row, expert in enumerate(shard.experts) if expert not in left_out]
        changed = [(row, p) for row, p in own if (gradient_hooks(p) if p.requires_grad else p.grad is not None)]
        if changed:
            gradient = gradient.clone()
        for row, parameter in changed:
            # A frozen expert keeps the gradient that it has.
            hooks = gradient_hooks(parameter) if parameter.requires_grad else None
            gradient[row] = call_hooks(hooks, gradient[row]) if hooks else 0
        return gradient

    def after(stacked: torch.Tensor) -> None:
        here, gradient = stack(), stacked.grad
        if here is None:
            return
        assert gradient is not None
        stacked.grad = None
        (_, shard), members = here.at(key), here.members(key)
        here.deal(key, gradient, [p.requires_grad and expert not in left_out for expert, p in enumerate(members)])
        for parameter in (members[expert] for expert in shard.experts if expert not in left_out):
            for hook in list((accumulation_hooks(parameter) or {}).values()) if parameter.requires_grad else ():
                hook(parameter)

    # As torch's own methods do, which refuse frozen parameters.
    carried, accumulated = OrderedDict[int, Any](gradient_hooks(stacked) or {}), OrderedDict[int, Any]()
    carried[RemovableHandle(carried).id] = before
    accumulated[RemovableHandle(accumulated).id] = after
    set_hooks_of_tensor(stacked, carried, accumulated)


def _is_tied(stacked: nn.Parameter, members: Sequence[nn.Parameter], shard: ExpertShard) -> bool:
    rows = {expert: row for row, expert in enumerate(shard.experts)}
    start, shape = stacked.data_ptr(), shard.full_shape[1:]
    step = shape.numel() * stacked.element_size()
    for expert, parameter in enumerate(members):
        row = rows.get(expert)
        if parameter.dtype != stacked.dtype or not is_member_shard(shard_of(parameter)):
            return False
        if row is None:
            if parameter.numel():
                return False
        elif parameter.data_ptr() != start + row * step or parameter.shape != shape:
            return False
    return True


def _dealt(stacked: nn.Parameter, own: Sequence[nn.Parameter]) -> torch.Tensor | None:
    """Return the tensor whose rows are the gradients of ``own``, but for frozen ones; None if there is none."""
    there = [(row, p.grad) for row, p in enumerate(own) if p.grad is not None]
    first, one = there[0]
    if any(p.grad is None and p.requires_grad for p in own) or one.dtype != stacked.dtype:
        return None
    step, memory = stacked.stride(0), one.untyped_storage()
    start = one.storage_offset() - first * step
    if start < 0 or (start + len(own) * step) * one.element_size() > memory.nbytes():
        return None
    for row, gradient in there:
        if (
            gradient.untyped_storage().data_ptr() != memory.data_ptr()
            or gradient.storage_offset() != start + row * step
        ):
            return None
        if gradient.stride() != stacked.stride()[1:]:
            return None
    return one.as_strided(stacked.shape, stacked.stride(), start)
