"""Kernels between the counts of a layer and the ticket of its exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check.case import Case, Maker, bytes_of
from hecate.runtime.one_sided import balance_rows, ticket_segments
from hecate.runtime.one_sided.device_dispatch import DeviceTables, bounded_ticket, device_quotas
from hecate.runtime.ops.ticket import make_tickets
from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import assign_tokens, shed_excess
from hecate.runtime.placement.topology import Topology

# Of all of it, milliseconds.
MOST = 0.1
EQUAL = {torch.int64: 0.0}


class _Layer:
    """Nodes of eight ranks, all slots full, and replicas for a load that is not quite the one that comes."""

    def __init__(self, make: Maker) -> None:
        ranks, experts = make.sizes.ranks, 8 * make.sizes.owned
        rng = np.random.default_rng(0)
        weights = rng.permutation(1.0 / np.arange(1, experts + 1))
        owners, replicas = Owners.contiguous(experts, ranks), [set[int]() for _ in range(experts)]
        expected = rng.multinomial(ranks * make.rows, weights / weights.sum())
        free = [make.sizes.replicas] * ranks
        shed_excess(expected.tolist(), owners, replicas, free)
        for rank, left in enumerate(free):
            for expert in rng.choice(experts, min(left, experts), replace=False, p=weights / weights.sum()):
                replicas[expert].add(rank)
        weights *= rng.uniform(0.7, 1.4, experts)
        self.rank = ranks - 1
        self.counts: Ints = rng.multinomial(make.rows, weights / weights.sum(), size=ranks).astype(np.int64)
        self.topology, self.placement = Topology.even(ranks, 8), Placement.with_replicas(owners, replicas)
        self.tables = DeviceTables.from_placement(self.placement, self.topology, self.rank, make.device)
        self.on_device = torch.from_numpy(self.counts).to(make.device)


def balance(make: Maker, dtype: torch.dtype) -> Case:
    layer = _Layer(make)
    operands = layer.on_device, layer.tables.owners, layer.tables.replicated, layer.tables.parts
    # What is found is as large as the counts.
    moved = *operands, layer.on_device
    return _compared(balance_rows.balance_rows, balance_rows.balance_rows_reference, operands, moved)


def segments(make: Maker, dtype: torch.dtype) -> Case:
    layer = _Layer(make)
    tables = layer.tables
    _, *quotas = device_quotas(layer.on_device, tables)
    operands = *quotas, tables.owners, tables.slots
    # What is found is as large as what is given.
    moved = *quotas, *quotas
    return _compared(ticket_segments.ticket_segments, ticket_segments.ticket_segments_reference, operands, moved)


def _compared(
    ours: Callable[..., Any], reference: Callable[..., Any], operands: Sequence[Any], moved: Sequence[Tensor]
) -> Case:
    """``moved`` are as many bytes as are read and written."""
    size = bytes_of(*moved)
    return Case(
        torch.int64, lambda: ours(*operands), lambda: reference(*operands), None, EQUAL, bytes=size, most_ms=MOST
    )


def all_of_it(make: Maker, dtype: torch.dtype) -> Iterator[Case]:
    """Launched one by one, and as a graph, which does not wait for the host; the reference is the host's own way."""
    layer = _Layer(make)
    # Their own rows leave, and about as many arrive.
    send, receive = make.rows, 2 * make.rows

    def ours() -> list[Tensor]:
        found = bounded_ticket(layer.on_device, layer.tables, rows=send, percent=200)
        return [found.slot_offsets, found.splits, found.send_index, found.receive_index]

    def by_host() -> list[Tensor]:
        quotas = assign_tokens(layer.on_device.cpu().numpy(), layer.placement, layer.topology, layer.rank)
        (ticket,) = make_tickets(quotas, make.device)
        indices = ((ticket.send_index, send, 0), (ticket.receive_index, receive, receive))
        padded = [torch.cat([index, index.new_full((most - len(index),), end)]) for index, most, end in indices]
        no_excess = ticket.splits.new_zeros(1, layer.topology.world_size)
        return [ticket.slot_offsets, torch.cat([ticket.splits, no_excess]).to(make.device), *padded]

    size = 2 * bytes_of(layer.on_device) + 8 * (send + receive)
    yield Case(dtype, ours, by_host, None, EQUAL, note="launched", bytes=size)
    yield Case(dtype, _replayed(ours, make.device), by_host, None, EQUAL, note="as a graph", bytes=size, most_ms=MOST)


def _replayed(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """``call`` captured once; elsewhere than on CUDA itself."""
    if device.type != "cuda":
        return call
    # What is compiled in the first call cannot be captured.
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> Any:
        graph.replay()
        return result

    return replay
