"""Optimizers that cannot work on shards, and state of another rank, are refused before a step."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.wrap.shard import shard_of
from tests.support.adversaries import Moving
from tests.support.models import PlainLanguageModel, batch
from tests.support.parity import error_of, run_step, step_and_compare
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.training.test_optimizer_state"


def trained(dense: Any) -> torch.nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = PlainLanguageModel(hidden=8, layers=1, experts=4)
    hecate.compile(model, hecate.Config(backend="aot_eager", dense=dense, policy="static"))
    run_step(model, batch(0))
    return model


def try_all() -> dict[str, str]:
    """On one rank: messages."""
    found = {}
    for dense in ("replicate", "shard"):
        model = trained(dense)
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        own = copy.deepcopy(optimizer.state_dict())
        of_rank0 = [own]
        dist.broadcast_object_list(of_rank0, 0)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.load_state_dict(of_rank0[0])
        found[f"rank 0's, {dense}"] = message_of(optimizer.step)
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        found[f"kept, {dense}"] = str(same)
        optimizer.load_state_dict(own)
        found[f"own, {dense}"] = message_of(optimizer.step)
        lbfgs = torch.optim.LBFGS(model.parameters())
        found[f"LBFGS, {dense}"] = message_of(lambda lbfgs=lbfgs: lbfgs.step(lambda: 0.0))
        for kind in (torch.optim.Adafactor, torch.optim.Muon):
            named = model.named_parameters()
            matrices = [p for n, p in named if (p.ndim == 2 and "b_out" not in n) or kind is torch.optim.Adafactor]
            found[f"{kind.__name__}, {dense}"] = message_of(kind(matrices).step)
    whole = trained("replicate")
    dense_only = torch.optim.LBFGS([p for p in whole.parameters() if shard_of(p) is None])
    found["LBFGS of what is whole"] = message_of(lambda: dense_only.step(lambda: run_step(whole, batch(1))))
    return found


def averages() -> dict[str, Any]:
    """On one rank: an average of the weights in the optimizer's state, while owners move in every step."""
    torch.manual_seed(0)
    model = PlainLanguageModel(hidden=8, layers=1, experts=4)
    torch.manual_seed(0)
    reference = PlainLanguageModel(hidden=8, layers=1, experts=4)
    config = hecate.Config(backend="aot_eager", policy=Moving(reshard_every=1))
    hecate.compile(model, config)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(6):
        step_and_compare(model, reference, batch(step))
        for optimizer in optimizers:
            optimizer.step()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    average = optimizer.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    average.lerp_(parameter.detach(), 0.5)
    ours, theirs = (dict(m.named_parameters()) for m in (model, reference))
    worst = 0.0
    for name, parameter in ours.items():
        shard, expected = shard_of(parameter), optimizers[1].state[theirs[name]]["average"]
        found = optimizers[0].state[parameter]["average"]
        worst = max(worst, error_of(found, shard.slice(expected) if shard else expected))
    copied = message_of(lambda: torch.optim.swa_utils.AveragedModel(model))
    return {"worst": worst, "moves": compiled_model_of(model, "test").owner_mover.moves, "copied": copied}


@cache
def results() -> list[dict[str, str]]:
    return run_ranks(f"{_HERE}:try_all", 2)


@pytest.mark.distributed
@pytest.mark.parametrize("dense", ["replicate", "shard"])
def test_state_of_another_rank_is_refused(dense: str) -> None:
    first, second = results()
    assert first[f"rank 0's, {dense}"] == "no error", "it is its own"
    assert "AdamW has the state of rank 0 of 2, and this is rank 1 of 2" in second[f"rank 0's, {dense}"]
    assert "on every rank" in second[f"rank 0's, {dense}"]
    assert second[f"kept, {dense}"] == "True", "nothing was lost"
    assert first[f"own, {dense}"] == second[f"own, {dense}"] == "no error"


@pytest.mark.distributed
def test_optimizers_that_need_whole_parameters_are_refused() -> None:
    for result in results():
        refused = {key for key, message in result.items() if "needs whole parameters" in message}
        # Muon takes matrices alone; those of the replicated kind are whole.
        assert refused == {
            "LBFGS, replicate", "Adafactor, replicate", "LBFGS, shard", "Adafactor, shard", "Muon, shard",
        }  # fmt: skip
        assert result["Muon, replicate"] == result["LBFGS of what is whole"] == "no error"


@pytest.mark.distributed
def test_averages_of_weights_follow_their_experts() -> None:
    for result in run_ranks(f"{_HERE}:averages", 2):
        assert result["worst"] < 1e-6
        assert len(result["moves"]) == 5 and min(result["moves"]) > 0
        assert "cannot be copied" in result["copied"] and "optimizer.state[parameter]" in result["copied"]
