"""What ranks exchange in tests of one-sided writes, and what must come: for references and for kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from hecate.runtime.one_sided.links import Rows, rows_of_places
from hecate.runtime.one_sided.transport import Transport
from hecate.runtime.one_sided.windows import PLACES
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


def skewed(counts: Iterator[int] | list[int], seed: int = 0, exchanges: int = 3) -> Case:
    """The same counts in each exchange, W of them, from each rank to the next ones."""
    row = list(counts)
    matrix = np.stack([np.roll(row, rank) for rank in range(len(row))])
    return Case(np.stack([matrix] * exchanges), seed=seed)
