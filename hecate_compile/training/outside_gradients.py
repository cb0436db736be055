"""Average gradients of replicated parameters from outside of the compiled forward when the backward ends.

The graph averages a gradient where it is made. A parameter may get others, too: from a head that a chunked loss uses
again, a regularizer, ``nn.LSTM``, a second forward. Averaging is idempotent, so ``param.grad`` is averaged once more
whenever it is not certain that the graph's own gradient arrived alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hecate.passes.captured.bucket_gradients import BUCKET_BYTES
from hecate.private import backward_number, gradient_hooks, in_backward, tree_leaves, version_of, when_backward_ends
from hecate.runtime.comm import collectives
from hecate.runtime.comm.agreement import agree
from hecate.runtime.comm.warn import warn_together
from hecate.runtime.ops.gradients import GradientSync, ReplicatedParameter
from hecate.runtime.state.step_mode import StepMode


@dataclass(frozen=True)
class _Watched:
    parameter: weakref.ref[Tensor]
    record: ReplicatedParameter

    @property
    def holders(self) -> Sequence[Tensor]:
        """The parameters that have the gradient when a backward is over: itself, or those it was dealt out to."""
        if self.record.holders is not None:
            return self.record.holders()
        parameter = self.parameter()
        return (parameter,) if parameter is not None else ()


@dataclass(frozen=True)
class _Edges:
    """The targets of the edges of a compiled backward, by position."""

    watched: tuple[tuple[int, ReplicatedParameter], ...]
    # Targets that are no parameter: an earlier part of the forward, if the graph broke.
    others: tuple[int, ...]


class _Sent:
    """The gradients that compiled backwards have sent to parameters, by address and version."""

    def __init__(self, watched: dict[int, _Watched], ran: Callable[[], None]) -> None:
        self._watched, self._ran = watched, ran
        # With the backward that sent them: one for inputs alone, as zero-bubble pipelines have, sends others in vain.
        self._of: dict[int, list[tuple[int, tuple[int, int]]]] = {}
        # By the class of the autograd node: every compiled graph has a class of its own.
        self._edges: weakref.WeakKeyDictionary[type, _Edges] = weakref.WeakKeyDictionary()

    def forget(self) -> None:
        self._of.clear()

    def take(self, record: ReplicatedParameter) -> list[tuple[int, int]]:
        """Return what the backward that runs has sent."""
        return [sent for number, sent in self._of.pop(record.id, []) if number == backward_number()]

    def follow(self, out: Any) -> None:
        """Let the compiled backwards that an output leads to tell what they send to which parameter."""
        seen: set[Any] = set()
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        nodes: list[Any] = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            name, followed = node.name(), node.next_functions
            if name.startswith("CompiledFunction"):
                edges = self._edges.get(type(node))
                if edges is None:
                    edges = self._edges[type(node)] = self._find(followed)
            elif name.startswith("_Replicate"):
                # A frame that Dynamo left to Python.
                edges = self._find(followed)
            else:
                nodes += [before for before, _ in followed if before is not None]
                continue
            nodes += [followed[index][0] for index in edges.others]
            node.register_hook(lambda sent, _, edges=edges: self._note(edges, sent))

    def _find(self, followed: Iterable[tuple[Any, int]]) -> _Edges:
        watched, others = [], []
        for index, (node, _) in enumerate(followed):
            leaf = getattr(node, "variable", None)
            if leaf is None and node is not None:
                others.append(index)
            elif (found := self._watched.get(id(leaf))) is not None and found.parameter() is leaf:
                watched.append((index, found.record))
        return _Edges(tuple(watched), tuple(others))

    def _note(self, edges: _Edges, sent: tuple[Tensor | None, ...]) -> None:
        self._ran()
        for index, record in edges.watched:
            grad = sent[index]
            if grad is not None:
                self._of.setdefault(record.id, []).append((backward_number(), _where(grad)))


class OutsideGradients:
    """Watches the replicated parameters of one model.

    =========  ========================================  ===================================================
    parameter  how it comes to this                      what happens when a backward ends
    =========  ========================================  ===================================================
    frozen     it had no gradient when it was looked at  nothing; watched from the next forward after it has
    averaged   the graph's own gradient arrived alone    nothing: it was averaged in the graph
    unsure     anything else arrived                     averaged; forgotten if the backward failed
    local      synchronization was off                   nothing while it is off; then averaged, unless the
                                                         graph's own gradient took it along
    =========  ========================================  ===================================================

    Ranks meet at the end of a backward from the first on in which some rank was unsure, so they must be unsure alike.
    Where Python around the graphs uses parameters they meet at the end of each, and need not: a gradient that a rank
    has not is zero there.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        # By identity of the parameter; all others by number of the record.
        self._watched: dict[int, _Watched] = {}
        self._frozen: dict[int, ReplicatedParameter] = {}
        self._unsure: dict[int, _Watched] = {}
        self._local: dict[int, _Watched] = {}
        # Versions of the parameters when their gradient was first left local.
        self._versions: dict[int, int] = {}
        self._own_hooks: set[int] = set()
        self._sent = _Sent(self._watched, self.backward_ran)
        # A comparison is due at the end of this backward; one was due before, so that all of them compare.
        self._queued, self._outside = False, False
        self._warned = False

    @property
    def averages(self) -> bool:
        """True once a backward has ended with averages, or will: all ranks compare in each from then on."""
        return self._meets or bool(self._local) or not self._sync.in_graph

    @property
    def _meets(self) -> bool:
        return self._outside or self._sync.in_python

    @property
    def stepped_apart(self) -> bool:
        """Tell whether parameters were changed while their gradients were local, as in local SGD."""
        return any(
            (p := watched.parameter()) is not None and version_of(p) != self._versions[id]
            for id, watched in self._local.items()
        )

    @property
    def synchronizes(self) -> bool:
        return self._sync.switches.enabled

    def watch(self, record: ReplicatedParameter) -> None:
        parameter = record.parameter
        if self._sync.world.group is None:
            return
        if not parameter.requires_grad:
            self._frozen[record.id] = record
            return
        self._frozen.pop(record.id, None)
        watched = self._watched[id(parameter)] = _Watched(weakref.ref(parameter), record)
        self._own_hooks.add(parameter.register_hook(lambda grad: self._arrived(watched, grad)).id)

    def before_forward(self, mode: StepMode) -> None:
        """Find out, where gradients were left local, whether hooks are given gradients on any rank. A collective."""
        sync = self._sync
        if sync.world.group is None or not (
            sync.in_graph and sync.switches.owed and sync.switches.enabled and mode.training
        ):
            return
        mine = any(
            number not in self._own_hooks
            for watched in self._watched.values()
            if watched.record.holders is None
            for number in gradient_hooks(watched.parameter()) or ()
        )
        found = torch.tensor(mine, dtype=torch.uint8, device=sync.world.control_device)
        sync.world.queue.drain()
        collectives.all_reduce(found, sync.world, op=ReduceOp.MAX)
        sync.hooked = bool(found)

    def after_forward(self, out: Any) -> None:
        """Follow the gradients of this forward, and of parameters that were unfrozen."""
        if self._sync.world.group is None:
            return
        if not in_backward():
            # No backward runs, so notes of one that failed are of no use.
            self._sent.forget()
            self._unsure.clear()
            self._queued = False
        for record in [r for r in self._frozen.values() if r.exists and r.parameter.requires_grad]:
            self.watch(record)
        self._sent.follow(out)

    def _arrived(self, watched: _Watched, grad: Tensor | None) -> None:
        record, parameter = watched.record, watched.parameter()
        if parameter is None or self._watched.get(id(parameter)) is not watched:
            # The record is of another parameter by now.
            return
        sent, averaged = self._sent.take(record), record.take_averaged()
        if grad is None:
            return
        if not self._sync.switches.enabled:
            if record.id not in self._local:
                self._local[record.id], self._versions[record.id] = watched, version_of(parameter)
            return
        # The gradient is the one that the graph sent, untouched: nothing was added on the way.
        certain = averaged and sent == [_where(grad)]
        # A local gradient goes along with the graph's all-reduce, or is averaged below.
        if record.holders is None:
            self._local.pop(record.id, None)
        if not certain:
            self._unsure[record.id] = watched
        if not certain or self._meets or self._local:
            self._queue()

    def backward_ran(self) -> None:
        """Come to the meeting also from a backward that gives no gradient to parameters that are watched."""
        if self._sync.in_python and self._sync.switches.enabled:
            self._queue()

    def _queue(self) -> None:
        if not self._queued:
            self._queued = True
            when_backward_ends(self._average_due)

    def _average_due(self) -> None:
        """Average, at the end of a backward, the gradients that may differ between ranks. A collective."""
        due, unsure = self._local | self._unsure, self._unsure
        self._local, self._unsure, self._queued = {}, {}, False
        if not due and not self._meets:
            return
        world = self._sync.world
        if self._sync.in_python or not self._sync.in_graph:
            everything = sorted(self._watched.values(), key=lambda watched: watched.record.id)
            names = [watched.record.name for watched in everything]
            agree(names, "which parameters are trained", "Freeze and add the same ones on every rank.", world)
            self._average(self._gradients_anywhere(everything, due))
            return
        here = [due[id] for id in sorted(due)]
        # What is dealt out to others is averaged here whenever it was left local, and comes from the graph.
        outside = [watched for watched in here if watched.record.holders is None or watched.record.id in unsure]
        self._outside = self._outside or bool(outside)
        agree(
            [watched.record.name for watched in here],
            "which parameters get gradients from outside of the compiled forward",
            "What is computed outside of it must use the same parameters on every rank, also where the local "
            "batch has nothing for them.",
            world,
        )
        self._warn(outside)
        for watched in here:
            _require_gradient(watched)
        if all(watched.record.holders is None for watched in here):
            self._average([p.grad for watched in here for p in watched.holders if p.grad is not None])
        else:
            # The experts that have one may be others on each rank.
            self._average(self._gradients_anywhere(here, due))

    def _gradients_anywhere(self, watched: Sequence[_Watched], due: dict[int, _Watched]) -> list[Tensor]:
        """Return the gradients of parameters that got one on any rank; where one got none it gets zeros."""
        world = self._sync.world
        # torch.autograd.grad calls the hooks too, and leaves no .grad.
        holders = [(one.record.id in due, holder) for one in watched for holder in one.holders]
        mine = [is_due and holder.grad is not None for is_due, holder in holders]
        used = torch.tensor(mine, dtype=torch.uint8, device="cpu").to(world.device)
        collectives.all_reduce(used, world, op=ReduceOp.MAX)
        found = [holder for (_, holder), anywhere in zip(holders, used.tolist(), strict=True) if anywhere]
        for holder in found:
            if holder.grad is None:
                holder.grad = torch.zeros_like(holder)
        return [holder.grad for holder in found if holder.grad is not None]

    @torch.no_grad()
    def _average(self, gradients: Iterable[Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in map(collectives.part_of, gradients):
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for same in by_dtype.values():
            for bucket in _buckets(same):
                self._average_bucket(bucket)

    def _average_bucket(self, gradients: list[Tensor]) -> None:
        dtype = self._sync.travels_as(gradients[0].dtype)
        buffer = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(dtype)
        self._sync.average(buffer)
        for gradient, part in zip(gradients, buffer.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def _warn(self, unsure: list[_Watched]) -> None:
        if self._warned or not unsure:
            return
        self._warned = True
        warn_together(
            f"hecate: gradients of {unsure[0].record.name} and {len(unsure) - 1} more parameters do not come from "
            "one compiled forward alone: something outside of it uses them, or several forwards share one backward. "
            "They are averaged once more when such a backward ends: right, but not hidden behind compute.",
            self._sync.world.rank,
            stacklevel=2,
        )


def _where(gradient: Tensor) -> tuple[int, int]:
    """Return the address and the version of what this rank has of a gradient."""
    here = collectives.part_of(gradient)
    return here.data_ptr(), version_of(here)


def _require_gradient(watched: _Watched) -> None:
    if watched.record.holders is None and any(holder.grad is None for holder in watched.holders):
        raise RuntimeError(
            f"hecate: {watched.record.name} has no gradient when its backward ends: something stepped or cleared it "
            "inside the backward, before what came from outside of the compiled forward was averaged. Step after it."
        )


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield gradients in buckets about as large as the graph's own: all at once would be a second copy of all."""
    bucket, size = [], 0
    for gradient in gradients:
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
