"""Random dispatches, and a device's ticket beside the host's."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch

from hecate.runtime.one_sided.device_dispatch import BoundedTicket, DeviceTables, bounded_ticket, device_quotas
from hecate.runtime.ops import ticket as host
from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import assign_tokens, rows_per_rank
from hecate.runtime.placement.topology import Topology


@dataclass(frozen=True)
class Dispatch:
    """One rank's part of one step."""

    counts: Ints
    placement: Placement
    topology: Topology
    rank: int


def random_dispatch(seed: int) -> Dispatch:
    """1 to 8 ranks on nodes in any order, 1 to 24 experts, any replicas, and a load of any shape."""
    rng = np.random.default_rng(seed)
    # As many cases with few experts as with many.
    ranks, experts = int(rng.integers(1, 9)), int(24 ** rng.uniform() + 0.5)
    _, nodes = np.unique(rng.integers(0, rng.integers(1, ranks + 1), ranks), return_inverse=True)
    topology = Topology(tuple((np.sort(nodes) if rng.integers(2) else nodes).tolist()))
    owners = Owners(tuple(rng.integers(0, ranks, experts).tolist()), ranks)
    # Nothing, a little, much, everything.
    share = rng.choice([0.0, 0.2, 0.6, 1.0])
    replicas = [set(np.flatnonzero(rng.uniform(size=ranks) < share).tolist()) for _ in range(experts)]
    return Dispatch(
        counts=_counts(rng, ranks, experts),
        placement=Placement.with_replicas(owners, replicas),
        topology=topology,
        rank=int(rng.integers(ranks)),
    )


def _counts(rng: np.random.Generator, ranks: int, experts: int) -> Ints:
    kind, rows = rng.choice(["zipf", "even", "one-hot", "empty", "idle ranks"]), int(rng.integers(1, 3000))
    counts = np.zeros((ranks, experts), dtype=np.int64)
    if kind == "even":
        counts[:] = rows // experts
    if kind == "one-hot":
        counts[:, rng.integers(experts)] = rng.integers(0, rows, ranks)
    if kind in ("zipf", "idle ranks"):
        weights = rng.permutation(1.0 / np.arange(1, experts + 1) ** rng.uniform(0, 1.5))
        counts[:] = rng.multinomial(rows, weights / weights.sum(), size=ranks)
    if kind == "idle ranks":
        counts[rng.integers(0, 2, ranks) == 0] = 0
    return counts


def check_quotas(given: Dispatch, device: torch.device) -> None:
    """The device's quotas are those of the planner, number for number."""
    quotas = assign_tokens(given.counts, given.placement, given.topology, given.rank)
    tables = DeviceTables.from_placement(given.placement, given.topology, given.rank, device)
    _, sends, receives = device_quotas(torch.from_numpy(given.counts).to(device), tables)
    assert np.array_equal(sends.cpu().numpy(), quotas.sends)
    assert np.array_equal(receives.cpu().numpy(), quotas.receives)


def check_dispatch(
    given: Dispatch, device: torch.device, percent: int | None = None, spare: int = 3
) -> BoundedTicket:
    """The device's ticket is that of the host, number for number; nothing travels if a rank has too little room.

    Args:
        percent: of its own rows for which a rank has room, by default as many as all ranks have if they have as many.
        spare: by how much the rank has more rows than go to experts.
    """
    quotas = assign_tokens(given.counts, given.placement, given.topology, given.rank)
    with mock.patch.object(host, "runs_on", lambda _: False):
        (ticket,) = host.make_tickets(quotas, device)
    tables = DeviceTables.from_placement(given.placement, given.topology, given.rank, device)
    percent = 100 * given.topology.world_size if percent is None else percent
    rows, counts = len(ticket.send_index) + spare, torch.from_numpy(given.counts).to(device)
    found, room = bounded_ticket(counts, tables, rows=rows, percent=percent), rows * percent // 100
    wanted = rows_per_rank(given.counts, given.placement, given.topology)
    excess = np.maximum(wanted - given.counts.sum(1) * percent // 100, 0)
    assert found.splits[2].tolist() == excess.tolist()
    assert torch.equal(found.splits[:2].cpu(), ticket.splits * int(not excess.any()))
    assert found.slot_offsets.dtype == torch.int32
    assert torch.equal(found.slot_offsets, ticket.slot_offsets.clamp_max(room))
    indices = (found.send_index, ticket.send_index, rows, 0), (found.receive_index, ticket.receive_index, room, room)
    for index, expected, most, nothing in indices:
        assert index.dtype == torch.int64 and len(index) == most
        assert torch.equal(index[: len(expected)], expected[:most])
        assert (index[len(expected) :] == nothing).all()
    return found
