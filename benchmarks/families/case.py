"""One family on this rank: compile it, take two steps, compare with what data parallelism computes."""

from __future__ import annotations

import importlib
import math
import os
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hecate

_STEPS = 2
# A gradient that is zero but for rounding has no relative error; neither has one far below all others.
_SMALLEST = 1e-4


def run(
    name: str,
    backend: str = "aot_eager",
    policy: str = "hecate",
    dtype: str | None = None,
    models: str = "benchmarks.families.models",
    evaluates: bool = False,
) -> dict[str, Any]:
    """What was found and rewritten, the worst error of the loss and of any gradient, graphs, seconds.

    ``models`` is a module with functions ``build`` and ``batch``. If it ``evaluates``, there is the worst error of a
    logit in evaluation, too. All of a model is cast to ``dtype``, if there is one.

    The reference computes every rank's batch in one process and averages, as DistributedDataParallel does: a
    load-balancing loss of the global batch would be another function. Errors are relative, of a gradient to its
    largest element.
    """
    warnings.simplefilter("ignore")
    module = importlib.import_module(models)
    build, batch = module.build, module.batch
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    made = [build(name) for _ in range(2)]
    reference, model = made if dtype is None else (model.to(getattr(torch, dtype)) for model in made)
    for part in reference.modules() if dtype == "float64" else ():
        if hasattr(part, "set_experts_implementation"):
            # The only one of transformers' that knows float64.
            part.set_experts_implementation("eager")
    expected = [
        mean_of([step_of(reference, batch(name, step * world + rank)) for rank in range(world)])
        for step in range(_STEPS)
    ]
    hecate.compile(model, hecate.Config(backend=backend, policy=policy))
    loss_error, gradient_error, worst, seconds = 0.0, 0.0, "", 0.0
    for step, (loss, gradients) in enumerate(expected):
        start = time.perf_counter()
        own_loss, got = step_of(model, batch(name, step * world + rank))
        seconds = seconds or time.perf_counter() - start
        mean = torch.tensor(own_loss, dtype=torch.float64)
        dist.all_reduce(mean)
        loss_error = max(loss_error, _or_infinite(abs(float(mean) / world - loss) / abs(loss)))
        error, key = worst_error(got, gradients)
        if error > gradient_error:
            gradient_error, worst = error, key
    explanation = hecate.explain(model)
    gathered = {skip.where: skip.reason for skip in explanation.skipped if skip.fallback}
    for one in explanation.in_python:
        gathered |= dict.fromkeys(one.experts, f"runs as Python: {one.reason.splitlines()[0]}")
    # In training: what evaluates alone may be another graph.
    exchanged = len(hecate.stats(model).layers)
    logits_error = 0.0
    if evaluates:
        given = batch(name, rank)
        ours, theirs = (_logits(m.eval(), given) for m in (model, reference))
        logits_error = _or_infinite(float((ours - theirs).abs().max() / theirs.abs().max()))
    return dict(
        layers=exchanged + len(gathered),
        found=len(explanation.experts),
        experts=max((one.num_experts for one in explanation.experts), default=0),
        rewritten=exchanged,
        reasons=sorted(set(gathered.values())),
        loss=expected[0][0],
        loss_error=loss_error,
        gradient_error=gradient_error,
        worst=worst,
        logits_error=logits_error,
        graphs=len(explanation.graphs),
        seconds=seconds,
    )


def worst_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the worst error of any gradient, relative to its largest element, and whose it is."""
    largest, worst = max(float(g.abs().max()) for g in expected.values()), (0.0, "")
    for key, gradient in expected.items():
        scale = max(float(gradient.abs().max()), _SMALLEST * largest)
        worst = max(worst, (_or_infinite(float((got[key] - gradient).abs().max()) / scale), key))
    return worst


def _or_infinite(error: float) -> float:
    """NaN is smaller than everything, so it must not get into a maximum."""
    return error if math.isfinite(error) else math.inf


def step_of(model: nn.Module, given: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step, and every gradient, whole, by the names of the state dict; weights stay as they were."""
    # A router may draw noise.
    torch.manual_seed(0)
    loss = model(**given)["loss"]
    loss.backward()
    buffers = {name for name, _ in model.named_buffers()}
    kept = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, _ in kept:
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        # A state dict shows what is sharded or stacked whole and by its old names.
        state = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        gradients = {key: value.clone() for key, value in state.items() if key not in buffers}
        for parameter, value in kept:
            parameter.copy_(value)
    return float(loss.detach()), gradients


@torch.no_grad()
def _logits(model: nn.Module, given: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    logits: torch.Tensor = model(**given)["logits"]
    return logits


def mean_of(parts: list[tuple[float, dict[str, torch.Tensor]]]) -> tuple[float, dict[str, torch.Tensor]]:
    losses = [loss for loss, _ in parts]
    gradients = {k: sum(g[k] for _, g in parts) / len(parts) for k in parts[0][1]}
    return sum(losses) / len(losses), gradients
