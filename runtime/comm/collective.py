"""Records of collectives: one for each, which passes, predictions and reports ask; an unknown kind is an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hecate.private import OpOverload

Role = Literal["exchange", "gather", "reduce"]
Carries = Literal["rows", "counts", "tickets", "replicas", "experts", "dense", "bucket", "fractions"]
RingRounds = Literal[0, 1, 2]
SavedInCheckpoints = Literal["always", "unless rematerialized", "as the user says"]
GatheredAgain = Literal["always", "if rematerialized", "never"]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """An operator that communicates, with its two halves.

    Attributes:
        name: of the operator, without its namespace.
        whole, start, wait: the operator, and the halves that a graph may put in different places.
        role: ``"exchange"``: its result is needed at once. ``"gather"``: parameters on their way to a use that comes
            later. ``"reduce"``: gradients, or fractions of a loss, that are needed at the end.
        carries: ``"rows"`` of tokens (arguments: rows, the parts of a ticket, ..., layer), ``"counts"``
            of rows, ``"tickets"`` for ranks that pass rows on, ``"replicas"`` of a layer's experts (or their
            gradients), all ``"experts"`` of a layer, sharded ``"dense"`` parameters, a ``"bucket"`` of whole ones'
            gradients, or the ``"fractions"`` of a load-balancing loss.
        homeward: of rows, that they return to where they came from.
        hops: of rows, how often each of them is sent: 2 for those that a rank of another node passes on.
        ring_rounds: how often its bytes pass around all ranks: 2 for an all-reduce (sum, then share), 1 for an
            all-gather, 0 if each rank sends straight to where its bytes belong.
        saved_in_checkpoints: whether a layer under ``torch.utils.checkpoint`` keeps its result, instead of
            communicating again in the backward.
        gathered_again: whether its result is dropped after the forward and gathered again for the backward.
        wait_needs_arguments: the wait's results are as long as the start's arguments, so it must see these whole.
        gaps_ahead: of a gather, how many gaps between layers before its use it may start (``passes/final/schedule``).
    """

    name: str
    whole: OpOverload
    start: OpOverload
    wait: OpOverload
    role: Role
    carries: Carries
    homeward: bool = False
    hops: Literal[1, 2] = 1
    ring_rounds: RingRounds = 0
    saved_in_checkpoints: SavedInCheckpoints = "as the user says"
    gathered_again: GatheredAgain = "never"
    wait_needs_arguments: bool = False
    gaps_ahead: int = 1


_by_name: dict[str, Collective] = {}
_by_operator: dict[object, Collective] = {}


def add_collective(collective: Collective) -> Collective:
    """Register a record, and return it; raises ValueError if the name is taken."""
    if collective.name in _by_name:
        raise ValueError(f"hecate: there is a collective {collective.name} already")
    _by_name[collective.name] = collective
    for operator in (collective.whole, collective.start, collective.wait):
        _by_operator[operator] = collective
    return collective


def collectives() -> tuple[Collective, ...]:
    """Return all records, in the order in which they were registered."""
    return tuple(_by_name.values())


def collective_named(name: str) -> Collective:
    """Return the record of the operator with this name, as notes and traces have it, or raise LookupError."""
    try:
        return _by_name[name]
    except KeyError:
        raise LookupError(f"hecate: {name!r} is no collective; there are {', '.join(sorted(_by_name))}") from None


def collective_of(operator: object) -> Collective | None:
    """Return the record of a node's target, be it the operator or one of its halves; None for anything else."""
    return _by_operator.get(operator)


def whole_of(operator: object) -> Collective | None:
    """Return the record if ``operator`` is a collective in one piece, else None."""
    found = _by_operator.get(operator)
    return found if found is not None and found.whole is operator else None


def start_of(operator: object) -> Collective | None:
    """Return the record if ``operator`` starts a collective, else None."""
    found = _by_operator.get(operator)
    return found if found is not None and found.start is operator else None


def wait_of(operator: object) -> Collective | None:
    """Return the record if ``operator`` waits for a collective, else None."""
    found = _by_operator.get(operator)
    return found if found is not None and found.wait is operator else None
