"""An explanation of what Hecate found and did: :func:`hecate.explain`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hecate.graph.backend import GraphRecord
from hecate.passes import STAGES, Remark, Skip, name_of, summary_of
from hecate.passes.base import PassRecord
from hecate.reports.kept_parameters import KeptParameters
from hecate.reports.tables import Section, as_bytes, as_time, sections_as_html, sections_as_text
from hecate.reports.travel import LayerBytes, Travel, layer_bytes, travels
from hecate.runtime.comm.queue import Span
from hecate.runtime.comm.world import World
from hecate.runtime.state.layer import Layer
from hecate.wrap.find_experts import ExpertsModule, PassedOver
from hecate.wrap.whole_layers import InPython

# Advice for a layer that was left alone for a reason that has no advice of its own.
_OTHERWISE = "docs/models.md has the spellings that are rewritten; the program is right, but slower"
_SUMMARIES = {name_of(entry): summary_of(entry) for stage in STAGES for entry in stage.entries}


@dataclass(frozen=True, kw_only=True)
class Region:
    """The outcome of the passes for one MoE layer in one graph; reason, line and fix if it was not rewritten."""

    graph: int
    layer: str
    rewritten: bool
    reason: str = ""
    line: str = ""
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The result of :func:`hecate.explain`; ``print`` it, or let a notebook show it.

    Attributes:
        world: rank and number of ranks.
        groups: of ranks, between which experts are sharded.
        policy: the policy that decides who holds what, on which nodes, and the speeds of the machine that it uses.
        experts: the modules that were sharded.
        passed_over: modules that look similar and were not.
        layers: the runtime records, with the owners.
        graphs: one record per compiled graph; empty before the first forward.
        spans: the collectives of the last forward and its backward, in the order of their starts.
        disabled: passes that are switched off.
        loops: ``file:line`` of loops and counts that were changed so that they can be traced.
        parameters: bytes that this rank keeps, and that the model had.
        text_model: name of the module that is traced alone, beside towers; "" if the whole model is.
        in_python: modules around experts that no graph can have.
    """

    world: World
    groups: int
    policy: str
    experts: tuple[ExpertsModule, ...]
    passed_over: tuple[PassedOver, ...]
    layers: tuple[Layer, ...]
    graphs: tuple[GraphRecord, ...]
    spans: tuple[Span, ...] = ()
    disabled: tuple[str, ...] = ()
    loops: tuple[str, ...] = ()
    parameters: tuple[KeptParameters, ...] = ()
    text_model: str = ""
    in_python: tuple[InPython, ...] = ()

    @property
    def skipped(self) -> tuple[Skip, ...]:
        """The places that some pass saw and left alone."""
        return tuple(skip for graph in self.graphs for record in graph.passes for skip in record.skipped)

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """The remarks of passes on modules, one for each module, from the first graph that it is in."""
        found: dict[str, Remark] = {}
        for graph in self.graphs:
            for remark in (remark for record in graph.passes for remark in record.remarks):
                found.setdefault(remark.where, remark)
        return tuple(found.values())

    @property
    def regions(self) -> tuple[Region, ...]:
        """The outcome for each MoE layer in each graph."""
        return tuple(
            _region(number, graph, layer) for number, graph in enumerate(self.graphs) for layer in graph.layers
        )

    @property
    def gathers(self) -> bool:
        """True if experts are gathered somewhere."""
        return bool(self.in_python) or any(not region.rewritten for region in self.regions)

    @property
    def unseen(self) -> tuple[str, ...]:
        """The MoE layers that are in no graph and run in no Python so far."""
        seen = {layer for graph in self.graphs for layer in graph.layers}
        seen |= {layer for one in self.in_python for layer in one.experts}
        # Layers that share parameters have one name in graphs.
        pairs = zip(self.experts, self.layers, strict=True)
        return tuple(experts.name for experts, layer in pairs if not {experts.name, layer.name} & seen)

    @property
    def travels(self) -> tuple[Travel, ...]:
        """The schedule of the last step, predicted and measured; before the first one that of all graphs."""
        predicted = [span for graph in self.graphs for spans in graph.notes.values() for span in spans]
        return travels(self.spans or predicted)

    @property
    def layer_bytes(self) -> tuple[LayerBytes, ...]:
        """The bytes that this rank sent for each layer, and their prediction."""
        return layer_bytes(self.layers, self.travels, self.graphs[-1].slots if self.graphs else 0)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data, with seconds and bytes as numbers."""
        return {
            "rank": self.world.rank,
            "ranks": self.world.size,
            "groups": self.groups,
            "policy": self.policy,
            "layers": [
                {
                    "name": experts.name,
                    "experts": experts.num_experts,
                    "found_by": experts.sign,
                    "parameters": list(experts.parameters),
                    "owned": list(layer.owners.counts),
                }
                for experts, layer in zip(self.experts, self.layers, strict=True)
            ],
            "not_experts": [{"name": one.name, "reason": one.reason} for one in self.passed_over],
            "parameters": [asdict(one) for one in self.parameters],
            "graphs": [
                {
                    "nodes": graph.nodes,
                    "because": graph.because,
                    "passes": {
                        part: [
                            {
                                "name": record.name,
                                "enabled": record.enabled,
                                "rewritten": record.rewritten,
                                "left_alone": len(record.skipped),
                                "seconds": record.seconds,
                            }
                            for record in records
                        ]
                        for part, records in {"captured": graph.passes, **graph.later}.items()
                    },
                }
                for graph in self.graphs
            ],
            "regions": [asdict(region) for region in self.regions],
            "left_alone": [{**asdict(skip), "fix": _fix_of(skip)} for skip in dict.fromkeys(self.skipped)],
            "schedule": [asdict(one) for one in self.travels],
            "bytes": [asdict(one) for one in self.layer_bytes],
            "disabled": list(self.disabled),
            "loops": list(self.loops),
            "text_model": self.text_model,
            "in_python": [asdict(one) for one in self.in_python],
        }

    def __str__(self) -> str:
        return sections_as_text(self._parts())

    def _repr_html_(self) -> str:
        return sections_as_html(self._parts())

    def _parts(self) -> list[Section | str]:
        """Return tables and sentences, in the order in which things happen."""
        size, groups = self.world.size, self.groups
        among = f": {groups} groups of {size // groups}, each" if groups > 1 else ","
        parts: list[Section | str] = [f"rank {self.world.rank} of {size}{among} {self.policy}"]
        parts.append(self._found() if self.experts else "no experts are sharded")
        if self.parameters:
            parts.append(self._kept())
        if self.world.size == 1:
            parts.append("one process, so nothing is sharded: start with torchrun --nproc-per-node N for more")
        parts += [f"not experts: {p.name}: {p.reason}" for p in self.passed_over]
        if self.text_model:
            parts.append(f"traced: {self.text_model}; the towers and all else around it run as Python")
        parts += [f"changed so that it can be traced (make_loops_traceable): {place}" for place in self.loops]
        for one in self.in_python:
            when = "" if one.training else " where the model is evaluated"
            parts.append(f"runs as Python{when}, with all experts gathered: {', '.join(one.modules)}: {one.reason}")
        if not self.graphs:
            parts.append("nothing compiled yet: run one forward")
        elif self.unseen:
            parts.append(f"in no graph yet: {', '.join(self.unseen)}")
        for number, graph in enumerate(self.graphs):
            title = f"graph {number}: {graph.nodes} calls"
            if graph.because:
                title += f"; another did not fit: {graph.because}"
            parts.append(_passes(title, graph.passes))
            for part, records in graph.later.items():
                pieces = graph.pieces.get(part)
                cut = f": {pieces.all} pieces, {pieces.different} of them different" if pieces is not None else ""
                parts.append(_passes(f"graph {number}, {part}{cut}", records))
            if self.world.size > 1 and not graph.later:
                parts.append(f"graph {number} behind autograd: from a cache, or not compiled yet")
        if self.regions:
            parts.append(self._regions())
        if self.travels:
            parts.append(self._schedule())
        if self.spans:
            parts.append(self._bytes())
        for remark in self.remarks:
            parts.append(f"attention: {remark.where}: {remark.text}")
        for (reason, line, fix), names in self._left_alone().items():
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            parts.append(f"left alone: {shown}: {reason}")
            if line:
                parts.append(f"  at {line}")
            if fix:
                parts.append(f"  to do: {fix}")
        return parts

    def _left_alone(self) -> dict[tuple[str, str, str], list[str]]:
        """Return names by reason, line of code and advice; an MoE layer has its first reason, which causes others."""
        left = [region for region in self.regions if not region.rewritten]
        found: dict[tuple[str, str, str], list[str]] = {}
        for region in left:
            found.setdefault((region.reason, region.line, region.fix), []).append(region.layer or "(the model)")
        layers = {region.layer for region in left}
        for skip in self.skipped:
            if not (skip.fallback and skip.where in layers):
                found.setdefault((skip.reason, skip.line, _fix_of(skip)), []).append(skip.where)
        return {key: list(dict.fromkeys(names)) for key, names in found.items()}

    def _found(self) -> Section:
        rows = [
            (
                experts.name or "(the model)",
                str(experts.num_experts),
                experts.sign,
                ", ".join(experts.parameters),
                ", ".join(map(str, layer.owners.counts[:8])) + (" ..." if layer.world.size > 8 else ""),
            )
            for experts, layer in zip(self.experts, self.layers, strict=True)
        ]
        columns = ("module", "experts", "found by", "parameters", "owned per rank")
        return Section(title="experts", columns=columns, rows=tuple(rows), numbers=(1,))

    def _kept(self) -> Section:
        rows = tuple(
            (one.kind, str(one.count), as_bytes(one.whole_bytes), as_bytes(one.kept_bytes)) for one in self.parameters
        )
        columns = ("parameters", "count", "before", "on this rank")
        return Section(title="memory of parameters", columns=columns, rows=rows, numbers=(1, 2, 3))

    def _regions(self) -> Section:
        done = "rows travel" if self.world.size > 1 else "rewritten; rows travel with more ranks"
        rows = tuple(
            (str(one.graph), one.layer or "(the model)", done if one.rewritten else "experts are gathered")
            for one in self.regions
        )
        columns = ("graph", "MoE layer", "what happens")
        return Section(title="MoE layers", columns=columns, rows=rows, numbers=(0,))

    def _schedule(self) -> Section:
        title = "schedule, as predicted: what travels, behind how much compute"
        columns: tuple[str, ...] = ("part", "of", "what travels", "times", "bytes", "predicted", "behind")
        rows = [
            (
                one.part,
                one.subject,
                one.operator,
                str(one.count),
                as_bytes(one.predicted_bytes),
                as_time(one.predicted),
                as_time(one.behind),
            )
            for one in self.travels
        ]
        if not self.spans:
            return Section(title=title, columns=columns, rows=tuple(rows), numbers=(3, 4, 5, 6))
        measured = [
            tuple("" if seconds is None else as_time(seconds) for seconds in (one.took, one.exposed))
            for one in self.travels
        ]
        return Section(
            title="schedule of the last step: predicted, behind how much compute, and measured",
            columns=(*columns, "took", "exposed"),
            rows=tuple((*row, *times) for row, times in zip(rows, measured, strict=True)),
            numbers=(3, 4, 5, 6, 7, 8),
        )

    def _bytes(self) -> Section:
        rows = tuple(
            (
                one.layer,
                as_bytes(one.predicted_rows),
                as_bytes(one.rows),
                as_bytes(one.predicted_experts),
                as_bytes(one.experts),
                as_bytes(one.most_replica_bytes),
                as_bytes(one.replica_bytes),
            )
            for one in self.layer_bytes
        )
        columns = (
            "MoE layer",
            "rows, predicted",
            "rows, sent",
            "experts, predicted",
            "experts, sent",
            "replicas, at most",
            "replicas, held (mean)",
        )
        return Section(
            title="bytes of this rank in the last step", columns=columns, rows=rows, numbers=(1, 2, 3, 4, 5, 6)
        )


def _fix_of(skip: Skip) -> str:
    return skip.fix or (_OTHERWISE if skip.fallback else "")


def _region(number: int, graph: GraphRecord, layer: str) -> Region:
    skips = [skip for record in graph.passes for skip in record.skipped if skip.where == layer and skip.fallback]
    exchanged = next((record for record in graph.passes if record.name == "exchange_rows"), None)
    if exchanged is None or not exchanged.enabled:
        why = "exchange_rows is switched off"
        how = 'leave out Config(policy="gather") or the name in disable_passes'
        return Region(graph=number, layer=layer, rewritten=False, reason=why, fix=how)
    # The exchange fails for the reason that the earliest pass gave.
    last = next((skip for skip in skips if skip in exchanged.skipped), None)
    if last is None:
        return Region(graph=number, layer=layer, rewritten=True)
    first, line = skips[0], skips[0].line or last.line
    return Region(graph=number, layer=layer, rewritten=False, reason=first.reason, line=line, fix=_fix_of(first))


def _passes(title: str, records: tuple[PassRecord, ...]) -> Section:
    rows = tuple(
        (
            str(index),
            record.name,
            _SUMMARIES.get(record.name, ""),
            str(record.rewritten) if record.enabled else "off",
            str(len(record.skipped)),
            f"{record.seconds * 1e3:.1f}",
        )
        for index, record in enumerate(records, start=1)
    )
    columns = ("", "pass", "what it does", "rewritten", "left alone", "ms")
    return Section(title=title, columns=columns, rows=rows, numbers=(3, 4, 5))
