"""keep_plans: checkpointed layers keep their plans, and rows that were exchanged.

Needs    bodies of ``torch.utils.checkpoint``, after all passes that write into them.
Changes  the context function of a body: placements, counts, tickets and exchanged rows are saved, and gathered
         experts too unless the user asks for ``rematerialize``
Never    touches what else is computed again: that is as the user's own ``context_fn`` says, or as by default.

A plan that is made again would be that of a later step, and rows would travel again. So it cannot be switched off.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hecate.passes.base import Outcome, PassContext
from hecate.passes.fx import calls
from hecate.runtime.comm.collective import collectives
from hecate.runtime.ops.registration import PLANS

_BODY = torch.ops.higher_order.tag_activation_checkpoint
_KEY = "_checkpoint_context_fn"


def _not_our_contexts(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in str(record.msg)


def keep_plans(gm: GraphModule, context: PassContext) -> Outcome:
    """Give every body that ``gm`` calls its context function."""
    # Collectives would communicate again.
    saved = ("always",) if context.rematerialize else ("always", "unless rematerialized")
    kept = frozenset(PLANS) | {c.whole for c in collectives() if c.saved_in_checkpoints in saved}
    rewritten = 0
    for node in gm.graph.nodes:
        if not calls(node, _BODY):
            continue
        body: Any = getattr(gm, str(node.args[0].target))
        if any(n.target in kept for n in body.graph.nodes):
            # torch warns about contexts of users; these are ours.
            logging.getLogger("torch._higher_order_ops.wrap").addFilter(_not_our_contexts)
            body.meta[_KEY] = functools.partial(_contexts, kept, body.meta.get(_KEY))
            rewritten += 1
    return Outcome(rewritten=rewritten)


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
