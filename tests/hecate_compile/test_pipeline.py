"""Stages of a pipeline (``torch.distributed.pipelining``), each of which is a compiled model of its own."""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

import hecate
from hecate.wrap.shard import shard_of
from tests.support.models import VOCABULARY, PlainMoE, batch
from tests.support.parity import compiled_on_free_links, error_of
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

_HERE = "tests.hecate_compile.test_pipeline"
# More micro-batches under way than a layer remembers plans of.
EXACT, MICRO_BATCHES = 1e-5, 6
# The schedule, which rank along the pipeline has each stage, and options.
CASES: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "GPipe": (ScheduleGPipe, (0, 1), {"replicas": 2}),
    "1F1B": (Schedule1F1B, (0, 1), {"replicas": 2, "dense": "shard"}),
    "zero bubble": (ScheduleInterleavedZeroBubble, (0, 1, 0, 1), {"policy": "static"}),
    "zero bubble, V": (ScheduleZBVZeroBubble, (0, 1, 1, 0), {"replicas": 2}),
}


class Stage(nn.Module):
    """A part of a language model, one layer deep."""

    def __init__(self, number: int, stages: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32) if number == 0 else None
        self.norm, self.moe = nn.LayerNorm(32), PlainMoE(32, 16, 8, 2)
        self.head = nn.Linear(32, VOCABULARY, bias=False) if number == stages - 1 else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden = given if self.embedding is None else self.embedding(given)
        hidden = hidden + self.moe(self.norm(hidden))
        return hidden if self.head is None else self.head(hidden)


def _stages(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Stage(number, count) for number in range(count)))


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def trained(name: str) -> dict[str, Any]:
    """Steps of stages on two ranks each against one process: losses, gradients and their norm."""
    schedule_of, owner, options = CASES[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    here = [number for number, rank in enumerate(owner) if rank == mesh["pp"].get_local_rank()]
    reference, models = _stages(len(owner)), [_stages(len(owner))[number] for number in here]
    for model in models:
        compiled_on_free_links(model, mesh=mesh["dp"], **options)
    stages = [
        PipelineStage(model, number, len(owner), torch.device("cpu"), group=mesh["pp"].get_group())
        for number, model in zip(here, models, strict=True)
    ]
    schedule = schedule_of(stages if len(stages) > 1 else stages[0], MICRO_BATCHES, loss_fn=_loss)
    parameters = [*chain(*(model.parameters() for model in models))]
    theirs = [*chain(*(reference[number].parameters() for number in here))]
    optimizers = [torch.optim.AdamW(some, lr=1e-3) for some in (parameters, reference.parameters())]
    worst, norms = 0.0, []
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ids, losses = batch(step, rows=4 * MICRO_BATCHES), list[torch.Tensor]()
        mine = ids.chunk(2)[mesh["dp"].get_local_rank()]
        given = (mine,) if here[0] == 0 else ()
        asked = {"target": mine, "losses": losses} if len(owner) - 1 in here else {}
        schedule.step(*given, **asked)
        expected = _loss(reference(ids), ids)
        expected.backward()
        if losses:
            total = torch.stack(losses).mean()
            dist.all_reduce(total, group=mesh["dp"].get_group())
            worst = max(worst, error_of(total / 2, expected.detach()))
        for parameter, whole in zip(parameters, theirs, strict=True):
            shard = shard_of(parameter)
            wanted = whole.grad if shard is None else shard.slice(whole.grad)
            worst = max(worst, error_of(parameter.grad, wanted, relative=True))
        order = 2.0 if step else float("inf")
        total = hecate.get_total_norm(parameters, order, stages=mesh["pp"])
        norm = hecate.clip_grad_norm_(parameters, 0.1, order, stages=mesh["pp"])
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, order)
        norms += [error_of(norm, wanted, relative=True), float(norm - total)]
        for optimizer in optimizers:
            optimizer.step()
    return {"worst": worst, "norms": norms, "graphs": [len(hecate.explain(model).graphs) for model in models]}


def owed() -> float:
    """The worst gradient of what was left local, where a backward for inputs alone runs before the one for all."""
    mesh = init_device_mesh("cpu", (4,))
    reference, model = _stages(2)[1], _stages(2)[1]
    compiled_on_free_links(model, mesh=mesh, policy="static")
    whole = torch.randn(2, 8, 16, 32, generator=torch.Generator().manual_seed(0))
    for step, synchronized in enumerate((False, True)):
        hecate.set_requires_gradient_sync(model, synchronized)
        mine = whole[step].chunk(4)[dist.get_rank()].clone().requires_grad_()
        loss = model(mine).square().mean()
        if synchronized:
            torch.autograd.grad(loss, mine, retain_graph=True)
        loss.backward()
        reference(whole[step]).square().mean().backward()
    errors = []
    for parameter, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        shard = shard_of(parameter)
        wanted = theirs.grad if shard is None else shard.slice(theirs.grad)
        errors.append(error_of(parameter.grad, wanted, relative=True))
    return max(errors)


def everything() -> dict[str, Any]:
    return {name: trained(name) for name in CASES} | {"owed": owed()}


@cache
def _everything() -> list[dict[str, Any]]:
    return run_ranks(f"{_HERE}:everything", 4, timeout=300)


def test_what_is_owed_waits_for_a_gradient_that_arrives() -> None:
    assert max(found["owed"] for found in _everything()) < EXACT


def test_norms_are_of_parameters() -> None:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 2.0)
    assert float(hecate.get_total_norm([parameter])) == 4.0
    with pytest.raises(TypeError, match="get_total_norm: expected the model or its parameters"):
        hecate.get_total_norm([parameter.grad])


@pytest.mark.parametrize("name", CASES)
def test_stages_train_as_one_process_does(name: str) -> None:
    for found in _everything():
        assert found[name]["worst"] < EXACT and max(map(abs, found[name]["norms"])) < EXACT, found[name]
        assert {*found[name]["graphs"]} == {1}
