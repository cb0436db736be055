"""share_fractions: a load-balancing loss takes the fractions of all ranks' tokens.

Needs    ``Config(balance_loss="global")``, several ranks, and a product of fractions f, of the tokens that each
         expert was chosen for, and means P [E] of the scores of which it was chosen. Both are sums over tokens that
         are divided by how many there are, or means; f has no gradient, and is [E] or [k, E].
Changes  f = counts / n; P = sums / n   becomes   f = mean(counts) / mean(n); P = sums / mean(n)
         where mean is that over all ranks. The mean of all ranks' losses, and that of their gradients, are then those
         of one process with all tokens.
Never    touches losses of each sequence, whose P is [batch, E], forwards without gradients, or what is changed in
         place before the product.

Source: "Demons in the Detail: On Implementing Load Balancing Loss for Training Specialized Mixture-of-Expert Models"
(2025), balance over the global batch.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.choices import Choice, choice_of
from hecate.passes.analysis.torch_values import GraphFacts, shape_of, value_of
from hecate.passes.base import Outcome, PassContext, Refused
from hecate.passes.fx import Builder, arg, closure_backward, operands, option, skip_of
from hecate.passes.match import SHAPES, is_cast, named


def share_fractions(gm: GraphModule, context: PassContext) -> Outcome:
    """Rewrite every such loss in ``gm``."""
    layer = min(context.layer_names, default=None)
    if not context.shares_fractions or layer is None:
        return Outcome()
    facts, rewritten, skipped = GraphFacts(gm.graph), 0, []
    choices = [choice for node in gm.graph.nodes if (choice := choice_of(node)) is not None]
    losses = [loss for node in gm.graph.nodes if (loss := _loss_of(node, choices)) is not None]
    for loss in losses:
        try:
            facts.refuse_changes_of(loss.read, until=loss.product)
        except Refused as refused:
            skipped.append(skip_of("load-balancing loss", refused, loss.product, fallback=False))
            continue
        _share(loss, layer)
        rewritten += 1
    return Outcome(rewritten=rewritten, skipped=tuple(skipped))


@dataclass(frozen=True, kw_only=True)
class _Ratio:
    """A mean over tokens, ``total / number``; without a total, the mean over ``dims`` of ``of``.

    Attributes:
        node: the mean.
        views: what shapes and casts it, the last first, up to an operand of the product.
    """

    node: Node
    views: tuple[Node, ...]
    total: Node | None = None
    number: object = None
    of: Node | None = None
    dims: tuple[int, ...] = ()

    @property
    def operand(self) -> Node:
        return self.views[0] if self.views else self.node

    @property
    def read(self) -> list[Node]:
        """The nodes whose values are read where the product is."""
        return [n for n in (self.node, *self.views, self.total, self.number, self.of) if isinstance(n, Node)]


@dataclass(frozen=True, kw_only=True)
class _Loss:
    product: Node
    fractions: _Ratio
    scores: _Ratio

    @property
    def read(self) -> list[Node]:
        tensors = [*self.fractions.read, *self.scores.read]
        return [node for node in tensors if isinstance(value_of(node), torch.Tensor)]


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
            of_tokens = _counts_tokens(fractions.number, choice) and _counts_tokens(scores.number, choice)
            if of_both and of_tokens and choice.among == experts[0]:
                return _Loss(product=node, fractions=fractions, scores=scores)
    return None


def _learns(node: Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _counts_tokens(number: object, choice: Choice) -> bool:
    """Tell whether a number may be that of tokens: a constant is that of the tokens, or choices, of some layers."""
    if not isinstance(number, (int, float)):
        return True
    tokens = math.prod(shape_of(choice.scores)[:-1])
    return type(tokens) is int and number > 0 and number % tokens == 0


def _ratio(value: object) -> _Ratio | None:
    """Return the mean over tokens that a value is, in any shape; None if it is none."""
    views: list[Node] = []
    while is_cast(value) or named(value, *SHAPES, "squeeze", "expand"):
        assert isinstance(value, Node)
        views.append(value)
        value = arg(value, 0)
    if not isinstance(value, Node) or not isinstance(value_of(value), torch.Tensor):
        return None
    if named(value, "truediv", "div") and len(value.args) == 2 and not value.kwargs:
        total, number = value.args
        scalar = not isinstance(value_of(number), torch.Tensor) or value_of(number).numel() == 1
        # A mean that is scaled is no sum over tokens.
        if not isinstance(total, Node) or not scalar or _ratio(total) is not None:
            return None
        return _Ratio(node=value, views=tuple(views), total=total, number=number)
    if not named(value, "mean"):
        return None
    source, dims = operands(value)[0], option(value, 1, "dim", option(value, 1, "axis"))
    dims = (dims,) if type(dims) is int else tuple(dims) if isinstance(dims, (tuple, list)) else ()
    kept = option(value, 2, "keepdim", False)
    if not dims or kept is not False or _ratio(source) is not None:
        return None
    return _Ratio(node=value, views=tuple(views), of=source, dims=dims)


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
    _use(loss, loss.fractions, here.call(operator.truediv, found, tokens), here)
    _use(loss, loss.scores, here.call(operator.truediv, sums, scored), here)


def _total_and_number(ratio: _Ratio, here: Builder) -> tuple[Node, Node]:
    """Write the sum over tokens, and how many there are as a tensor of one element, in float32 or wider."""
    number = ratio.number
    if ratio.total is None:
        sizes = [here.call(torch.ops.aten.sym_size.int, ratio.of, dim) for dim in ratio.dims]
        number = functools.reduce(lambda one, other: here.call(operator.mul, one, other), sizes)
    mean = _widened(ratio.node, here)
    if isinstance(value_of(number), torch.Tensor):
        number = _widened(number, here)
    else:
        number = here.call(operator.mul, here.method("new_ones", mean, 1), number)
    return _widened(ratio.total, here) if ratio.total is not None else here.call(operator.mul, mean, number), number


def _widened(value: Any, here: Builder) -> Node:
    """Return a value in floating numbers of 32 bits or more: in 16 there are too few for tokens."""
    dtype = value_of(value).dtype
    return value if dtype.is_floating_point and dtype.itemsize > 2 else here.method("float", value)


def _use(loss: _Loss, old: _Ratio, new: Node, here: Builder) -> None:
    """Use ``new`` for a mean in the product, behind copies of what shapes and casts it."""
    made = {old.node: here.method("type_as", new, old.node)}
    for view in reversed(old.views):
        made[view] = here.copy(view, made)
    product = loss.product
    product.args = tuple(made[old.operand] if one is old.operand else one for one in product.args)
