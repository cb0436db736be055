"""A program: a compiled graph as a list of compute, and of collectives that start and are waited for.

Sizes that depend on routing stay symbols, which stand for a layer's rows, replicas and shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import sympy
import torch
from numpy.typing import NDArray
from torch.fx import Node

from hecate.graph.lowering import Captured
from hecate.passes.final.node_cost import Clock, bytes_of, flops, memory_bytes, payload_of, wire_itemsize
from hecate.passes.fx import arguments_of, calls, is_getitem
from hecate.runtime.comm.collective import Collective, collective_named, start_of, wait_of
from hecate.runtime.ops.gradients import REPLICATED
from hecate.runtime.ops.ticket import TICKET_PARTS
from hecate.simulator.replay import LayerStep

Floats = NDArray[np.float64]
Among = Literal["group", "twins", "everyone"]
# "leaving" counts own experts of which other ranks have replicas.
What = Literal["rows", "replicas", "owned", "leaving"]
# Counts of a layer on every rank: (layer id, what) -> [W].
RankSizes = Mapping[tuple[int, What], Floats]


class Meaning(NamedTuple):
    """The meaning of an unbacked size; ``share`` is the part of a layer's rows that one chunk has."""

    layer: int
    what: What
    share: float = 1.0


Symbols = dict[sympy.Symbol, Meaning]


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Operators between two collectives, as (operations, bytes); ``routed`` are functions that return two ``[W]``."""

    operators: int
    fixed: tuple[tuple[float, float], ...]
    routed: tuple[Callable[[RankSizes], list[Floats]], ...]


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start of collective ``token`` of this program; ``unit`` is bytes of a row or an expert, else of all.

    It is ``among`` the ranks of a group, those that have the same experts, or everyone.
    """

    token: int
    operator: str
    layer: int | None
    unit: float
    among: Among = "group"

    @property
    def collective(self) -> Collective:
        return collective_named(self.operator)


@dataclass(frozen=True)
class Wait:
    """The wait of compute for the result of the collective with this number."""

    token: int


Item = Compute | Start | Wait


def program_of(captured: Captured, symbols: Symbols) -> list[Item]:
    """Translate one graph; the forward fills ``symbols``, meanings of unbacked sizes, and the backward uses them."""
    graph = captured.graph.graph
    clock = Clock(captured.graph, captured.context)
    learn_sizes(graph.nodes, symbols)
    items: list[Item] = []
    tokens: dict[Node, int] = {}
    pending: list[Node] = []

    def flush() -> None:
        if pending:
            items.append(_compute(pending, clock, symbols))
            pending.clear()

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if start_of(node.target) is not None:
            flush()
            tokens[node] = len(tokens)
            items.append(_start(node, tokens[node], clock, symbols))
        elif wait_of(node.target) is not None:
            flush()
            items.append(Wait(tokens[node.args[0]]))
        elif not is_getitem(node):
            pending.append(node)
    flush()
    return items


def learn_sizes(nodes: Any, symbols: Symbols) -> None:
    """Note which symbol is which size; the order of results is that of ``hecate.runtime.ops``."""
    hecate = torch.ops.hecate
    for node in nodes:
        value = node.meta.get("val")
        if calls(node, hecate.place, hecate.calibrate):
            _note(symbols, value[1].shape[0], arguments_of(node)["layer"], "replicas")
        elif calls(node, hecate.route):
            chunks = len(value) // TICKET_PARTS
            for chunk in range(chunks):
                arriving = value[TICKET_PARTS * chunk + 3].shape[0]
                _note(symbols, arriving, arguments_of(node)["layer"], "rows", 1 / chunks)


def _note(symbols: Symbols, size: Any, layer: int, what: What, share: float = 1.0) -> None:
    if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
        symbols.setdefault(size.node.expr, Meaning(layer, what, share))


def _compute(nodes: Sequence[Node], clock: Clock, symbols: Symbols) -> Compute:
    fixed, routed, operators = [], [], 0
    for node in nodes:
        operations, moved = sympy.sympify(flops(node)), sympy.sympify(memory_bytes(node))
        if not operations and not moved:
            continue
        operators += 1
        unknown = sorted(operations.free_symbols | moved.free_symbols, key=str)
        if not any(symbol in symbols or symbol not in clock.hints for symbol in unknown):
            fixed.append((float(clock.number(operations)), float(clock.number(moved))))
        else:
            routed.append(function_of([operations, moved], clock, symbols))
    return Compute(operators=operators, fixed=tuple(fixed), routed=tuple(routed))


def function_of(
    expressions: Sequence[sympy.Expr], clock: Clock, symbols: Symbols
) -> Callable[[RankSizes], list[Floats]]:
    """Make a function of :func:`rank_sizes` from expressions in a graph's sizes; it gives ``[W]``, or one for all."""
    unknown = sorted(set().union(*(expression.free_symbols for expression in expressions)), key=str)
    call = sympy.lambdify(list(unknown), list(expressions), modules="numpy")
    layers = [symbols[symbol].layer for symbol in unknown if symbol in symbols]

    def evaluate(sizes: RankSizes) -> list[Floats]:
        any_layer = layers[0] if layers else next(iter(sizes))[0]
        values: list[Any] = []
        for symbol in unknown:
            if symbol in symbols:
                meaning = symbols[symbol]
                values.append(sizes[meaning.layer, meaning.what] * meaning.share)
            elif symbol in clock.hints:
                values.append(float(clock.hints[symbol]))
            else:
                # The length of a shard.
                values.append(sizes[any_layer, "owned"])
        return [np.asarray(value, dtype=np.float64) for value in call(*values)]

    return evaluate


def rank_sizes(ids: Sequence[int], layers: Sequence[LayerStep]) -> RankSizes:
    """Return the rows, replicas and experts that each rank has in a step, by layer id."""
    sizes: dict[tuple[int, What], Floats] = {}
    for id, layer in zip(ids, layers, strict=True):
        experts, ranks = layer.placement.pairs
        owned = np.asarray(layer.placement.owners.counts, dtype=np.float64)
        sizes[id, "rows"] = layer.rows.sum(0).astype(np.float64)
        sizes[id, "owned"] = owned
        sizes[id, "replicas"] = np.bincount(ranks, minlength=len(owned)) - owned
        elsewhere = np.bincount(experts, minlength=len(layer.computed)) > 1
        sizes[id, "leaving"] = np.bincount(layer.placement.owner_array[elsewhere], minlength=len(owned)).astype(float)
    return sizes


def _start(node: Node, token: int, clock: Clock, symbols: Symbols) -> Start:
    collective, arguments = start_of(node.target), arguments_of(node)
    assert collective is not None
    tensors = [part.meta["val"] for part in payload_of(node)]
    if collective.carries == "tickets":
        # Four bytes: a number for each row.
        unit: float = 4
    elif depends_on_routing(collective):
        # The bytes of one line of each tensor.
        unit = float(sum(clock.number(prod(t.shape[1:])) * wire_itemsize(node, t) for t in tensors))
        if collective.carries == "rows":
            # A chunk has its share of every row that travels.
            arriving = arguments["receive_index"].meta["val"].shape[0]
            unit *= symbols[arriving.node.expr].share
    else:
        unit = clock.number(bytes_of(tensors))
    among: Among = "group"
    if collective.carries == "bucket":
        world = REPLICATED[arguments["ids"][0]].sync.world
        among = "everyone" if world is world.everyone else "twins"
    return Start(token=token, operator=collective.name, layer=arguments.get("layer"), unit=float(unit), among=among)


def depends_on_routing(collective: Collective) -> bool:
    """Return whether a collective's bytes depend on rows or on who holds which experts."""
    return collective.carries in ("rows", "tickets", "replicas", "experts")
