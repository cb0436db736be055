"""Where Dynamo would keep its graphs: of a model with other hooks, or of a first forward that broke for once."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import hecate
from hecate.compiled_model import compiled_model_of
from tests.support.models import PlainLanguageModel, batch, build
from tests.support.parity import clear_gradients, compare, error_of, rank_and_size, step_and_compare
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.test_traced_anew"
EAGER = hecate.Config(backend="aot_eager")


def _small() -> PlainLanguageModel:
    torch.manual_seed(0)
    return PlainLanguageModel(hidden=16, layers=1, experts=2)


def _graphs(model: nn.Module) -> int:
    return len(compiled_model_of(model, "explain").backend.graphs)


class Seen:
    """What hooks leave on one model: how often they were called, and the last result."""

    def __init__(self) -> None:
        self.calls, self.last = torch.zeros(()), {"out": torch.zeros(())}

    def record(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        with torch.no_grad():
            self.calls.add_(1)
        self.last["out"] = out.detach()


def _double(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 2


def _hang(model: PlainLanguageModel, seen: Seen, kind: str) -> list[Any]:
    if kind == "backward":
        return [model.norms[0].register_full_backward_hook(lambda module, into, out: (into[0] * 2,))]
    return [
        model.blocks[0].router.register_forward_hook(seen.record),
        model.norms[0].register_forward_hook(_double),
        model.blocks[0].router.register_forward_pre_hook(lambda module, args: args[0] * 2),
        model.register_forward_pre_hook(lambda module, args: args),
    ]


def hooks() -> dict[str, Any]:
    """Put on after two steps, taken off again after some more; training steps, and one without gradients."""
    found: dict[str, Any] = {}
    # A backward hook breaks the graph, so there are more of each length.
    for name, lengths in (("forward", (16, 17, 18, 16)), ("backward", (16,))):
        model, reference = hecate.compile(_small(), EAGER), _small()
        errors = [step_and_compare(model, reference, batch(step)) for step in range(2)]
        seen, expected = Seen(), Seen()
        handles = _hang(model, seen, name) + _hang(reference, expected, name)
        graphs = [_graphs(model)]
        for length in lengths:
            errors.append(step_and_compare(model, reference, batch(3, length=length)))
            graphs.append(_graphs(model))
        if name == "forward":
            with torch.no_grad():
                model(batch(0)), reference(batch(0))
        called = int(seen.calls), int(expected.calls)
        for handle in handles:
            handle.remove()
        before = _graphs(model)
        errors.append(step_and_compare(model, reference, batch(7)))
        found[name] = {
            "error": max(max(one.loss, one.gradient) for one in errors),
            "graphs": graphs,
            "called": called,
            "back": _graphs(model) - before,
        }
    return found


def hook_on_one_rank() -> str:
    """As programs have it that watch on rank 0 alone."""
    model = hecate.compile(_small(), EAGER)
    ids = batch(0)
    model(ids)
    if rank_and_size()[0] == 0:
        model.blocks[0].router.register_forward_hook(_double)
    return message_of(lambda: model(ids))


class Scale:
    """A hook with a state: what it multiplies by, and what it saw."""

    def __init__(self) -> None:
        self.by, self.seen = torch.tensor(2.0), torch.zeros(())

    def hook(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.add_(1)
        return out * self.by


def _add(module: nn.Module, args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor:
    return out + 1


def on_and_off() -> dict[str, Any]:
    """The same hooks again and again, as around evaluations; and functions that are made anew each time."""
    model, reference = hecate.compile(_small(), EAGER), _small()
    errors, graphs = [], []
    scales = Scale(), Scale()

    @torch.no_grad()
    def step(number: int) -> None:
        errors.append(error_of(model(batch(number))["logits"], reference(batch(number))["logits"]))
        graphs.append(_graphs(model))

    for turn in range(4):
        step(3 * turn)
        handles = []
        for one, scale in zip((model, reference), scales, strict=True):
            scale.by = torch.tensor(2.0 + turn)
            # Their order is another one in each second turn.
            puts = [
                lambda module=one.norms[0], scale=scale: module.register_forward_hook(scale.hook),
                lambda module=one.norms[0]: module.register_forward_hook(_add, with_kwargs=True),
            ]
            handles += [put() for put in (puts if turn % 2 else reversed(puts))]
        step(3 * turn + 1)
        for handle in handles:
            handle.remove()
    for turn in range(2):
        handles = [
            one.norms[0].register_forward_hook(lambda module, args, out, turn=turn: out * turn)
            for one in (model, reference)
        ]
        step(20 + turn)
        for handle in handles:
            handle.remove()
    step(30)
    seen = [float(scale.seen) for scale in scales]
    return {"error": max(errors), "graphs": graphs, "seen": seen}


_lock = threading.Lock()


class Backbone(nn.Module):
    """Sets something up in its first forward, under a lock, which torch does not trace."""

    def __init__(self, model: PlainLanguageModel) -> None:
        super().__init__()
        self.norms, self.blocks, self.ready = model.norms, model.blocks, False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            with _lock:
                self.ready = True
        for norm, block in zip(self.norms, self.blocks, strict=True):
            hidden = hidden + block(norm(hidden))
        return hidden


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        model = _small()
        self.embedding, self.backbone, self.head = model.embedding, Backbone(model), nn.Linear(16, 96)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.backbone(self.embedding(input_ids)))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def first_forwards_that_break() -> dict[str, Any]:
    """In the second step one rank has a batch of another length, the other one that it had before."""
    found = {}
    for name in ("lazy", "recorders"):
        models: list[Any] = [Lazy() if name == "lazy" else build("qwen3_moe", layers=1) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        model, reference = hecate.compile(models[0], EAGER), models[1]
        if name == "recorders":
            # As trainers do with a model that they are given.
            for one in models:
                one.config.output_router_logits = True
        rank, size = rank_and_size()
        errors, graphs = [], []
        for step, longer in enumerate((0, 8, 0, 8)):
            clear_gradients(model, reference)
            batches = [batch(size * step + number, rows=4, length=16 + longer * number) for number in range(size)]
            loss = model(input_ids=batches[rank], labels=batches[rank])["loss"]
            loss.backward()
            theirs = torch.stack([reference(input_ids=ids, labels=ids)["loss"] for ids in batches]).mean()
            theirs.backward()
            difference = compare(model, loss.detach(), reference, theirs.detach())
            errors.append(max(difference.loss, difference.gradient))
            graphs.append(_graphs(model))
        found[name] = {"error": max(errors), "graphs": graphs}
    return found


def everything() -> dict[str, Any]:
    """On one rank, in one launch."""
    return {
        "hooks": hooks(),
        "on and off": on_and_off(),
        "broke": first_forwards_that_break(),
        "one rank": hook_on_one_rank(),
    }


@cache
def results() -> list[dict[str, Any]]:
    return run_ranks(f"{_HERE}:everything", 2)


pytestmark = pytest.mark.distributed


def test_hooks_are_called_from_the_forward_after_which_they_are_put_on() -> None:
    for name, result in (pair for found in results() for pair in found["hooks"].items()):
        assert result["error"] < 1e-5, (name, result)
        assert result["called"] == ([5, 5] if name == "forward" else [0, 0]), (name, result)
        assert name == "backward" or result["graphs"][2:] == [result["graphs"][2]] * 3, (name, result)
        assert result["back"] <= 0, "graphs of before are used again"


def test_hooks_that_come_back_find_their_graphs_and_those_of_hooks_that_are_gone_go() -> None:
    for found in (rank["on and off"] for rank in results()):
        assert found["error"] < 1e-5 and found["seen"] == [4, 4], found
        # Without, with both orders of hooks, and nothing new from then on.
        assert found["graphs"][:8] == [1, 2, 2, 3, 3, 3, 3, 3], found
        # Those of functions that are made anew each time go with them.
        assert found["graphs"][8:] == [4, 4, 3], found


def test_a_hook_on_one_rank_is_refused_on_all() -> None:
    for text in (rank["one rank"] for rank in results()):
        assert "on blocks.0.router: _double) on rank 0" in text, text
        assert "put them on and take them off on all ranks" in text


def test_ranks_do_not_part_after_a_first_forward_that_broke() -> None:
    for found in (rank["broke"] for rank in results()):
        assert found["lazy"]["error"] < 1e-5 and found["lazy"]["graphs"][0] > found["lazy"]["graphs"][1] == 1
        assert found["recorders"]["error"] < 1e-5 and found["recorders"]["graphs"][0] == 1
