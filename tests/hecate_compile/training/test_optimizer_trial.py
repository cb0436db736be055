"""Optimizers that nobody has heard of are tried on small parameters before their first step on shards."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.optim import Optimizer

import hecate
from tests.support.models import PlainLanguageModel, batch
from tests.support.parity import state_error, step_and_compare
from tests.support.ranks import message_of, run_ranks

pytestmark = pytest.mark.distributed
Closure = Callable[[], Any] | None


class Own(Optimizer):
    """What users write."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @property
    def all(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def step(self, closure: Closure = None) -> None:
        with torch.no_grad():
            for p in self.all:
                p -= self.param_groups[0]["lr"] * self.update(p)

    def update(self, p: Any) -> torch.Tensor:
        return p.grad.sign()


class TrustRatio(Own):
    def update(self, p: Any) -> torch.Tensor:
        return p.grad * p.norm() / p.grad.norm()


class OneScale(Own):
    """The norm of all gradients."""

    def update(self, p: Any) -> torch.Tensor:
        return p.grad / (1 + sum(q.grad.square().sum() for q in self.all).sqrt())


class Estimating(Own):
    """Nothing shows but in a number that it keeps, until much later."""

    def update(self, p: Any) -> torch.Tensor:
        group = self.param_groups[0]
        group["estimate"] = group.get("estimate", 0.0) + float(p.grad.sum())
        return p.grad.sign()


class InBlocks(Own):
    """State in eight bits, with a scale for every 256 numbers, which do not end with a row: as torchao's AdamW."""

    def update(self, p: Any) -> torch.Tensor:
        average = self.state[p].get("average", torch.zeros_like(p)).lerp(p.grad, 0.1).flatten()
        blocks = torch.nn.functional.pad(average, (0, -len(average) % 256)).view(-1, 256)
        scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        average = ((blocks / scales).round() * scales).flatten()[: p.numel()].view_as(p)
        self.state[p]["average"] = average
        return average


class OfTheRoot(Own):
    """Elements for themselves, and the mean of all ranks."""

    def step(self, closure: Closure = None) -> None:
        super().step()
        for p in self.all:
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()


class Sharp(Own):
    """Two gradients a step, the second from where the norm of the first leads."""

    def step(self, closure: Closure = None) -> None:
        assert closure is not None
        with torch.no_grad():
            norm = sum(p.grad.square().sum() for p in self.all).sqrt()
            moved = [(p, 0.05 * p.grad / norm) for p in self.all]
            for p, change in moved:
                p += change
        closure()
        with torch.no_grad():
            for p, change in moved:
                p -= change + 0.1 * p.grad


class Lion(Own):
    def update(self, p: Any) -> torch.Tensor:
        average = self.state[p].setdefault("average", torch.zeros_like(p))
        update = average.lerp(p.grad, 0.1).sign()
        average.lerp_(p.grad, 0.01)
        return update


class Early(Own):
    """State from the beginning."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, 0.5)

    def update(self, p: Any) -> torch.Tensor:
        return p.grad / self.state[p]["sum"].add_(p.grad.square()).sqrt()


class Compiled(Own):
    """Its arithmetic goes through torch.compile."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.shapes: list[Any] = []
        self.compiled = torch.compile(lambda g: g.sign() * 0.5, backend=self._seen, dynamic=False)

    def _seen(self, graph: Any, inputs: Any) -> Any:
        self.shapes.append(inputs[0].shape)
        return graph

    def update(self, p: Any) -> torch.Tensor:
        return self.compiled(p.grad)


class Around(Optimizer):
    """Not much of an optimizer itself, with what it needs not among its defaults."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.param_groups, self.inner, self.slow = inner.param_groups, inner, {}

    def step(self, closure: Closure = None) -> None:
        self.inner.step()
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"]):
                slow = self.slow.setdefault(p, torch.zeros_like(p))
                p.copy_(slow.lerp_(p, 0.5))


class Noisy(Own):
    def update(self, p: Any) -> torch.Tensor:
        return p.grad + torch.randn_like(p)


class Locked(Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.lock = threading.Lock()


class Holding(Lion):
    """Keeps what it is about, and asks it nothing."""

    model: Any = None


class Asking(Lion):
    """Its rate follows from its model."""

    model: Any = None

    def update(self, p: Any) -> torch.Tensor:
        return super().update(p) * len(list(self.model.children()))


class Notes:
    """What an optimizer may hold that is no container of torch's: here more numbers than are copied."""

    def __init__(self) -> None:
        self.past = [torch.zeros(2**21) for _ in range(3)]


def _scheduled(params: Any) -> Optimizer:
    """Its rate begins at zero, and its step is wrapped."""
    optimizer = TrustRatio(params)
    optimizer.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # type: ignore[attr-defined]
    return optimizer


REFUSED: dict[str, Callable[[Any], Optimizer]] = {
    "trust ratio": TrustRatio,
    "one scale": OneScale,
    "estimating": Estimating,
    "average": OfTheRoot,
    "in blocks": InBlocks,
    "sharp": Sharp,
    "scheduled": _scheduled,
    "around": lambda p: Around(OneScale(p)),
    "adafactor": torch.optim.Adafactor,
    "a derived": type("Mine", (torch.optim.Adafactor,), {}),
}
RIGHT: dict[str, Callable[[Any], Optimizer]] = {
    "lion": Lion,
    "early": Early,
    "compiled": Compiled,
    "around": lambda p: Around(Lion(p)),
    "derived": type("Mine", (torch.optim.AdamW,), {}),
    "groups": lambda p: Lion([{"params": [q], "name": str(n), "lr": 0.1 + n / 100} for n, q in enumerate(p)]),
}


def try_all() -> dict[str, Any]:
    """On one rank."""
    torch.manual_seed(0)
    model, reference = (PlainLanguageModel(hidden=8, layers=1, experts=4) for _ in range(2))
    model.load_state_dict(reference.state_dict())
    hecate.compile(model, hecate.Config(backend="aot_eager", policy="static"))
    found: dict[str, Any] = {"refused": {}, "kept": {}, "right": {}, "warned": {}}
    step_and_compare(model, reference, batch(0))
    before = [p.detach().clone() for p in model.parameters()]

    def unchanged() -> bool:
        return all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    for name, make in REFUSED.items():
        optimizer, random = make(list(model.parameters())), torch.get_rng_state()
        closure = (lambda: None) if name == "sharp" else None
        found["refused"][name] = message_of(lambda step=optimizer.step, given=closure: step(given))
        found["kept"][name] = unchanged() and torch.equal(random, torch.get_rng_state()) and not optimizer.state
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW)
    found["zero"], found["kept"]["zero"] = message_of(zero.step), unchanged()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    local = PostLocalSGDOptimizer(sgd, PeriodicModelAverager(period=1, warmup_steps=0))
    found["local"], found["kept"]["local"] = message_of(local.step), unchanged()

    head, copied = torch.nn.Linear(1, 1), []
    torch.nn.Linear.__deepcopy__ = lambda module, memo: copied.append(module)  # type: ignore[attr-defined]
    for name, kind in {"noisy": Noisy, "locked": Locked, "holding": Holding, "asking": Asking, "large": Lion}.items():
        optimizer = kind(model.parameters())
        vars(optimizer).update(model=model, kept={"heads": [head], "call": model.forward})
        if name == "large":
            vars(optimizer).update(notes=Notes())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            message = message_of(optimizer.step)
            optimizer.step()
        found["warned"][name] = [message, *(str(w.message) for w in caught if "hecate" in str(w.message))]

    del torch.nn.Linear.__deepcopy__
    found["copied"] = len(copied)
    start = {key: value.clone() for key, value in reference.state_dict().items()}
    for name, make in RIGHT.items():
        model.load_state_dict(start)
        reference.load_state_dict(start)
        ours, theirs = (make(list(one.parameters())) for one in (model, reference))
        for step in range(2):
            step_and_compare(model, reference, batch(step))
            ours.step()
            theirs.step()
        found["right"][name] = state_error(model.state_dict(), reference.state_dict())
        if isinstance(ours, Compiled):
            found["shapes"] = {*ours.shapes} <= {p.shape for p in model.parameters()}
    began = time.perf_counter()
    Lion(model.parameters()).step()
    found["seconds"] = time.perf_counter() - began
    return found


@cache
def results() -> list[dict[str, Any]]:
    return run_ranks(try_all, 2)


def test_what_needs_whole_parameters_is_refused_on_all_ranks_before_it_changes_anything() -> None:
    for result in results():
        assert set(result["refused"]) == set(REFUSED)
        for name, message in result["refused"].items():
            assert "needs whole parameters" in message, f"{name}: {message}"
        assert all(result["kept"].values()), result["kept"]

        # So is what copies or averages parameters over ranks.
        assert "ZeroRedundancyOptimizer copies each parameter" in result["zero"]
        assert "w_in would be averaged over ranks" in result["local"]
        assert "PostLocalSGDOptimizer" in result["local"]


def test_what_treats_elements_alone_trains_as_in_one_process() -> None:
    for result in results():
        assert set(result["right"]) == set(RIGHT)
        assert all(worst < 1e-5 for worst in result["right"].values()), result["right"]
        assert result["shapes"], "a trial compiles nothing"
        assert result["seconds"] < 1


def test_what_cannot_be_tried_is_named_once() -> None:
    first, second = results()
    reasons = {
        "noisy": "draws random numbers",
        "locked": "cannot pickle",
        "large": "large tensors",
        "asking": "its step uses a PlainLanguageModel that it holds",
    }
    for name, reason in reasons.items():
        message, *warned = first["warned"][name]
        assert message == "no error" and len(warned) == 1, warned
        assert reason in warned[0] and "a norm, a mean or a product" in warned[0]
        assert second["warned"][name] == ["no error"]
    assert first["warned"]["holding"] == second["warned"]["holding"] == ["no error"]
    assert first["copied"] == second["copied"] == 0, "modules are neither copied nor shared"
