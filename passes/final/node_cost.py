"""Cost of a node of an ATen graph: operations (torch's own formulas, and attention's here), bytes and seconds.

Sizes that depend on data get a guess: as many rows arrive as leave, and every slot for a replica is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from hecate.passes.base import PassContext
from hecate.passes.fx import arguments_of, calls, fake_mode_of, is_getitem, is_view
from hecate.private import ATTENTION, ATTENTION_BACKWARD, tree_leaves, tree_map
from hecate.runtime.comm.collective import Collective, collective_of, start_of, wait_of, whole_of
from hecate.runtime.ops.dense import DENSE_SHARDS
from hecate.runtime.ops.gradients import REPLICATED
from hecate.runtime.ops.sparse_collectives import sum_dtype
from hecate.runtime.ops.ticket import TICKET_PARTS
from hecate.runtime.state.layer import get_layer

aten = torch.ops.aten


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
    """Count operations of scores ``[B, H, Q, D] x [B, h, K, D]`` and their product with values ``[B, h, K, V]``."""
    batch, heads, queries, width = query.shape
    return 2 * batch * heads * queries * key.shape[2] * (width + value.shape[3])


def _attention_backward_flops(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> Any:
    """Count operations of scores anew, their gradient and that of values, gradients of queries and of keys."""
    batch, heads, queries, width = query.shape
    return 2 * batch * heads * queries * key.shape[2] * (3 * width + 2 * value.shape[3])


# torch has no formulas for CPUs, and before 2.13 its own refuse fewer heads of keys than of queries.
_ATTENTION: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(ATTENTION, _attention_flops),
    **dict.fromkeys(ATTENTION_BACKWARD, _attention_backward_flops),
}


def _formula_of(node: Node) -> Callable[..., Any] | None:
    packet = getattr(node.target, "overloadpacket", None)
    return _ATTENTION.get(packet) or flop_registry.get(packet)


def is_heavy(node: Node) -> bool:
    """Tell whether a node is a matmul, a convolution or an attention."""
    return _formula_of(node) is not None


def flops(node: Node) -> sympy.Expr:
    """Return floating-point operations of matmuls, convolutions and attention; 0 for all else."""
    formula = _formula_of(node)
    if node.op != "call_function" or formula is None:
        return sympy.S.Zero
    args, kwargs = tree_map(_value, (node.args, node.kwargs))
    return _expression(formula(*args, **kwargs, out_val=_value(node)))


def bytes_of(values: Any) -> sympy.Expr:
    """Return the bytes of all tensors in a tree of fake tensors."""
    return sum(
        (
            _expression(value.numel()) * value.element_size()
            for value in tree_leaves(values)
            if isinstance(value, Tensor)
        ),
        start=sympy.S.Zero,
    )


def bytes_of_sums(grads: Sequence[Tensor]) -> sympy.Expr:
    """Return the bytes of gradients in the dtype in which they are added up."""
    return sum((_expression(grad.numel()) * sum_dtype(grad.dtype).itemsize for grad in grads), start=sympy.S.Zero)


def memory_bytes(node: Node) -> sympy.Expr:
    """Return the bytes that a node reads from memory and writes to it; 0 for views."""
    if node.op != "call_function" or is_getitem(node) or is_view(node):
        return sympy.S.Zero
    return bytes_of([_value(n) for n in node.all_input_nodes]) + bytes_of(_value(node))


class Clock:
    """Seconds of nodes and collectives; sizes that depend on data are learned where the forward makes them."""

    def __init__(self, gm: GraphModule, context: PassContext) -> None:
        self.context, self.guesses = context, context.guesses
        found = fake_mode_of(gm.graph)
        environment = found[1].shape_env if found is not None else None
        # Renamed in torch 2.13.
        old = getattr(environment, "backed_var_to_val", None)
        self.hints: dict[Any, Any] = dict(old if old is not None else getattr(environment, "var_to_val", None) or {})
        self._learn(gm.graph.nodes)

    def _learn(self, nodes: Iterable[Node]) -> None:
        """Guess the data-dependent sizes that arise in a graph."""
        hecate = torch.ops.hecate
        for node in nodes:
            if calls(node, hecate.place, hecate.calibrate) and isinstance(_value(node), (tuple, list)):
                self._guess(_value(node)[1].shape[0], self.context.slots)
            elif calls(node, hecate.route) and isinstance(_value(node), (tuple, list)):
                rows = [user for user in node.users if is_getitem(user) and user.args[1] == 2]
                sent = [
                    user.args[0]
                    for part in rows
                    for user in part.users
                    if (one := whole_of(user.target) or start_of(user.target)) is not None
                    and one.carries == "rows"
                    and not one.homeward
                ]
                if not sent:
                    # All rows cross to a node once, and the node knows the token of each.
                    users = [user for part in rows for user in part.users]
                    sent = [arguments_of(user)["tokens"] for user in users if _routes_nodes(user)]
                if sent:
                    chunks = len(_value(node)) // TICKET_PARTS
                    count = -(-self.number(_value(sent[0]).shape[0]) // chunks)
                    for index, part in enumerate(_value(node)):
                        if index % TICKET_PARTS >= 2:
                            self._guess(part.shape[0], count)
            elif _routes_nodes(node) and isinstance(_value(node), (tuple, list)):
                # The guess is that no two rows of a token go to the same node.
                for part in _value(node)[1:3]:
                    self._guess(part.shape[0], self.number(_value(arguments_of(node)["tokens"]).shape[0]))

    def _guess(self, size: Any, number: int) -> None:
        expression = _expression(size)
        if isinstance(expression, sympy.Symbol):
            self.guesses.setdefault(expression, number)

    def number(self, size: Any) -> int:
        """Return a size as a number."""
        expression = _expression(size)
        # A symbol without a guess or hint is the length of a shard, or a size of which nothing is known.
        known = {s: self.guesses.get(s, self.hints.get(s, self.context.owned)) for s in expression.free_symbols}
        return int(expression.subs(known) if known else expression)

    def seconds(self, node: Node) -> float:
        """Return the compute time of one node: its operations or its bytes, whichever takes longer."""
        if start_of(node.target) is not None or wait_of(node.target) is not None:
            return 0.0
        rates = self.context.rates
        operations, moved = flops(node), memory_bytes(node)
        return max(self.number(operations) / rates.flops, self.number(moved) / rates.memory_bytes)

    def link_seconds(self, start: Node, wait: Node) -> float:
        """Return the seconds of a collective with nothing else on the link."""
        between = _started_by(start).carries == "bucket"
        link = self.context.link_bytes_between_groups if between else self.context.link_bytes
        return self.sent_bytes(start, wait) / link

    def sent_bytes(self, start: Node, wait: Node) -> float:
        """Return the bytes of a collective on this rank's link."""
        context, collective = self.context, _started_by(start)
        payload = sum(self.number(_value(n).numel()) * wire_itemsize(start, _value(n)) for n in payload_of(start))
        if collective.carries == "rows" and collective.homeward and context.room_percent:
            # Rows that return come from a room that is not full: as many rows arrive as leave.
            payload = payload * 100 // context.room_percent
        if collective.carries == "replicas":
            # The payload is the rank's own experts or their gradients.
            return payload * context.slots / max(1, context.owned)
        if collective.role == "gather":
            payload = self.number(bytes_of(_value(wait)))
        ranks = REPLICATED[arguments_of(start)["ids"][0]].sync.world.size if collective.carries == "bucket" else None
        ranks = ranks if ranks is not None else context.world_size
        others = (ranks - 1) / ranks
        return payload * others * max(1, collective.ring_rounds)

    def bytes_in_flight(self, start: Node, wait: Node) -> int:
        """Return the most bytes that parameters or gradients under way hold on any rank: sent, received and sums."""
        arrives, collective, numbers = bytes_of(_value(wait)), _started_by(start), {}
        if collective.carries != "replicas":
            size = arrives + wire_bytes(start, tensors_of(start))
        else:
            gathers = collective.role == "gather"
            replicas = _value(wait) if gathers else [_value(n) for n in arguments_of(start)["replicas"]]
            # A rank sends about as many own experts as it gets replicas, and so many gradients come back.
            size = 2 * bytes_of(replicas)
            if not gathers:
                size += arrives + bytes_of_sums(replicas)
            numbers = dict.fromkeys(_expression(replicas[0].shape[0]).free_symbols, self.context.slots)
        most = max(self.context.owned, self.context.slots)
        return int(size.subs({symbol: numbers.get(symbol, most) for symbol in size.free_symbols}))


def _started_by(start: Node) -> Collective:
    collective = start_of(start.target)
    if collective is None:
        raise LookupError(f"hecate: {start.name} starts no collective")
    return collective


def _routes_nodes(node: Node) -> bool:
    """Tell whether a node tells ranks which rows to pass on inside their nodes."""
    collective = collective_of(node.target) if node.op == "call_function" else None
    return collective is not None and collective.carries == "tickets"


def payload_of(start: Node) -> list[Node]:
    """Return what a collective carries: the rows, or the list of parameters or gradients that comes first."""
    first = next(iter(arguments_of(start).values()))
    return list(first) if isinstance(first, (list, tuple)) else [first]


def wire_itemsize(start: Node, tensor: Tensor) -> int:
    """Return the bytes of one element in a collective, as it travels."""
    arguments, collective = arguments_of(start), _started_by(start)
    if collective.carries == "rows":
        return get_layer(arguments["layer"]).wire_of(tensor).itemsize
    if collective.carries == "bucket":
        return REPLICATED[arguments["ids"][0]].sync.travels_as(tensor.dtype).itemsize
    if collective.carries == "dense" and collective.role == "reduce":
        return (DENSE_SHARDS[arguments["ids"][0]].sync.dtype or tensor.dtype).itemsize
    return tensor.element_size()


def wire_bytes(start: Node, carried: Iterable[Any]) -> sympy.Expr:
    """Return the bytes of the tensors in ``carried``, as they travel."""
    values = [value for one in carried if isinstance(value := _value(one), Tensor)]
    return sum((_expression(value.numel()) * wire_itemsize(start, value) for value in values), start=sympy.S.Zero)


def tensors_of(start: Node) -> list[Node]:
    """Return the payload, and the rest that a start copies: gradients of replicas beside those of own experts."""
    given = arguments_of(start).items()
    lists = [value for name, value in given if name != "after" and isinstance(value, (list, tuple))]
    return list(dict.fromkeys([*payload_of(start), *(node for part in lists for node in part)]))


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else node


def _expression(size: Any) -> sympy.Expr:
    if isinstance(size, sympy.Expr):
        return size
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))
