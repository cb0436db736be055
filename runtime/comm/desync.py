"""Where ranks parted: the first collective in which they do different things, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hecate.runtime.comm.history import Call

_ADVICE = (
    "Every rank must run the same forwards and backwards in the same order, with the same library versions. Often "
    "one rank has called the model more often than another: in loaders or evaluations of different length (give all "
    "ranks equally many batches), or in model.generate, where texts end at different steps (synced_gpus=True). "
    "Or a forward took an input that others did without, such as images: give it to all ranks, masked where there is "
    "nothing. "
    'Config(policy="replicate") has no collectives inside a forward.'
)
# Pairs of ranks, and ranks that do the same, that a message lists.
_LISTED = 8


class DisagreementError(RuntimeError):
    """Ranks differ in something that must be equal; raised on every rank with the first difference."""


def first_difference(calls: Mapping[int, Sequence[Call]]) -> str | None:
    """The text of a :class:`DisagreementError`, or None if nothing contradicts.

    A rank that has not come yet contradicts nothing: it may be slow.

    Args:
        calls: the last collectives of ranks, by rank in their group. A rank that did not tell is left out.
    """
    by_number: dict[int, dict[int, Call]] = {}
    for rank, started in sorted(calls.items()):
        for call in started:
            by_number.setdefault(call.number, {})[rank] = call
    for number, found in sorted(by_number.items()):
        problem = _different(found) or _unfitting(found)
        if problem is not None:
            return f"hecate: ranks disagree on collective {number} since the start.\n{problem}\n{_ADVICE}"
    return None


def _different(found: Mapping[int, Call]) -> str | None:
    """Ranks that are in something else than most of them."""
    same: dict[tuple[str, str, str], list[int]] = {}
    for rank, call in found.items():
        same.setdefault((call.kind, call.label, call.size), []).append(rank)
    if len(same) < 2:
        return None
    # The same label with other sizes: say these too.
    alike = max(Counter(str(found[ranks[0]]) for ranks in same.values()).values()) > 1
    lines = []
    for ranks in sorted(same.values(), key=lambda ranks: (-len(ranks), ranks)):
        call = found[ranks[0]]
        lines.append(f"  {_ranks(ranks)}: {call}{f' ({call.kind} of {call.size})' if alike and call.label else ''}")
    return "\n".join(lines)


def _unfitting(found: Mapping[int, Call]) -> str | None:
    """Pairs of which one sends what the other does not expect."""
    lines = []
    for source, call in found.items():
        for destination, other in found.items():
            if call.send is None or other.receive is None or call.send[destination] == other.receive[source]:
                continue
            lines.append(
                f"  rank {source} sends {call.send[destination]} rows to rank {destination}, "
                f"which expects {other.receive[source]}, in {call}"
            )
    more = f"\n  and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return "\n".join(lines[:_LISTED]) + more if lines else None


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"ranks {', '.join(map(str, ranks[:_LISTED]))}{more}"
