"""What ``hecate.load`` refuses, and what it takes when it is told to; in one process with a plain model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hecate
from tests.support.models import build
from tests.support.ranks import message_of


class Net(nn.Module):
    def __init__(self, width: int = 4, extra: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(3, width, dtype=dtype)
        self.norm = nn.BatchNorm1d(width)
        if extra:
            self.second = nn.Linear(width, 2, bias=False)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = Net()
    optimizer = _adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    hecate.save(tmp_path, model, optimizer, step=3, extra={"seen": 17})
    return tmp_path


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "shape": (lambda: Net(5), _adamw, r"first.weight has the shape \[4, 3\] in the checkpoint and \[5, 3\]"),
    "dtype": (lambda: Net(dtype=torch.bfloat16), _adamw, r"first.weight is torch.float32 in .* cast=True"),
    "missing": (lambda: Net(extra=True), _adamw, "second.weight is not in the checkpoint"),
    "unexpected": (lambda: Net().first, lambda model: None, "first.weight is not in the model"),
    "groups": (
        Net,
        lambda model: torch.optim.AdamW([{"params": [p]} for p in model.parameters()]),
        r"group 0 of AdamW has 1 parameters \(first.weight\), and no group",
    ),
    "number of optimizers": (Net, lambda model: [_adamw(model), _adamw(model)], "1 optimizers were saved, and 2"),
    "another's parameters": (Net, lambda model: _adamw(Net()), "that is not in the model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_changes(saved: Path, case: str) -> None:
    make, make_optimizer, said = REFUSED[case]
    model = make()
    optimizer = make_optimizer(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = torch.get_rng_state()
    with pytest.raises(hecate.MismatchError, match=said):
        hecate.load(saved, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(numbers, torch.get_rng_state())
    if isinstance(optimizer, torch.optim.Optimizer):
        assert not optimizer.state


def test_told_to_it_takes_what_is_in_both(saved: Path) -> None:
    model, reference = Net(extra=True, dtype=torch.bfloat16), Net()
    hecate.load(saved, reference)
    own = model.second.weight.clone()
    loaded = hecate.load(saved, model, strict=False, cast=True)
    assert (loaded.step, loaded.ranks, loaded.extra, loaded.skipped) == (3, 1, {"seen": 17}, ())
    assert torch.equal(model.first.weight, reference.first.weight.bfloat16())
    assert torch.equal(model.second.weight, own)


def test_a_model_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    hecate.save(tmp_path, build("qwen3_moe", layers=1), step=1)
    other = build("qwen3_moe", layers=1, seed=1, num_experts_per_tok=1, rms_norm_eps=0.5, attention_dropout=0.5)
    with pytest.raises(hecate.MismatchError) as error:
        hecate.load(tmp_path, other)
    assert "model.config.num_experts_per_tok was 2 and is 1" in str(error.value)
    assert "rms_norm_eps" in str(error.value) and "dropout" not in str(error.value)
    assert hecate.load(tmp_path, other, same_options=False).step == 1


class Counting(nn.Linear):
    seen = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_what_modules_save_beside_tensors(tmp_path: Path) -> None:
    model, other = nn.Sequential(Counting(2, 2)), nn.Sequential(Counting(2, 2))
    model[0].seen = 7
    hecate.save(tmp_path, model, step=1)
    hecate.load(tmp_path, other)
    assert other[0].seen == 7
    with pytest.raises(hecate.MismatchError, match="the model has no extra state in '0'"):
        hecate.load(tmp_path, nn.Sequential(nn.Linear(2, 2)))


def test_wrong_arguments_of_save(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"step": step}, f"step={step!r}") for step in (-1, True, 1.0, "2", None)
    ]
    wrong += [({"step": 1, "keep": keep}, f"keep={keep!r}") for keep in (0, -1, True, 1.5, "2")]
    for arguments, said in (*wrong, ({"step": 1, "optimizer": _adamw(Net())}, "give model")):
        with pytest.raises((ValueError, hecate.CheckpointError), match=said):
            hecate.save(tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()


def test_several_optimizers_and_schedules(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        torch.manual_seed(seed)
        model = Net(extra=True)
        optimizers = [
            torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW([*model.norm.parameters(), *model.second.parameters()], lr=torch.tensor(0.2)),
        ]
        return model, optimizers, torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 10)

    def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], schedule: Any) -> None:
        for _ in range(3):
            rows = torch.randn(5, 3)
            model.second(model.norm(model.first(rows))).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()

    one, other = make(0), make(1)
    train(*one)
    hecate.save(tmp_path, one[0], one[1], step=3, extra=one[2].state_dict())
    train(*one)
    other[2].load_state_dict(hecate.load(tmp_path, other[0], other[1]).extra)
    train(*other)
    assert all(map(torch.equal, one[0].state_dict().values(), other[0].state_dict().values()))
    assert other[1][0].param_groups[0]["lr"] == one[1][0].param_groups[0]["lr"] != 0.1


def test_a_step_without_a_model_is_of_another_model(tmp_path: Path) -> None:
    hecate.save(tmp_path, step=1, extra=5)
    assert "first.weight is not in the checkpoint" in message_of(lambda: hecate.load(tmp_path, Net()))
    assert hecate.load(tmp_path).extra == 5
