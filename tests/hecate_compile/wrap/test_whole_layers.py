"""Layers that no graph can have run as their authors wrote them, with all experts gathered."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hecate
from hecate.wrap import whole_runs
from tests.hecate_compile.wrap.untraced_models import (
    KINDS,
    RARE_TOKEN,
    CheckpointedModel,
    CountedMoE,
    DroppingMoE,
    EndingModel,
    FusedMoE,
    NormedMoE,
    RareMoE,
    RecomputedAsOfOldMoE,
    RecomputedByExpertMoE,
    RecomputedMoE,
    RejectingModel,
    TwiceModel,
    UnevenMoE,
    WatchedMoE,
    WrappingMoE,
    with_rare_token,
)
from tests.support.adversaries import Anything
from tests.support.models import PlainLanguageModel, batch
from tests.support.parity import compare, rank_and_size, state_error, train_both
from tests.support.ranks import message_of, run_ranks


def _seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def small(kind: str) -> PlainLanguageModel:
    torch.manual_seed(0)
    layers = 2 if kind == "counts by numpy" else 1
    return PlainLanguageModel(KINDS[kind], hidden=16, layers=layers, experts=6)


def train(kind: str, folder: str) -> dict[str, Any]:
    """On one rank: steps in which ranks choose other experts; a save and a load; an evaluation before the last."""
    model, reference = small(kind), small(kind)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hecate.compile(model, hecate.Config(backend="aot_eager", policy=Anything(reshard_every=2)))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3) for m in (model, reference)]
        gradients, off, logits, trained, alone = [], [], 0.0, 0, not dist.is_initialized()
        for step in range(5):
            if step == 4:
                trained = len(told)
                model.eval(), reference.eval()
                with torch.no_grad():
                    ours, theirs = (m(input_ids=batch(9, rows=1))["logits"] for m in (model, reference))
                logits = float((ours - theirs).abs().max())
                model.train(), reference.train()
            # Few tokens, so that each rank leaves some experts out.
            ids = batch(step, rows=2)[:, : 4 + step % 2]
            gradients.append(train_both(model, reference, optimizers, ids).gradient)
            if step == 1:
                hecate.save(folder, model, optimizers[0], step=1)
                hecate.load(folder, model, optimizers[0])
            # Ranks count their own calls.
            states = (m.state_dict() for m in (model, reference))
            off.append(state_error(*({n: p for n, p in s.items() if alone or "used" not in n} for s in states)))
    warned = [(number < trained, str(one.message)) for number, one in enumerate(told)]
    said = [(trains, text) for trains, text in warned if "runs as Python, with all experts" in text]
    if not alone:
        (explained,) = hecate.explain(model).in_python
        assert explained.training == (kind != "for evaluation alone") and hecate.explain(model).gathers
    return {"gradients": gradients, "off": off, "logits": logits, "told": said}


VARIANTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "dense shards, as data want": (lambda: small("parameters of all, as data want"), {"dense": "shard"}),
    "dense shards, recomputed": (lambda: CheckpointedModel(NormedMoE, reentrant=False), {"dense": "shard"}),
    "recomputed around a layer": (lambda: CheckpointedModel(FusedMoE, reentrant=False), {}),
    "recomputed as of old": (lambda: CheckpointedModel(FusedMoE, reentrant=True), {}),
    "recomputed as of old, a list": (lambda: CheckpointedModel(CountedMoE, reentrant=True), {}),
    "recomputed inside and around": (lambda: CheckpointedModel(RecomputedMoE, reentrant=False, turns=2), {}),
    "recomputed as of old inside": (lambda: PlainLanguageModel(RecomputedAsOfOldMoE, 16, 2, 6), {}),
    "twice in a checkpoint": (lambda: TwiceModel(NormedMoE, hidden=16, layers=1, experts=6), {"dense": "shard"}),
    "no rows on a rank": (RejectingModel, {}),
    "no rows on a rank, frozen": (lambda: RejectingModel(frozen=True), {}),
    "frozen": (lambda: CheckpointedModel(FusedMoE, reentrant=False, frozen=True, turns=2), {}),
}


def vary(name: str) -> list[float]:
    """On one rank: errors of gradients in three steps in which ranks choose other experts."""
    make, options = VARIANTS[name]
    model, reference = _seeded(make), _seeded(make)
    hecate.compile(model, hecate.Config(backend="aot_eager", policy=Anything(reshard_every=2), **options))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    errors = []
    for step in range(3):
        ids = batch(step, rows=2)[:, : 1 if "no rows" in name else 4]
        errors.append(train_both(model, reference, optimizers, ids).gradient)
    assert not whole_runs._in_backward and not whole_runs._entered
    return errors


def vary_all() -> dict[str, list[float]]:
    return {name: vary(name) for name in VARIANTS}


@pytest.mark.distributed
def test_they_train_in_checkpoints_with_dense_shards_and_frozen() -> None:
    for found in run_ranks(vary_all, 2):
        wrong = {name: errors for name, errors in found.items() if max(errors) > 1e-4}
        assert not wrong, wrong


def watch() -> list[int]:
    """On one rank: how much of what layers were given is there after a forward, and after its backward."""
    model = PlainLanguageModel(WatchedMoE, layers=2)
    blocks = [*model.blocks]
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    found = []
    for _ in range(2):
        loss = model(input_ids=batch(0), labels=batch(0))["loss"]
        found.append(sum(not seen.expired() for block in blocks for seen in block.seen))
        loss.backward()
    return found


@pytest.mark.distributed
def test_nothing_gathered_is_kept_for_the_backward() -> None:
    assert run_ranks(watch, 2) == [[0, 0], [0, 0]]


def train_all(folder: str) -> dict[str, dict[str, Any]]:
    return {kind: train(kind, f"{folder}/{number}") for number, kind in enumerate(KINDS)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(train_all, 2, folder=str(tmp_path_factory.mktemp("whole")))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_they_train_as_in_one_process(ranks: list[dict[str, dict[str, Any]]], kind: str) -> None:
    for rank, found in enumerate(every[kind] for every in ranks):
        assert max(found["gradients"]) < 1e-4 and max(found["off"]) < 1e-5 and found["logits"] < 1e-4, found
        assert bool(found["told"]) == (rank == 0), found["told"]
    assert {trains for trains, _ in ranks[0][kind]["told"]} == {kind != "for evaluation alone"}


@pytest.mark.parametrize("kind", ("counts by numpy", "counts by bincount", "chosen by data", "recomputed"))
def test_they_train_on_one_rank(kind: str, tmp_path: Path) -> None:
    """Where nothing is gathered, experts without tokens have no gradient either."""
    found = train(kind, str(tmp_path))
    assert max(found["gradients"]) < 1e-4 and max(found["off"]) < 1e-5 and found["logits"] < 1e-4, found


def test_a_first_forward_that_is_tried_again_draws_the_same_numbers() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(PlainLanguageModel(DroppingMoE, layers=1))
    hecate.compile(models[0], hecate.Config(backend="aot_eager"))
    losses = []
    for model in models:
        torch.manual_seed(1)
        losses.append(float(model(input_ids=batch(0), labels=batch(0))["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


class Cache:
    """What a model is given, and changes."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []


class RememberingModel(PlainLanguageModel):
    """Changes what it is given, and itself, before a layer that cannot be traced."""

    def __init__(self) -> None:
        super().__init__(CountedMoE, layers=1)
        self.calls, self.seen, self.last = 0, list[int](), deque[int](maxlen=1)
        self.register_buffer("count", torch.zeros(()))
        self.usage = torch.zeros(3)

    def forward(self, input_ids: torch.Tensor, cache: Cache, labels: torch.Tensor | None = None) -> Any:
        cache.keys.append(self.embedding(input_ids))
        self.calls += 1
        self.seen.append(self.calls)
        self.last.append(self.calls)
        self.count += 1
        self.usage += 1
        torch._dynamo.graph_break()
        return super().forward(input_ids=input_ids, labels=labels)


def test_a_first_forward_that_is_tried_again_finds_what_it_was_given() -> None:
    model, cache = hecate.compile(RememberingModel(), hecate.Config(backend="aot_eager")), Cache()
    for call in range(1, 3):
        model(input_ids=batch(0), cache=cache, labels=batch(0))
        assert (len(cache.keys), model.calls, int(model.count)) == (call, call, call)
        assert model.seen == list(range(1, call + 1)) and [*model.last] == [call]
        assert model.usage.tolist() == [call] * 3


class ChangingModel(PlainLanguageModel):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        input_ids.clamp_(max=5)
        torch._dynamo.graph_break()
        return super().forward(input_ids=input_ids, labels=labels)


def test_a_first_forward_that_changes_a_tensor_is_not_tried_again() -> None:
    model = hecate.compile(ChangingModel(CountedMoE, layers=1), hecate.Config(backend="aot_eager"))
    with pytest.raises(RuntimeError, match="Call the model once more, with new inputs"):
        model(batch(0), batch(0))
    assert torch.isfinite(model(batch(0), batch(0))["loss"])


class ShrinkingModel(PlainLanguageModel):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        with torch.no_grad():
            self.embedding.weight.mul_(0.5)
        torch._dynamo.graph_break()
        return super().forward(input_ids=input_ids, labels=labels)


def test_a_first_forward_that_changes_a_parameter_is_not_tried_again() -> None:
    model = hecate.compile(ShrinkingModel(CountedMoE, layers=1), hecate.Config(backend="aot_eager"))
    with pytest.raises(RuntimeError, match="the first forward has changed"):
        model(batch(0), batch(0))


def fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("no memory")


def odd() -> dict[str, Any]:
    """On one rank: a backward that fails before a step; what ranks have of other kinds, in other numbers."""
    model, reference = (_seeded(lambda: PlainLanguageModel(FusedMoE, 16, 2, 6)) for _ in range(2))
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    gradients = []
    for step in range(3):
        ids = batch(step, rows=2)[:, :4]
        if step == 1:
            # In the middle of a layer.
            handle = dict(model.named_parameters())["blocks.0.router.weight"].register_hook(fail)
            assert "no memory" in message_of(lambda ids=ids: model(input_ids=ids)["logits"].sum().backward())
            handle.remove()
        gradients.append(train_both(model, reference, optimizers, ids).gradient)
    wrapped = hecate.compile(PlainLanguageModel(WrappingMoE, layers=1), hecate.Config(backend="aot_eager"))
    uneven = with_rare_token(PlainLanguageModel(UnevenMoE, hidden=16, layers=1, experts=6))
    uneven = hecate.compile(uneven, hecate.Config(backend="aot_eager"))
    return {
        "gradients": gradients,
        "recomputed by expert": ends_with(RecomputedByExpertMoE),
        "experts of one rank": ends_with(RareMoE),
        "wrapped": message_of(lambda: wrapped(input_ids=batch(0), labels=batch(0))),
        "uneven": message_of(lambda: uneven(input_ids=own_rows(0))),
    }


def rare_on_rank_0(seed: int) -> torch.Tensor:
    ids = batch(seed, rows=2)[:, :4]
    ids[ids == RARE_TOKEN] = 0
    ids[0, 0] = RARE_TOKEN
    return ids


def own_rows(seed: int) -> torch.Tensor:
    rank, size = rank_and_size()
    return rare_on_rank_0(seed).chunk(size)[rank]


def ends_with(moe: Any) -> list[float]:
    """Errors of gradients where the loss is outside of the model, right behind a layer that runs as Python."""
    models = [_seeded(lambda: with_rare_token(EndingModel(moe, 16, 1, 6))) for _ in range(2)]
    hecate.compile(models[0], hecate.Config(backend="aot_eager"))
    errors = []
    for step in range(3):
        losses = []
        for model, ids in zip(models, (own_rows(step), rare_on_rank_0(step)), strict=True):
            model.zero_grad()
            losses.append(model(input_ids=ids)["logits"].square().mean())
            losses[-1].backward()
        errors.append(compare(models[0], losses[0].detach(), models[1], losses[1].detach()).gradient)
    return errors


@pytest.mark.distributed
def test_a_backward_that_fails_and_what_ranks_have_of_other_kinds_and_numbers() -> None:
    for found in run_ranks(odd, 2):
        for name in ("gradients", "recomputed by expert", "experts of one rank"):
            assert max(found[name]) < 1e-4, (name, found)
        assert "returns Wrapped, in which no tensor is found" in found["wrapped"], found
        assert "floating point on this rank, and from 1 to 2 on all" in found["uneven"], found
