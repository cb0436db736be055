"""Checks that all ranks are about to do the same thing, before a difference becomes a hang.

Texts travel as bytes in tensors, never as pickled objects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch

from hecate.runtime.comm import collectives
from hecate.runtime.comm.history import DisagreementError, as_plain, doing, first_difference, from_plain, history_of
from hecate.runtime.comm.world import World

__all__ = ["DisagreementError", "agree", "compare_histories"]


# Stands for the digest of a rank that does not know its own.
_NO_DIGEST = bytes(32)


def agree(lines: Sequence[str] | None, what: str, advice: str, world: World) -> None:
    """Raise on all ranks if ``lines`` differ between ranks. A collective; costs one digest when they agree.

    Args:
        lines: the description to compare, one fact per line; None on a rank that does not know and is not asked.
        what: what is compared, for the message ("the model", "graph 0").
        advice: what to do about a difference.

    Raises:
        DisagreementError: names the ranks and the first line that differs.
    """
    if world.group is None:
        return
    # Collectives of a graph that are still under way must not mix with these.
    world.queue.drain()
    with doing(f"the comparison of {what}"):
        text = "\n".join(lines if lines is not None else ["(not known)"]).encode()
        digest = hashlib.sha256(text).digest() if lines is not None else _NO_DIGEST
        if len({*_gather(digest, 32, world)} - {_NO_DIGEST}) <= 1:
            return
        everyone = [text.decode().split("\n") for text in gather_texts(text, world)]
    raise DisagreementError(f"hecate: ranks disagree on {what}.\n{_first_difference(everyone)}\n{advice}")


def compare_histories(world: World) -> None:
    """Raise DisagreementError with the first collective in which ranks are known to differ; a collective."""
    assert world.group is not None, "one rank has nobody to differ from"
    text = json.dumps(as_plain(history_of(world.group).calls)).encode()
    world.queue.drain()
    with doing("the comparison of collectives"):
        texts = gather_texts(text, world)
    calls = {rank: from_plain(json.loads(found)) for rank, found in enumerate(texts)}
    raise DisagreementError(
        first_difference(calls)
        or "hecate: ranks disagree on collectives that lie further back than what they remember of them."
    )


def gather_texts(text: bytes, world: World) -> list[bytes]:
    """Return the text of every rank, in rank order. A collective."""
    lengths = [int.from_bytes(raw, "little") for raw in _gather(len(text).to_bytes(8, "little"), 8, world)]
    texts = _gather(text, max(lengths), world)
    return [raw[:length] for raw, length in zip(texts, lengths, strict=True)]


def _gather(payload: bytes, length: int, world: World) -> list[bytes]:
    device = world.control_device
    mine = torch.zeros(length, dtype=torch.uint8, device="cpu")
    if payload:
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return [bytes(line) for line in collectives.all_gather_even(mine.to(device), world).tolist()]


def _first_difference(everyone: list[list[str]]) -> str:
    longest = max(len(lines) for lines in everyone)
    for index in range(longest):
        at = [lines[index] if index < len(lines) else "(nothing)" for lines in everyone]
        if len(set(at)) > 1:
            return "\n".join(f"  rank {rank}, line {index}: {line}" for rank, line in enumerate(at))
    return "  (the texts are equal; the digests are not)"
