"""Fingerprint of a graph: lines of text that must be equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.torch_values import value_of
from hecate.passes.fx import BODY_OF, arg, bodies_of, calls, operands
from hecate.private import OpOverload, OpOverloadPacket, dynamo_source
from hecate.runtime.ops.gradients import REPLICATED, replicate, replicate_bucket


def fingerprint(gm: GraphModule, *, everything: bool = True) -> list[str]:
    """Return operators in order, parameter names, shapes and dtypes, and the widths of the rows in collectives.

    Without ``everything`` these are only operators in which ranks meet, and what is computed with other ranks' rows.
    Lines leave out what may rightly differ between ranks: how many tokens a rank has, how long its sequences are, how
    many experts it owns, and what torch computes and asserts of sizes where it has seen several.
    """
    nodes = [node for body in bodies_of(gm) for node in body.graph.nodes if everything or _is_met_in(node)]
    lines = map(_describe, nodes)
    return [line for line in lines if line]


def communicates(gm: GraphModule, *, training: bool) -> bool:
    """Tell whether ranks meet in a graph, or in its backward; any other graph may differ between ranks."""
    return any(
        (training and calls(node, replicate, replicate_bucket)) or _is_hecates(node)
        for body in bodies_of(gm)
        for node in body.graph.nodes
    )


def _is_met_in(node: Node) -> bool:
    return BODY_OF in node.meta or calls(node, replicate, replicate_bucket) or _is_hecates(node)


def _is_hecates(node: Node) -> bool:
    return str(node.target).startswith("hecate.") and not str(node.target).startswith("hecate.s2_")


def _describe(node: Node) -> str:
    if node.op == "placeholder":
        return _placeholder(node)
    if calls(node, replicate, replicate_bucket):
        numbers: Any = arg(node, 1)
        names = [REPLICATED[number].name for number in (numbers if isinstance(numbers, (list, tuple)) else [numbers])]
        return f"average the gradients of {names}"
    operator = isinstance(node.target, (OpOverload, OpOverloadPacket))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    target = str(node.target) if operator else name
    if not target.startswith("hecate."):
        if "_assert" in target or isinstance(value_of(node), _NUMBERS):
            return ""
        # Between the cuts, a number from the model's code meets rows of other ranks.
        numbers = [a for a in operands(node) if isinstance(a, (int, float))] if BODY_OF in node.meta else []
        return f"{node.op} {target} {numbers}" if numbers else f"{node.op} {target}"
    if target.startswith("hecate.s2_"):
        return f"{target} {[list(a) for a in operands(node) if _integers(a)]}"
    carried = value_of(arg(node, 0))
    width = _sizes(carried)[1:] if isinstance(carried, torch.Tensor) else "?"
    constants = [arg for arg in node.args if isinstance(arg, int) or _integers(arg)]
    return f"{target} {constants} rows of {width}"


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def _integers(arg: object) -> bool:
    return isinstance(arg, (list, tuple)) and all(isinstance(item, int) for item in arg)


def _placeholder(node: Node) -> str:
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return ""
    source = dynamo_source(node)
    name = source.name if source is not None else node.name
    if "_parameters" in name:
        # Dimension 0 is left out: the experts, or rows, that a rank has are not a symbol everywhere.
        return f"parameter {name} {value.ndim}-D {_sizes(value)[1:]} {value.dtype}"
    return f"input {name} {value.ndim}-D {value.dtype}"


def _sizes(value: torch.Tensor) -> list[int | str]:
    return [size if isinstance(size, int) else "?" for size in value.shape]
