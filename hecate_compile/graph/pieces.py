"""Piecewise compile: cut a scheduled graph at Hecate's operators, and compile pieces that are alike once.

A deep model repeats its layers: between Hecate's operators the same few pieces come again and again. Which layer it
is stands in the operators alone, so the schedule across layers stays as it is. vLLM cuts graphs at attention in the
same way, and calls it piecewise compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from hecate.graph.steps import Boxed, InPieces, Pieces, Program
from hecate.passes.fx import calls, is_foreign_collective, is_getitem, is_view, reached
from hecate.private import OpOverload, schema_of, symbolic_shapes

# Compiles a piece, given fake inputs and the numbers of those that never move in memory.
CompilePiece = Callable[[GraphModule, list[Any], list[int]], Boxed]


def compile_in_pieces(gm: GraphModule, compile_piece: CompilePiece, static: Iterable[int] = ()) -> InPieces:
    """Compile ``gm``, an ATen graph with fake values after all of Hecate's passes, piece by piece.

    ``static`` are the numbers of inputs that never move in memory. Raises RuntimeError if a piece has a size that is
    no node of the graph.
    """
    cut, program, known = _Cut(gm, set(static)), Program(gm), dict[Any, Boxed]()
    for number, alone in enumerate(cut.alone_before):
        for node in alone:
            program.run_node(node)
        if number in cut.members:
            piece = cut.piece(number)
            key = piece.key
            if key not in known:
                known[key] = compile_piece(piece.graph(gm), piece.examples, piece.static)
            program.run_piece(known[key], piece.inputs, piece.results)
    return program.finished(Pieces(len(cut.members), len(known)))


# --- where a graph is cut ---


class _Cut:
    """A graph, and the pieces that it is cut into.

    A node is a member of a piece, or runs by itself, or floats: views and sizes cost nothing, and are written again
    wherever they are read. So pieces hand each other tensors and not views of them, and the first piece does not have
    the views of all layers' parameters.

    Attributes:
        members: the nodes of each piece, by its number.
        alone_before: for each number, the nodes that run by themselves behind the piece before and before this one.
    """

    def __init__(self, gm: GraphModule, static: set[int]) -> None:
        self.gm, nodes = gm, list(gm.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self._static = {node for number, node in enumerate(placeholders) if number in static}
        self._order = {node: number for number, node in enumerate(nodes)}
        written = {target for node in nodes for target in _written_by(node)}
        # A view of what is written later must be taken where it stands.
        self._changing = written | reached(written, lambda node: filter(_passes_on, node.users))
        self._piece_of: dict[Node, int] = {}
        self._alone: set[Node] = set(placeholders)
        self.members: dict[int, list[Node]] = {}
        self.alone_before: list[list[Node]] = [[]]
        self._assign(nodes)
        self._sizes = _nodes_of_symbols(gm, nodes)

    def _assign(self, nodes: list[Node]) -> None:
        # An assertion may look at a number that its piece returns, so it comes behind.
        assertions: list[Node] = []
        for node in nodes:
            if node.op in ("placeholder", "output") or self._floats(node):
                continue
            source = node.all_input_nodes[0] if is_getitem(node) else None
            if source in self._piece_of:
                self._put(node, self._piece_of[source])
            elif _is_cut(node):
                self.alone_before.append([*assertions, node])
                assertions.clear()
                self._alone.add(node)
            elif calls(node, torch.ops.aten._assert_scalar):
                # Its words name symbols, by which pieces that are alike would differ.
                assertions.append(node)
                self._alone.add(node)
            elif source in self._alone or str(node.target) in _SEEDS:
                self.alone_before[-1].append(node)
                self._alone.add(node)
            else:
                self._put(node, len(self.alone_before) - 1)
        self.alone_before.append(assertions)

    def _put(self, node: Node, number: int) -> None:
        self._piece_of[node] = number
        self.members.setdefault(number, []).append(node)

    def _floats(self, node: Node) -> bool:
        if node.op == "get_attr":
            return True
        if _passes_on(node):
            source = node.all_input_nodes[0]
            of_view = is_view(node) or (source not in self._alone and source not in self._piece_of)
            return of_view and node not in self._changing
        return _is_number(node) and not node.meta.get("unbacked_bindings")

    def piece(self, number: int) -> _Piece:
        members = self.members[number]
        inside = sorted([*self._floating_above(members), *members], key=self._order.__getitem__)
        mine = set(inside)
        outside = dict.fromkeys(source for node in inside for source in node.all_input_nodes if source not in mine)
        bound = {symbol for node in members for symbol in node.meta.get("unbacked_bindings") or ()}
        sizes: dict[Node, None] = {}
        for symbol in dict.fromkeys(symbol for node in [*outside, *inside] for symbol in _symbols(node)):
            if symbol not in bound:
                if symbol not in self._sizes:
                    raise RuntimeError(
                        f"hecate: Config(piecewise=True): no node of this graph is the size {symbol} of one of its "
                        "pieces. Compile it whole: leave piecewise out"
                    )
                sizes[self._sizes[symbol]] = None
        inputs = [*{**sizes, **outside}]
        return _Piece(
            inputs=inputs,
            # A size that comes from outside is not computed again.
            inside=[node for node in inside if node not in sizes],
            results=[node for node in members if self._leaves(node, number)],
            static=[place for place, node in enumerate(inputs) if node in self._static],
        )

    def _floating_above(self, nodes: Iterable[Node]) -> set[Node]:
        """Return the nodes that float and are needed for ``nodes``."""

        def floating(node: Node) -> list[Node]:
            return [source for source in node.all_input_nodes if not {source} & (self._alone | self._piece_of.keys())]

        return reached(nodes, floating)

    def _leaves(self, node: Node, number: int) -> bool:
        """Return whether anything outside of the piece reads a member of it, if only by what floats."""
        return node in self._sizes.values() or any(
            self._piece_of[user] != number
            if user in self._piece_of
            else user in self._alone or user.op == "output" or self._leaves(user, number)
            for user in node.users
        )


# Inductor's seeds: each place that draws random numbers has the number of its own.
_SEEDS = ("prims.inductor_seeds.default", "prims.inductor_lookup_seed.default")


def _is_cut(node: Node) -> bool:
    mine = isinstance(node.target, OpOverload) and node.target.namespace == "hecate"
    return mine or is_foreign_collective(node)


def _passes_on(node: Node) -> bool:
    return is_getitem(node) or is_view(node)


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


def _written_by(node: Node) -> list[Node]:
    """Return the arguments that an operator changes."""
    schema = schema_of(node.target)
    given = zip(schema.arguments, node.args, strict=False) if schema is not None else ()
    return [value for argument, value in given if argument.is_write and isinstance(value, Node)]


def _symbols(node: Node) -> Any:
    return sorted(symbolic_shapes.free_symbols(node.meta.get("val")), key=str)


def _nodes_of_symbols(gm: GraphModule, nodes: Sequence[Node]) -> dict[Any, Node]:
    """Return for each symbol a node that is its number; a size of a tensor gets one."""
    found: dict[Any, Node] = {}
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat)) and value.node.expr.is_Symbol:
            found.setdefault(value.node.expr, node)
    for node in nodes:
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in found:
                with gm.graph.inserting_after(node):
                    number = gm.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                number.meta["val"] = size
                found[size.node.expr] = number
    return found


# --- a piece ---


@dataclass(frozen=True)
class _Piece:
    """A part of a graph.

    Attributes:
        inputs: the nodes that it is given; first those that are sizes in it.
        inside: its nodes, in order, with what floats.
        results: the nodes that it returns.
        static: the numbers of inputs that never move in memory.
    """

    inputs: list[Node]
    inside: list[Node]
    results: list[Node]
    static: list[int]

    @property
    def examples(self) -> list[Any]:
        return [node.meta["val"] for node in self.inputs]

    def graph(self, owner: GraphModule) -> GraphModule:
        """Write it as a graph of its own, with the attributes of ``owner``."""
        graph, new = Graph(), dict[Node, Node]()
        for number, node in enumerate(self.inputs):
            new[node] = graph.placeholder(f"arg{number}_1")
            new[node].meta["val"] = node.meta["val"]
        for node in self.inside:
            new[node] = graph.node_copy(node, new.__getitem__)
        output = graph.output(tuple(new[node] for node in self.results))
        # The other pieces were traced with the strides that its results have in the whole graph.
        output.meta["user_visible_output_idxs"] = list(range(len(self.results)))
        return GraphModule(owner, graph)

    @property
    def key(self) -> Any:
        """What it computes: equal for two that can run the same code.

        Sizes that only data decide are named in the order of their use; other sizes are those of the batch.
        """
        names: dict[Any, sympy.Symbol] = {}
        numbers = {node: number for number, node in enumerate([*self.inputs, *self.inside])}

        def size(value: Any) -> str:
            if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return repr(value)
            for symbol in sorted(symbolic_shapes.free_unbacked_symbols(value), key=str):
                bounds = value.node.shape_env.bound_sympy(symbol)
                names.setdefault(symbol, sympy.Symbol(f"size{len(names)}_of_{bounds}"))
            return str(value.node.expr.xreplace(names))

        def example(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                sizes = (*value.shape, *value.stride(), value.storage_offset())
                return value.dtype, str(value.device), value.ndim, *map(size, sizes)
            return tuple(map(example, value)) if isinstance(value, (list, tuple)) else size(value)

        def argument(value: Any) -> Any:
            if isinstance(value, Node):
                return numbers[value]
            if isinstance(value, (list, tuple)):
                return tuple(map(argument, value))
            if isinstance(value, dict):
                return tuple((key, argument(entry)) for key, entry in value.items())
            return "constant", size(value)

        given = tuple(map(example, self.examples))
        lines = tuple(
            (str(node.target), argument(node.args), argument(node.kwargs), example(node.meta.get("val")))
            for node in self.inside
        )
        return given, lines, tuple(numbers[node] for node in self.results), tuple(self.static)
