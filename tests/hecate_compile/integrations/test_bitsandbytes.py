"""AdamW of bitsandbytes, whose state is in eight bits, on shards: trained, moved, saved and gone on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hecate
from hecate.checkpoints.optimizer_tensors import take_whole_state
from hecate.compiled_model import compiled_model_of
from tests.hecate_compile.wrap.test_stack_experts import ListMoE
from tests.support.adversaries import Restless
from tests.support.extent import ALL
from tests.support.models import PlainLanguageModel, PlainMoE, batch
from tests.support.parity import run_step, state_error, step_both
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.integrations.test_bitsandbytes"
pytestmark = pytest.mark.distributed
# Experts of 2,048 elements, eight blocks: two of them are 4,096, the least of which there are eight bits.
EXPERTS = 4


class Wide(PlainMoE):
    def __init__(self, hidden: int, intermediate: int, experts: int, choices: int) -> None:
        super().__init__(hidden, 4 * intermediate, experts, choices)


def plain(kind: str, seed: int = 0, experts: int = EXPERTS) -> nn.Module:
    torch.manual_seed(seed)
    return PlainLanguageModel(ListMoE if kind == "list" else Wide, layers=1, experts=experts)


def compiled(kind: str, seed: int = 0, **options: Any) -> nn.Module:
    policy = Restless(reshard_every=1)
    return hecate.compile(plain(kind, seed, **options), hecate.Config(backend="aot_eager", policy=policy))


def adamw(model: nn.Module) -> Any:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=0.01, eps=1e-3)


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    run_step(model, batch(number))
    optimizer.step()


def train(kind: str, folder: str) -> dict[str, Any]:
    """On one rank: beside one process, and a run that goes on from a checkpoint beside one that was not stopped."""
    found: dict[str, Any] = {"losses": []}
    model, reference = compiled(kind), plain(kind)
    optimizers = adamw(model), adamw(reference)
    for number in range(3):
        found["losses"].append(step_both(model, reference, batch(number)))
        for optimizer in optimizers:
            optimizer.step()
    found["error"] = state_error(model.state_dict(), reference.state_dict())
    found["moved"] = state_error(plain(kind).state_dict(), reference.state_dict())
    found["owners"] = compiled_model_of(model, "test").owner_mover.moves
    states = optimizers[0].state
    found["in bytes"] = [
        n for n, p in model.named_parameters() if states[p] and states[p]["state1"].dtype == torch.uint8
    ]
    hecate.save(folder, model, optimizers[0], step=3)
    step(model, optimizers[0], 3)
    again = compiled(kind, seed=1)
    resumed = adamw(again)
    hecate.load(folder, again, resumed)
    step(again, resumed, 3)
    found["resumed"] = state_error(again.state_dict(), model.state_dict())
    found["states"] = _difference(again, resumed, model, optimizers[0])
    hecate.save(f"{folder}/end", model, optimizers[0], step=4)
    if kind == "plain":
        # What one process has left goes on here, too.
        other = compiled(kind, seed=2)
        other.load_state_dict(reference.state_dict())
        taken = adamw(other)
        take_whole_state(other, taken, optimizers[1].state_dict(), "optimizer.pt")
        step_both(other, reference, batch(3))
        for optimizer in (taken, optimizers[1]):
            optimizer.step()
        found["taken"] = state_error(other.state_dict(), reference.state_dict())
    return found


def _difference(model: nn.Module, optimizer: Any, expected: nn.Module, other: Any) -> float:
    """Of the worst element of any state."""
    return max(
        float((value.float() - other.state[theirs][key].float()).abs().max())
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True)
        for key, value in optimizer.state[mine].items()
        if torch.is_tensor(value)
    )


def uneven() -> str:
    """On one rank: three experts, of which two are in eight bits and one is not."""
    model = compiled("plain", experts=3)
    return message_of(lambda: step(model, adamw(model), 0))


@pytest.mark.parametrize("kind", ["plain", "list"] if ALL else ["plain"])
def test_state_in_eight_bits_moves_is_saved_and_gone_on_from(kind: str, tmp_path: Path) -> None:
    for found in run_ranks(f"{_HERE}:train", 2, kind=kind, folder=str(tmp_path)):
        # An expert of a list has parameters of its own, which are too small for eight bits.
        assert len(found["in bytes"]) >= 2 * (kind == "plain"), found
        assert len(found["owners"]) >= 2 and min(found["owners"]) > 0, found
        assert found["resumed"] == 0 and found["states"] == 0
        if kind == "plain":
            # A last bit of a gradient may decide between two neighbours of the 256 numbers.
            assert max(found["losses"]) < 1e-4 and max(found["error"], found["taken"]) < 0.05 * found["moved"], found
    model = plain(kind, seed=3)
    optimizer = adamw(model)
    hecate.load(tmp_path, model, optimizer)
    step(model, optimizer, 3)
    end = plain(kind, seed=4)
    hecate.load(tmp_path / "end", end)
    assert state_error(model.state_dict(), end.state_dict()) < 2e-3


def test_state_that_ranks_would_have_in_other_forms_is_refused() -> None:
    for said in run_ranks(f"{_HERE}:uneven", 2):
        assert "AdamW8bit needs whole parameters" in said and "State in eight bits or fewer is in blocks" in said
