"""Random dispatches, and a device's ticket beside the host's."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch

from hecate.runtime.one_sided.device_dispatch import DeviceTables, DeviceTicket, device_quotas, device_ticket
from hecate.runtime.ops import ticket as host
from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import assign_tokens
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


def check_dispatch(given: Dispatch, device: torch.device, spare: tuple[int, int] = (3, 0)) -> DeviceTicket:
    """The device's ticket is that of the host, number for number.

    Args:
        spare: by how much the capacities for what leaves and what arrives are larger than what is used.
    """
    quotas = assign_tokens(given.counts, given.placement, given.topology, given.rank)
    with mock.patch.object(host, "runs_on", lambda _: False):
        (ticket,) = host.make_tickets(quotas, given.placement, given.rank, device)
    tables = DeviceTables.from_placement(given.placement, given.topology, given.rank, device)
    counts = torch.from_numpy(given.counts).to(device)
    used = [len(ticket.send_index), len(ticket.receive_index)]
    capacities = [max(count + more, 0) for count, more in zip(used, spare, strict=True)]
    send, receive = capacities
    _, sends, receives = device_quotas(counts, tables)
    found = device_ticket(sends, receives, tables, send_capacity=send, receive_capacity=receive)
    assert found.slot_offsets.dtype == torch.int32 and torch.equal(found.slot_offsets, ticket.slot_offsets)
    assert torch.equal(found.splits.cpu(), ticket.splits)
    assert found.used.tolist() == used
    indices = (found.send_index, ticket.send_index), (found.receive_index, ticket.receive_index)
    for most, (index, expected) in zip(capacities, indices, strict=True):
        assert index.dtype == torch.int64 and len(index) == most
        assert torch.equal(index[: len(expected)], expected[:most])
        assert not index[len(expected) :].any()
    return found
