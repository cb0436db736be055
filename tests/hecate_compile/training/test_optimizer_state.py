"""Optimizers that cannot work on shards, and state of another rank, are refused before a step."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.wrap.shard import shard_of
from tests.support.adversaries import Moving
from tests.support.models import PlainLanguageModel, batch
from tests.support.parity import clear_gradients, error_of, run_step, step_and_compare
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.training.test_optimizer_state"


def trained(dense: Any) -> torch.nn.Module:
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


def state_from_the_start() -> float:
    """On one rank: Adagrad has state before its first step, and owners move before that."""
    torch.manual_seed(0)
    model = PlainLanguageModel(hidden=8, layers=1, experts=4)
    torch.manual_seed(0)
    reference = PlainLanguageModel(hidden=8, layers=1, experts=4)
    hecate.compile(model, hecate.Config(backend="aot_eager", policy=Moving(reshard_every=1)))
    worst = 0.0
    for _ in range(2):
        optimizers = [torch.optim.Adagrad(m.parameters(), initial_accumulator_value=0.1) for m in (model, reference)]
        for step in range(3):
            worst = max(worst, step_and_compare(model, reference, batch(step)).gradient)
            for optimizer in optimizers:
                optimizer.step()
    return worst


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


class InBlocks(torch.optim.Optimizer):
    """SGD with momentum in eight bits, and a scale for every block of 16 numbers."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            momentum = p.grad.clone()
            if state:
                scale = state["scale"].repeat_interleave(16)[: p.numel()]
                momentum += 0.9 * (state["bits"].flatten() * scale).view_as(p)
            blocks = torch.nn.functional.pad(momentum.flatten(), (0, -p.numel() % 16)).view(-1, 16)
            scale = blocks.abs().amax(1) / 127 + 1e-12
            self.state[p] = self.keep((blocks / scale[:, None]).round().flatten()[: p.numel()].view_as(p), scale)
            p -= 0.1 * momentum

    def keep(self, bits: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
        return {"bits": bits, "scale": scale}


class Packed(torch.Tensor):
    """Numbers that none but its own operators may look at."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"Packed: {func}")


class InSubclass(InBlocks):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p -= 0.1 * p.grad
            self.state[p] = self.keep(p.grad.clone(), p.grad)

    def keep(self, bits: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
        return {"packed": Packed(bits)}


class InLists(InSubclass):
    def keep(self, bits: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
        return {"history": [1.0, 2.0]}


def eight_bits(folder: str) -> dict[str, Any]:
    """On one rank: what is said, and whether its way out is one."""
    found: dict[str, Any] = {}
    model = trained("replicate")
    for kind in (InBlocks, InSubclass, InLists, torch.optim.AdamW):
        optimizer = kind(model.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.step()
        said = [str(w.message) for w in caught if "cannot write" in str(w.message)]
        save = message_of(lambda o=optimizer, k=kind: hecate.save(f"{folder}/{k.__name__}", model, o, step=1))
        found[kind.__name__] = [said, save]
        if kind is InSubclass:
            other = kind(model.parameters())
            other.state.update(optimizer.state)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                other.step()
            found["not tried"] = [str(w.message) for w in caught if "could not be tried" in str(w.message)]
        if kind is not InBlocks:
            continue
        hecate.save(f"{folder}/model", model, step=1)
        mine = f"{folder}/optimizer{dist.get_rank()}.pt"
        torch.save(optimizer.state_dict(), mine)
        again = trained("replicate")
        hecate.load(f"{folder}/model", again)
        other = kind(again.parameters())
        other.load_state_dict(torch.load(mine))
        for one, stepped in ((model, optimizer), (again, other)):
            clear_gradients(one)
            run_step(one, batch(3))
            stepped.step()
        found["resumed"] = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    return found


def averages_elsewhere(keep: bool) -> list[str]:
    """On one rank: what is said when owners move, with a dict of averages beside the optimizer or without."""
    torch.manual_seed(0)
    model = PlainLanguageModel(hidden=8, layers=1, experts=4)
    hecate.compile(model, hecate.Config(backend="aot_eager", policy=Moving(reshard_every=1)))
    optimizer = torch.optim.AdamW(model.parameters())
    averages: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            run_step(model, batch(step))
            optimizer.step()
            if keep:
                averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert len(compiled_model_of(model, "test").owner_mover.moves) == 3
    return [str(w.message) for w in caught if "change owners" in str(w.message)] + ["averages"] * bool(averages)


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
            "LBFGS, replicate",
            "Adafactor, replicate",
            "LBFGS, shard",
            "Adafactor, shard",
            "Muon, shard",
        }
        assert result["Muon, replicate"] == result["LBFGS of what is whole"] == "no error"


@pytest.mark.distributed
def test_averages_of_weights_follow_their_experts() -> None:
    for result in run_ranks(f"{_HERE}:averages", 2):
        assert result["worst"] < 1e-6
        assert len(result["moves"]) == 5 and min(result["moves"]) > 0
        assert "cannot be copied" in result["copied"] and "optimizer.state[parameter]" in result["copied"]


@pytest.mark.distributed
def test_state_that_an_optimizer_has_from_the_start_follows_its_experts() -> None:
    assert max(run_ranks(f"{_HERE}:state_from_the_start", 2)) < 1e-5


@pytest.mark.distributed
def test_state_that_no_checkpoint_can_have_is_told_after_the_first_step_with_a_way_out(tmp_path: Path) -> None:
    first, second = run_ranks(f"{_HERE}:eight_bits", 2, folder=str(tmp_path))
    assert first["AdamW"] == second["AdamW"] == [[], "no error"]
    for kind, what in {
        "InBlocks": "'scale' of blocks.0.w_in is a Tensor [",
        "InSubclass": "is a Packed [",
        "InLists": "'history' of blocks.0.w_in is a list",
    }.items():
        (said,), save = first[kind]
        assert f"{kind}'s " in said and what in said, said
        assert "optimizer.state_dict() in a file of its own" in said
        assert "CheckpointError: hecate.save: rank 0: ValueError: " in save and said.removeprefix("hecate: ") in save
        assert second[kind][0] == [] and second[kind][1] == save
    assert first["resumed"] and second["resumed"]
    assert first["not tried"] == second["not tried"] == []


@pytest.mark.distributed
def test_averages_elsewhere_are_told_when_experts_move_first() -> None:
    (said, *rest), second = run_ranks(f"{_HERE}:averages_elsewhere", 2, keep=True)
    assert "3 tensors that are no parameter, gradient or optimizer state" in said, said
    assert "optimizer.state[parameter]" in said and "reshard_every=0" in said
    assert rest == second == ["averages"]
    assert run_ranks(f"{_HERE}:averages_elsewhere", 2, keep=False) == [[], []]
