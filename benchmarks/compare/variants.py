"""Systems that are another one with other options, and bounds, which are no systems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A system on Hecate's engine that differs from another one in options, not in its policy.

    Attributes:
        of: the system whose policy it has.
        options: of ``hecate.Config``.
        top_k: it is in the tables of shapes whose tokens choose so many experts, or more; None for no table: it is
            measured only where ``--systems`` names it.
    """

    of: str
    options: Mapping[str, Any] = field(default_factory=dict)
    top_k: int | None = None


_NODES = {"dispatch": "nodes"}
# A line here is all that another one needs. Where a token chooses many experts, those nearest to Hecate have rows by
# node as well.
VARIANTS: dict[str, Variant] = {
    "static EP (node-wise)": Variant(of="static EP", options=_NODES, top_k=1),
    "hecate (node-wise)": Variant(of="hecate", options=_NODES, top_k=1),
    "FlexMoE (node-wise)": Variant(of="FlexMoE", options=_NODES, top_k=8),
    "post-gate (node-wise)": Variant(of="post-gate", options=_NODES, top_k=8),
    "hecate (one chunk)": Variant(of="hecate", options={"chunks": 1}),
    "hecate (two chunks)": Variant(of="hecate", options={"chunks": 2}),
}
# A bound is played by a system's model: with even routing, or with links on which nothing takes time.
BOUNDS = {"bound: balanced routing": "static EP", "bound: free links": "hecate"}
# Experts on the ranks of a node, and the same on every node.
IN_NODES = "static EP (in nodes)"
