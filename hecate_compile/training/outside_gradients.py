"""Gradients of replicated parameters from outside of the compiled forward: averaged when the backward ends.

Inside the graph a gradient is averaged where it is made. What reaches a parameter may be more than that, or something
else: a head that a chunked loss uses again, a regularizer, a module that reads its parameters under other names
(``nn.LSTM``), a second forward. Averaging is idempotent, so it is enough to average ``param.grad`` once more
whenever it is not certain that the graph's own gradient arrived alone.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hecate.runtime.comm import collectives
from hecate.runtime.comm.agreement import agree
from hecate.runtime.ops.gradients import GradientSync, ReplicatedParameter


@dataclass(frozen=True)
class _Watched:
    """A replicated parameter and its record."""

    parameter: weakref.ref[Tensor]
    record: ReplicatedParameter


@dataclass(frozen=True)
class _Edges:
    """Where the edges of a compiled backward lead.

    Attributes:
        watched: position and record of the parameters that are watched.
        others: positions of what is no parameter: an earlier part of the forward, if the graph broke.
    """

    watched: tuple[tuple[int, ReplicatedParameter], ...]
    others: tuple[int, ...]


class OutsideGradients:
    """Watches the replicated parameters of one model.

    Args:
        sync: with synchronization off gradients stay local, wherever they come from.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        self._watched: dict[int, _Watched] = {}
        # What compiled backwards have sent to a parameter: address and version of the gradient.
        self._sent: dict[int, list[tuple[int, int]]] = {}
        self._unsure: dict[int, _Watched] = {}
        # By the class of the autograd node, of which every compiled graph has its own.
        self._edges: weakref.WeakKeyDictionary[type, _Edges] = weakref.WeakKeyDictionary()
        self._warned = False

    def watch(self, record: ReplicatedParameter) -> None:
        """Look at each gradient that arrives at the parameter of ``record``, if it gets any."""
        parameter = record.parameter
        if self._sync.world.group is None or not parameter.requires_grad:
            return
        watched = self._watched[id(parameter)] = _Watched(weakref.ref(parameter), record)
        parameter.register_hook(lambda grad: self._arrived(watched, grad))

    def after_forward(self, out: Any) -> None:
        """Let the compiled backwards behind an output tell what they send to which parameter."""
        if self._sync.world.group is None:
            return
        seen: set[Any] = set()
        nodes: list[Any] = [
            leaf.grad_fn for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.grad_fn is not None
        ]
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
            elif id(leaf) in self._watched:
                watched.append((index, self._watched[id(leaf)].record))
        return _Edges(tuple(watched), tuple(others))

    def _note(self, edges: _Edges, sent: tuple[Tensor | None, ...]) -> None:
        for index, record in edges.watched:
            grad = sent[index]
            if grad is not None:
                self._sent.setdefault(record.id, []).append((grad.data_ptr(), grad._version))

    def _arrived(self, watched: _Watched, grad: Tensor | None) -> None:
        record = watched.record
        sent, averaged = self._sent.pop(record.id, []), record.take_averaged()
        if grad is None or not self._sync.enabled:
            return
        # What the graph sent, untouched: nothing was added on the way.
        if averaged and sent == [(grad.data_ptr(), grad._version)]:
            return
        if not self._unsure:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._average)
        self._unsure[record.id] = watched

    def _average(self) -> None:
        """Average the gradients that are not certainly equal on all ranks. At the end of a backward; a collective."""
        unsure, self._unsure = [self._unsure[id] for id in sorted(self._unsure)], {}
        world = self._sync.world
        agree(
            [watched.record.name for watched in unsure],
            "which parameters get gradients from outside of the compiled forward",
            "What is computed outside of it must use the same parameters on every rank, also where the local batch "
            "has nothing for them.",
            world,
        )
        self._say(unsure)
        gradients = [p.grad for w in unsure if (p := w.parameter()) is not None and p.grad is not None]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        with torch.no_grad():
            for dtype, same in by_dtype.items():
                buffer = torch.cat([gradient.reshape(-1) for gradient in same]).to(self._sync.dtype or dtype)
                collectives.all_reduce(buffer, world)
                buffer.div_(world.size)
                for gradient, part in zip(same, buffer.split([g.numel() for g in same]), strict=True):
                    gradient.copy_(part.view_as(gradient))

    def _say(self, unsure: list[_Watched]) -> None:
        if self._warned or self._sync.world.rank:
            return
        self._warned = True
        warnings.warn(
            f"hecate: gradients of {unsure[0].record.name} and {len(unsure) - 1} more parameters do not come from "
            "one compiled forward alone: something outside of it uses them, or several forwards share one backward. "
            "They are averaged once more when such a backward ends: right, but not hidden behind compute.",
            stacklevel=2,
        )
