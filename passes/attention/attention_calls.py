"""Calls of ``scaled_dot_product_attention`` in a captured graph, and the graphs that they may be in."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.torch_values import GraphFacts, name_in_model, shape_of
from hecate.passes.attention.open_sizes import same_size
from hecate.passes.base import Refused
from hecate.passes.fx import arg, calls, option
from hecate.passes.match import named

# Key in the meta of a mask, for the name of the layer that it is for.
ATTENTION_OF = "hecate_attention"
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(eq=False)
class Scope:
    """A graph, and where its arguments come from: the body of a checkpointed layer is called by the graph around."""

    gm: GraphModule
    call: Node | None = None
    outer: Scope | None = None
    facts: GraphFacts = field(init=False)

    def __post_init__(self) -> None:
        self.facts = GraphFacts(self.gm.graph)

    def bodies(self) -> Iterator[Scope]:
        """Yield the bodies of checkpointed layers, and those inside them."""
        sites: dict[str, list[Node]] = {}
        for node in self.gm.graph.nodes:
            if calls(node, _CHECKPOINT):
                sites.setdefault(str(arg(node, 0).target), []).append(node)
        for name, (call, *others) in sites.items():
            body = getattr(self.gm, name, None)
            # A body with several callers has arguments that are not known.
            if isinstance(body, GraphModule) and not others:
                inner = Scope(body, call, self)
                yield inner
                yield from inner.bodies()

    def resolve(self, value: Node) -> tuple[Scope, Node]:
        """Return the graph that computes a value, and the value in it; for an argument these are the caller's."""
        if value.op != "placeholder" or self.call is None or self.outer is None:
            return self, value
        names = [node for node in self.gm.graph.nodes if node.op == "placeholder"]
        passed = self.call.args[1:]
        source = passed[names.index(value)] if len(names) == len(passed) else None
        return self.outer.resolve(source) if isinstance(source, Node) else (self, value)


def attends(node: Node) -> bool:
    """Tell whether a node is a call of ``scaled_dot_product_attention``."""
    return calls(node, torch.nn.functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention)


def operands_of_attention(node: Node) -> dict[str, Any]:
    """Return the arguments that a call gives, by name."""
    return dict(zip(_NAMES, node.args, strict=False)) | dict(node.kwargs)


def change_operands(node: Node, changed: Mapping[str, Any]) -> None:
    """Give a call other arguments, by position where it had them so."""
    given = dict(node.kwargs)
    args = [changed.get(name, value) for name, value in zip(_NAMES, node.args, strict=False)]
    node.args = tuple(args)
    node.kwargs = given | {name: value for name, value in changed.items() if name not in _NAMES[: len(args)]}


def name_of_layer(node: Node, scope: Scope | None = None) -> str:
    """Return the module that a node is in, else the checkpointed layer whose body it is in; else its own name."""
    return next(_modules(node, scope), node.name)


def number_of_layer(node: Node, scope: Scope) -> int | None:
    """Return the first number in the module's name, or in that of the checkpointed layer around the node."""
    found = (re.search(r"(?:^|[.\['])(\d+)(?=$|[.\]'])", name) for name in _modules(node, scope))
    return next((int(match[1]) for match in found if match), None)


def _modules(node: Node, scope: Scope | None) -> Iterator[str]:
    """Yield the known modules of a node: its own, then those that call the checkpointed bodies around it."""
    here: Node | None = node
    while here is not None:
        stack = list((here.meta.get("nn_module_stack") or {}).values())
        if stack:
            yield name_in_model(str(stack[-1][0]))
        here, scope = (scope.call, scope.outer) if scope is not None else (None, None)


def unrepeated(node: Node, facts: GraphFacts, *, until: Node) -> Node:
    """Return the keys or values ``[b, Hk, S, D]`` whose heads ``node`` repeats for their query heads; or ``node``.

    They are found by shapes: a dimension of one is put behind the heads, expanded and joined with them, or
    ``repeat_interleave`` is called. A tensor that is changed in place before ``until`` is not read through.
    """
    source = _repeated_by_expand(node) or _repeated_by_interleave(node)
    if source is None:
        return node
    try:
        facts.refuse_changes_of([source], until=until)
    except Refused:
        return node
    return source


_VIEWS = ("reshape", "view", "contiguous", "clone", "flatten")


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))


def _repeated_by_expand(node: Node) -> Node | None:
    """Return x if ``node`` is ``x[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)``."""
    inner: Any = node
    while named(inner, *_VIEWS) and len(shape_of(inner)) == 4:
        inner = arg(inner, 0)
    while named(inner, "contiguous", "clone") and len(shape_of(inner)) == 5:
        inner = arg(inner, 0)
    if len(shape_of(inner)) != 5 or not named(inner, "expand", "expand_as"):
        return None
    b, heads, count, tokens, width = shape_of(inner)
    single: Any = arg(inner, 0)
    if not _same(shape_of(single), (b, heads, 1, tokens, width)):
        return None
    if not _same(shape_of(node), (b, heads * count, tokens, width)):
        return None
    added = named(single, "unsqueeze") or (
        calls(single, operator.getitem) and isinstance(arg(single, 1), tuple) and None in arg(single, 1)
    )
    source: Any = arg(single, 0) if added else None
    # A slice in the index would show in the shape; a permutation is no call of these.
    return source if _same(shape_of(source), (b, heads, tokens, width)) else None


def _repeated_by_interleave(node: Node) -> Node | None:
    """Return x if ``node`` is ``x.repeat_interleave(n, dim=1)``."""
    if not named(node, "repeat_interleave") or not node.args:
        return None
    source, repeats = arg(node, 0), option(node, 1, "repeats")
    if not isinstance(source, Node) or not isinstance(repeats, int) or option(node, 2, "dim") not in (1, -3):
        return None
    if len(shape_of(source)) != 4:
        return None
    b, heads, tokens, width = shape_of(source)
    return source if _same(shape_of(node), (b, heads * repeats, tokens, width)) else None
