"""A graph and the bodies of checkpointed layers in it, whose arguments come from the graph around them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from hecate.passes.analysis.torch_values import GraphFacts
from hecate.passes.fx import arg, calls

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


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
