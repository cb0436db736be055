"""What ranks exchange in tests of one-sided writes, and what must come: for references and for kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from hecate.runtime.kernels.sum_replicas import sum_replicas
from hecate.runtime.one_sided.links import Rows, rows_of_places
from hecate.runtime.one_sided.transport import Transport
from hecate.runtime.one_sided.windows import PLACES
from hecate.runtime.placement.planner import rounds_of
from tests.support.one_sided import steps_of_all_to_all
from tests.support.unordered_memory import Program, Ranks

# Rows of eight numbers, of which a segment holds four in float32.
WIDTH, SEGMENT = 8, 128


@dataclass(frozen=True)
class Case:
    """Several exchanges of some ranks.

    Attributes:
        counts: rows of each exchange from each rank to each, ``[n, W, W]``.
        seed: of the schedule and of the orders of rows.
        speeds: of the ranks.
    """

    counts: np.ndarray
    seed: int
    speeds: tuple[float, ...] = ()
    dtype: torch.dtype = torch.float32
    wire: torch.dtype = torch.float32

    @property
    def world_size(self) -> int:
        return int(self.counts.shape[1])


@st.composite
def cases(draw: st.DrawFn, most_exchanges: int = 4, most_ranks: int = 8) -> Case:
    """No rows, one row, and up to three chunks; ranks of any speed."""
    size, exchanges = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_exchanges))
    numbers = st.sampled_from([0, 0, 1, 1, 2, 4, 5, 9])
    counts = draw(st.lists(numbers, min_size=exchanges * size * size, max_size=exchanges * size * size))
    dtype = st.sampled_from([torch.float32, torch.bfloat16])
    return Case(
        counts=np.array(counts, dtype=np.int64).reshape(exchanges, size, size),
        seed=draw(st.integers(0, 2**32)),
        speeds=tuple(draw(st.lists(st.sampled_from([0.01, 0.1, 1.0]), min_size=size, max_size=size))),
        dtype=draw(dtype),
        wire=draw(dtype),
    )


class Lost(AssertionError):
    """Rows did not come, or others came."""


@dataclass
class Exchanges:
    """Programs of all ranks for one case.

    Attributes:
        arrived: what each rank has received in each exchange.
        returned: what each rank has got back of what it sent, doubled on the way.
    """

    case: Case
    device: torch.device
    arrived: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    returned: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def rows(self, exchange: int, rank: int) -> Tensor:
        """What a rank sends, each row with a number of its own; two more are padding, which no one gets."""
        count = int(self.case.counts[exchange, rank].sum()) + 2
        numbers = torch.arange(count * WIDTH) * 7 + 31 * rank + 101 * exchange
        return (numbers % 199).view(count, WIDTH).to(self.device, self.case.dtype)

    def order(self, exchange: int, rank: int) -> tuple[Tensor, Tensor]:
        """Which row goes at each place, and which received row each slot's order has."""
        random = np.random.default_rng([self.case.seed, exchange, rank])
        counts = self.case.counts[exchange]
        sent, received = int(counts[rank].sum()), int(counts[:, rank].sum())
        index = (random.permutation(number) for number in (sent, received))
        there, here = (torch.from_numpy(one).to(self.device) for one in index)
        return there, here

    def program(self, transport: Transport, rank: int) -> Program:
        """Each exchange there and back."""
        for number, counts in enumerate(self.case.counts):
            (there, here), rows = self.order(number, rank), self.rows(number, rank)
            arrived = rows.new_full((len(here), WIDTH), torch.nan)
            # A bound for this rank's links: other ranks go through another number of chunks.
            most = int(max(counts[rank].max(), counts[:, rank].max()))
            sends, receives = (torch.from_numpy(c.copy()).to(self.device) for c in (counts[rank], counts[:, rank]))
            bound: dict[str, Any] = dict(most=most, wire=self.case.wire)
            yield from transport.steps(Rows(rows, there), sends, Rows(arrived, rows_of_places(here)), **bound)
            self.arrived[number, rank] = arrived
            back = torch.zeros_like(rows)
            yield from transport.steps(Rows(arrived * 2, rows_of_places(here)), receives, Rows(back, there), **bound)
            self.returned[number, rank] = back

    def check(self, rank: int) -> None:
        """What came is what was sent, and came back to where it was."""
        for number, counts in enumerate(self.case.counts):
            parts = [
                self.rows(number, s)[self.order(number, s)[0]].split(counts[s].tolist())[rank]
                for s in range(self.case.world_size)
            ]
            rows, sent = self.rows(number, rank), int(counts[rank].sum())
            expected = torch.cat(parts)[self.order(number, rank)[1]], torch.cat([rows[:sent] * 2, rows[sent:] * 0])
            found = self.arrived[number, rank], self.returned[number, rank]
            if not all(map(torch.equal, found, expected)):
                raise Lost(f"exchange {number} of rank {rank}")


def run(case: Case, device: torch.device, **options: Any) -> Ranks:
    """All exchanges of a case, with all that must hold.

    Args:
        options: what a protocol leaves out; then ranks may be further ahead than there are places.
    """
    exchanges = Exchanges(case, device)
    ranks = Ranks(case.world_size, segment=SEGMENT, seed=case.seed, speeds=case.speeds, device=device, **options)
    ranks.run([exchanges.program(transport, rank) for rank, transport in enumerate(ranks.transports)])
    for rank, transport in enumerate(ranks.transports):
        transport.check()
        exchanges.check(rank)
    assert options or ranks.ahead <= PLACES
    return ranks


@dataclass
class Experts:
    """Experts to their replicas, and gradients back: one row for an expert, longer than a segment.

    Attributes:
        owner: of each expert.
        holders: which ranks want each expert, bool ``[E, W]``; not its owner.
    """

    owner: np.ndarray
    holders: np.ndarray
    device: torch.device
    replicas: dict[int, Tensor] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def draw(world_size: int, seed: int, device: torch.device) -> Experts:
        random = np.random.default_rng(seed)
        owner = random.integers(0, world_size, 6)
        holders = random.random((6, world_size)) < 0.5
        holders[np.arange(6), owner] = False
        return Experts(owner, holders, device)

    def weights(self, expert: int) -> Tensor:
        return torch.arange(50, dtype=torch.float32, device=self.device) + 100.0 * float(expert)

    def gradient(self, expert: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(int(10 * expert + rank))
        return torch.randn(50, generator=generator).to(self.device)

    def program(self, transport: Transport, rank: int) -> Program:
        size = transport.windows.size
        mine = np.flatnonzero(self.owner == rank)
        # In the order of the other rank.
        leave = [(other, expert) for other in range(size) for expert in mine if self.holders[expert, other]]
        held = np.flatnonzero(self.holders[:, rank])
        arrive = [(int(self.owner[expert]), expert) for expert in held[np.argsort(self.owner[held], kind="stable")]]
        out = self.stacked([self.weights(expert) for _, expert in leave])
        replicas = torch.empty(len(arrive), 50, device=self.device)
        send, receive = (np.bincount([other for other, _ in pairs], minlength=size) for pairs in (leave, arrive))
        yield from steps_of_all_to_all(transport, out, replicas, send.tolist(), receive.tolist())
        self.replicas[rank] = replicas

        grads = self.stacked([self.gradient(expert, rank) for _, expert in arrive])
        parts = torch.empty(len(leave), 50, device=self.device)
        yield from steps_of_all_to_all(transport, grads, parts, receive.tolist(), send.tolist())
        totals = self.stacked([self.gradient(expert, rank) for expert in mine])
        slots = np.array([int(np.searchsorted(mine, expert)) for _, expert in leave], dtype=np.int64)
        lengths = np.bincount(slots, minlength=len(mine))
        starts, order = np.cumsum([0, *lengths]), np.argsort(slots, kind="stable")
        on_device = [torch.from_numpy(numbers).to(self.device) for numbers in (starts, order)]
        sum_replicas(totals, parts, *on_device, rounds_of(lengths))
        self.sums[rank] = totals

    def stacked(self, rows: list[Tensor]) -> Tensor:
        return torch.stack(rows) if rows else torch.empty(0, 50, device=self.device)

    def check(self, rank: int) -> None:
        held = np.flatnonzero(self.holders[:, rank])
        held = held[np.argsort(self.owner[held], kind="stable")]
        assert torch.equal(self.replicas[rank], self.stacked([self.weights(expert) for expert in held]))
        mine = np.flatnonzero(self.owner == rank)
        for row, expert in enumerate(mine):
            total = self.gradient(expert, rank)
            # In the order of ranks: a sum in float32 shows its order.
            for other in np.flatnonzero(self.holders[expert]):
                total = total + self.gradient(expert, int(other))
            assert torch.equal(self.sums[rank][row], total)


def run_experts(world_size: int, seed: int, device: torch.device) -> None:
    experts = Experts.draw(world_size, seed, device)
    ranks = Ranks(world_size, segment=SEGMENT, seed=seed, device=device)
    ranks.run([experts.program(transport, rank) for rank, transport in enumerate(ranks.transports)])
    for rank, transport in enumerate(ranks.transports):
        transport.check()
        experts.check(rank)


def skewed(counts: Iterator[int] | list[int], seed: int = 0, exchanges: int = 3) -> Case:
    """The same counts in each exchange, W of them, from each rank to the next ones."""
    row = list(counts)
    matrix = np.stack([np.roll(row, rank) for rank in range(len(row))])
    return Case(np.stack([matrix] * exchanges), seed=seed)
