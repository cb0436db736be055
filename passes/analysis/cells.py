"""Computations with experts on tensors with two leading dimensions, written on rows ``[R, 1, ...]`` instead.

They are for ``flatten_batches``, where the two are experts and places, and ``sort_lookups``, where they are tokens
and choices. Code between the products keeps its dimensions: the first two become one, and one of size 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from hecate.passes.analysis.rowwise import Kind, check_rowwise
from hecate.passes.analysis.torch_values import GraphFacts, gathers_by_layer
from hecate.passes.base import Outcome, PassContext, Refused
from hecate.passes.fx import Builder, between, copy_place, exits_of, skip_of


def rewrite_layers(
    gm: GraphModule, context: PassContext, what: str, rewrite: Callable[[list[Node]], bool]
) -> Outcome:
    """Call ``rewrite`` with the gathers of every layer in ``gm``; it returns whether it found ``what``."""
    rewritten, skipped = 0, []
    for layer, gathers in gathers_by_layer(gm.graph).items():
        try:
            rewritten += rewrite(gathers)
        except Refused as reason:
            skipped.append(skip_of(context.name(layer), reason, *gathers, reason=f"{what}: {reason}"))
    return Outcome(rewritten=rewritten, skipped=tuple(skipped))


@dataclass(frozen=True, kw_only=True)
class Cells:
    """A computation with one layer's experts.

    Attributes:
        products: products of rows with matrices of experts, by node: what has the rows.
        vectors: vectors of experts that meet rows.
        entries: row tensors that flow in.
        body: products and the nodes between them, in graph order.
        exits: row tensors that flow out.
        last: the last node that it is computed from.
    """

    products: Mapping[Node, Node]
    vectors: tuple[Node, ...]
    entries: tuple[Node, ...]
    body: tuple[Node, ...]
    exits: tuple[Node, ...]
    last: Node

    @classmethod
    def find(
        cls,
        facts: GraphFacts,
        products: Mapping[Node, Node],
        vectors: Collection[Node],
        parameters: Collection[Node],
        *needed: Node,
    ) -> Cells:
        """Find what lies between the products, and where vectors meet their rows. Raises Refused.

        ``parameters`` are all nodes that are computed of experts alone; ``needed`` is what it needs beside its rows.
        """
        # A vector may follow the last product.
        anchors = {*products, *(user for vector in vectors for user in vector.users if user not in parameters)}
        inside = anchors | between(anchors, anchors)
        body = tuple(sorted(inside))
        sources = dict.fromkeys(source for node in body for source in node.all_input_nodes if source not in inside)
        outside = [source for source in sources if source not in parameters]
        rows = set(products.values())
        entries, exits = tuple(source for source in outside if source in rows), tuple(exits_of(inside))
        facts.refuse_changes_of((*outside, *body, *needed), until=body[-1])
        facts.refuse_autocast()
        facts.refuse_mixed_modes(inside, "in it")
        used = tuple(sorted(vector for vector in vectors if vector in sources))
        # All of it is computed behind the last of these.
        last = max((*entries, *used, *needed))
        if any(user < last for exit in exits for user in exit.users if user not in inside):
            raise Refused("a result is used before everything that it is computed with is known")
        return cls(products=products, vectors=used, entries=entries, body=body, exits=exits, last=last)

    def check_apart(self, kind: Kind, given: Mapping[Node, Kind], *, depth: int = 1) -> None:
        """Raise Refused unless every cell of what is made between the products depends on that cell alone."""
        # A product's result is one more input, whatever came in.
        inputs = dict(given) | dict.fromkeys(self.products, kind)
        inside = set(self.body)
        needed = dict.fromkeys((*self.exits, *(rows for rows in self.products.values() if rows in inside)))
        wanted = [node for node in needed if node not in self.products]
        if wanted:
            between_them = [node for node in self.body if node not in self.products]
            check_rowwise(between_them, inputs, dict.fromkeys(wanted, kind), depth=depth)

    def write(self, new: dict[Node, Node], behind: Node, multiply: Callable[[Builder, Node], Node]) -> None:
        """Write the body behind a node, each node where it was, with products by ``multiply``, into ``new``."""
        last = behind
        for node in self.body:
            here = Builder(node.graph, after=max(node, last))
            new[node] = multiply(here, node) if node in self.products else here.copy(node, new)
            copy_place(node, new[node])
            last = here.last
