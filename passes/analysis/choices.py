"""Operations by which a router chooses experts, in Dynamo's graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from hecate.passes.analysis.torch_values import is_state, shape_of, value_of
from hecate.passes.fx import arg, closure_backward, is_getitem, operands, option, reached
from hecate.passes.match import named


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An operation that chooses ``count`` of ``among`` scores: ``node`` has the places, or its result 1 has them.

    What is looked up in a table has no scores, and is among any number of experts, 0.
    """

    node: Node
    scores: Node | None
    among: int
    count: int
    has_values: bool
    keeps_dim: bool

    @property
    def places(self) -> list[Node]:
        return (
            [user for user in self.node.users if is_getitem(user) and arg(user, 1) == 1]
            if self.has_values
            else [self.node]
        )


_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")


def of_router(choice: Choice) -> bool:
    """Tell whether scores may be a router's: products with weights, as far as is known.

    Those of attention are products of what was computed from tokens on both sides, and may be as many as experts.
    """
    products = [] if choice.scores is None else [n for n in made_from(choice.scores) if named(n, *_PRODUCTS)]
    return all(map(_has_weights, products))


def made_from(scores: Node) -> set[Node]:
    """Return the products that scores are made of without another one between, or inputs where there are none."""
    found = reached([scores], lambda node: [] if named(node, *_PRODUCTS) else node.all_input_nodes) | {scores}
    products = {node for node in found if named(node, *_PRODUCTS)}
    return products or {node for node in found if node.op == "placeholder"}


def _has_weights(product: Node) -> bool:
    """Tell whether a product has an operand to which no other product leads."""
    sources = product.all_input_nodes
    return any(not any(named(n, *_PRODUCTS) for n in (one, *closure_backward([one]))) for one in sources)


def choice_of(node: Node) -> Choice | None:
    """Return the choice that a node makes along the last dimension of scores; None if it makes none that is used."""
    if named(node, "topk"):
        count, position, default = option(node, 1, "k"), 2, -1
    elif named(node, "max", "argmax"):
        count, position, default = 1, 1, None
    else:
        return None
    scores, dim = operands(node)[0], option(node, position, "dim", default)
    value = value_of(scores)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or type(dim) is not int:
        return None
    sizes = shape_of(scores)
    if type(count) is not int or not sizes or dim % len(sizes) != len(sizes) - 1 or type(sizes[-1]) is not int:
        return None
    kept = named(node, "topk") or option(node, position + 1, "keepdim", False) is True
    found = Choice(
        node=node,
        scores=scores,
        among=sizes[-1],
        count=count,
        has_values=not named(node, "argmax"),
        keeps_dim=kept,
    )
    return found if any(place.users for place in found.places) else None


def lookup_of(node: Node) -> Choice | None:
    """Return the choice that a node makes in a table ``[n, k]`` of the model's; None if it makes none."""
    if not (is_getitem(node) or named(node, "embedding", "index_select")) or not node.users:
        return None
    tables = [one for one in node.all_input_nodes if is_state(one)]
    sizes, value = shape_of(node), value_of(node)
    if len(tables) != 1 or len(shape_of(tables[0])) != 2 or not isinstance(value, torch.Tensor) or len(sizes) < 2:
        return None
    whole = shape_of(tables[0])[1] == sizes[-1] and type(sizes[-1]) is int
    if not whole or value.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64):
        return None
    return Choice(node=node, scores=None, among=0, count=sizes[-1], has_values=False, keeps_dim=True)
