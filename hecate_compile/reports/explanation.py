"""What Hecate found and did: :func:`hecate.explain`."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from hecate.graph.backend import GraphRecord
from hecate.passes import FINAL_PASSES, JOINT_PASSES, PASSES, Remark, Skip, summary_of
from hecate.passes.final.collective_notes import schedule_lines
from hecate.reports.text import as_text
from hecate.runtime.comm.queue import Span
from hecate.runtime.comm.world import World
from hecate.runtime.state.layer import Layer
from hecate.wrap.find_experts import ExpertsModule, PassedOver


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What :func:`hecate.explain` returns; ``print`` it.

    Attributes:
        world: rank and number of ranks.
        policy: what decides who holds what, on which nodes, and what it takes for the speed of the machine.
        experts: the modules that were sharded.
        passed_over: modules that look similar and were not.
        layers: the runtime records, with the owners.
        graphs: one record per compiled graph; empty before the first forward.
        spans: the collectives of the last forward and its backward, in the order of their starts.
        disabled: passes that are switched off.
        loops: ``file:line`` of loops and counts that were changed so that they can be traced.
    """

    world: World
    policy: str
    experts: tuple[ExpertsModule, ...]
    passed_over: tuple[PassedOver, ...]
    layers: tuple[Layer, ...]
    graphs: tuple[GraphRecord, ...]
    spans: tuple[Span, ...] = ()
    disabled: tuple[str, ...] = ()
    loops: tuple[str, ...] = ()

    @property
    def skipped(self) -> tuple[Skip, ...]:
        """Everything some pass saw and left alone."""
        return tuple(skip for graph in self.graphs for record in graph.passes for skip in record.skipped)

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """What passes say about a module, once for each: of the first graph that it is in."""
        found: dict[str, Remark] = {}
        for graph in self.graphs:
            for remark in (remark for record in graph.passes for remark in record.remarks):
                found.setdefault(remark.where, remark)
        return tuple(found.values())

    def __str__(self) -> str:
        found = Table("module", "experts", "found by", "parameters", "owned per rank", title="experts")
        for experts, layer in zip(self.experts, self.layers, strict=True):
            owned = ", ".join(map(str, layer.owners.counts[:8])) + (" ..." if self.world.size > 8 else "")
            found.add_row(
                experts.name or "(the model)", str(experts.num_experts), experts.sign,
                ", ".join(experts.parameters), owned,
            )  # fmt: skip
        parts: list[Table | str] = [f"rank {self.world.rank} of {self.world.size}, {self.policy}", found]
        if self.world.size == 1:
            parts.append("one process, so nothing is sharded: start with torchrun --nproc-per-node N for more")
        parts += [f"not experts: {p.name}: {p.reason}" for p in self.passed_over]
        parts += [f"changed so that it can be traced (hecate/wrap/loops says how): {place}" for place in self.loops]
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
            parts += schedule_lines(self.spans, measured=True)
        for remark in self.remarks:
            parts.append(f"attention: {remark.where}: {remark.text}")
        for skip in dict.fromkeys(self.skipped):
            parts.append(f"left alone: {skip.where}: {skip.reason}")
        return as_text(*parts)
