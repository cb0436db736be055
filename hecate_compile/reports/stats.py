"""The rows and bytes of the last step: :func:`hecate.stats`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from hecate.reports.tables import as_text
from hecate.runtime.comm import collectives
from hecate.runtime.comm.mesh import Mesh
from hecate.runtime.state.layer import Layer


@dataclass(frozen=True, kw_only=True)
class LayerStats:
    """An MoE layer in the last forward and its backward.

    For a layer that is called several times in a forward, rows are those of its last call, and bytes those of this
    call and of all backwards.

    Attributes:
        name: qualified name of the experts module.
        rows: rows that each rank computed (routed tokens, each counted once per choice), length W.
        expert_rows: rows of each expert over all ranks, length E.
        bytes_sent: bytes of rows that each rank sent to others, forward and backward, length W.
        node_bytes_sent: the part of them that went to other nodes, length W.
        replicas: copies of experts on ranks that do not own them, over all ranks.
        expert_bytes_sent: bytes of experts and their gradients that each rank sent to others, length W.
    """

    name: str
    rows: tuple[int, ...]
    expert_rows: tuple[int, ...]
    bytes_sent: tuple[int, ...]
    node_bytes_sent: tuple[int, ...]
    replicas: int
    expert_bytes_sent: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Rows of the busiest rank over the mean; 1.0 is balanced, and so is a step without rows."""
        total = sum(self.rows)
        return max(self.rows) * len(self.rows) / total if total else 1.0

    @property
    def max_violation(self) -> float:
        """MaxVio: by how much the busiest expert has more rows than the mean, relative to it; 0 is balanced."""
        total = sum(self.expert_rows)
        return max(self.expert_rows) * len(self.expert_rows) / total - 1 if total else 0.0

    @property
    def variation(self) -> float:
        """Coefficient of variation of the rows of experts: standard deviation over mean; 0 is balanced."""
        mean = sum(self.expert_rows) / len(self.expert_rows)
        return statistics.pstdev(self.expert_rows) / mean if mean else 0.0

    @property
    def entropy(self) -> float:
        """Entropy of how rows are spread over experts, over that of an even spread: 1 is balanced, 0 one expert."""
        total, experts = sum(self.expert_rows), len(self.expert_rows)
        shares = [rows / total for rows in self.expert_rows if rows]
        return -sum(share * math.log(share) for share in shares) / math.log(experts) if total and experts > 1 else 1.0

    @property
    def dead_experts(self) -> tuple[int, ...]:
        """The experts to which no row went."""
        return tuple(expert for expert, rows in enumerate(self.expert_rows) if not rows)


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The result of :func:`hecate.stats`; ``print`` it.

    Attributes:
        layers: one entry for each MoE layer that exchanges rows, in model order.
    """

    layers: tuple[LayerStats, ...]

    @property
    def imbalance(self) -> float:
        """Mean over layers of max/mean rows per rank; NaN if no layer exchanged rows."""
        return sum(layer.imbalance for layer in self.layers) / len(self.layers) if self.layers else float("nan")

    def __str__(self) -> str:
        table = Table("layer", "rows per rank", "max/mean", "hottest expert", "replicas", "MB sent per rank")
        for layer in self.layers:
            hottest = max(range(len(layer.expert_rows)), key=layer.expert_rows.__getitem__)
            sent = [rows + experts for rows, experts in zip(layer.bytes_sent, layer.expert_bytes_sent, strict=True)]
            table.add_row(
                layer.name,
                " ".join(map(str, layer.rows)),
                f"{layer.imbalance:.2f}",
                f"{hottest} ({layer.expert_rows[hottest]})",
                str(layer.replicas),
                " ".join(f"{size / 1e6:.2f}" for size in sent),
            )
        return as_text(table)


# Numbers of a layer that each rank tells, before its rows by expert.
_OWN = 6


def collect_stats(layers: Sequence[Layer], mesh: Mesh) -> Stats:
    """Gather the last step's counts. A collective: all ranks call it together."""
    world, found, mine = mesh.everyone, [], [torch.zeros(0, dtype=torch.int64, device="cpu")]
    seen = [layer for layer in layers if layer.counts is not None]
    for layer in seen:
        layer.read_rows()
        assert layer.counts is not None
        per_expert = layer.counts.cpu().sum(0)
        rows = layer.rows if mesh.group.size > 1 else int(per_expert.sum())
        # Ranks between which tensors are split compute the same rows: one of them counts.
        counts = world.rank == mesh.ranks[0] == min((world.rank, *mesh.copies))
        own = (rows, layer.bytes_sent, layer.node_bytes_sent, layer.expert_bytes_sent, layer.replicas, counts)
        assert len(own) == _OWN
        mine += [torch.tensor(own, device="cpu"), per_expert]
    told = collectives.all_gather_even(torch.cat(mine).to(world.control_device), world).cpu()
    for layer, of_ranks in zip(seen, told.split([_OWN + layer.num_experts for layer in seen], 1), strict=True):
        # Ranks of a group know the same of its experts.
        of_groups = of_ranks[of_ranks[:, _OWN - 1] > 0].sum(0).tolist()
        replicas, expert_rows = of_groups[_OWN - 2], of_groups[_OWN:]
        rows_of, sent, crossed, experts_sent, *_ = of_ranks.t().tolist()
        found.append(
            LayerStats(
                name=layer.name,
                rows=tuple(rows_of),
                expert_rows=tuple(expert_rows),
                bytes_sent=tuple(sent),
                node_bytes_sent=tuple(crossed),
                replicas=replicas,
                expert_bytes_sent=tuple(experts_sent),
            )
        )
    return Stats(layers=tuple(found))
