"""A cluster, as a TOML file describes it."""

from __future__ import annotations

import math
import tomllib
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hecate.runtime.placement.planner import Rates
from hecate.runtime.placement.topology import Topology


class ClusterError(ValueError):
    """A cluster file is missing, or says something that no cluster is."""


_MAY_BE_NOTHING = ("latency", "ring", "hop", "plan", "plan_rank", "operator", "start")


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Machines, and how fast they are.

    Attributes:
        name: for tables.
        nodes, gpus: machines, and ranks on each.
        flops: operations per second that a rank reaches in matmuls; not the peak.
        memory_bytes: bytes per second that a rank reads and writes in its own memory.
        rank_bytes: bytes per second of a rank's link inside its node, in each direction.
        node_bytes: bytes per second of a node's link, in each direction.
        latency: seconds that a collective takes with next to nothing to carry.
        ring: further seconds of a collective around all ranks (all-gather, all-reduce), with nothing to carry.
        hop: seconds that it takes longer for each further rank; in an all-reduce, twice for each doubling of ranks.
        plan, plan_rank: seconds between counts and the exchange of rows in which a rank plans: at least, and more for
            each rank of the group.
        operator: seconds that an operator takes with nothing to compute; 0 where they are launched ahead of time.
        start: seconds of compute that starting a collective takes, on ranks that send or receive in it.
        routed: how many times longer operators on experts' rows take than their operations and bytes say: many
            matmuls of changing sizes are slower than one.
        crowded: part of a node's rate that an exchange of rows reaches, in which all ranks send to all; less than 1
            where flows share a link unevenly.
        cpus: ranks compute on CPUs, where gradients are added up inside nodes before they cross
            (``all_reduce_by_nodes``) and counts go straight to everybody; GPUs have NCCL's rings.

    Raises:
        ClusterError: a name that is no text, ``cpus`` that is neither true nor false, a number that is not positive,
            a part that is more than the whole.
    """

    name: str
    nodes: int
    gpus: int
    flops: float
    memory_bytes: float
    rank_bytes: float
    node_bytes: float
    latency: float = 20e-6
    ring: float = 0.0
    hop: float = 0.0
    plan: float = 0.0
    plan_rank: float = 0.0
    operator: float = 0.0
    start: float = 0.0
    routed: float = 1.0
    crowded: float = 1.0
    cpus: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                if not isinstance(value, str):
                    raise ClusterError(f"hecate: a cluster: name = {value!r}, expected a text in quotes")
                continue
            if field.name == "cpus":
                if not isinstance(value, bool):
                    raise ClusterError(f"hecate: cluster {self.name}: cpus = {value!r}, expected true or false")
                continue
            whole, free = field.name in ("nodes", "gpus"), field.name in _MAY_BE_NOTHING
            most = 1 if field.name == "crowded" else math.inf
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not 0 <= value <= most or (value == 0 and not free):
                raise ClusterError(
                    f"hecate: cluster {self.name}: {field.name} = {value!r}, expected a {'whole ' * whole}number"
                    f"{', 0 or more' if free else ' above 0'}{', at most 1' if most == 1 else ''}"
                )

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    def of_group(self, ranks: int) -> ClusterSpec:
        """Return the part of the cluster that a group of so many ranks has: whole nodes, or part of one.

        Raises ClusterError if it is neither, or ranks make no whole groups.
        """
        if ranks < 1 or self.ranks % ranks:
            raise ClusterError(
                f"hecate: cluster {self.name}: its {self.ranks} ranks do not make whole groups of {ranks}"
            )
        if max(ranks, self.gpus) % min(ranks, self.gpus):
            raise ClusterError(
                f"hecate: cluster {self.name}: groups of {ranks} ranks are neither whole nodes of {self.gpus} nor "
                "equal parts of one"
            )
        return replace(self, nodes=max(1, ranks // self.gpus), gpus=min(ranks, self.gpus))

    @property
    def topology(self) -> Topology:
        return Topology.even(self.ranks, self.gpus)

    @property
    def rates(self) -> Rates:
        """The rates for the planner, without hidden time, which depends on the model."""
        # A measurement with exchanges, as in training, would come out like this.
        node_bytes = self.node_bytes * self.crowded
        return Rates(
            flops=self.flops, rank_bytes=self.rank_bytes, node_bytes=node_bytes, memory_bytes=self.memory_bytes
        )

    @classmethod
    def load(cls, path: Path) -> ClusterSpec:
        """Read a TOML file with these attributes as keys, ``name`` by default the file's, or raise ClusterError."""
        try:
            given: dict[str, Any] = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ClusterError(f"hecate: {path} is not a cluster file: {error}") from None
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(known))
        needed = {field.name for field in fields(cls) if field.default is MISSING and field.name != "name"}
        missing = sorted(needed - set(given))
        if unknown or missing:
            said = [f"unknown {', '.join(unknown)}"] if unknown else []
            said += [f"missing {', '.join(missing)}"] if missing else []
            raise ClusterError(f"hecate: {path}: {'; '.join(said)}. The keys are {', '.join(known)}.")
        return cls(**{"name": path.stem, **given})
