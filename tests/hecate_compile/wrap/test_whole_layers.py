"""Layers that no graph can have run as their authors wrote them, with all experts gathered."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import dropout, silu
from torch.utils.checkpoint import checkpoint

import hecate
from hecate.wrap import whole_runs
from tests.hecate_compile.wrap.test_carry_over import CountingExpert, of
from tests.hecate_compile.wrap.test_stack_experts import Expert, ListMoE
from tests.support.adversaries import Anything
from tests.support.models import PlainLanguageModel, PlainMoE, batch
from tests.support.parity import compare, run_step, state_error
from tests.support.ranks import message_of, run_ranks


class CountedMoE(ListMoE):
    """Tokens are sorted, and numpy says how many each expert has, as in DeepSeek's own code for inference."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.choose(tokens)
        counts = np.bincount(chosen.flatten().numpy(), minlength=len(self.experts))
        order = chosen.flatten().argsort()
        rows, start, outs = tokens[order // self.choices], 0, []
        for expert, count in enumerate(counts.tolist()):
            if count:
                outs.append(self.experts[expert](rows[start : start + count]))
            start += count
        out = torch.empty_like(rows)
        out[order] = torch.cat(outs)
        return (out.view(*chosen.shape, -1) * weights[..., None]).sum(1).view_as(hidden)


class CountingMoE(PlainMoE):
    """Rows are split by counts from bincount, which torch cannot trace."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        chosen = self.router(tokens).argmax(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, None, self.w_in.shape[0])
        parts = tokens[order].split(counts.tolist())
        outs = [p @ self.w_in[e] @ self.w_out[e] + self.b_out[e] for e, p in enumerate(parts)]
        return torch.zeros_like(tokens).index_add(0, order, torch.cat(outs)).view_as(hidden)


class SkippedMoE(PlainMoE):
    """A layer whose own code is kept from the compiler."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.forward = torch.compiler.disable(super().forward)  # type: ignore[method-assign]


class FusedMoE(nn.Module):
    """Parameters for all experts, which are read in a loop over those that tokens have chosen."""

    def __init__(self, hidden: int, intermediate: int, experts: int, choices: int) -> None:
        super().__init__()
        self.num_experts, self.choices = experts, choices
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, intermediate) / 4)
        self.down = nn.Parameter(torch.randn(experts, intermediate, hidden) / 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(self.choices, dim=-1)
        out = torch.zeros_like(tokens)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, choice = torch.where(chosen == expert)
            done = silu(tokens[rows] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, rows, done * weights[rows, choice, None])
        return out.view_as(hidden)


class BoundedExpert(Expert):
    """One that cannot do without rows, and has a parameter that nobody reads."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        bound = float(rows.abs().amax())
        return self.w2(silu(self.w1(rows.clamp(-bound, bound))))


class DroppingMoE(CountedMoE):
    """Draws random numbers before it cannot be traced."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(dropout(hidden, 0.5, self.training))


class ChangedMoE(nn.Module):
    """Changes in place what a layer returns that runs as Python."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.inner = FusedMoE(*sizes)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden).add_(hidden)


class Wrapped:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class WrappingMoE(nn.Module):
    """Has a layer in it that returns an object of the model's own."""

    class Inner(FusedMoE):
        @torch.compiler.disable
        def forward(self, hidden: torch.Tensor) -> Any:
            return Wrapped(super().forward(hidden))

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.inner = self.Inner(*sizes)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden).tensor  # type: ignore[no-any-return]


class RecomputedMoE(FusedMoE):
    """One that runs once more in the backward, up to the last tensor that this needs."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=False)  # type: ignore[no-any-return]


class RecomputedAsOfOldMoE(FusedMoE):
    """The same with a backward of its own in the backward."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=True)  # type: ignore[no-any-return]


class TwiceModel(PlainLanguageModel):
    """A checkpoint has two calls of a layer, whose tokens differ; the loss is of one result of two alone."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        (block,), norm = self.blocks, self.norms[0]

        def both(hidden: torch.Tensor) -> torch.Tensor:
            hidden = hidden + block(norm(hidden))
            return hidden + block(norm(hidden.flip(-1) * 3))  # type: ignore[no-any-return]

        logits = self.head(checkpoint(both, self.embedding(input_ids), use_reentrant=False))
        return {"logits": logits, "loss": logits.logsumexp(-1).mean()}


class RejectingMoE(FusedMoE):
    """Experts take tokens of some kinds; a rank may have none of them. Logits of the router are returned, too."""

    def forward(self, hidden: torch.Tensor) -> Any:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        logits = self.router(tokens)
        out = torch.zeros_like(tokens)
        for expert in sorted(set(logits.argmax(-1).tolist()) - {0, 1, 2}):
            (rows,) = torch.where(logits.argmax(-1) == expert)
            out = out.index_add(0, rows, silu(tokens[rows] @ self.up[expert]) @ self.down[expert])
        return out.view_as(hidden), logits


class RejectingModel(PlainLanguageModel):
    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__(RejectingMoE, hidden=16, layers=2, experts=6)
        for block in self.blocks if frozen else ():
            block.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            hidden = hidden + block(norm(hidden))[0]
        logits = self.head(hidden)
        return {"logits": logits, "loss": logits.logsumexp(-1).mean()}


class NormedMoE(nn.Module):
    """Parameters of all, a norm and a shared projection, are read as often as this rank's tokens want it."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.inner, self.norm = FusedMoE(*sizes), nn.LayerNorm(sizes[0])
        self.shared = nn.Linear(sizes[0], sizes[0])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.inner.router(tokens).softmax(-1).topk(self.inner.choices, dim=-1)
        out = torch.zeros_like(tokens)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, choice = torch.where(chosen == expert)
            done = self.norm(silu(tokens[rows] @ self.inner.up[expert]) @ self.inner.down[expert])
            out = out.index_add(0, rows, done * weights[rows, choice, None])
        first = chosen[:, 0] == 0
        if first.any():
            out = out + self.shared(tokens) * first[:, None]
        return out.view_as(hidden)


class CheckpointedModel(PlainLanguageModel):
    """Blocks run once more in the backward, with a norm before them and a product behind."""

    def __init__(self, moe: Any, *, reentrant: bool, frozen: bool = False, turns: int = 1) -> None:
        super().__init__(moe, hidden=16, layers=2, experts=6, turns=turns)
        self.reentrant = reentrant
        if frozen:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("embedding" in name or "router" in name)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embedding(input_ids)
        for _ in range(self.turns):
            for norm, block in zip(self.norms, self.blocks, strict=True):

                def both(hidden: torch.Tensor, norm: Any = norm, block: Any = block) -> torch.Tensor:
                    return hidden + silu(block(norm(hidden)))  # type: ignore[no-any-return]

                hidden = checkpoint(both, hidden, use_reentrant=self.reentrant)
        logits = self.head(hidden)
        loss = logits.logsumexp(-1).mean() if labels is None else silu(logits).square().mean()
        return {"logits": logits, "loss": loss}


class WatchedMoE(FusedMoE):
    """Notes what it was given to read."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen: list[Any] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.append(StorageWeakRef(self.up.untyped_storage()))
        return super().forward(hidden)


class SwitchingMoE(ListMoE):
    """Other code where nothing is trained, as DeepSeek's."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) if self.training else self.infer(hidden)

    @torch.no_grad()
    def infer(self, hidden: torch.Tensor) -> torch.Tensor:
        return CountedMoE.forward(self, hidden)  # type: ignore[arg-type]


KINDS: dict[str, Any] = {
    "counts by numpy": CountedMoE,
    "counts by bincount": CountingMoE,
    "chosen by data": FusedMoE,
    "kept from the compiler": SkippedMoE,
    "recomputed": RecomputedMoE,
    "changed in place": ChangedMoE,
    "parameters of all, as data want": NormedMoE,
    "for evaluation alone": SwitchingMoE,
    # Loops that leave out experts without rows, which do something else without any.
    "counts calls": of(CountingExpert),
    "asks for the largest": of(BoundedExpert),
}


def small(kind: str, seed: int = 0) -> PlainLanguageModel:
    torch.manual_seed(seed)
    layers = 2 if kind in ("counts by numpy", "chosen by data") else 1
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
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = run_step(model, ids)
            expected = reference(input_ids=ids, labels=ids)["loss"]
            expected.backward()
            gradients.append(compare(model, loss, reference, expected.detach()).gradient)
            for optimizer in optimizers:
                optimizer.step()
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
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    reference = make()
    hecate.compile(model, hecate.Config(backend="aot_eager", policy=Anything(reshard_every=2), **options))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    errors = []
    for step in range(3):
        ids = batch(step, rows=2)[:, : 1 if "no rows" in name else 4]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = run_step(model, ids)
        expected = reference(input_ids=ids, labels=ids)["loss"]
        expected.backward()
        errors.append(compare(model, loss, reference, expected.detach()).gradient)
        for optimizer in optimizers:
            optimizer.step()
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


@pytest.mark.parametrize("kind", KINDS)
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
    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []


class RememberingModel(PlainLanguageModel):
    """Changes what it is given, and itself, before a layer that cannot be traced."""

    def __init__(self) -> None:
        super().__init__(CountedMoE, layers=1)
        self.calls, self.seen = 0, list[int]()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, cache: Cache, labels: torch.Tensor | None = None) -> Any:
        cache.keys.append(self.embedding(input_ids))
        self.calls += 1
        self.seen.append(self.calls)
        self.count += 1
        torch._dynamo.graph_break()
        return super().forward(input_ids=input_ids, labels=labels)


def test_a_first_forward_that_is_tried_again_finds_what_it_was_given() -> None:
    model, cache = hecate.compile(RememberingModel(), hecate.Config(backend="aot_eager")), Cache()
    for call in range(1, 3):
        model(input_ids=batch(0), cache=cache, labels=batch(0))
        assert (len(cache.keys), model.calls, int(model.count)) == (call, call, call)
        assert model.seen == list(range(1, call + 1))


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


def fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("no memory")


def odd() -> dict[str, Any]:
    """On one rank: a backward that fails before a step; and results that autograd cannot be told of."""
    model, reference = small("chosen by data"), small("chosen by data")
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
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = run_step(model, ids)
        expected = reference(input_ids=ids, labels=ids)["loss"]
        expected.backward()
        gradients.append(compare(model, loss, reference, expected.detach()).gradient)
        for optimizer in optimizers:
            optimizer.step()
    wrapped = hecate.compile(PlainLanguageModel(WrappingMoE, layers=1), hecate.Config(backend="aot_eager"))
    return {"gradients": gradients, "wrapped": message_of(lambda: wrapped(input_ids=batch(0), labels=batch(0)))}


@pytest.mark.distributed
def test_a_backward_that_fails_and_results_in_a_class_of_their_own() -> None:
    for found in run_ranks(odd, 2):
        assert max(found["gradients"]) < 1e-4, found
        assert "returns Wrapped, in which no tensor is found" in found["wrapped"], found
