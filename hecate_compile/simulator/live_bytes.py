"""Bytes that every rank holds during a step: states, slots, and results of operators while somebody needs them.

- A result is alive from its operator to its last user, in the backward if it is saved. Other results of the forward
  but the loss are dropped when it returns.
- Views own nothing. Nothing is fused or written over another's memory, so Inductor's peak is lower.
- A collective holds its results and buffers from its start to its wait.
- Memory inside other operators, of the batch, the process and the allocator's gaps is not counted.
- Gradients are cleared to None between steps. The optimizer needs no memory besides its states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import sympy
import torch
from torch.fx import Graph, Node

from hecate.passes.final.node_cost import Clock, bytes_of, bytes_of_sums, tensors_of, wire_bytes
from hecate.passes.fx import arguments_of, calls, is_getitem, is_view
from hecate.private import tree_leaves
from hecate.runtime.comm.collective import start_of, wait_of
from hecate.simulator.capture import Capture
from hecate.simulator.program import Floats, RankSizes, Symbols, function_of, learn_sizes, rank_sizes
from hecate.simulator.replay import LayerStep

Kind = Literal["activations", "gathered", "gradients"]
# Numbers of the storages that a tensor lies in: one, or none if it is a state or empty.
Storages = tuple[int, ...]
KINDS: tuple[Kind, ...] = ("activations", "gathered", "gradients")


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of each rank, ``[W]``: states, which stay, and the peak of everything.

    Parts of the peak are ``gradients`` of parameters, ``gathered`` parameters and replicas, and ``activations``, all
    else; ``most_activations`` is their most, whenever that is.
    """

    states: Floats
    peak: Floats
    gradients: Floats
    gathered: Floats
    activations: Floats
    most_activations: Floats


@dataclass(kw_only=True)
class _Storage:
    """Memory behind one or several tensors, alive at all positions from ``born`` to ``last``."""

    size: sympy.Expr
    kind: Kind
    born: int
    last: int


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    """Storages that a collective holds: results, buffers until its wait, and ``passing`` until just before it."""

    results: list[Storages]
    buffers: Storages = ()
    passing: Storages = ()


class LiveBytes:
    """Walks through a captured step and adds up live storages."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        symbols: Symbols = {}
        clocks = [Clock(captured.graph, captured.context) for captured in capture.graphs]
        for captured in capture.graphs:
            learn_sizes(captured.graph.graph.nodes, symbols)
        forward, backward = (captured.graph.graph for captured in capture.graphs)
        walk = _Walk(symbols)
        walk.forward(forward, saves=sum(not _is_tangent(node) for node in backward.find_nodes(op="placeholder")))
        walk.backward(backward)
        self._length = walk.position + 1
        # Lifetimes of equal size are added up together.
        changes: dict[tuple[sympy.Expr, Kind], Counter[int]] = {}
        for storage in walk.storages:
            if storage.size != 0:
                change = changes.setdefault((storage.size, storage.kind), Counter())
                change[storage.born] += 1
                change[storage.last + 1] -= 1
        self._lifetimes: list[tuple[Callable[[RankSizes], Sequence[Floats]], Kind, Counter[int]]] = [
            (function_of([size], clocks[-1], symbols), kind, change) for (size, kind), change in changes.items()
        ]

    def step(self, layers: Sequence[LayerStep], *, optimizer_bytes: float) -> StepMemory:
        """Return the bytes of the step with this routing of each layer, in the order of the captured model's.

        ``optimizer_bytes`` are of one parameter besides itself and its gradient: 8 for AdamW in fp32, 12 with a
        master copy.
        """
        capture = self._capture
        sizes = rank_sizes([layer.id for layer in capture.layers], layers)
        world_size = len(layers[0].rows)
        dense = sum(count * (size + optimizer_bytes) for count, size in capture.dense)
        states = np.full(world_size, dense, dtype=np.float64)
        for layer in capture.layers:
            own = sizes[layer.id, "owned"] * layer.sizes.expert_bytes
            states += own * (1 + optimizer_bytes / layer.dtype.itemsize)
        alive = {kind: np.zeros((self._length + 1, world_size)) for kind in KINDS}
        for function, kind, change in self._lifetimes:
            (size,) = function(sizes)
            positions, counts = np.array(list(change)), np.array(list(change.values()), dtype=np.float64)
            alive[kind][positions] += counts[:, None] * size
        for timeline in alive.values():
            np.cumsum(timeline, axis=0, out=timeline)
        total = sum(alive.values(), start=np.zeros(()))
        when, ranks = total.argmax(0), np.arange(world_size)
        parts = {kind: alive[kind][when, ranks] for kind in KINDS}
        return StepMemory(
            states=states,
            peak=states + total[when, ranks],
            most_activations=alive["activations"].max(0),
            gradients=parts["gradients"],
            gathered=parts["gathered"],
            activations=parts["activations"],
        )


class _Walk:
    """The storages of graphs that run one after the other, and when they live; adds its own to ``symbols``."""

    def __init__(self, symbols: Symbols) -> None:
        self._symbols = symbols
        self.storages: list[_Storage] = []
        self.position = 0
        # Storages of every tensor that the forward saves, in order.
        self._saved: list[Storages] = []

    def forward(self, graph: Graph, *, saves: int) -> None:
        """Walk through the forward, whose last ``saves`` results are for the backward."""
        # The inputs are parameters, which are states, and the batch.
        held = self._run(graph, {})
        self._saved = [held[node][0] for node in _results(graph)[-saves:] if _is_tensor(node)] if saves else []

    def backward(self, graph: Graph) -> None:
        held: dict[Node, list[Storages]] = {}
        saved = iter(self._saved)
        self.position += 1
        for node in graph.nodes:
            if node.op == "placeholder" and _is_tensor(node):
                held[node] = [self._new(bytes_of(node.meta["val"])) if _is_tangent(node) else next(saved)]
        if next(saved, None) is not None:
            raise LookupError("hecate: the forward saves more than the backward takes")
        held = self._run(graph, held)
        self.position += 1
        for node in _results(graph):
            for number in held[node][0] if _is_tensor(node) else ():
                self.storages[number].last = self.position
                self.storages[number].kind = "gradients"

    def _run(self, graph: Graph, held: dict[Node, list[Storages]]) -> dict[Node, list[Storages]]:
        """Return the storages of every result of each node; a tensor has one result, with one storage or none."""
        in_flight: dict[Node, _InFlight] = {}
        for node in graph.nodes:
            self.position += 1
            for source in node.all_input_nodes:
                # Later collectives name an earlier one's start for the order alone.
                self._touch(held.get(source, ()))
            if node.op != "call_function":
                held.setdefault(node, [()])
            elif start_of(node.target) is not None:
                in_flight[node] = self._start(node)
            elif wait_of(node.target) is not None:
                held[node] = self._wait(node, in_flight)
            elif is_getitem(node):
                whole, index = node.args
                assert isinstance(whole, Node) and isinstance(index, int)
                held[node] = [held[whole][index if len(held[whole]) > 1 else 0]]
            elif is_view(node) or calls(node, torch.ops.aten._unsafe_view):
                # Their memory is that of the first argument.
                first = tree_leaves(node.args)[0]
                held[node] = held[first] if isinstance(first, Node) else [()]
            else:
                held[node] = self._results(node, "activations")
        return held

    def _start(self, start: Node) -> _InFlight:
        collective = start_of(start.target)
        (wait,) = (user for user in start.users if wait_of(user.target) is not None)
        assert collective is not None
        sent = wire_bytes(start, tensors_of(start))
        if collective.carries == "bucket":
            # Its one buffer is its result, if that need not be cast.
            results = self._results(wait, "activations")
            cast = sent != bytes_of(wait.meta["val"])
            return _InFlight(results=results, buffers=self._new(sent)) if cast else _InFlight(results=results)
        if collective.carries == "rows":
            buffers = self._new(sent + wire_bytes(start, [wait]))
            return _InFlight(results=self._results(wait, "activations"), buffers=buffers)
        if collective.carries != "replicas":
            kind: Kind = "gathered" if collective.role == "gather" else "activations"
            return _InFlight(results=self._results(wait, kind), buffers=self._new(sent))
        if collective.role != "reduce":
            arriving = bytes_of(wait.meta["val"])
            leaving = self._leaving(arriving)
            # Buffers are copies of experts that leave; passing are those chosen for a stage, packed, and replicas as
            # they came.
            buffers, passing = self._new(leaving), self._new(2 * leaving + arriving)
            return _InFlight(results=self._results(wait, "gathered"), buffers=buffers, passing=passing)
        replicas = [node.meta["val"] for node in arguments_of(start)["replicas"]]
        # Buffers are gradients of replicas, packed, and sums of those for which parts come; passing are the parts.
        buffers = self._new(bytes_of(replicas) + self._leaving(bytes_of_sums(replicas)))
        passing = self._new(self._leaving(bytes_of(replicas)))
        return _InFlight(results=self._results(wait, "activations"), buffers=buffers, passing=passing)

    def _wait(self, wait: Node, in_flight: dict[Node, _InFlight]) -> list[Storages]:
        (start,) = (node for node in wait.all_input_nodes if node in in_flight)
        found = in_flight[start]
        self._touch([*found.results, found.buffers])
        for number in found.passing:
            self.storages[number].last = self.position - 1
        return found.results

    def _leaving(self, replicas: sympy.Expr) -> sympy.Expr:
        """Turn bytes of a rank's replicas into bytes of own experts that others have, each counted once."""
        for symbol in replicas.free_symbols:
            meaning = self._symbols.get(symbol)
            if meaning is not None and meaning.what == "replicas":
                leaving = sympy.Symbol(f"leaving_{meaning.layer}")
                self._symbols[leaving] = meaning._replace(what="leaving")
                replicas = replicas.subs(symbol, leaving)
        return replicas

    def _results(self, node: Node, kind: Kind) -> list[Storages]:
        value = node.meta.get("val")
        parts = value if isinstance(value, (tuple, list)) else [value]
        return [self._new(bytes_of(part), kind) for part in parts]

    def _new(self, size: sympy.Expr, kind: Kind = "activations") -> Storages:
        if size == 0:
            return ()
        self.storages.append(_Storage(size=size, kind=kind, born=self.position, last=self.position))
        return (len(self.storages) - 1,)

    def _touch(self, results: Iterable[Storages]) -> None:
        for storages in results:
            for number in storages:
                self.storages[number].last = self.position


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _is_tangent(node: Node) -> bool:
    return node.name.startswith("tangents")


def _results(graph: Graph) -> list[Any]:
    (output,) = graph.find_nodes(op="output")
    return list(output.args[0])


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the rank that has most: parameters, gradients and optimizer states; and slots.

    Slots hold replicas from a layer's forward to its backward (of two layers with re-materialization), and gradients
    of one layer's replicas and own experts on their way; 0 for a policy that never replicates.
    """

    states: float
    slots: float


def count_memory(
    made: Capture, step: Sequence[LayerStep], *, optimizer_bytes: float, rematerialize: bool = False
) -> Memory:
    """Add up the bytes of one step; ``optimizer_bytes`` are as in ``LiveBytes.step``."""
    dense = sum(count * (2 * size + optimizer_bytes) for count, size in made.dense)
    owned = np.zeros(len(step[0].rows))
    held, sent = [], []
    for layer, routed in zip(made.layers, step, strict=True):
        per_rank = np.asarray(routed.placement.owners.counts, dtype=np.float64)
        owned += per_rank * layer.sizes.expert_bytes * (2 + optimizer_bytes / layer.dtype.itemsize)
        _, ranks = routed.placement.pairs
        sent.append(np.bincount(ranks, minlength=len(per_rank)) * float(layer.sizes.expert_bytes))
        held.append(sent[-1] - per_rank * layer.sizes.expert_bytes)
    most = np.sort(held, axis=0)[::-1]
    slots = (most[:2] if rematerialize else most).sum(0) + np.max(sent, axis=0)
    if not made.graphs[0].context.replicates:
        slots = np.zeros_like(slots)
    worst = int(np.argmax(owned + slots))
    return Memory(states=float(dense + owned[worst]), slots=float(slots[worst]))
