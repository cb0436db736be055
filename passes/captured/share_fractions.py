"""share_fractions: a load-balancing loss takes the fractions of all ranks' tokens.

Needs    ``Config(balance_loss="global")``, several ranks, and a product of fractions f, of the tokens that each
         expert was chosen for, and means P [E] of the scores of which it was chosen. Both are sums over tokens that
         are divided by how many there are, or means; f has no gradient, and is [E] or [k, E].
Changes  f = counts / n; P = sums / n   becomes   f = mean(counts) / mean(n); P = sums / mean(n)
         where mean is that over all ranks. The mean of all ranks' losses, and that of their gradients, are then those
         of one process with all tokens.
Never    touches losses of each sequence, whose P is [batch, E], or forwards without gradients.

Source: "Demons in the Detail: On Implementing Load Balancing Loss for Training Specialized Mixture-of-Expert Models"
(2025), balance over the global batch.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.choices import Choice, choice_of
from hecate.passes.analysis.torch_values import shape_of, value_of
from hecate.passes.base import Outcome, PassContext
from hecate.passes.fx import Builder, arg, closure_backward, operands, option
from hecate.passes.match import SHAPES, is_cast, named


def share_fractions(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite every such loss in ``gm``."""
    layer = min(context.layer_names, default=None)
    if not context.shares_fractions or layer is None or context.world_size == 1:
        return Outcome()
    choices = [choice for node in gm.graph.nodes if (choice := choice_of(node)) is not None]
    losses = [loss for node in gm.graph.nodes if (loss := _loss_of(node, choices)) is not None]
    for loss in losses:
        _share(loss, layer)
    return Outcome(rewritten=len(losses))


@dataclass(frozen=True, kw_only=True)
class _Ratio:
    """A mean over tokens: ``node`` is ``total / number``; without a total, the mean over ``dims`` of ``of``."""

    node: Node
    total: Node | None = None
    number: object = None
    of: Node | None = None
    dims: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Loss:
    product: Node
    fractions: _Ratio
    scores: _Ratio


def _loss_of(node: Node, choices: list[Choice]) -> _Loss | None:
    """Return the loss that a product is part of; None if it is of another kind."""
    if not named(node, "mul") or len(node.args) != 2:
        return None
    for one, other in (node.args, node.args[::-1]):
        fractions, scores = _ratio(one), _ratio(other)
        if fractions is None or scores is None or _learns(fractions.node) or not _learns(scores.node):
            continue
        sizes, experts = shape_of(fractions.node), shape_of(scores.node)
        if len(experts) != 1 or len(sizes) not in (1, 2) or sizes[-1] != experts[0]:
            continue
        counted, scored = closure_backward([fractions.node]), closure_backward([scores.node])
        for choice in choices:
            of_both = choice.scores in scored and not counted.isdisjoint(choice.places)
            if of_both and choice.among == experts[0]:
                return _Loss(product=node, fractions=fractions, scores=scores)
    return None


def _learns(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _ratio(value: object) -> _Ratio | None:
    """Return the mean over tokens that a value is, in any shape; None if it is none."""
    while is_cast(value) or named(value, *SHAPES, "squeeze", "expand"):
        assert isinstance(value, Node)
        value = arg(value, 0)
    if not isinstance(value, Node) or not isinstance(value_of(value), torch.Tensor):
        return None
    if named(value, "truediv", "div") and len(operands(value)) == 2:
        total, number = operands(value)
        scalar = not isinstance(value_of(number), torch.Tensor) or value_of(number).numel() == 1
        return _Ratio(node=value, total=total, number=number) if isinstance(total, Node) and scalar else None
    if not named(value, "mean"):
        return None
    source, dims = operands(value)[0], option(value, 1, "dim", option(value, 1, "axis"))
    dims = (dims,) if type(dims) is int else tuple(dims) if isinstance(dims, (tuple, list)) else ()
    kept = option(value, 2, "keepdim", False)
    return _Ratio(node=value, of=source, dims=dims) if dims and kept is False else None


def _share(loss: _Loss, layer: int) -> None:
    """Write what all ranks have, in front of the product, and use it there."""
    here = Builder(loss.product.graph, before=loss.product, layer=layer)
    counts, own_tokens = _total_and_number(loss.fractions, here)
    sums, own_scored = _total_and_number(loss.scores, here)
    sizes = shape_of(loss.fractions.node)
    own = here.call(torch.cat, [here.method("reshape", part, -1) for part in (counts, own_tokens, own_scored)])
    shared = here.call(torch.ops.hecate.average_fractions.default, here.method("detach", own), layer)
    found = here.method("reshape", here.call(operator.getitem, shared, slice(None, -2)), *sizes)
    tokens, scored = (here.call(operator.getitem, shared, index) for index in (-2, -1))
    _use(loss, loss.fractions.node, here.call(operator.truediv, found, tokens), here)
    _use(loss, loss.scores.node, here.call(operator.truediv, sums, scored), here)


def _total_and_number(ratio: _Ratio, here: Builder) -> tuple[Node, Node]:
    """Write the sum over tokens, and how many there are as a tensor of one element."""
    number = ratio.number
    if ratio.total is None:
        assert ratio.of is not None
        sizes = [here.call(torch.ops.aten.sym_size.int, ratio.of, dim) for dim in ratio.dims]
        number = sizes[0]
        for size in sizes[1:]:
            number = here.call(operator.mul, number, size)
    like = ratio.node
    if not isinstance(value_of(number), torch.Tensor):
        # A mean of nothing is divided by zero with or without other ranks.
        number = here.call(operator.mul, here.method("new_ones", like, 1), number)
    else:
        number = here.method("to", number, value_of(like).dtype)
    total = ratio.total if ratio.total is not None else here.call(operator.mul, like, number)
    return total, number


def _use(loss: _Loss, old: Node, new: Node, here: Builder) -> None:
    """Use ``new`` for ``old`` in the product, behind copies of the views between."""
    chain, made = [], {old: new}
    for operand in loss.product.args:
        while isinstance(operand, Node) and operand is not old and len(operand.all_input_nodes) == 1:
            chain.append(operand)
            operand = operand.all_input_nodes[0]
        if operand is old:
            break
        chain = []
    for view in reversed(chain):
        made[view] = here.copy(view, made)
    last = chain[0] if chain else old
    loss.product.replace_input_with(last, made[last])
