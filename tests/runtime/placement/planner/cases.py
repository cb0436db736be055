"""Random worlds for property tests: ranks in nodes, owners, and rows of every rank for every expert."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from hecate.runtime.placement.owners import Ints, Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import CostModel, LayerSizes, Rates
from hecate.runtime.placement.topology import Topology
from tests.support.extent import ALL

FAST = settings(max_examples=500 if ALL else 50, deadline=None)
SIZES = LayerSizes(row_flops=6e6, row_bytes=4e3, expert_bytes=6e6)


def costs_of(topology: Topology, rates: Rates) -> CostModel:
    """Of a layer of :data:`SIZES`."""
    return CostModel(topology=topology, sizes=SIZES, rates=rates)


@dataclass(frozen=True)
class Case:
    topology: Topology
    owners: Owners
    counts: Ints

    @property
    def load(self) -> Ints:
        total: Ints = self.counts.sum(0)
        return total


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Nodes of any size in any order, any ownership, and counts: zipf, one-hot, zeros, ties, idle ranks."""
    world_size, num_experts = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    _, nodes = np.unique(rng.integers(0, draw(st.integers(1, world_size)), world_size), return_inverse=True)
    kind = draw(st.sampled_from(["zipf", "one-hot", "zeros", "ties", "idle ranks"]))
    counts = np.zeros((world_size, num_experts), dtype=np.int64)
    if kind in ("zipf", "idle ranks"):
        weights = rng.permutation(1.0 / np.arange(1, num_experts + 1) ** rng.uniform(0, 1.5))
        counts[:] = rng.multinomial(int(rng.integers(0, 500)), weights / weights.sum(), size=world_size)
    if kind == "idle ranks":
        counts[rng.integers(0, 2, world_size) == 0] = 0
    if kind == "one-hot":
        counts[:, rng.integers(num_experts)] = rng.integers(0, 100, world_size)
    if kind == "ties":
        counts[:] = 7
    owners = Owners(tuple(rng.integers(0, world_size, num_experts).tolist()), world_size)
    return Case(Topology(tuple(nodes.tolist())), owners, counts)


@st.composite
def placements(draw: st.DrawFn, case: Case) -> Placement:
    """Any replicas at all, not only those that a planner would choose."""
    ranks = st.sets(st.integers(0, case.owners.world_size - 1), max_size=4)
    experts = case.owners.num_experts
    return Placement.with_replicas(case.owners, draw(st.lists(ranks, min_size=experts, max_size=experts)))


# A case, and replicas for it.
PLACED = cases().flatmap(lambda case: st.tuples(st.just(case), placements(case)))

rates = st.builds(
    Rates,
    flops=st.sampled_from([1e12, 5e13]),
    rank_bytes=st.sampled_from([1e10, 1e12]),
    node_bytes=st.sampled_from([1e9, 1e11]),
    hidden_seconds=st.sampled_from([0.0, 1e-3, 1.0]),
)
