"""Histories: the collectives that a rank has started on a group, so that ranks can find out where they parted.

Two numbers prove that ranks run the same program, and travel with the counts of each exchange
(:attr:`History.proof`). If they differ, :func:`first_difference` says in words where ranks parted.
"""

from __future__ import annotations

import random
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from operator import mul
from typing import Any

import torch
import torch.distributed as dist

# Remembered collectives: those of a step or more, after which a difference is noticed at the latest.
_LENGTH = 2048
# A prime, so that a product with a factor is 0 only if the other one is.
_MODULUS = 2**61 - 1
_label: ContextVar[str] = ContextVar("_label", default="")
_purpose: ContextVar[str] = ContextVar("_purpose", default="a collective")
_ADVICE = (
    "Every rank must run the same forwards and backwards in the same order, with the same library versions. Often "
    "one rank has called the model more often than another: in loaders or evaluations of different length (give all "
    "ranks equally many batches), or in model.generate, where texts end at different steps (synced_gpus=True). "
    "Or a forward took an input that others did without, such as images: give it to all ranks, masked where there is "
    "nothing; docs/models.md says which models need not. "
    'Config(policy="replicate") has no collectives inside a forward.'
)
# A message lists at most so many pairs of ranks, or ranks that do the same.
_LISTED = 8


@dataclass(frozen=True)
class Call:
    """A collective as ranks compare it.

    ``number`` counts the group's collectives from 1, ``label`` names operator, layer and step ("" if unset), ``size``
    is "4096 bfloat16": of a row in an all-to-all, else of the tensor. ``send`` and ``receive`` are an all-to-all's
    rows.
    """

    number: int
    kind: str
    label: str
    size: str
    send: list[int] | None = None
    receive: list[int] | None = None

    def __str__(self) -> str:
        return self.label or f"{self.kind} of {self.size}"


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Label the collectives inside the block, in words that are the same on all ranks."""
    token = _label.set(label)
    try:
        yield
    finally:
        _label.reset(token)


def current_label() -> str:
    """Return the label that :func:`labelled` has set, or ""."""
    return _label.get()


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Name the purpose of collectives inside the block, as the user knows it: "hecate.stats"."""
    token = _purpose.set(what)
    try:
        yield
    finally:
        _purpose.reset(token)


def current_purpose() -> str:
    """Return the purpose that :func:`doing` has named."""
    return _purpose.get()


class History:
    """The last collectives of one group, which forgets its own name when ``torch.distributed`` ends."""

    def __init__(self, group_name: str, rank: int, size: int) -> None:
        self.group_name, self.number = group_name, 0
        self._calls: deque[tuple[Any, ...]] = deque(maxlen=_LENGTH)
        self._order = self._balance = 0
        self._outward = [_weight(rank, other) for other in range(size)]
        self._inward = [_weight(other, rank) for other in range(size)]

    def add(self, kind: str, tensor: torch.Tensor, splits: tuple[Sequence[int], Sequence[int]] | None = None) -> None:
        """Record a collective that begins now; ``splits`` are rows to and from each rank, of an all-to-all."""
        self.number = number = self.number + 1
        label = _label.get()
        values = tensor.numel() if splits is None else tensor.shape[1:].numel()
        self._order = zlib.crc32(f"{kind} {label} {values} {tensor.dtype}".encode(), self._order)
        send, receive = splits if splits is not None else (None, None)
        if send is not None and receive is not None:
            balance = sum(map(mul, send, self._outward)) - sum(map(mul, receive, self._inward))
            self._balance = (self._balance + balance * (2 * number + 1)) % _MODULUS
        self._calls.append((number, kind, label, values, tensor.dtype, send, receive))

    @property
    def order(self) -> int:
        """A hash of 32 bits of all collectives so far, but for their splits; equal on ranks that started the same."""
        return self._order

    @property
    def proof(self) -> list[int]:
        """Two numbers for :func:`proven`: one is the same on all ranks, the other adds up to 0 over them."""
        return [self._order, self._balance]

    @property
    def calls(self) -> list[Call]:
        """All remembered collectives, oldest first."""
        return self.last(_LENGTH)

    def last(self, count: int) -> list[Call]:
        """Return the last ``count`` collectives, oldest first."""
        # Another thread may add one meanwhile: a deque can be copied then, but not iterated over.
        recent = list(self._calls.copy())[-count:]
        return [
            Call(number, kind, label, f"{values} {str(dtype).removeprefix('torch.')}", send, receive)
            for number, kind, label, values, dtype, send, receive in recent
        ]


def proven(proofs: Sequence[Sequence[int]]) -> bool:
    """Tell whether all ranks started the same collectives, with splits that fit, by the proofs of all ranks."""
    return all(order == proofs[0][0] for order, _ in proofs) and sum(balance for _, balance in proofs) % _MODULUS == 0


def as_plain(calls: Sequence[Call], splits: int) -> list[dict[str, Any]]:
    """Convert collectives to dicts for JSON, with at most ``splits`` values of splits in all, the newest."""
    found, left = [asdict(call) for call in calls], splits
    for call in reversed(found):
        left -= 2 * len(call["send"] or ())
        if left < 0:
            call["send"] = call["receive"] = None
    return found


def from_plain(calls: Sequence[dict[str, Any]]) -> list[Call]:
    """Return the collectives that :func:`as_plain` converted."""
    return [Call(**call) for call in calls]


def _weight(source: int, destination: int) -> int:
    """Return a number of its own for each pair of ranks, so that two errors do not cancel out."""
    return random.Random(source * 2**32 + destination).getrandbits(60)


_histories: weakref.WeakKeyDictionary[dist.ProcessGroup, History] = weakref.WeakKeyDictionary()


def history_of(group: dist.ProcessGroup) -> History:
    """Return this rank's history of ``group``. It is kept by the object: ranks that are threads share names."""
    found = _histories.get(group)
    if found is None:
        found = _histories[group] = History(group.group_name, group.rank(), group.size())
    return found


def known_groups() -> list[tuple[dist.ProcessGroup, History]]:
    """Return the groups that still exist, with their histories."""
    return list(_histories.items())


class DisagreementError(RuntimeError):
    """Ranks differ in something that must be equal; raised on every rank with the first difference.

    Attributes:
        places: if ranks differ in what they do next in a first forward, the lines of the model's code that are at it
            here, from the outside in; else None.
    """

    places: Sequence[tuple[str, int]] | None = None


def first_difference(calls: Mapping[int, Sequence[Call]], numbers: Sequence[int] | None = None) -> str | None:
    """Return the text of a :class:`DisagreementError` from the last calls by rank, or None if nothing contradicts.

    A rank that has not come yet contradicts nothing: it may be slow. The text calls ranks by their ``numbers``.
    """
    names = numbers if numbers is not None else range(1 + max(calls, default=0))
    by_number: dict[int, dict[int, Call]] = {}
    for rank, started in sorted(calls.items()):
        for call in started:
            by_number.setdefault(call.number, {})[rank] = call
    for number, found in sorted(by_number.items()):
        problem = _different(found, names) or _unfitting(found, names)
        if problem is not None:
            return f"hecate: ranks disagree on collective {number} since the start.\n{problem}\n{_ADVICE}"
    return None


def _different(found: Mapping[int, Call], names: Sequence[int]) -> str | None:
    """Describe the ranks that are in another collective than most."""
    same: dict[tuple[str, str, str], list[int]] = {}
    for rank, call in found.items():
        same.setdefault((call.kind, call.label, call.size), []).append(rank)
    if len(same) < 2:
        return None
    # Labels that are equal do not tell the ranks apart: their sizes do.
    alike = max(Counter(str(found[ranks[0]]) for ranks in same.values()).values()) > 1
    lines = []
    for ranks in sorted(same.values(), key=lambda ranks: (-len(ranks), ranks)):
        call = found[ranks[0]]
        details = f" ({call.kind} of {call.size})" if alike and call.label else ""
        lines.append(f"  {_ranks([names[rank] for rank in ranks])}: {call}{details}")
    return "\n".join(lines)


def _unfitting(found: Mapping[int, Call], names: Sequence[int]) -> str | None:
    """Describe the pairs of ranks of which one sends what the other does not expect."""
    lines = []
    for source, call in found.items():
        for destination, other in found.items():
            if call.send is None or other.receive is None or call.send[destination] == other.receive[source]:
                continue
            lines.append(
                f"  rank {names[source]} sends {call.send[destination]} rows to rank {names[destination]}, "
                f"which expects {other.receive[source]}, in {call}"
            )
    more = f"\n  and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return "\n".join(lines[:_LISTED]) + more if lines else None


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"ranks {', '.join(map(str, ranks[:_LISTED]))}{more}"
