"""Gradients that do not come from one compiled forward alone are those of one process too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hecate
from tests.support.models import VOCABULARY, PlainLanguageModel, batch
from tests.support.parity import clear_gradients, compare, rank_and_size
from tests.support.ranks import message_of, run_ranks

pytestmark = pytest.mark.distributed
EAGER = hecate.Config(backend="aot_eager", reshard_every=0)


class Headless(PlainLanguageModel):
    """Its loss is computed by the caller, with the embedding and with a head that the forward never uses."""

    def __init__(self) -> None:
        super().__init__(hidden=8, layers=1, experts=4)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.memory = nn.LSTM(8, 8, batch_first=True)

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> torch.Tensor:
        hidden, _ = self.memory(self.embedding(input_ids))
        return hidden + self.blocks[0](self.norms[0](hidden))


def tied(model: Headless, ids: torch.Tensor) -> torch.Tensor:
    """A chunked loss through the embedding that the forward used too."""
    chunks = zip(model(ids).chunk(2, 1), ids.chunk(2, 1), strict=True)
    return sum(cross_entropy((h @ model.embedding.weight.T).flatten(0, 1), part.flatten()) for h, part in chunks) / 2


def head(model: Headless, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model.head(model(ids)).flatten(0, 1), ids.flatten())


def regularized(model: Headless, ids: torch.Tensor) -> torch.Tensor:
    """Parameters outside of the experts are in a penalty, outside of the forward."""
    return head(model, ids) + 0.1 * sum(p.square().sum() for n, p in model.named_parameters() if "blocks" not in n)


def twice(model: Headless, ids: torch.Tensor) -> torch.Tensor:
    """Two forwards, one backward."""
    return head(model, ids) + tied(model, ids.flip(1))


Loss = Callable[[Headless, torch.Tensor], torch.Tensor]
LOSSES: dict[str, Loss] = {"tied": tied, "head": head, "regularized": regularized, "twice": twice}


def accumulate(model: Headless, reference: Headless, losses: Sequence[Loss], step: int) -> float:
    """The worst error after a micro-batch for each loss, of which only the last is synchronized."""
    rank, size = rank_and_size()
    clear_gradients(model, reference)
    for micro, loss_of in enumerate(losses):
        hecate.set_requires_gradient_sync(model, micro == len(losses) - 1)
        ids = batch(10 * step + micro)
        loss = loss_of(model, ids.chunk(size)[rank])
        loss.backward()
        expected = loss_of(reference, ids)
        expected.backward()
    difference = compare(model, loss.detach(), reference, expected.detach())
    return max(difference.gradient, difference.loss)


def measure() -> dict[str, Any]:
    """On one rank."""
    torch.manual_seed(0)
    reference = Headless()
    torch.manual_seed(0)
    model = Headless()
    # The head is unfrozen later.
    model.head.requires_grad_(False)
    hecate.compile(model, EAGER)
    model.head.requires_grad_(True)
    rank, size = rank_and_size()
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, loss_of in LOSSES.items():
            for step in range(2):
                found[name] = max(found.get(name, 0.0), accumulate(model, reference, (loss_of, loss_of), step))
    found["warnings"] = [str(w.message) for w in caught if "averaged once more" in str(w.message)]
    # The head in the unsynchronized micro-batch alone.
    found["absent"] = max(accumulate(model, reference, (head, tied), step) for step in range(2))

    hooks = [m.norms[0].weight.register_hook(lambda gradient: 0.5 * gradient) for m in (model, reference)]
    found["hooked"] = max(accumulate(model, reference, (head, head, head), step) for step in range(2))
    for hook in hooks:
        hook.remove()
    seen: list[torch.Tensor] = []
    if rank == 0:
        hooks = [model.norms[0].weight.register_hook(seen.append)]
    found["on one rank"] = accumulate(model, reference, (head, head), 0)
    if rank == 0:
        hooks[0].remove()

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    failing = model.norms[0].weight.register_hook(fail)
    found["failed"] = message_of(lambda: tied(model, batch(0).chunk(size)[rank]).backward())
    failing.remove()
    found["after"] = accumulate(model, reference, (tied,), 1)

    def differ() -> None:
        hidden = model(batch(0))
        (hidden.sum() + (model.head(hidden).sum() if rank else model.norms[0](hidden).sum())).backward()

    found["differ"] = message_of(differ)
    return found


@cache
def results() -> list[dict[str, Any]]:
    return run_ranks(measure, 2)


@pytest.mark.parametrize("name", [*LOSSES, "absent"])
def test_equal_one_process(name: str) -> None:
    for result in results():
        assert result[name] < 1e-5


@pytest.mark.parametrize("which", ["hooked", "on one rank"])
def test_hooks_are_given_each_micro_batch_once(which: str) -> None:
    for result in results():
        assert result[which] < 1e-5


def test_a_backward_that_failed_leaves_nothing_behind() -> None:
    for result in results():
        assert "ZeroDivisionError" in result["failed"]
        assert result["after"] < 1e-5


def test_it_is_said_once() -> None:
    first, second = (result["warnings"] for result in results())
    assert len(first) == 1 and "several forwards share one backward" in first[0]
    assert second == []


def test_ranks_that_use_different_parameters_are_told() -> None:
    for result in results():
        assert "DisagreementError: hecate: ranks disagree on which parameters get gradients" in result["differ"]
        assert "rank 0, line 0" in result["differ"] and "head.weight" in result["differ"]
