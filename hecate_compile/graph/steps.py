"""A graph in pieces as it runs: one step after another, on values that are dropped with their last reader."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch.fx import GraphModule, Node

# Takes a list, which it empties, and returns all results.
Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Pieces:
    """How many pieces a graph was cut into, and how many differ: so many were compiled."""

    all: int
    different: int


@dataclass(frozen=True)
class _Slot:
    """Where a value lies while a graph runs."""

    number: int


@dataclass
class _RunPiece:
    compiled: Boxed
    reads: list[int]
    results: list[int]
    last: list[int] = field(default_factory=list)

    def __call__(self, values: list[Any]) -> None:
        args = [values[number] for number in self.reads]
        # A piece drops each of its inputs as soon as it is done with it.
        for number in self.last:
            values[number] = None
        for number, value in zip(self.results, self.compiled(args), strict=True):
            values[number] = value if number not in self.last else None


@dataclass
class _RunNode:
    target: Any
    arguments: Any
    reads: list[int]
    results: list[int]
    last: list[int] = field(default_factory=list)

    def __call__(self, values: list[Any]) -> None:
        args, kwargs = _filled(self.arguments, values)
        values[self.results[0]] = self.target(*args, **kwargs)
        for number in self.last:
            values[number] = None


def _filled(template: Any, values: list[Any]) -> Any:
    kind = type(template)
    if kind is _Slot:
        return values[template.number]
    if kind is list or kind is tuple:
        return kind([_filled(entry, values) for entry in template])
    return {key: _filled(entry, values) for key, entry in template.items()} if kind is dict else template


@dataclass
class InPieces:
    """A graph that runs piece by piece: takes a list, which it empties, and returns all results."""

    pieces: Pieces
    _steps: list[_RunPiece | _RunNode]
    _results: list[Any]
    _slots: int
    _unread: list[int]
    _boxed_call: bool = True

    def __call__(self, args: list[Any]) -> list[Any]:
        values = args + [None] * (self._slots - len(args))
        args.clear()
        for number in self._unread:
            values[number] = None
        for step in self._steps:
            step(values)
        found: list[Any] = _filled(self._results, values)
        return found


class Program:
    """The steps of a graph, as they are written. ``last`` of a step are the slots that nothing reads behind it."""

    def __init__(self, gm: GraphModule, members: Container[Node]) -> None:
        self._gm, self._members = gm, members
        self._steps: list[_RunPiece | _RunNode] = []
        self._slots: dict[Node, int] = {}
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                self._slot(node)

    def _slot(self, node: Node) -> int:
        return self._slots.setdefault(node, len(self._slots))

    def run_node(self, node: Node) -> None:
        """Add a node, and before it what floats above it."""
        self._compute(node.all_input_nodes)
        target: Any = node.target
        if node.op == "get_attr":
            value = attrgetter(target)(self._gm)
            self._steps.append(_RunNode(lambda: value, ((), {}), [], [self._slot(node)]))
            return
        reads = [self._slots[source] for source in node.all_input_nodes]
        self._steps.append(_RunNode(target, self._template((node.args, node.kwargs)), reads, [self._slot(node)]))

    def _compute(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node not in self._slots:
                assert node not in self._members, f"{node} is computed by its piece"
                self.run_node(node)

    def _template(self, value: Any) -> Any:
        """Return arguments with slots for nodes, in plain collections."""
        if isinstance(value, Node):
            return _Slot(self._slots[value])
        if isinstance(value, (list, tuple)):
            kind: Any = list if isinstance(value, list) else tuple
            return kind([self._template(entry) for entry in value])
        return {key: self._template(entry) for key, entry in value.items()} if isinstance(value, dict) else value

    def run_piece(self, compiled: Boxed, inputs: Sequence[Node], results: Sequence[Node]) -> None:
        self._compute(inputs)
        reads = [self._slots[node] for node in inputs]
        self._steps.append(_RunPiece(compiled, reads, [self._slot(node) for node in results]))

    def finished(self, pieces: Pieces) -> InPieces:
        output = self._gm.graph.output_node()
        self._compute(output.all_input_nodes)
        read = {self._slots[node] for node in output.all_input_nodes}
        for step in reversed(self._steps):
            step.last = sorted({*step.reads, *step.results} - read)
            read.update(step.reads)
        # What no step writes was given.
        unread = set(self._slots.values()) - read - {number for step in self._steps for number in step.results}
        results = list(self._template(output.args[0]))
        return InPieces(pieces, self._steps, results, len(self._slots), sorted(unread))
