"""Checkpointed layers run twice; the plan of an exchange, and the rows that it moved, must not change between."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hecate.passes.fx import calls
from hecate.runtime.comm.collective import collectives
from hecate.runtime.ops.registration import PLANS

_BODY = torch.ops.higher_order.tag_activation_checkpoint
_KEY = "_checkpoint_context_fn"


def _not_our_contexts(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in str(record.msg)


def keep_plans(gm: GraphModule, rematerialize: bool) -> None:
    """Save placements, counts, tickets and exchanged rows of every ``torch.utils.checkpoint`` body in ``gm``.

    Plans computed again would be those of a later step, and rows would travel again. So would gathered experts,
    unless the user asks for that with ``rematerialize``. All else is recomputed as the user's own ``context_fn``
    says, or as checkpointing does by default.
    """
    kept = _kept(rematerialize)
    for owner in gm.modules():
        if not isinstance(owner, GraphModule):
            continue
        for node in owner.graph.nodes:
            if calls(node, _BODY):
                body: Any = getattr(owner, str(node.args[0].target))
                if any(n.target in kept for n in body.graph.nodes):
                    # torch warns about contexts of users; these are ours.
                    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_not_our_contexts)
                    body.meta[_KEY] = functools.partial(_contexts, kept, body.meta.get(_KEY))


def _kept(rematerialize: bool) -> frozenset[Any]:
    """Operators whose results are saved: plans, and what would travel again."""
    saved = ("always",) if rematerialize else ("always", "unless rematerialized")
    return frozenset(PLANS) | {c.whole for c in collectives() if c.saved_in_checkpoints in saved}


def _contexts(kept: frozenset[Any], users: Callable[[], Any] | None) -> Any:
    if users is None:
        return create_selective_checkpoint_contexts(functools.partial(_policy, kept))
    first, second = users()
    for mode in (first, second):
        inner = getattr(mode, "policy_fn", None)
        if inner is not None:
            mode.policy_fn = functools.partial(_policy, kept, otherwise=inner)
    return first, second


def _policy(
    kept: frozenset[Any],
    context: Any,
    op: Any,
    *args: Any,
    otherwise: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Any:
    if op in kept:
        return CheckpointPolicy.MUST_SAVE
    return otherwise(context, op, *args, **kwargs) if otherwise else CheckpointPolicy.PREFER_RECOMPUTE
