"""Compile a model for any number of ranks, in one process and without running it: nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hecate.compilation import compile
from hecate.compiled_model import compiled_model_of
from hecate.config import Config
from hecate.graph.lowering import Captured, NotRun, capturing
from hecate.passes.fx import arguments_of
from hecate.private import dynamo_counters, fake_store, reset_dynamo
from hecate.runtime.comm.collective import collective_named
from hecate.runtime.ops.gradients import REPLICATED, ReplicatedParameter
from hecate.runtime.placement.planner import LayerSizes
from hecate.runtime.state.layer import Layer
from hecate.simulator.cluster import ClusterSpec
from hecate.wrap.shard import shard_of


class CaptureError(RuntimeError):
    """A model that cannot be compiled without running, or that the simulator cannot walk through."""


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Make this process rank 0 of ``count`` in the block, with a fresh Dynamo.

    Raises CaptureError if torch.distributed is in use already.
    """
    if dist.is_initialized():
        raise CaptureError("hecate: a simulation needs a process of its own, without torch.distributed")
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=count)
    try:
        # Dynamo would take graphs of an earlier capture with as many ranks for these.
        reset_dynamo()
        dynamo_counters.clear()
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class NotRunModel:
    """A model compiled and not run: graphs after all passes up to the first break, and reasons of breaks, counted."""

    model: nn.Module
    graphs: list[Captured]
    breaks: dict[str, int]


def compile_as_rank_0(
    model: nn.Module, inputs: Mapping[str, Any], cluster: ClusterSpec, config: Config
) -> NotRunModel:
    """Compile ``model(**inputs)`` as rank 0 of ``cluster``, whose topology and, if none are given, rates are taken.

    Raises CaptureError if torch.distributed is in use already, and whatever :func:`hecate.compile` raises.
    """
    if config.transport != "collectives":
        raise CaptureError(f"hecate: transport={config.transport!r} needs ranks that run; it is not simulated")
    rates = config.rates or cluster.rates
    with fake_ranks(cluster.ranks):
        compiled = compile(model, replace(config, topology=cluster.topology, rates=rates))
        with capturing() as graphs, suppress(NotRun):
            compiled(**inputs)
    return NotRunModel(model=compiled, graphs=graphs, breaks=dict(dynamo_counters["graph_break"]))


@dataclass(frozen=True, kw_only=True)
class Capture:
    """A model as rank 0 of a cluster would run it: graphs and layers in the order in which they run.

    A rank routes ``rows`` in each layer (tokens times choices; 0 for one rank), of ``row_bytes`` each on the wire,
    from ``tokens`` of its batch. ``dense_parameters`` are elements of matrices outside the experts; ``dense`` has
    (elements, bytes of each) of every parameter there. Ranks are in so many ``groups``.
    """

    graphs: tuple[Captured, ...]
    layers: tuple[Layer, ...]
    rows: int
    row_bytes: int
    tokens: int
    dense_parameters: int
    dense: tuple[tuple[int, int], ...]
    groups: int = 1
    # Graphs name them, and they live as long as somebody holds them.
    records: tuple[ReplicatedParameter, ...] = ()

    @property
    def sizes(self) -> list[LayerSizes]:
        """The sizes of each layer, for the planner."""
        return [replace(layer.sizes, row_bytes=self.row_bytes) for layer in self.layers]

    @property
    def dense_bytes(self) -> int:
        """Bytes of parameters outside the experts."""
        return sum(count * size for count, size in self.dense)


def capture(model: nn.Module, inputs: Mapping[str, Any], cluster: ClusterSpec, config: Config) -> Capture:
    """Compile ``model(**inputs).loss``, not compiled yet, for ``cluster``; values of the inputs do not matter.

    On the meta device the experts of other ranks need no memory. The cluster's topology takes the place of the
    config's, as do its rates if there are none, and ``"rows"`` that of ``dispatch="auto"``. With ``"nodes"``, counts
    do not say which rows are of one token: see ``CostModel``.

    Raises:
        CaptureError: torch.distributed is in use already, the model has graph breaks, or it exchanges no tokens.
            Also whatever :func:`hecate.compile` raises.
    """
    dispatch = config.dispatch if config.dispatch != "auto" else "rows"
    made = compile_as_rank_0(model, inputs, cluster, replace(config, dispatch=dispatch))
    compiled, graphs, breaks = made.model, made.graphs, made.breaks
    parts = [captured.context.part for captured in graphs]
    if parts != ["forward", "backward"] or breaks:
        raise CaptureError(
            f"hecate: expected one forward and one backward graph, got {parts} and {len(breaks)} graph breaks: the "
            "simulator needs a model without any, in training mode. TORCH_LOGS=graph_breaks shows them."
        )
    state = compiled_model_of(compiled, "simulate")
    rows = _rows(graphs[0]) if cluster.ranks > 1 else torch.empty(0, device="cpu")
    _learn_choices(graphs[0], state.layers)
    return Capture(
        graphs=tuple(graphs),
        layers=state.layers,
        rows=rows.shape[0],
        row_bytes=rows.shape[1:].numel() * state.layers[0].travels_as(rows.dtype).itemsize,
        tokens=max(t.numel() for t in inputs.values() if isinstance(t, torch.Tensor) and not t.is_floating_point()),
        dense_parameters=state.backend.dense_parameters,
        dense=tuple(
            (p.numel(), p.element_size())
            for p in compiled.parameters()
            if (shard := shard_of(p)) is None or shard.part != "experts"
        ),
        groups=state.mesh.groups,
        records=tuple(record for captured in graphs for record in _records_in(captured)),
    )


def _records_in(captured: Captured) -> Iterator[ReplicatedParameter]:
    """Yield the records of parameters whose gradients are averaged."""
    start = collective_named("average_gradients").start
    for node in captured.graph.graph.find_nodes(op="call_function", target=start):
        yield from (REPLICATED[id] for id in arguments_of(node)["ids"])


def _learn_choices(forward: Captured, layers: Sequence[Layer]) -> None:
    """Tell the planner how many rows a token has, as the first step would."""
    by_id = {layer.id: layer for layer in layers}
    for node in forward.graph.graph.find_nodes(op="call_function", target=torch.ops.hecate.route_nodes_start.default):
        arguments = arguments_of(node)
        if arguments["choices"]:
            placer = by_id[arguments["layer"]].placer
            placer.sizes = replace(placer.sizes, together=arguments["choices"])


def _rows(forward: Captured) -> torch.Tensor:
    """Return the rows that a rank sends to experts, as a fake tensor ``[rows, ...]``."""
    hecate = torch.ops.hecate
    nodes = [n for n in forward.graph.graph.nodes if n.op == "call_function"]
    # Where rows cross to nodes, the other exchange is of a routing weight for each row.
    by_node = any(n.target is hecate.exchange_nodes_start.default for n in nodes)
    start = hecate.exchange_nodes_start.default if by_node else hecate.exchange_start.default
    for node in nodes:
        if node.target is start:
            rows: torch.Tensor = arguments_of(node)["rows"].meta["val"]
            if isinstance(rows.shape[0], int):
                return rows
    raise CaptureError("hecate: the graph exchanges no tokens, so there is nothing to simulate; see hecate.explain")
