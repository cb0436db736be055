"""Checks that a piece of a graph computes every row on its own.

Only then may rows be moved to another rank, or joined with other rows, before it runs. The piece is traced to ATen on
fake tensors with another number of rows and of experts than the model has, so a size that the model's code baked in
shows as an error. Then the kind of every value is derived:

    ROWS    dimension 0 is rows: element r depends on row r of its inputs alone
    SLOTS   dimension 0 is experts
    CELLS   dimension 0 is experts and dimension 1 rows, as many for each: element [e, c] depends on those alone
    OFFSETS, IDS   the ends of the slots; the slot of each row
    PLAIN   the same for all rows

An operator that is not known to keep rows apart is refused, by its name.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from hecate.passes.analysis.torch_values import value_of
from hecate.passes.base import Refused
from hecate.passes.fx import arg, operands
from hecate.passes.match import name_of
from hecate.private import FakeTensorMode, OpOverload, schema_of

# Primes that no model has as a size, so that dimension 0 cannot be mistaken for another one.
ROW_COUNT, SLOT_COUNT = 10007, 1009
# Of dimensions that rows have in front.
_IN_FRONT = (1013, 1019, 1021, 1031)

_aten = torch.ops.aten


class Kind(Enum):
    """The meaning of dimension 0 of a value."""

    ROWS = "rows"
    SLOTS = "experts"
    CELLS = "rows of experts"
    OFFSETS = "offsets"
    IDS = "expert ids of rows"
    PLAIN = "plain"


_Leading = Mapping[Kind, tuple[int, ...]]
_LEADING: _Leading = {
    Kind.ROWS: (ROW_COUNT,),
    Kind.IDS: (ROW_COUNT,),
    Kind.SLOTS: (SLOT_COUNT,),
    Kind.OFFSETS: (SLOT_COUNT,),
    Kind.CELLS: (SLOT_COUNT, ROW_COUNT),
}


_APART = (
    "what is computed between the expert matmuls must treat each row by itself: move it before or behind the experts"
)


def check_rowwise(
    nodes: list[Node], inputs: Mapping[Node, Kind], outputs: Mapping[Node, Kind], *, depth: int = 1
) -> None:
    """Raise Refused unless ``nodes`` compute ``outputs`` of these kinds from ``inputs``, the rest being PLAIN.

    With a larger ``depth`` rows are in so many dimensions, and ROWS depend on that one of all of them alone.
    """
    leading = _LEADING if depth == 1 else {Kind.ROWS: (*_IN_FRONT[: depth - 1], ROW_COUNT)}
    traced, kinds = _trace(nodes, inputs, list(outputs), leading)
    known: dict[Node, Kind] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            known[node] = kinds.pop(0)
        elif node.op == "output":
            for value, (source, kind) in zip(arg(node, 0), outputs.items(), strict=True):
                got = known.get(value, Kind.PLAIN)
                if got is not kind:
                    raise Refused(f"{source.name} should be {kind.value} but is {got.value}", fix=_APART)
        else:
            try:
                known[node] = _derive(node, known, leading)
            except Refused as refused:
                # The model's code has a call of this name, if it is no part of another one.
                name = name_of(node).split(".")[0].strip("_")
                written = next((one for one in nodes if name_of(one).strip("_") == name), None)
                raise Refused(str(refused), written, fix=refused.fix) from None


def _trace(
    nodes: list[Node], inputs: Mapping[Node, Kind], outputs: list[Node], leading: _Leading
) -> tuple[GraphModule, list[Kind]]:
    """Return the piece as an ATen graph on fake tensors, and the kinds of its placeholders."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    fakes: list[Any] = []
    kinds: list[Kind] = []
    inside = set(nodes)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for node in nodes:
            for source in node.all_input_nodes:
                if source in inside or source in copies:
                    continue
                kind = inputs.get(source, Kind.PLAIN)
                copies[source] = graph.placeholder(f"{kind.name.lower()}_{len(fakes)}")
                fakes.append(_fake(source, leading.get(kind, ())))
                kinds.append(kind)
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(copies[node] for node in outputs))
        owner = nodes[0].graph.owning_module
        piece = GraphModule(owner if owner is not None else torch.nn.Module(), graph)
        try:
            with torch.no_grad():
                return make_fx(piece)(*fakes), kinds
        except Exception as error:
            first = str(error).strip().splitlines() or [type(error).__name__]
            raise Refused(
                f"it does not run with another number of rows: {first[0]}",
                fix="write -1 or x.shape[0] in place of a fixed number of rows",
            ) from error


def _fake(node: Node, leading: tuple[int, ...]) -> Any:
    """Return a fake of a node's value, with these sizes of its first dimensions."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        if value is None:
            raise Refused(f"nothing is known about the shape of {node.name}")
        return int(value.node.hint) if isinstance(value, torch.SymInt) and value.node.has_hint() else value
    sizes = []
    for dim, size in enumerate(value.shape):
        if dim < len(leading):
            sizes.append(leading[dim])
        elif isinstance(size, torch.SymInt):
            if not size.node.has_hint():
                raise Refused(f"{node.name} has the data-dependent size {size} in dimension {dim}")
            sizes.append(int(size.node.hint))
        else:
            sizes.append(size)
    return torch.empty(sizes, dtype=value.dtype, device=value.device)


def _derive(node: Node, known: dict[Node, Kind], leading: _Leading) -> Kind:
    """Return the kind of one ATen node's result."""
    kinds = {known.get(source, Kind.PLAIN) for source in node.all_input_nodes}
    if kinds <= {Kind.PLAIN}:
        return Kind.PLAIN
    target = node.target
    if target is operator.getitem:
        return known[arg(node, 0)]
    if target is torch.ops.hecate.grouped_mm.default:
        expected = [Kind.ROWS, Kind.SLOTS, Kind.OFFSETS]
        got = [known.get(operand, Kind.PLAIN) for operand in operands(node)[: len(expected)]]
        if got != expected:
            raise Refused(f"grouped matmul of {', '.join(kind.value for kind in got)}")
        return Kind.ROWS
    if target is _aten.index.Tensor and known.get(arg(node, 0)) is Kind.SLOTS:
        ids = arg(node, 1)
        if len(ids) == 1 and known.get(ids[0]) is Kind.IDS:
            return Kind.ROWS
    kind = next((k for k in (Kind.ROWS, Kind.CELLS, Kind.SLOTS) if k in kinds), None)
    if kind is None or not kinds <= {kind, Kind.PLAIN} | ({Kind.SLOTS} if kind is Kind.CELLS else set()):
        raise Refused(f"{target} mixes {' and '.join(sorted(k.value for k in kinds))}", fix=_APART)
    if not _keeps_apart(node, {n for n in node.all_input_nodes if known.get(n) is kind}, leading[kind]):
        raise Refused(f"{target} is not known to keep {kind.value} apart", fix=_APART)
    return kind


# Operators with a dimension argument: fine unless it is dimension 0.
_ALONG = frozenset((
    "split", "split_with_sizes", "slice", "select", "unbind", "unsqueeze", "squeeze", "sum", "mean", "amax", "amin",
    "_softmax", "_log_softmax", "cumsum", "cat", "stack", "var_mean", "var", "linalg_vector_norm", "flip", "permute",
    "glu", "max",
))  # fmt: skip
# Operators whose results have the rows of their input.
_SAME_FIRST = frozenset((
    "view", "_unsafe_view", "reshape", "expand", "clone", "detach", "alias", "_to_copy", "native_dropout",
    "contiguous", "lift_fresh_copy", "zeros_like", "ones_like", "empty_like", "full_like",
))  # fmt: skip


def _keeps_apart(node: Node, counted: set[Node], leading: tuple[int, ...]) -> bool:
    """Tell whether row r (``leading``: sizes of its dimensions) depends on row r of the counted inputs alone."""
    depth = len(leading)
    out = node.meta["val"]
    results = [v for v in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(v, torch.Tensor)]
    if any(v.shape[:depth] != leading for v in results):
        return False
    target = node.target
    # Of others than torch's own, a name says nothing.
    name = name_of(node).partition(".")[0] if getattr(target, "namespace", None) == "aten" else ""
    if any(n.meta["val"].shape[:depth] != leading for n in counted):
        return False
    if name in _SAME_FIRST:
        return True
    if target in (_aten.mm.default, _aten.bmm.default):
        # Rows times a matrix; a batched product keeps its batch apart.
        alone = target is _aten.bmm.default or arg(node, 1) not in counted
        return depth == 1 and arg(node, 0) in counted and alone
    if target is _aten.addmm.default:
        return depth == 1 and arg(node, 1) in counted and arg(node, 2) not in counted and arg(node, 0) not in counted
    if target is _aten.transpose.int:
        return all(arg(node, index) % results[0].ndim >= depth for index in (1, 2))
    if target in (_aten.native_layer_norm.default, _aten._fused_rms_norm.default):
        return len(arg(node, 1)) <= results[0].ndim - depth
    if name in _ALONG:
        return _not_along_first(node, depth)
    if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags:
        return all(_aligned(n, counted, results[0], leading) for n in node.all_input_nodes)
    return False


def _not_along_first(node: Node, depth: int) -> bool:
    schema = schema_of(node.target)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    dims: Any = given.get("dim", given.get("dims"))
    if dims is None:
        dims = -1 if node.target is _aten.glu.default else 0
    source = arg(node, 0)[0] if isinstance(arg(node, 0), (list, tuple)) else arg(node, 0)
    ndim = source.meta["val"].ndim
    if node.target is _aten.permute.default:
        return [d % ndim for d in dims[:depth]] == list(range(depth))
    if node.target in (_aten.unsqueeze.default, _aten.stack.default):
        ndim += 1
    listed = dims if isinstance(dims, (list, tuple)) else [dims]
    return len(listed) > 0 and all(d % ndim >= depth for d in listed)


def _aligned(operand: Node, counted: set[Node], result: torch.Tensor, leading: tuple[int, ...]) -> bool:
    """Tell whether a pointwise operand lines up with the rows of the result, or is broadcast over them."""
    value = operand.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return True
    if operand in counted:
        return value.ndim == result.ndim
    first = (1,) * (result.ndim - value.ndim) + tuple(value.shape)
    # A value of each expert may meet all of its rows.
    return all(
        size in (1, leading[0] if len(leading) > 1 and dim == 0 else 1)
        for dim, size in enumerate(first[: len(leading)])
    )
