"""Tables that the collectives of a placement's replicas read on a rank's device: parts of one tensor, in one copy."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hecate.runtime.comm.collectives import on_device_together
from hecate.runtime.placement.planner import Parts, StageOfRank, Travels


@dataclass(frozen=True, eq=False)
class Coming:
    """A stage in which experts come to their replicas."""

    stage: StageOfRank  # on the host; at hand are copies of own experts that leave, and behind them replicas
    leave: Tensor  # of the experts at hand those that go out, int64 ``[n]``
    arrive: Tensor  # replicas that come in, int64 ``[m]``
    in_first: int  # how many of those that go out are own experts


@dataclass(frozen=True, eq=False)
class Returning:
    """A stage in which gradients return to the owners."""

    stage: StageOfRank
    parts: Parts
    leave: Tensor  # replicas whose gradients go out, int64 ``[m]``
    # As in :class:`Parts`.
    passed_on: Tensor
    totals: Tensor
    order: Tensor
    begins: Tensor


@dataclass(frozen=True, eq=False)
class ReplicaTables:
    """The tables of one rank. Stages in which no rank sends anything are left out."""

    places: Tensor  # own experts that leave, int64 ``[L]``
    coming: list[Coming]
    returning: list[Returning]  # in the order in which gradients travel; empty where none will
    summed: Tensor  # slots that get parts of gradients, int64 ``[P]``
    home: int  # how many of them are own experts; these come first

    @classmethod
    def of(cls, travels: Travels, device: torch.device, *, homeward: bool) -> ReplicaTables:
        """Return the tables on ``device``, without waiting for it; ``homeward`` if gradients will return."""
        leaving, owned = len(travels.leaving), travels.placement.owners.counts[travels.rank]
        there = [mine for stage, mine in zip(travels.stages, travels.there, strict=True) if len(stage.experts)]
        back = (
            [
                (mine, parts)
                for stage, mine, parts in reversed([*zip(travels.stages, travels.slots, travels.parts, strict=True)])
                if len(stage.experts)
            ]
            if homeward
            else []
        )
        summed = travels.summed if homeward else travels.places[:0]
        numbers = [travels.places, summed]
        for mine in there:
            numbers += [mine.leave, mine.arrive - leaving]
        for mine, parts in back:
            numbers += [mine.arrive - owned, parts.passed_on, parts.totals, parts.order, parts.begins]
        tables = iter(on_device_together(numbers, device))
        return cls(
            places=next(tables),
            summed=next(tables),
            coming=[Coming(mine, next(tables), next(tables), int((mine.leave < leaving).sum())) for mine in there],
            returning=[Returning(mine, parts, *(next(tables) for _ in range(5))) for mine, parts in back],
            home=int((summed < owned).sum()),
        )


def tables_of(travels: Travels, device: torch.device, *, homeward: bool = True) -> ReplicaTables:
    """Return :meth:`ReplicaTables.of`, made once for all steps in which replicas travel so."""
    if (known := _KNOWN.get(travels)) is None:
        known = _KNOWN[travels] = ReplicaTables.of(travels, device, homeward=homeward)
    return known


_KNOWN: WeakKeyDictionary[Travels, ReplicaTables] = WeakKeyDictionary()
