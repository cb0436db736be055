"""Ranks in one process that see each other's writes late, in parts and in any order, as memory allows it.

A rank writes into copies of the others' windows. What it wrote is brought over piece by piece, whenever a random
schedule says so; only a signal brings all rows with it that were written before, which is what release means. Ranks
go on step by step in any order. A step that would wait is left until it would not, so nothing here takes time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch

from hecate.runtime.one_sided.links import Chunk
from hecate.runtime.one_sided.transport import Transport
from hecate.runtime.one_sided.windows import PLACES, Windows, local_windows

Program = Iterator[tuple[str, Chunk]]


class Stuck(AssertionError):
    """Ranks wait for each other for ever."""


class Ranks:
    """The transports of all ranks, and the memory between them.

    Args:
        segment: bytes of a chunk.
        seed: of the schedule.
        speeds: how often each rank has its turn, and how often what it wrote moves, next to others; by default alike.
        releases, places: whether a signal brings the rows with it, and how many places windows have. Without the
            former, and with fewer places, nothing can be right.

    Attributes:
        transports: one for each rank.
        ahead: the most chunks that were signalled on a link and not yet taken.
    """

    def __init__(
        self,
        world_size: int,
        *,
        segment: int,
        seed: int,
        device: torch.device,
        speeds: Sequence[float] = (),
        releases: bool = True,
        places: int = PLACES,
        kind: Callable[..., Transport] = Transport,
    ) -> None:
        self._windows = local_windows(world_size, segment, device, places=places)
        self._views = [_copies_of_others(windows) for windows in self._windows]
        self.transports = [kind(view, seconds=0.0) for view in self._views]
        self.ahead = 0
        self._random, self._releases = random.Random(seed), releases
        self._speeds = list(speeds) or [1.0] * world_size
        # Of each reader, which chunks it has taken of each source; and words that have not been brought over.
        self._taken = torch.zeros((world_size, world_size), dtype=torch.int64, device=device)
        self._written: set[tuple[int, int]] = set()

    def run(self, programs: Sequence[Program], absent: Collection[int] = ()) -> None:
        """Let all ranks come to the end of their programs.

        Args:
            absent: ranks that never come, whose programs are not begun.

        Raises:
            Stuck: all that are left wait, and not for an absent one.
        """
        present = [rank for rank in range(len(programs)) if rank not in absent]
        steps = {rank: next(programs[rank], None) for rank in present}
        waiting: set[int] = set()
        while any(step is not None for step in steps.values()):
            able = [rank for rank in present if steps[rank] is not None and rank not in waiting]
            moves: list[int | tuple[int, int]] = [*able, *sorted(self._written)]
            if not moves:
                rank = self._give_up(steps, absent)
            else:
                weights = [self._speeds[move if isinstance(move, int) else move[0]] for move in moves]
                move = self._random.choices(moves, weights)[0]
                if not isinstance(move, int):
                    self._bring(*move)
                    waiting.discard(move[1])
                    continue
                rank = move
                if self.transports[rank].missing(*_step(steps[rank])):
                    waiting.add(rank)
                    continue
            waiting.discard(rank)
            name, _ = _step(steps[rank])
            steps[rank] = next(programs[rank], None)
            self._note(rank, name)

    def _note(self, rank: int, name: str) -> None:
        told = self.transports[rank]._told
        if name == "signal":
            self._written |= {(rank, other) for other in range(len(self.transports)) if other != rank}
            self.ahead = max(self.ahead, int((told - self._taken[:, rank]).amax()))
        if name == "take":
            self._taken[rank] = told

    def _bring(self, source: int, reader: int) -> None:
        """Bring over some rows, or a word, and with it all rows that it stands for."""
        (here, there) = self._views[source].data[reader][:, source], self._windows[reader].data[reader][:, source]
        if self._random.random() < 0.3:
            begin, end = sorted(self._random.choices(range(here.shape[1] + 1), k=2))
            there[:, begin:end] = here[:, begin:end]
            return
        if self._releases:
            there.copy_(here)
        words, place = self._views[source].signals[reader], self._random.randrange(here.shape[0])
        home = self._windows[reader].signals[reader]
        # Another place's word may come before.
        home[place, source] = words[place, source]
        if torch.equal(home[:, source], words[:, source]):
            self._written.discard((source, reader))

    def _give_up(self, steps: dict[int, tuple[str, Chunk] | None], absent: Collection[int]) -> int:
        """A rank that waits for absent ones only."""
        for rank, step in steps.items():
            if step is not None and set(self.transports[rank].missing(*step)) <= set(absent):
                return rank
        raise Stuck(str({rank: step and step[0] for rank, step in steps.items()}))


def _step(step: tuple[str, Chunk] | None) -> tuple[str, Chunk]:
    assert step is not None
    return step


def _copies_of_others(windows: Windows) -> Windows:
    def copied(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [part if rank == windows.rank else part.clone() for rank, part in enumerate(parts)]

    return replace(windows, data=copied(windows.data), signals=copied(windows.signals))
