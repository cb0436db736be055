"""drop_causal_masks: attention gets is_causal=True instead of a mask that says the same.

Needs    torch.nn.functional.scaled_dot_product_attention with a boolean mask that is computed from sizes and
         constants alone, and causal at every size that the graph allows (mask_cone); as many queries as keys.
Changes  scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=False, ...)       becomes
         scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True, ...)
         What computed the mask stays, and goes with the other unused nodes when autograd's graph is made.
Never    touches a mask that depends on data, such as padding or given positions, one with numbers in it, one with a
         window, or one that some size might change; changes dropout, scale or the grouping of heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from hecate.passes.base import Outcome, PassContext, Refused, Skip
from hecate.passes.captured.mask_cone import MaskCone
from hecate.passes.captured.open_sizes import limits, same_size
from hecate.passes.captured.scope import Scope
from hecate.passes.captured.torch_values import value_of
from hecate.passes.fx import calls, line_of

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
# On a call that was looked at with the graph around it, which knows more than the body of a checkpointed layer alone.
_LOOKED_AT = "hecate_mask_looked_at"


def drop_causal_masks(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite the calls of ``gm`` and of the checkpointed layers in it."""
    root = Scope(gm)
    rewritten = 0
    answers: dict[Node, MaskCone | str] = {}
    left: dict[str, list[Node]] = {}
    for scope in (root, *root.bodies()):
        for node in scope.gm.graph.nodes:
            if _LOOKED_AT in node.meta or not _attends_with_mask(node):
                continue
            node.meta[_LOOKED_AT] = True
            try:
                _refuse(node, scope, answers)
            except Refused as refused:
                left.setdefault(str(refused), []).append(node)
                continue
            _rewrite(node)
            rewritten += 1
    skipped = [
        Skip(where=_where(nodes), reason=reason, fallback=False, line=str(line_of(nodes[0]) or ""))
        for reason, nodes in left.items()
    ]
    return Outcome(rewritten=rewritten, skipped=tuple(skipped))


def _operands(node: Node) -> dict[str, Any]:
    return dict(zip(_NAMES, node.args, strict=False)) | dict(node.kwargs)


def _attends_with_mask(node: Node) -> bool:
    attends = calls(
        node, torch.nn.functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention
    )
    return attends and isinstance(_operands(node).get("attn_mask"), Node)


def _rewrite(node: Node) -> None:
    """Change two arguments and no node: a rank with longer sequences may have to keep what another one drops, and the
    operators of their graphs are compared."""
    changed = {"attn_mask": None, "is_causal": True}
    given = dict(node.kwargs)
    args = [changed.get(name, value) for name, value in zip(_NAMES, node.args, strict=False)]
    node.args = tuple(args)
    node.kwargs = given | {name: value for name, value in changed.items() if name not in _NAMES[: len(args)]}


def _refuse(node: Node, scope: Scope, answers: dict[Node, MaskCone | str]) -> None:
    """Raise unless the mask of a call is causal.

    Args:
        answers: what was found out about masks before, a cone or why not; one mask serves many layers.

    Raises:
        Refused: why it is not.
    """
    given = _operands(node)
    mask = given["attn_mask"]
    home, source = scope.resolve(mask)
    if source not in answers:
        try:
            cone = MaskCone(source, home)
            _refuse_other_patterns(cone)
            answers[source] = cone
        except Refused as refused:
            answers[source] = str(refused)
    answer = answers[source]
    if isinstance(answer, str):
        raise Refused(answer)
    _refuse_other_shapes(value_of(given["query"]), value_of(given["key"]), value_of(mask))
    answer.refuse_changes(scope, mask, until=node)
    if given.get("is_causal"):
        raise Refused("the mask comes with is_causal")


def _refuse_other_shapes(query: Any, key: Any, mask: torch.Tensor) -> None:
    """Causal attention without a mask means: query i sees keys 0 to i, for as many queries as keys."""
    if not isinstance(query, torch.Tensor) or not isinstance(key, torch.Tensor):
        raise Refused("nothing is known about the shapes of queries and keys")
    lengths = (query.shape[-2], key.shape[-2], *mask.shape[-2:])
    if not all(same_size(lengths[0], length) for length in lengths):
        raise Refused(f"there are {query.shape[-2]} queries and {key.shape[-2]} keys")
    # A mask with more batches or heads than the queries would repeat them.
    extra = query.ndim - mask.ndim
    if extra < 0 or any(
        not same_size(size, 1) and not same_size(size, query.shape[extra + dim])
        for dim, size in enumerate(mask.shape[:-2])
    ):
        raise Refused(f"a mask of shape {tuple(mask.shape)} enlarges queries of shape {tuple(query.shape)}")


def _refuse_other_patterns(cone: MaskCone) -> None:
    """Raise unless the mask is causal at all sizes of its graph."""
    if value_of(cone.mask).dtype is not torch.bool:
        raise Refused("the mask is numbers that are added, not true and false")
    if not same_size(cone.queries, cone.keys):
        raise Refused(f"the mask is not square: {cone.queries} queries and {cone.keys} keys")
    if cone.is_fixed:
        _refuse_at(cone, int(cone.batch), int(cone.queries))
        return
    for batch, length in ((3, 5), (2, 9)):
        _refuse_at(cone, _within(cone.batch, batch), _within(cone.queries, length))
    # Far enough that a window, or an offset of some batch, would show.
    far = cone.reach()
    for batch, length in ((2, far), (far, 5), (far, far)):
        _refuse_at(cone, _within(cone.batch, batch), _within(cone.queries, length))


def _within(size: int | torch.SymInt, wanted: int) -> int:
    low, high = limits(size)
    return min(max(wanted, low), high)


def _refuse_at(cone: MaskCone, batch: int, length: int) -> None:
    keys = torch.arange(length, device="cpu")
    for first, rows in cone.rows(batch, length, length):
        queries = torch.arange(first, first + rows.shape[-2], device="cpu")
        if not bool((rows == (keys <= queries[:, None])).all()):
            raise Refused(f"the mask is not causal at a length of {length}: it has a window or another pattern")


def _where(nodes: list[Node]) -> str:
    """The first layer by its name, and how many more."""
    stack = list((nodes[0].meta.get("nn_module_stack") or {}).values())
    name = str(stack[-1][0]) if stack else nodes[0].name
    name = name.removeprefix("L['self'].").replace("L['self']", "(the model)")
    return f"{name} and {len(nodes) - 1} more" if len(nodes) > 1 else name
