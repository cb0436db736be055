"""normalize_matmuls: one spelling for grouped matmuls over experts.

Needs    gather_experts nodes and one of the three spellings that model code uses.
Changes  torch._grouped_mm(x, w, offs=o)                       becomes
         torch.nn.functional.grouped_mm(x, w, offs=o)          hecate.grouped_mm(x, w, o)
         transformers.grouped_mm_fallback(x, w, offs=o)
Never    touches a grouped matmul whose weights are not gathered experts, or one with a bias or out_dtype.

Autocast reaches none of these spellings, so under it float32 experts compute in float32: that stays, and is told.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.expert_numbers import count_all
from hecate.passes.analysis.torch_values import NO_AUTOCAST, under_autocast, value_of
from hecate.passes.base import Outcome, PassContext, Refused, Skip
from hecate.passes.fx import arg, calls, describe, skip_of
from hecate.private import grouped_mm

_SPELLING = "call torch.nn.functional.grouped_mm(rows, weight, offs=offsets) without bias and out_dtype"
_NOT_CAST = "its experts compute in float32, and rows travel so: autocast does not reach grouped matmuls"


def normalize_matmuls(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite the spellings in place."""
    rewritten, skipped, autocast = 0, [], under_autocast(gm.graph)
    for node in list(gm.graph.nodes):
        if not calls(node, *_spellings()):
            continue
        operands = _operands(node)
        gathered = _gathers_behind(operands["weight"])
        if not gathered:
            continue
        where = context.name(arg(gathered[0], 2))
        extra = [key for key in ("bias", "out_dtype") if operands.get(key) is not None]
        if extra or operands.get("offs") is None:
            reason = f"grouped matmul with {' and '.join(extra) or 'no offs'}: {describe(node)}"
            skipped.append(skip_of(where, Refused(reason, node, fix=_SPELLING)))
            continue
        if autocast and getattr(value_of(operands["weight"]), "dtype", None) == torch.float32:
            skipped.append(Skip(where=where, reason=_NOT_CAST, fallback=False, fix=NO_AUTOCAST))
        x, offsets = operands["input"], operands["offs"]
        filled = (True,) if count_all(offsets, x) else ()
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(
                torch.ops.hecate.grouped_mm.default, (x, operands["weight"], offsets, *filled)
            )
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        rewritten += 1
    return Outcome(rewritten=rewritten, skipped=tuple(dict.fromkeys(skipped)))


def _gathers_behind(weight: Node) -> list[Node]:
    """Return the gathers from which alone a weight is computed (views, casts, adapters); none if there is more."""
    found, seen, waiting = [], {weight}, [weight]
    while waiting:
        node = waiting.pop()
        if calls(node, torch.ops.hecate.gather_experts):
            found.append(node)
            continue
        if not node.all_input_nodes or calls(node, *_spellings(), torch.ops.hecate.grouped_mm):
            return []
        waiting += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)
    return sorted(found)


def _spellings() -> list[Any]:
    found: list[Any] = [grouped_mm]
    if hasattr(torch.nn.functional, "grouped_mm"):
        found.append(torch.nn.functional.grouped_mm)
    # Registered when transformers is imported; absent otherwise.
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        found.append(torch.ops.transformers.grouped_mm_fallback)
    return found


def _operands(node: Node) -> dict[str, Any]:
    names = ("input", "weight", "offs", "bias", "out_dtype")
    operands: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    for alias, name in (("self", "input"), ("mat_a", "input"), ("mat2", "weight"), ("mat_b", "weight")):
        if alias in operands:
            operands[name] = operands.pop(alias)
    return operands
