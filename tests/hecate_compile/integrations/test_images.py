"""Models that see images, on all ranks, on one alone, or on none: each step is that of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import hecate
from benchmarks.families.images import ON_ONE_RANK, SMALL, TALL, image_batch, measure
from benchmarks.families.models import build
from hecate.wrap.find_experts import find_experts
from hecate.wrap.shard import shard_of
from hecate.wrap.text_model import find_text_model
from tests.support.extent import ALL
from tests.support.models import VOCABULARY, PlainMoE, batch
from tests.support.parity import clear_gradients, compare, error_of, rank_and_size
from tests.support.ranks import run_ranks

FAMILIES = ["qwen3_vl_moe", "glm4v_moe", "qwen3_5_moe_vl", "aria", "step3p7"]
_LONG = pytest.mark.skipif(not ALL, reason="twenty seconds each: with HECATE_TESTS=all")
EAGER = hecate.Config(backend="aot_eager")


class Tower(nn.Module):
    """Makes one token of each image, whose lengths it reads from data."""

    input_modalities = "image"

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second, self.checkpointed = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden), False

    def forward(self, patches: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(self._run, patches, use_reentrant=False) if self.checkpointed else self._run(patches)
        return torch.stack([part.mean(0) for part in inner.split(lengths.tolist())])

    def _run(self, patches: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(patches.to(self.first.weight.dtype)).relu())


class Experts(PlainMoE):
    """All experts of all tokens, which is quick to compile."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(self.choices, dim=-1)
        scores = tokens.new_zeros(len(tokens), len(self.w_in)).scatter(1, chosen, weights)
        inner = torch.bmm(tokens.expand(len(self.w_in), -1, -1), self.w_in).relu()
        y = torch.bmm(inner, self.w_out) + self.b_out[:, None]
        return (y * scores.t().unsqueeze(-1)).sum(0).view_as(hidden)


class Text(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, hidden), nn.LayerNorm(hidden)
        self.block = Experts(hidden, 16, 4, 2)

    def forward(self, hidden: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        hidden = hidden + self.block(self.norm(hidden))
        return hidden if seen is None else hidden + seen.mean(0)


class SeesImages(nn.Module):
    """Its head is tied to the embedding, which the text model has; both are used around it."""

    input_modalities = ("image", "text")

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.tower, self.text, self.norm = Tower(hidden), Text(hidden), nn.LayerNorm(hidden)

    def forward(self, ids: torch.Tensor, images: torch.Tensor | None = None, given: Any = None) -> Any:
        hidden, seen = self.text.embedding(ids), None
        if given is not None:
            hidden = hidden + given
        if images is not None:
            seen = self.tower(images, torch.tensor([len(images) - 1, 1]))
            hidden = torch.cat([hidden[:, :2], hidden[:, 2:] + seen[0]], 1)
        logits = self.norm(self.text(hidden, seen)) @ self.text.embedding.weight.T
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _given(step: int, images: tuple[int, ...], rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids of a rank, and its patches, if it has any."""
    count = images[rank]
    generator = torch.Generator().manual_seed(7 * step + rank)
    patches = torch.randn(count, 8, generator=generator) if count else None
    return batch(2 * step + rank, rows=2, length=6 + rank), patches


def _pair(config: hecate.Config = EAGER) -> tuple[SeesImages, SeesImages]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(SeesImages())
    return hecate.compile(made[0], config), made[1]


def _steps(model: nn.Module, reference: nn.Module, *steps: tuple[int, ...]) -> float:
    """The worst error of micro-batches, of which only the last is synchronized."""
    rank, size = rank_and_size()
    clear_gradients(model, reference)
    for step, images in enumerate(steps):
        hecate.set_requires_gradient_sync(model, step == len(steps) - 1)
        loss = model(*_given(step, images, rank))
        loss.backward()
        expected = sum(reference(*_given(step, images, other)) for other in range(size)) / size
        expected.backward()
    difference = compare(model, loss.detach(), reference, expected.detach())
    return max(difference.loss, difference.gradient)


def evaluated(model: nn.Module, reference: nn.Module) -> float:
    rank, _ = rank_and_size()
    worst = 0.0
    with torch.no_grad():
        for step, images in enumerate([(0, 3), (4, 0), (3, 3)]):
            given = _given(step, images, rank)
            worst = max(worst, error_of(model(*given), reference(*given)))
    return worst


def tower_alone() -> float:
    """All is frozen but the tower, and gradients flow through the text model of both ranks."""
    model, reference = _pair()
    rank, size = rank_and_size()
    for one in (model, reference):
        one.text.requires_grad_(False)
        one.norm.requires_grad_(False)
    worst = 0.0
    for step, images in enumerate([(3, 0), (0, 4), (0, 0), (0, 3)]):
        clear_gradients(model, reference)
        zeros = torch.zeros((), requires_grad=True)
        loss = model(*_given(step, images, rank), zeros)
        loss.backward()
        expected = sum(reference(*_given(step, images, other), torch.zeros(())) for other in range(size)) / size
        if expected.requires_grad:
            expected.backward()
        worst = max(worst, compare(model, loss.detach(), reference, expected.detach()).gradient)
    return worst


def generated() -> bool:
    """With images on the first rank alone: the texts of one process."""
    name = "qwen3_vl_moe"
    model, reference = build(name).eval(), build(name).eval()
    hecate.compile(model, EAGER)
    rank, _ = rank_and_size()
    given = image_batch(name, reference, 0, [SMALL, TALL] if rank == 0 else [])
    del given["labels"]
    texts = [one.generate(**given, max_new_tokens=4, do_sample=False) for one in (model, reference)]
    return torch.equal(*texts)


def sharded() -> dict[str, Any]:
    """All is sharded by rows but what stands beside the text model."""
    model, reference = _pair(hecate.Config(backend="aot_eager", dense="shard"))
    parts = {name for name, p in model.named_parameters() if shard_of(p) is not None}
    whole = {name for name, _ in model.named_parameters()} - parts
    return {
        "error": max(_steps(model, reference, images) for images in [(3, 0), (0, 4), (5, 3)]),
        "whole": sorted({name.partition(".")[0] for name in whole}),
    }


def of_families() -> dict[str, Any]:
    found: dict[str, Any] = {
        name: measure(name, ON_ONE_RANK, layers=1) for name in (FAMILIES if ALL else FAMILIES[:1])
    }
    return found | {"generated": generated() if ALL else None}


def of_ones_own() -> dict[str, Any]:
    model, reference = _pair()
    alone = [(3, 0), (0, 4), (0, 0), (5, 3)]
    return {
        "alone": max(_steps(model, reference, images) for images in alone),
        "evaluated": evaluated(model, reference),
        "micro-batches": max(_steps(model, reference, *images) for images in (alone, alone[::-1], alone[:2])),
        "tower alone": tower_alone(),
        "sharded": sharded(),
    }


def everything() -> dict[str, Any]:
    """On one rank, in one launch."""
    return of_families() | of_ones_own()


@cache
def results() -> list[dict[str, Any]]:
    return run_ranks(everything, 2, timeout=600)


@pytest.mark.distributed
@pytest.mark.parametrize("name", [*FAMILIES[:1], *(pytest.param(one, marks=_LONG) for one in FAMILIES[1:])])
def test_images_on_any_ranks_are_those_of_one_process(name: str) -> None:
    """On one rank alone in the first step, on the other, on both, on none."""
    for rank in results():
        found = rank[name]
        assert max(found["loss"], found["gradient"]) < 1e-5, found


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["alone", "evaluated", "micro-batches", "tower alone"])
def test_a_model_of_ones_own_says_what_it_takes(what: str) -> None:
    for rank in results():
        assert rank[what] < 1e-5


@_LONG
@pytest.mark.distributed
def test_images_on_one_rank_are_generated_from() -> None:
    assert all(rank["generated"] for rank in results())


@pytest.mark.distributed
def test_towers_are_whole_where_all_else_is_sharded() -> None:
    for rank in results():
        assert rank["sharded"]["error"] < 1e-5
        assert rank["sharded"]["whole"] == ["norm", "tower"], "what stands beside the text model"


def test_a_tower_that_is_computed_again_reads_as_in_its_forward() -> None:
    """Parameters in two bytes, in a layer in Python."""
    gradients = []
    for checkpointed in (False, True):
        model, _ = _pair(hecate.Config(backend="aot_eager", mixed_precision=MixedPrecisionPolicy(torch.bfloat16)))
        model.tower.checkpointed = checkpointed
        model(*_given(0, (3, 0), 0)).backward()
        gradients.append([p.grad for p in model.tower.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_text_model_stands_beside_a_tower() -> None:
    model = SeesImages()
    experts, _ = find_experts(model)
    assert find_text_model(model, experts) is model.text
    assert find_text_model(nn.ModuleDict({"wrapped": model}), experts) is model.text
    model.input_modalities = "text"
    assert find_text_model(model, experts) is None, "an encoder of text has nothing to say"
    model.input_modalities = ("image", "text")
    del model.tower
    assert find_text_model(model, experts) is None, "no tower"
    model = SeesImages()
    model.tower.more = Experts(8, 16, 4, 2)
    assert find_text_model(model, find_experts(model)[0]) is None, "the tower has experts, too"
    model = SeesImages()
    model.text = nn.ModuleList([model.text])
    assert find_text_model(model, find_experts(model)[0]) is None, "a list of layers is not called"
