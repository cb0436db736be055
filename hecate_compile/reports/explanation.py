"""What Hecate found, did and saw: :func:`explain` and :func:`stats`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from hecate.graph.backend import GraphRecord
from hecate.passes import FINAL_PASSES, JOINT_PASSES, PASSES, Skip, summary_of
from hecate.passes.final.collective_notes import describe
from hecate.runtime.comm import collectives
from hecate.runtime.comm.queue import Span
from hecate.runtime.comm.world import World
from hecate.runtime.state.layer import Layer
from hecate.wrap.find_experts import ExpertsModule, Passed


def _text(*tables: Table | str) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    for table in tables:
        console.print(table)
    return console.export_text()


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What :func:`hecate.explain` returns; ``print`` it.

    Attributes:
        world: rank and number of ranks.
        policy: what decides who holds what, on which nodes, and what it takes for the speed of the machine.
        experts: the modules that were sharded.
        passed: modules that look similar and were not.
        layers: the runtime records, with the owners.
        graphs: one record per compiled graph; empty before the first forward.
        spans: the collectives of the last forward and its backward, in the order of their starts.
        disabled: passes that are switched off.
    """

    world: World
    policy: str
    experts: tuple[ExpertsModule, ...]
    passed: tuple[Passed, ...]
    layers: tuple[Layer, ...]
    graphs: tuple[GraphRecord, ...]
    spans: tuple[Span, ...] = ()
    disabled: tuple[str, ...] = ()

    @property
    def skipped(self) -> tuple[Skip, ...]:
        """Everything some pass saw and left alone."""
        return tuple(skip for graph in self.graphs for record in graph.passes for skip in record.skipped)

    def __str__(self) -> str:
        found = Table("module", "experts", "found by", "parameters", "owned per rank", title="experts")
        for experts, layer in zip(self.experts, self.layers, strict=True):
            owned = ", ".join(map(str, layer.owners.counts[:8])) + (" ..." if self.world.size > 8 else "")
            found.add_row(
                experts.name or "(the model)", str(experts.num_experts), experts.sign,
                ", ".join(experts.parameters), owned,
            )  # fmt: skip
        parts: list[Table | str] = [f"rank {self.world.rank} of {self.world.size}, {self.policy}", found]
        parts += [f"not experts: {p.name}: {p.reason}" for p in self.passed]
        if not self.graphs:
            parts.append("nothing compiled yet: run one forward")
        for number, graph in enumerate(self.graphs):
            table = Table("", "pass", "what it does", "rewritten", "ms", title=f"graph {number}: {graph.nodes} calls")
            for index, (function, record) in enumerate(zip(PASSES, graph.passes, strict=True), start=1):
                count = str(record.rewritten) if record.enabled else "off"
                table.add_row(str(index), record.name, summary_of(function), count, f"{record.seconds * 1e3:.0f}")
            parts.append(table)
        if self.world.size > 1 and self.graphs:
            later = [function.__name__ for function in (*JOINT_PASSES, *FINAL_PASSES)]
            parts.append("after autograd: " + ", ".join(f"{n} (off)" if n in self.disabled else n for n in later))
        if self.spans:
            parts.append("schedule of the last step: predicted ms behind ms of compute (measured)")
            parts += describe(self.spans, measured=True)
        for skip in dict.fromkeys(self.skipped):
            parts.append(f"left alone: {skip.where}: {skip.reason}")
        return _text(*parts)


@dataclass(frozen=True, kw_only=True)
class LayerStats:
    """One MoE layer in the last forward and its backward.

    Attributes:
        name: qualified name of the experts module.
        rows: rows that each rank computed (routed tokens, each counted once per choice), length W.
        expert_rows: rows of each expert over all ranks, length E.
        bytes_sent: bytes of rows that each rank sent to others, forward and backward, length W.
        replicas: copies of experts on ranks that do not own them, over all ranks.
        expert_bytes_sent: bytes of experts and their gradients that each rank sent to others, length W.
    """

    name: str
    rows: tuple[int, ...]
    expert_rows: tuple[int, ...]
    bytes_sent: tuple[int, ...]
    replicas: int
    expert_bytes_sent: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Rows of the busiest rank over the mean; 1.0 is balanced, and so is a step without rows."""
        total = sum(self.rows)
        return max(self.rows) * len(self.rows) / total if total else 1.0


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What :func:`hecate.stats` returns; ``print`` it.

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
                layer.name, " ".join(map(str, layer.rows)), f"{layer.imbalance:.2f}",
                f"{hottest} ({layer.expert_rows[hottest]})", str(layer.replicas),
                " ".join(f"{size / 1e6:.2f}" for size in sent),
            )  # fmt: skip
        return _text(table)


def collect_stats(layers: Sequence[Layer], world: World) -> Stats:
    """Gather the last step's counts. A collective: all ranks call it together."""
    seen = [layer for layer in layers if layer.counts is not None]
    mine = [[layer.rows, layer.bytes_sent, layer.expert_bytes_sent] for layer in seen]
    numbers = torch.tensor(mine, dtype=torch.int64, device=world.control_device).view(len(seen), 3)
    everyone = collectives.all_gather_even(numbers, world).cpu()
    found = []
    for index, layer in enumerate(seen):
        assert layer.counts is not None
        per_expert = layer.counts.cpu().sum(0)
        rows, sent, experts_sent = everyone[:, index].t().tolist()
        found.append(
            LayerStats(
                name=layer.name,
                rows=tuple(rows) if world.size > 1 else (int(per_expert.sum()),),
                expert_rows=tuple(per_expert.tolist()),
                bytes_sent=tuple(sent),
                replicas=layer.replicas,
                expert_bytes_sent=tuple(experts_sent),
            )
        )
    return Stats(layers=tuple(found))
