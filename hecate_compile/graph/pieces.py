"""Piecewise compile: cut a scheduled graph at Hecate's operators, and compile pieces that are alike once.

A deep model repeats its layers: between Hecate's operators the same few pieces come again and again. Which layer it
is stands in the operators alone, so the schedule across layers stays as it is. vLLM cuts graphs at attention in the
same way, and calls it piecewise compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from hecate.graph.steps import Boxed, InPieces, Pieces, Program
from hecate.passes.fx import calls, fake_mode_of, is_foreign_collective, is_getitem, is_view, reached
from hecate.private import OpOverload, symbolic_shapes

# Compiles a piece, given fake inputs and the numbers of those that never move in memory.
CompilePiece = Callable[[GraphModule, list[Any], list[int]], Boxed]


def compile_in_pieces(gm: GraphModule, compile_piece: CompilePiece, static: Iterable[int] = ()) -> InPieces:
    """Compile ``gm``, an ATen graph with fake values after all of Hecate's passes, piece by piece.

    ``static`` are the numbers of inputs that never move in memory. Raises RuntimeError if a piece has a size that is
    no node of the graph.
    """
    cut, known = _Cut(gm, set(static)), dict[Any, Boxed]()
    program = Program(gm, cut.piece_of)
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
        piece_of: the number of the piece that a node is a member of.
        members: the nodes of each piece, by its number.
        alone_before: for each number, the nodes that run by themselves behind the piece before and before this one.
    """

    def __init__(self, gm: GraphModule, static: set[int]) -> None:
        nodes = list(gm.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self._static = {node for number, node in enumerate(placeholders) if number in static}
        self._order = {node: number for number, node in enumerate(nodes)}
        self._alone: set[Node] = set(placeholders)
        self.piece_of: dict[Node, int] = {}
        self.members: dict[int, list[Node]] = {}
        self.alone_before: list[list[Node]] = [[]]
        self._assign(nodes)
        # Written into the graph behind what they are sizes of, and so of no piece.
        self._sizes = _Sizes(gm, nodes)
        self._drafts = {number: self._draft(members) for number, members in self.members.items()}
        self._asked = {size for draft in self._drafts.values() for size in draft.sizes}

    def _assign(self, nodes: list[Node]) -> None:
        # An assertion may look at a number that its piece returns, so it comes behind.
        assertions: list[Node] = []
        for node in nodes:
            if node.op in ("placeholder", "output") or self._floats(node):
                continue
            source = node.all_input_nodes[0] if is_getitem(node) else None
            if source in self.piece_of:
                self._put(node, self.piece_of[source])
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
        self.piece_of[node] = number
        self.members.setdefault(number, []).append(node)

    def _floats(self, node: Node) -> bool:
        """Return whether a node is written again wherever it is read.

        A view of a buffer that is written later, too: a piece that is given both as inputs would not know that they
        share memory.
        """
        if node.op == "get_attr":
            return True
        if is_getitem(node):
            source = node.all_input_nodes[0]
            return source not in self._alone and source not in self.piece_of
        if is_view(node):
            return str(node.target) not in _MAY_COPY
        return _is_number(node) and not node.meta.get("unbacked_bindings")

    def _draft(self, members: Sequence[Node]) -> _Draft:
        above = reached(members, lambda node: filter(self._is_afloat, node.all_input_nodes))
        inside = sorted([*above, *members], key=self._order.__getitem__)
        mine = set(inside)
        outside = dict.fromkeys(source for node in inside for source in node.all_input_nodes if source not in mine)
        bound = {symbol for node in members for symbol in _bound_by(node)}
        symbols = dict.fromkeys(symbol for node in [*outside, *inside] for symbol in _symbols(node))
        sizes = [self._sizes.node_of(symbol) for symbol in symbols if symbol not in bound]
        return _Draft(inside, list(outside), sizes)

    def piece(self, number: int) -> _Piece:
        draft = self._drafts[number]
        inputs = list(dict.fromkeys([*draft.sizes, *draft.outside]))
        return _Piece(
            inputs=inputs,
            # A size that comes from outside is not computed again.
            inside=[node for node in draft.inside if node not in draft.sizes],
            results=[node for node in self.members[number] if self._leaves(node)],
            static=[place for place, node in enumerate(inputs) if node in self._static],
        )

    def _leaves(self, member: Node) -> bool:
        """Return whether anything outside of its piece reads a member, if only by what floats."""
        floating = [member, *reached([member], lambda node: filter(self._is_afloat, node.users))]
        return any(
            node in self._asked
            or any(
                user in self._alone or user.op == "output" or self._is_elsewhere(user, member) for user in node.users
            )
            for node in floating
        )

    def _is_afloat(self, node: Node) -> bool:
        return node.op != "output" and node not in self._alone and node not in self.piece_of

    def _is_elsewhere(self, node: Node, member: Node) -> bool:
        return self.piece_of.get(node, self.piece_of[member]) != self.piece_of[member]


class _Draft(NamedTuple):
    """A piece before it is known what others ask of it.

    ``inside`` are its members with what floats above them, in order, ``outside`` what they read, and ``sizes`` the
    nodes that are sizes in it, but for those that its members find out.
    """

    inside: list[Node]
    outside: list[Node]
    sizes: list[Node]


# Their schema says that they return a view, and they may return a copy.
_MAY_COPY = ("aten.reshape.default", "aten.contiguous.default")

# Inductor's seeds: each place that draws random numbers has the number of its own.
_SEEDS = ("prims.inductor_seeds.default", "prims.inductor_lookup_seed.default")


def _is_cut(node: Node) -> bool:
    mine = isinstance(node.target, OpOverload) and node.target.namespace == "hecate"
    return mine or is_foreign_collective(node)


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


def _symbols(node: Node) -> Any:
    return sorted(symbolic_shapes.free_symbols(node.meta.get("val")), key=str)


def _bound_by(node: Node) -> Iterable[Any]:
    """Return the symbols of sizes that a node finds out, by the names that they have in other nodes."""
    bindings, found = node.meta.get("unbacked_bindings"), fake_mode_of(node.graph)
    if not bindings or found is None:
        return ()
    return symbolic_shapes.resolve_unbacked_bindings(found[1].shape_env, bindings) or ()


class _Sizes:
    """For each symbol in a graph a node that is its number; where only tensors have it, one is written."""

    def __init__(self, gm: GraphModule, nodes: Sequence[Node]) -> None:
        self._graph = gm.graph
        self._nodes: dict[Any, Node] = {}
        self._dims: dict[Any, tuple[Node, int]] = {}
        for node in nodes:
            value = node.meta.get("val")
            if isinstance(value, (torch.SymInt, torch.SymFloat)) and value.node.expr.is_Symbol:
                self._nodes.setdefault(value.node.expr, node)
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    self._dims.setdefault(size.node.expr, (node, dim))

    def node_of(self, symbol: Any) -> Node:
        if symbol not in self._nodes:
            if symbol not in self._dims:
                raise RuntimeError(
                    f"hecate: Config(piecewise=True): no node of this graph is the size {symbol} of one of its "
                    "pieces. Compile it whole: leave piecewise out"
                )
            tensor, dim = self._dims[symbol]
            with self._graph.inserting_after(tensor):
                size = self._graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))
            size.meta["val"] = tensor.meta["val"].shape[dim]
            self._nodes[symbol] = size
        return self._nodes[symbol]


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

        Sizes that only data decide are named in the order of their use; other sizes are those of the batch. What is
        asserted of a size is part of it, as Inductor asserts it in the code.
        """
        names: dict[Any, sympy.Symbol] = {}
        asserted: dict[Any, Any] = {}
        numbers = {node: number for number, node in enumerate([*self.inputs, *self.inside])}

        def size(value: Any) -> str:
            if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return repr(value)
            known: Any = value.node.shape_env
            for symbol in sorted(symbolic_shapes.free_unbacked_symbols(value), key=str):
                if symbol not in names:
                    names[symbol] = sympy.Symbol(f"size{len(names)}_of_{known.bound_sympy(symbol)}")
                    asserted[symbol] = known.deferred_runtime_asserts.get(symbol, ())
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
        results = tuple(numbers[node] for node in self.results)
        promised = sorted(str(one.expr.xreplace(names)) for kept in asserted.values() for one in kept)
        return given, lines, results, tuple(self.static), tuple(promised)
