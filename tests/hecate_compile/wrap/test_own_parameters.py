"""Experts in a list keep their parameters: names, dimensions, freezing, hooks, groups and rates of their own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import hecate
from tests.hecate_compile.wrap.test_stack_experts import DictMoE, small
from tests.support.adversaries import Anything
from tests.support.models import batch
from tests.support.parity import run_step, state_error
from tests.support.ranks import message_of, run_ranks

Optimizer = torch.optim.Optimizer


def prepare(model: nn.Module) -> None:
    """Freeze whole experts and parts of some, and hang hooks on others, before anything is compiled."""
    experts = model.blocks[0].experts
    experts[3].requires_grad_(False)
    experts[0].w2.requires_grad_(False)
    experts[1].w1.weight.lr_scale = 0.5
    experts[2].w3.weight.register_post_accumulate_grad_hook(halve)


def halve(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def optimize(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> Optimizer:
    """By dimensions, as nanoGPT does, with a rate of its own for an expert."""
    own = {id(p) for p in model.blocks[0].experts[1].parameters()}
    rest = [p for p in model.parameters() if id(p) not in own]
    return kind(
        [
            {"params": [p for p in rest if p.dim() >= 2], "weight_decay": 0.5},
            {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
            {"params": model.blocks[0].experts[1].parameters(), "lr": 0.03},
        ],
        lr=0.01,
        **options,
    )


class Twins:
    """A compiled model on every rank, and the same in one process, which do the same."""

    def __init__(self, **options: Any) -> None:
        self.model, self.reference = small(layers=1), small(layers=1)
        for model in (self.model, self.reference):
            prepare(model)
        self.names = [(n, p.ndim, p.requires_grad) for n, p in self.reference.named_parameters()]
        hecate.compile(self.model, hecate.Config(backend="aot_eager", **options))
        # Large enough not to turn the rounding of a gradient that is nearly zero into a step.
        self.optimizers = [optimize(m, eps=1e-3) for m in self.both]
        self.steps = 0

    @property
    def both(self) -> tuple[Any, Any]:
        return self.model, self.reference

    def step(self, *, clip: str = "", micro: int = 1, to_none: bool = True) -> float:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        for part in range(micro):
            ids = batch(100 * part + self.steps)
            run_step(self.model, ids)
            self.reference(input_ids=ids, labels=ids)["loss"].backward()
        self.steps += 1
        for model, optimizer in zip(self.both, self.optimizers, strict=True):
            if clip == "torch":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if clip == "an expert":
                torch.nn.utils.clip_grad_norm_(model.blocks[0].experts[2].parameters(), 0.01)
            optimizer.step()
        return self.error()

    def assign(self) -> None:
        """Put other parameters in the place of the experts', and build the optimizer anew."""
        other = small(layers=1, seed=3).blocks[0].experts.state_dict()
        for model in self.both:
            model.blocks[0].experts.load_state_dict({n: value.clone() for n, value in other.items()}, assign=True)
        self.optimizers = [optimize(m, eps=1e-3) for m in self.both]

    def error(self) -> float:
        return state_error(self.model.state_dict(), self.reference.state_dict())


def train(folder: str) -> dict[str, Any]:
    """On one rank."""
    twins = Twins(policy=Anything(reshard_every=2))
    found: dict[str, Any] = {
        "names": [(n, p.ndim, p.requires_grad) for n, p in twins.model.named_parameters()] == twins.names,
        "attribute": twins.model.blocks[0].experts[1].w1._parameters["weight"].lr_scale,
    }
    off: dict[str, float] = found.setdefault("off", {})
    off["plain"] = max(twins.step() for _ in range(3))
    off["clipped"] = max(twins.step(clip="torch", micro=2), twins.step(clip="an expert", to_none=False))
    handles = []
    for model in twins.both:
        own = dict(model.named_parameters())["blocks.0.experts.1.w2.weight"]
        mask = torch.rand(16, 16, generator=torch.Generator().manual_seed(0)).round()
        handles.append(own.register_hook(lambda g, mask=mask: g * mask))
    off["hooks"] = max(twins.step(micro=2), twins.step())
    for handle in handles:
        handle.remove()
    for model in twins.both:
        experts = model.blocks[0].experts
        experts[3].requires_grad_(True)
        experts[1].requires_grad_(False)
    off["thawed"] = max(twins.step() for _ in range(3))
    for model in twins.both:
        # Its gradient stays where it is, and it does not train.
        model.blocks[0].experts[2].w1.requires_grad_(False)
    off["frozen with a gradient"] = max(twins.step(to_none=False) for _ in range(2))
    for model in twins.both:
        model.blocks[0].experts[2].w1.requires_grad_(True)
    off["thawed again"] = twins.step(to_none=False)
    for model in twins.both:
        model.to(torch.bfloat16).to(torch.float32)
    off["cast"] = max(twins.error(), twins.step(to_none=False))
    one, other = (model.blocks[0].experts[2].state_dict() for model in twins.both)
    off["an expert"] = state_error(one, other)
    for model in twins.both:
        model.blocks[0].experts[1].load_state_dict(other)
    off["copied"] = max(twins.error(), twins.step())
    twins.assign()
    off["assigned"] = twins.error()
    off["after"] = max(twins.step(clip="torch") for _ in range(3))

    hecate.save(folder, twins.model, twins.optimizers[0], step=1)
    state = copy.deepcopy(get_optimizer_state_dict(twins.model, twins.optimizers[0]))
    off["went on"] = max(twins.step() for _ in range(2))
    for name, load in (("loaded", True), ("by DCP", False)):
        again = Twins(policy=Anything(seed=7, reshard_every=2))
        again.steps = twins.steps - 2
        experts = again.model.blocks[0].experts
        # As it was when it was saved: assigned parameters have no hooks.
        again.assign()
        experts[3].requires_grad_(True)
        experts[1].requires_grad_(False)
        hecate.load(folder, again.model, again.optimizers[0] if load else None)
        if not load:
            set_optimizer_state_dict(again.model, again.optimizers[0], state)
        for _ in range(2):
            again.optimizers[0].zero_grad()
            run_step(again.model, batch(again.steps))
            again.steps += 1
            again.optimizers[0].step()
        off[name] = state_error(again.model.state_dict(), twins.reference.state_dict())
    return found


class Lamb(torch.optim.SGD):
    """Steps as long as each parameter is, which takes whole ones."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    with torch.no_grad():
                        ratio = parameter.norm() / (parameter.grad.norm() + 1e-3)
                        parameter.sub_(group["lr"] * ratio * parameter.grad)


class Total(Lamb):
    """Steps by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        all_of_them = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.norm() ** 2 for p in all_of_them) ** 0.5
        with torch.no_grad():
            for parameter in all_of_them:
                parameter.sub_(0.1 * parameter.grad / norm)


def choose_optimizers() -> dict[str, Any]:
    """On one rank: an optimizer that takes norms of parameters, and one that takes a norm of all."""
    twins = Twins()
    twins.optimizers = [Lamb(m.parameters(), lr=0.01) for m in twins.both]
    worst = max(twins.step() for _ in range(3))
    twins.optimizers = [Total(m.parameters(), lr=0.01) for m in twins.both]
    return {"worst": worst, "refused": message_of(twins.step)}


@pytest.mark.distributed
def test_they_train_as_in_one_process(tmp_path: Path) -> None:
    for found in run_ranks(train, 2, folder=str(tmp_path)):
        assert found["names"] and found["attribute"] == 0.5
        assert max(found["off"].values()) < 2e-5, found["off"]


class ChoosyMoE(DictMoE):
    """One whose router has a bias, by which experts can be kept from having tokens."""

    def __init__(self, hidden: int, *sizes: int) -> None:
        super().__init__(hidden, *sizes)
        self.router.bias = nn.Parameter(torch.zeros(len(self.router.weight)))


def leave_out(folder: str, expert_group: int | None = None) -> dict[str, Any]:
    """On one rank: steps in which some experts have no tokens, and a save between two of them."""
    found: dict[str, Any] = {}
    for name, policy in (("moves", Anything(reshard_every=2)), ("gathers", "gather")):
        model, reference = small(ChoosyMoE, layers=1), small(ChoosyMoE, layers=1)
        hecate.compile(model, hecate.Config(backend="aot_eager", policy=policy, expert_group=expert_group))
        both: tuple[Any, Any] = (model, reference)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.5, eps=1e-3) for m in both]
        off, same = [], True
        for step, away in enumerate(((3,), (1, 3), (1, 3), (), (0, 1), (2,))):
            for one, optimizer in zip(both, optimizers, strict=True):
                with torch.no_grad():
                    one.blocks[0].router.bias.copy_(torch.tensor([-100.0 * (expert in away) for expert in range(4)]))
                optimizer.zero_grad()
            ids = batch(step)
            run_step(model, ids)
            reference(input_ids=ids, labels=ids)["loss"].backward()
            wanted = {n: p.grad is None for n, p in reference.named_parameters()}
            assert {n.split(".")[3] for n, none in wanted.items() if none} == {f"expert_{expert}" for expert in away}
            # Elsewhere it may be empty.
            same &= all((p.grad is None) == wanted[n] for n, p in model.named_parameters() if p.numel())
            for optimizer in optimizers:
                optimizer.step()
            if step == 1:
                hecate.save(f"{folder}/{name}", model, optimizers[0], step=1)
                hecate.load(f"{folder}/{name}", model, optimizers[0])
            off.append(state_error(model.state_dict(), reference.state_dict()))
        found[name] = {"same": same, "off": off}
    return found


def check_left_out(found: dict[str, Any]) -> None:
    for kind in found.values():
        assert kind["same"] and max(kind["off"]) < 1e-5, found


@pytest.mark.distributed
def test_experts_without_tokens_have_no_gradient_where_the_loop_leaves_them_out(tmp_path: Path) -> None:
    """So momentum and decay do not change them, and state of others alone moves, is saved and loaded."""
    for found in run_ranks(leave_out, 2, folder=str(tmp_path)):
        check_left_out(found)


def test_experts_without_tokens_in_one_process(tmp_path: Path) -> None:
    check_left_out(leave_out(str(tmp_path)))


@pytest.mark.distributed
def test_optimizers_may_take_norms_of_whole_experts() -> None:
    for found in run_ranks(choose_optimizers, 2):
        assert found["worst"] < 1e-5
        assert "Total needs whole parameters" in found["refused"]


def test_one_process_keeps_its_parameters() -> None:
    model, reference = small(layers=1), small(layers=1)
    for one in (model, reference):
        prepare(one)
    own = dict(model.named_parameters())
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    assert all(own[name] is parameter for name, parameter in model.named_parameters())
    ids = batch(0)
    for one in (model, reference):
        one(input_ids=ids, labels=ids)["loss"].backward()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), name
        if parameter.grad is not None and expected.grad is not None:
            assert torch.allclose(parameter.grad, expected.grad, atol=1e-6), name
