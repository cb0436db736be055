"""Ranks whose own code lets whole parameters come apart are told so, soon and by name."""

from __future__ import annotations

import threading
import time
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.wrap.shard import shard_of
from tests.support.extent import ALL
from tests.support.models import PlainLanguageModel, batch
from tests.support.parity import clear_gradients, rank_and_size, run_step
from tests.support.ranks import message_of, run_ranks

pytestmark = pytest.mark.distributed


def _scale_by_hand(model: nn.Module, step: int) -> None:
    norm = sum(p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5
    for p in model.parameters():
        p.grad *= 0.1 / norm


def _scale_by_foreach(model: nn.Module, step: int) -> None:
    gradients = [p.grad for p in model.parameters()]
    torch._foreach_mul_(gradients, 0.1 / torch.stack(torch._foreach_norm(gradients)).norm())


def _scale_by_torch(model: nn.Module, step: int) -> None:
    gradients = [p.grad for p in model.parameters()]
    torch._foreach_mul_(gradients, 0.1 / torch.nn.utils.get_total_norm(gradients))


def _noise(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        p.grad += 0.01 * torch.randn_like(p)


def _by_one_unit(model: nn.Module, step: int) -> None:
    """As other hardware would."""
    if rank_and_size()[0] == 1:
        weight = model.get_parameter("norms.0.weight")
        with torch.no_grad():
            weight[0] = torch.nextafter(weight[0], torch.tensor(2.0))


def _late(model: nn.Module, step: int) -> None:
    """Nothing but in one of the last steps, on one rank alone."""
    if rank_and_size()[0] == 1 and step == 28:
        with torch.no_grad():
            model.get_parameter("norms.0.weight")[0] += 0.5


class _Summing(torch.optim.SGD):
    """Scales all gradients by a sum over them; it has a lock, and so it cannot be copied and tried."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.lock = threading.Lock()

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        torch._foreach_mul_(gradients, 1 / (1 + sum(g.abs().sum() for g in gradients)))
        return super().step(closure)


CLIPPED: dict[str, Any] = {"by hand": _scale_by_hand, "late": _late}
# Other ways to what these come to.
if ALL:
    CLIPPED |= {"foreach": _scale_by_foreach, "noise": _noise}


def _nothing(model: nn.Module, step: int) -> None:
    pass


def _train(
    change: Any, folder: str = "", *, local: str = "", kind: Any = torch.optim.AdamW, **options: Any
) -> list[Any]:
    """Steps until something is raised, at most 31; messages of it and of a save."""
    torch.manual_seed(0)
    model = PlainLanguageModel(hidden=8, layers=1, experts=4)
    options = {"policy": "static", "compare_every": 30} | options
    hecate.compile(model, hecate.Config(backend="aot_eager", **options))
    optimizer = kind(model.parameters(), lr=1e-2)
    torch.manual_seed(rank_and_size()[0])
    step, raised = 0, "no error"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while step < 31 and raised == "no error":
            clear_gradients(model)
            if local:
                with model.no_sync():
                    raised = message_of(partial(run_step, model, batch(step % 4)))
            if local != "always" and raised == "no error":
                raised = message_of(partial(run_step, model, batch(step % 4)))
            if raised == "no error":
                change(model, step)
                optimizer.step()
                step += 1
        if folder:
            hecate.save(Path(folder), model, step=1)
    said = "\n".join(str(w.message) for w in caught if "hecate" in str(w.message))
    return [step, raised, said]


def train_all(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {name: _train(change) for name, change in CLIPPED.items()}
    found["optimizer"] = _train(_nothing, kind=_Summing)
    found["accumulated"] = _train(_late, local="first micro-batch", compare_every=6)
    found["local steps"] = _train(_late, local="always", compare_every=6)
    found["torch's norm"] = _train(_scale_by_torch, folder + "/torch")
    found["sharded"] = _train(_scale_by_torch, dense="shard")
    found["one unit"] = _train(_by_one_unit)
    found["never"] = _train(_scale_by_hand, folder + "/never", compare_every=0)
    found["saved"] = _train(_late, folder + "/saved", compare_every=1000)
    found["replicate"] = _train(_late, folder + "/replicate", policy="replicate")
    found["milliseconds"] = costs()
    return found


def costs() -> float:
    """Milliseconds of one comparison, of 64 parameters with 64 MB."""
    torch.manual_seed(0)
    model = PlainLanguageModel(hidden=8, layers=1, experts=4)
    model.more = nn.ParameterList(nn.Parameter(torch.zeros(2**18)) for _ in range(64))
    hecate.compile(model, hecate.Config(backend="aot_eager", policy="static"))
    check = compiled_model_of(model, "test").forward.between.drift[0]
    assert sum(shard_of(p) is None for p in model.parameters()) > 64
    check._compare()
    began = time.perf_counter()
    assert all(check._compare() is None for _ in range(5))
    return (time.perf_counter() - began) / 5 * 1e3


@cache
def results() -> list[dict[str, Any]]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(train_all, 2, folder=folder)


@pytest.mark.parametrize(
    ("name", "step"),
    [("by hand", 10), ("optimizer", 1), ("late", 30), *([("foreach", 10), ("noise", 1)] if ALL else [])],
)
def test_what_lets_ranks_come_apart_is_told_on_all_ranks_with_its_likely_causes(name: str, step: int) -> None:
    first, second = (result[name] for result in results())
    assert first[0] == second[0] == step
    assert first[1] == second[1]
    assert f"DisagreementError: hecate: after {step} training forwards ranks have other values of" in first[1]
    assert "of rank 1 is off rank 0's by" in first[1]
    assert "a norm over gradients taken by hand" in first[1] and "get_total_norm" in first[1]
    if name == "late":
        assert "1 of the " in first[1] and "norms.0.weight of rank 1 is off rank 0's by 5.0e-01" in first[1]


def test_loops_that_accumulate_are_compared_too() -> None:
    first, second = (result["accumulated"] for result in results())
    assert first[:2] == second[:2] and first[0] == 30
    assert "after 60 training forwards" in first[1] and "norms.0.weight of rank 1" in first[1]


@pytest.mark.parametrize("name", ["torch's norm", "sharded", "never", "local steps"])
def test_what_is_right_is_not_told(name: str) -> None:
    for result in results():
        assert result[name] == [31, "no error", ""]


def test_a_difference_of_rounding_is_told_once_and_ends_nothing() -> None:
    first, second = (result["one unit"] for result in results())
    assert first[:2] == second[:2] == [31, "no error"]
    assert first[2].count("So little comes of ranks with other hardware") == 1


@pytest.mark.parametrize("name", ["saved", "replicate"])
def test_a_save_says_that_ranks_have_come_apart(name: str) -> None:
    first, second = (result[name] for result in results())
    assert first[:2] == [31, "no error"] and second == [31, "no error", ""]
    assert "hecate.save: ranks have other values of" in first[2] and "One rank's values are saved" in first[2]


def test_comparing_is_cheap() -> None:
    assert max(result["milliseconds"] for result in results()) < 500
