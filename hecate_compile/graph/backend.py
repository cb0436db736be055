"""The torch.compile backend: rewrite the captured graph, compare it across ranks, hand it on."""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from hecate.config import Config
from hecate.graph.dump_options import dump_options
from hecate.graph.lowering import lower
from hecate.graph.refused import refuse_chosen_experts, refuse_lost_changes
from hecate.graph.steps import Pieces
from hecate.passes import PASSES, PassContext
from hecate.passes.analysis.torch_values import GraphFacts, gathers_by_layer, is_of_model, size_hint
from hecate.passes.base import PassRecord, Skip
from hecate.passes.dumps.folder import DumpFolder, graph_log, own_folder
from hecate.passes.fingerprint import communicates, fingerprint
from hecate.passes.fx import bodies_of
from hecate.passes.runner import run_passes
from hecate.private import dynamo_source, symbols_of_trace, why_traced
from hecate.runtime.attention.options import UnsupportedAttentionError
from hecate.runtime.comm.agreement import DisagreementError, agree
from hecate.runtime.comm.queue import Span
from hecate.runtime.comm.warn import warn_together
from hecate.runtime.comm.world import World
from hecate.runtime.placement.hecate_policy import most_replicas
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state.layer import Layer, Relaying
from hecate.runtime.state.overlap_window import fewest_tokens, overlaps, predict_hidden
from hecate.runtime.state.placer import Placer
from hecate.runtime.state.step_mode import CurrentStep
from hecate.wrap.graph_breaks import break_near, places_around, places_in
from hecate.wrap.untraced import WITHOUT_TRACING

log = logging.getLogger("hecate")


@dataclass(frozen=True, kw_only=True)
class GraphRecord:
    """The record of a compiled graph.

    Attributes:
        nodes: number of operators after the passes.
        layers: names of the MoE layers in it; a model whose tracing breaks has several graphs.
        later: what the passes after autograd did to "joint", "forward" and "backward"; filled when these compile, and
            not with graphs that come from a cache.
        notes: the collectives of "forward" and "backward", as predicted; like ``later``.
        pieces: of ``Config(piecewise=True)``, for "forward" and "backward"; like ``later``.
        slots: replicas that a rank may hold of a layer.
        because: the guard by which the graph before does not fit; "" for the first of its code.
    """

    nodes: int
    passes: tuple[PassRecord, ...]
    layers: tuple[str, ...] = ()
    later: dict[str, tuple[PassRecord, ...]] = field(default_factory=dict, compare=False)
    notes: dict[str, tuple[Span, ...]] = field(default_factory=dict, compare=False)
    pieces: dict[str, Pieces] = field(default_factory=dict, compare=False)
    slots: int = 0
    because: str = ""


@dataclass(eq=False)
class Backend:
    """The backend that Dynamo calls with every graph of the model.

    Attributes:
        world, nodes: the ranks that train the model, and which of them share a node.
        dense_parameters: elements of the matrices outside the experts and embeddings; for predictions.
        key_heads: heads of keys in the model's config, if it has any.
        sparse_layers: how many layers must become sparse; None for as many as in the first graph.
        source_diff: how the model's code was changed, as the lines of a diff; dumped with the graphs.
        compares_all: ranks compare all of a graph, not only what they meet in.
        compared: how many graphs all ranks have compared so far, so this is the same on all.
        written: the ids of parameters that this run trains or has trained, or that came from a checkpoint.
    """

    config: Config
    world: World
    nodes: Topology
    placer: Placer
    layers: Sequence[Layer]
    step: CurrentStep
    dense_parameters: int = 0
    key_heads: int | None = None
    sparse_layers: int | None = None
    source_diff: Sequence[str] = ()
    compares_all: bool = True
    graphs: list[GraphRecord] = field(default_factory=list)
    compared: int = 0
    written: set[int] = field(default_factory=set)
    _warned: set[str] = field(default_factory=set)
    _tokens: int = 0
    _number: int = 0
    _dumps: DumpFolder | None = field(init=False, default=None)
    _dumping: bool = field(init=False)

    def __post_init__(self) -> None:
        options = dump_options(self.config)
        self._dumping = options is not None
        if options is not None and (self.world.rank == 0 or options.every_rank):
            folder = own_folder(options.folder / f"rank{self.world.rank}")
            self._dumps = DumpFolder(folder, options.most_bytes)
            if self.source_diff:
                self._dumps.write("make_loops_traceable.diff", "\n".join(self.source_diff) + "\n")

    def entry(self, symbols: list[Any]) -> Callable[..., Callable[..., Any]]:
        """Return the backend for Dynamo, which keeps every one that it has seen: this must not keep the model's.

        ``symbols`` gets what torch knows of the symbols in each graph.
        """
        backend = weakref.ref(self)

        def hecate(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            alive = backend()
            assert alive is not None, "the model that is being compiled holds its backend"
            symbols.append(symbols_of_trace())
            return alive(gm, example_inputs)

        return hecate

    @property
    def skips(self) -> Iterator[tuple[str, Skip]]:
        """What passes, by their names, have left alone in all graphs."""
        for graph in self.graphs:
            for record in graph.passes:
                yield from ((record.name, skip) for skip in record.skipped)

    def check_compiled(self, *, training: bool) -> bool:
        """Raise if what the options ask for was not compiled, behind a forward; return whether that can be told."""
        if not self.graphs and self.config.attention is not None:
            raise UnsupportedAttentionError(
                "hecate: Config(attention=...) has made no layer sparse, because torch.compile compiled nothing. Is "
                "it switched off, by TORCHDYNAMO_DISABLE or torch.compiler.set_stance?"
            )
        if self.config.balance_loss == "own":
            return True
        records = [record for graph in self.graphs for record in graph.passes if record.name == "share_fractions"]
        if training and self.world.size > 1 and not sum(record.rewritten for record in records):
            raise ValueError(
                'hecate: Config(balance_loss="global"), and no load-balancing loss was found in the forward. '
                "transformers' models have one with output_router_logits=True, where they are given labels. One that "
                "is of each sequence, or summed outside of the forward, is not found"
            )
        return training

    def _refuse_dense(self, records: Sequence[PassRecord]) -> None:
        """Raise unless a graph, which is the whole model, has all sparse layers that it should have."""
        if self.config.attention is None:
            return
        sparse = sum(record.rewritten for record in records if record.name == "shard_context")
        wanted = self.sparse_layers if self.sparse_layers is not None else 1
        if sparse < wanted:
            so_far = "made no layer sparse" if not sparse else f"made only {sparse} of {wanted} layers sparse"
            raise UnsupportedAttentionError(
                f"hecate: Config(attention=...) has {so_far}: the others do not call "
                "torch.nn.functional.scaled_dot_product_attention where torch.compile sees it. "
                "S2Attention(dense_layers=...) names layers that are to stay dense"
            )
        if self.sparse_layers is None:
            self.sparse_layers = sparse

    @property
    def dumped_all(self) -> bool:
        """True if everything that should be dumped so far could be written."""
        return self._dumps is None or self._dumps.whole

    @property
    def disabled(self) -> tuple[str, ...]:
        if self.config.policy == "gather":
            return (*self.config.disable_passes, "group_expert_loops", "exchange_rows")
        return tuple(self.config.disable_passes)

    @property
    def communicates(self) -> bool:
        """True if graphs communicate. If they do not, ranks may run different ones."""
        return self.config.policy != "replicate"

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        number, mode = self._number, self.step.mode
        self._number += 1
        comparing = self.communicates and mode is not None and mode.first
        if number == 0 and comparing and self.world.size > 1:
            self._tokens = fewest_tokens(_tokens(gm), self.world)
            if self.config.rates is None and overlaps(self.placer.rates, self.world):
                rates = predict_hidden(
                    self._tokens, self.dense_parameters, max(1, len(self.layers)), self.placer.rates
                )
                self.placer.set_rates(rates, because="measured in hecate.compile, hidden time predicted")
        context = self._context(holds_choices=mode is not None and mode.holds_choices)
        bodies = [body.graph for body in bodies_of(gm)]
        layers = dict.fromkeys(context.name(layer) for body in bodies for layer in gathers_by_layer(body))
        precision = self.config.mixed_precision
        for body in bodies:
            refuse_lost_changes(body, precision.param_dtype if precision is not None else None)
            if self.world.size > 1 or (mode is not None and mode.first):
                refuse_chosen_experts(body, sys._getframe())
        records = run_passes(
            gm,
            context,
            passes=PASSES,
            disabled=self.disabled,
            dump=graph_log(number, "", context.layer_names, self._dumps),
        )
        self._refuse_dense(records)
        records = [replace(record, skipped=tuple(map(_with_break, record.skipped))) for record in records]
        calls = sum(node.op.startswith("call") for node in gm.graph.nodes)
        record = GraphRecord(
            nodes=calls,
            passes=tuple(records),
            layers=tuple(layers),
            slots=context.slots,
            because=why_traced(),
        )
        self.graphs.append(record)
        self._warn_fallbacks(records)
        # Ranks may run different graphs, if these do not communicate.
        comparing = comparing and mode is not None and communicates(gm, training=mode.training)
        if comparing:
            self.compared += 1
            try:
                self._compare(gm, number)
            except DisagreementError as error:
                # Data may have cut a layer's code, which is the same on all ranks if it runs as Python.
                # What is being compiled does not run yet.
                traces = (node.stack_trace for node in gm.graph.nodes)
                error.places = places_around(sys._getframe()) + places_in(next(filter(None, traces), ""))
                raise
        try:
            compiled = lower(
                gm,
                example_inputs,
                backend=self.config.backend,
                piecewise=self.config.piecewise,
                context=context,
                disabled=self.disabled,
                dumps=self._dumps,
                dumping=self._dumping,
                number=number,
                records=record.later,
                notes=record.notes,
                pieces=record.pieces,
            )
        except BaseException:
            # Nothing runs this graph. Torch traces it anew where it took a constant number for one that changes.
            self.graphs.pop()
            self._number = number
            raise
        if comparing:
            for part in ("forward", "backward"):
                spans = record.notes.get(part)
                agree(
                    [f"{span.operator} of {span.subject}" for span in spans] if spans is not None else None,
                    f"the order of collectives in the {part} of graph {number}",
                    "Report this with the dumps that HECATE_DUMP=<folder> HECATE_DUMP_RANKS=all writes; "
                    'Config(disable_passes=["schedule"]) is a way out.',
                    self.world,
                )
        return compiled

    def _compare(self, gm: GraphModule, number: int) -> None:
        agree(
            fingerprint(gm, everything=self.compares_all),
            f"graph {number}",
            "Every rank must run the same model code: look for branches on the rank or on local data, "
            "and for inputs that only some ranks are given, such as images: give all ranks the same ones, masked "
            "where there is nothing, or let the model say which part is its tower (docs/models.md). "
            "HECATE_DUMP=<folder> HECATE_DUMP_RANKS=all writes each rank's graph. "
            f"{WITHOUT_TRACING}",
            self.world,
        )

    def _context(self, *, holds_choices: bool) -> PassContext:
        size, topology, config = self.placer.world.size, self.placer.topology, self.config
        experts = max((layer.num_experts for layer in self.layers), default=1)
        room_percent = max((layer.carrier.room_percent for layer in self.layers), default=0)
        relays = all(isinstance(layer.carrier, Relaying) for layer in self.layers)
        slots = most_replicas(config.replicas, config.replica_memory, experts, size)
        return PassContext(
            world_size=size,
            replicates=self.placer.policy.replicates,
            # Calibrating adds replicas.
            calibrates=self.placer.policy.calibrates and self.placer.policy.replicates,
            layer_names={layer.id: layer.name for layer in self.layers},
            # Tickets of bounded room are made in one part.
            chunks=config.chunks if not room_percent else 1,
            dispatch=config.dispatch if relays else "rows",
            room_percent=room_percent,
            tokens=self._tokens,
            overlaps=overlaps(self.placer.rates, self.world),
            rematerialize=self.config.rematerialize,
            prefetch_bytes=self.config.prefetch_bytes,
            owned=-(-experts // size),
            slots=slots if self.placer.policy.replicates else 0,
            nodes=topology.num_nodes,
            ranks_per_node=max(map(len, topology.members)),
            all_nodes=self.nodes.num_nodes,
            all_ranks_per_node=max(map(len, self.nodes.members)),
            rates=self.placer.rates,
            attention=self.config.attention,
            key_heads=self.key_heads,
            shares_fractions=self.config.balance_loss == "global" and self.world.size > 1,
            held={layer.id: layer.num_experts for layer in self.layers} if holds_choices else {},
        )

    def _warn_fallbacks(self, records: list[PassRecord]) -> None:
        """Warn once per module, with the first reason; all ranks rewrite alike."""
        for record in records:
            for skip in record.skipped:
                if not skip.fallback or skip.where in self._warned:
                    continue
                self._warned.add(skip.where)
                warn_together(
                    f"hecate: {skip.where} was not rewritten by {record.name} and gathers all its experts "
                    f"on every rank instead (right, but slow): {skip.reason}",
                    self.world.rank,
                    stacklevel=2,
                )


def _with_break(skip: Skip) -> Skip:
    """Add to a reason the graph break in the same function, if there is one: half a loop is not understood."""
    file, _, number = skip.line.rpartition(":")
    broken = break_near(file, int(number)) if skip.fallback and number.isdigit() else ""
    return replace(skip, reason=f"{skip.reason} (torch.compile broke the graph at {broken})") if broken else skip


def _tokens(gm: GraphModule) -> int:
    """Return the tokens of the batch: two leading sizes of the largest input of ids, or else of another input.

    The last size of rows is their width.
    """
    ids, others = [0], [0]
    facts = GraphFacts(gm.graph)
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            continue
        value, source = node.meta.get("example_value"), dynamo_source(node)
        # The others are parameters, buffers and attributes of the model.
        given = not facts.same_on_all_ranks(node) and not (source is not None and is_of_model(source.name))
        if given and isinstance(value, torch.Tensor):
            leading = value.shape[:2] if value.ndim > 2 or not value.is_floating_point() else value.shape[:1]
            count = math.prod(size_hint(size) for size in leading)
            (others if value.is_floating_point() else ids).append(count)
    return max(ids) or max(others)
