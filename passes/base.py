"""Interface of passes: what the runner hands to a pass, what a pass hands back, and what is remembered of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.fx import GraphModule, Node

from hecate.runtime.attention.options import S2Attention
from hecate.runtime.placement.planner import Rates

Chunks = int | Literal["auto"]
RowDispatch = Literal["rows", "nodes", "auto"]

_UNKNOWN = Rates(flops=1.0, rank_bytes=1.0, node_bytes=1.0)


@dataclass(frozen=True, kw_only=True)
class PassContext:
    """Facts that a pass may know besides the graph. Never the rank, never ownership: all ranks rewrite alike.

    Attributes:
        world_size: W.
        replicates: the policy may hold experts on ranks that do not own them.
        calibrates: it may do so once more after the gate.
        part: "forward" or "backward", once autograd has parted them.
        layer_names: layer id -> name of the experts module, for messages.
        chunks: parts into which the rows of a layer are cut, or "auto": two where that is predicted to pay.
        dispatch: how rows travel between nodes: each by itself, once for each token and node, or as is predicted to
            pay.
        room_percent: for so many percent of its own rows a rank has room; 0 for any number, which then comes in the
            sizes of tensors. Rows travel each by itself and in one part.
        tokens: of a rank in one step, the fewest of all ranks when they first compiled; 0 where they are not known.
            For predictions that all ranks must make alike.
        overlaps: transfers and compute go on beside each other; not where gloo copies with the cores that compute.
        rematerialize: gather experts again in the backward.
        prefetch_bytes: most bytes of parameters and of gradients under way beside the compute; None for twice
            the largest transfer.
        owned, slots: experts that a rank owns in one layer, and replicas that it may hold; for predictions.
        nodes, ranks_per_node: machines of a group, and its ranks on each; for predictions.
        all_nodes, all_ranks_per_node: of all groups.
        rates: how fast the machine is; for predictions.
        guesses: sizes that depend on data, learned from the forward; for predictions.
        attention: the pattern that attention gets, or None.
        key_heads: heads of keys that the model's config says, or None where it does not.
        shares_fractions: load-balancing losses are of all ranks' tokens.
        held: numbers of experts, by the layers whose routers' choices are recorded or replayed.
    """

    world_size: int
    replicates: bool = False
    calibrates: bool = False
    part: str = "forward"
    layer_names: Mapping[int, str] = field(default_factory=dict)
    chunks: Chunks = 1
    dispatch: RowDispatch = "rows"
    room_percent: int = 0
    tokens: int = 0
    overlaps: bool = True
    rematerialize: bool = False
    prefetch_bytes: int | None = None
    owned: int = 1
    slots: int = 0
    nodes: int = 1
    ranks_per_node: int = 1
    all_nodes: int = 1
    all_ranks_per_node: int = 1
    rates: Rates = _UNKNOWN
    guesses: dict[Any, int] = field(default_factory=dict, compare=False)
    attention: S2Attention | None = None
    key_heads: int | None = None
    shares_fractions: bool = False
    held: Mapping[int, int] = field(default_factory=dict)

    @property
    def link_bytes(self) -> float:
        """Bytes per second of a rank's share of the slowest link inside its group."""
        return self._link_bytes(self.nodes, self.ranks_per_node)

    @property
    def link_bytes_between_groups(self) -> float:
        """Bytes per second of a rank's share of the slowest link of all."""
        if self.all_nodes == 1:
            return self.link_bytes
        return self._link_bytes(self.all_nodes, self.all_ranks_per_node)

    def _link_bytes(self, nodes: int, ranks_per_node: int) -> float:
        return self.rates.rank_bytes if nodes == 1 else self.rates.node_bytes / ranks_per_node

    def name(self, layer: int) -> str:
        return self.layer_names.get(layer, f"layer {layer}")


@dataclass(frozen=True, kw_only=True)
class Skip:
    """A place that a pass saw and left alone.

    Attributes:
        where: the module.
        reason: why, in words a user can act on.
        fallback: the program is now slower than it should be, and the user is warned.
        line: the line of model code that causes it, "file:number"; "" if it is not known.
        fix: what a user can do about it; "" where there is nothing to say.
    """

    where: str
    reason: str
    fallback: bool = True
    line: str = ""
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A finding of a pass that a user may want to know.

    Attributes:
        where: the module.
        text: what, for ``hecate.explain``.
    """

    where: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one pass on one graph."""

    rewritten: int = 0
    skipped: tuple[Skip, ...] = ()
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PassRecord(Outcome):
    """A record of one pass on one graph and on the graphs inside it.

    Attributes:
        seconds: time it took, verification included.
    """

    name: str
    enabled: bool
    seconds: float


Pass = Callable[[GraphModule, PassContext], Outcome]


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """A rewrite of code that is no graph yet. A room above this one does it, so the list has it by name.

    Attributes:
        name: of the function that does it.
        file: where that is, from the repository's root.
        does: what it does, in one line.
    """

    name: str
    file: str
    does: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Passes and rewrites that run at one time.

    Attributes:
        name: of the stage.
        when: what they run on.
        entries: in the order in which they run.
    """

    name: str
    when: str
    entries: tuple[Pass | Rewrite, ...]


class Refused(Exception):
    """Raised by a pass that does not understand what it sees; the message is the reason. The graph is unchanged.

    Args:
        node: what it does not understand, if that is one node.
        fix: what a user can do about it.
    """

    def __init__(self, reason: str, node: Node | None = None, *, fix: str = "") -> None:
        super().__init__(reason)
        self.node, self.fix = node, fix
