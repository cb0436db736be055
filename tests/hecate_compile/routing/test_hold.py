"""Routing that is recorded and replayed, in one process and on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hecate
from benchmarks.families.replayed import OverwrittenRouters
from tests.support.models import PlainLanguageModel, PlainMoE, batch, build
from tests.support.ranks import message_of, run_ranks

EXPERTS, CHOICES = 8, 2
PLAIN = hecate.Config(backend="aot_eager")


def compiled(family: str = "qwen3_moe", **changes: Any) -> nn.Module:
    return hecate.compile(build(family, **changes), PLAIN)


def drawn(seed: int, *, layers: int = 2, like: Tensor | None = None) -> Tensor:
    """Experts ``[batch, sequence, layer, k]`` for the tokens of a batch, all of a token different."""
    sizes = (like if like is not None else batch(0)).shape
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*sizes, layers, EXPERTS, generator=generator).topk(CHOICES).indices


def loss_and_gradients(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids)["loss"]
    loss.backward()
    return loss.detach(), gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def overwritten(family: str, ids: Tensor, routing: Tensor, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A step of a plain model whose routers are overwritten."""
    with OverwrittenRouters([(EXPERTS, routing[:, :, layer]) for layer in range(routing.shape[2])]) as routers:
        step = loss_and_gradients(build(family, **changes), ids)
    assert routers.left == 0
    return step


def assert_equal(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(got[0], expected[0])
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(got[1][name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("family", ["plain", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_drawn_routing_is_that_of_overwritten_routers(family: str) -> None:
    model, ids = compiled(family), batch(0)
    with hecate.replay_routing(model, drawn(1)):
        got = loss_and_gradients(model, ids)
    assert_equal(got, overwritten(family, ids, drawn(1)))


def test_a_recorded_routing_gives_the_same_step_to_the_bit(tmp_path: Path) -> None:
    model, ids = compiled(), batch(0)
    loss, gradients = loss_and_gradients(model, ids)
    with hecate.record_routing(model) as routing:
        loss_and_gradients(model, ids)
    assert [*routing.by_layer] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert routing.ids.shape == (*ids.shape, 2, CHOICES)
    routing.save(tmp_path / "routing.npz")
    kept = hecate.Routing.load(tmp_path / "routing.npz")
    assert kept.by_layer["model.layers.0.mlp.experts"].dtype == torch.int8
    assert repr(kept) == repr(routing)
    # In a file, in a recording, as inference engines have it, and by names.
    for given in (kept, routing, routing.ids.numpy().astype(np.uint8), routing.ids.to(torch.int32), routing.by_layer):
        with hecate.replay_routing(model, given):
            again, others = loss_and_gradients(model, ids)
        assert torch.equal(again, loss)
        assert all(torch.equal(others[name], gradient) for name, gradient in gradients.items())


def test_graphs_without_held_choices_stay(capsys: pytest.CaptureFixture[str]) -> None:
    model, ids = compiled(), batch(0)
    loss, _ = loss_and_gradients(model, ids)
    graphs = len(hecate.explain(model).graphs)
    for seed in range(3):
        with hecate.replay_routing(model, drawn(seed)):
            loss_and_gradients(model, ids)
        assert torch.equal(loss_and_gradients(model, ids)[0], loss)
    found = hecate.explain(model).graphs
    assert len(found) == 2 * graphs
    held = [sum(p.rewritten for p in graph.passes if p.name == "hold_choices") for graph in found]
    assert sorted(held) == [0] * graphs + [2] * graphs


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_of_micro_batches(reentrant: bool) -> None:
    """What the backward computes again is what its forward chose, though another micro-batch came in between."""
    model, expected = compiled(), []
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    parts = (batch(1), batch(2))
    for seed, ids in enumerate(parts):
        expected.append(overwritten("qwen3_moe", ids, drawn(seed)))
    losses = []
    for seed, ids in enumerate(parts):
        with hecate.replay_routing(model, drawn(seed)):
            losses.append(model(input_ids=ids, labels=ids)["loss"])
    for loss, (wanted, _) in zip(losses, expected, strict=True):
        torch.testing.assert_close(loss.detach(), wanted)
    for loss in losses:
        loss.backward()
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, sum(grads[name] for _, grads in expected))


def test_tokens_of_which_nothing_is_known() -> None:
    model, ids = compiled(), batch(0)
    with hecate.record_routing(model) as routing:
        loss_and_gradients(model, ids)
    own, given = routing.ids.long(), drawn(3)
    # They see none of those behind them.
    given[:, :5] = own[:, :5]
    expected = overwritten("qwen3_moe", ids, given)
    given[:, :5] = -1
    with hecate.replay_routing(model, given):
        assert_equal(loss_and_gradients(model, ids), expected)


def test_a_rollout_is_replayed_in_training() -> None:
    """A forward over a generated text has the log-probabilities of the rollout, whatever the model's weights are."""
    model, prompts = compiled(), batch(0)[:, :6]
    with hecate.record_routing(model) as routing:
        out = model.generate(
            prompts, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    texts = out.sequences
    # The last token was not put in.
    assert routing.ids.shape == (len(prompts), texts.shape[1] - 1, 2, CHOICES)
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.gate.weight.add_(torch.randn_like(block.mlp.gate.weight) * 1e-4)
    with hecate.replay_routing(model, routing):
        logits = model(input_ids=texts[:, :-1])["logits"]
    rollout = torch.stack(out.logits, dim=1)
    torch.testing.assert_close(logits[:, -5:], rollout, atol=1e-3, rtol=1e-3)


def test_ids_of_all_layers_of_the_model() -> None:
    """Inference engines give ids for layers without experts, too."""
    changes = dict(layers=3, first_k_dense_replace=1)
    model, ids, given = compiled("deepseek_v3", **changes), batch(0), drawn(2, layers=3)
    with hecate.replay_routing(model, given):
        got = loss_and_gradients(model, ids)
    assert_equal(got, overwritten("deepseek_v3", ids, given[:, :, 1:], **changes))


class Backwards(PlainLanguageModel):
    """Layers that run in another order than they have in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norms = self.blocks[::-1], self.norms[::-1]
        self.reversed = nn.ModuleList([*self.blocks][::-1])
        self.blocks = nn.ModuleList()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        blocks = [*self.reversed][::-1]
        hidden = self.embedding(input_ids)
        for norm, block in zip(self.norms, blocks, strict=True):
            hidden = hidden + block(norm(hidden))
        return {"loss": torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), input_ids.flatten())}


def test_layers_are_those_of_the_model_in_whatever_order_they_run() -> None:
    torch.manual_seed(0)
    model, ids = hecate.compile(Backwards(), PLAIN), batch(0)
    with hecate.record_routing(model) as routing:
        expected = loss_and_gradients(model, ids)
    assert [*routing.by_layer] == ["reversed.0", "reversed.1"]
    for given in (routing, routing.ids):
        with hecate.replay_routing(model, given):
            assert_equal(loss_and_gradients(model, ids), expected)


@pytest.mark.slow
def test_what_inductor_writes_over() -> None:
    """Neither what was recorded nor what the user gave is memory of a graph."""
    reference, ids = compiled(), batch(0)
    model = hecate.compile(build("qwen3_moe"), hecate.Config())
    given = drawn(1)
    kept, expected = given.clone(), None
    for one in (reference, model):
        with hecate.record_routing(one) as routing:
            loss_and_gradients(one, ids)
        expected = routing.ids if expected is None else expected
        assert torch.equal(routing.ids, expected)
    for _ in range(2):
        with hecate.replay_routing(model, given):
            assert_equal(loss_and_gradients(model, ids), overwritten("qwen3_moe", ids, given))
        assert torch.equal(given, kept)


def test_layers_that_were_not_called_are_named() -> None:
    model, ids = compiled(), batch(0)
    model.model.layers.pop(1)
    said = r"has called model\.layers\.1\.mlp\.experts, which"
    with pytest.warns(UserWarning, match=said), hecate.record_routing(model):
        loss_and_gradients(model, ids)


class Threshold(PlainMoE):
    """The tokens of an expert are those whose score is large enough; nothing is chosen."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        scores = self.router(tokens).softmax(-1)
        out = torch.zeros_like(tokens)
        for expert in range(self.w_in.shape[0]):
            (token,) = torch.where(scores[:, expert] > 1 / len(self.w_in))
            h = torch.nn.functional.silu(tokens[token] @ self.w_in[expert]) @ self.w_out[expert]
            out.index_add_(0, token, h * scores[token, expert, None])
        return out.view_as(hidden)


def test_layers_that_are_called_again() -> None:
    """As in looped models: each call has its own routing."""
    model, ids = compiled("plain", turns=2), batch(0)
    with hecate.record_routing(model) as routing:
        expected = loss_and_gradients(model, ids)
    assert [*routing.by_layer] == ["blocks.0", "blocks.1", "blocks.0 (2)", "blocks.1 (2)"]
    with hecate.replay_routing(model, routing):
        assert_equal(loss_and_gradients(model, ids), expected)
    # In the order in which layers run.
    given = drawn(1, layers=4)
    with hecate.replay_routing(model, {name: given[:, :, layer] for layer, name in enumerate(routing.by_layer)}):
        got = loss_and_gradients(model, ids)
    assert_equal(got, overwritten("plain", ids, given, turns=2))


def test_a_router_that_is_not_found() -> None:
    made, ids = hecate.compile(PlainLanguageModel(Threshold), PLAIN), batch(0)
    before = loss_and_gradients(made, ids)
    for block in (hecate.record_routing(made), hecate.replay_routing(made, drawn(1))):
        with pytest.raises(ValueError, match=r"blocks\.0: in the graph that has them, no topk, max or argmax"), block:
            loss_and_gradients(made, ids)
    assert_equal(loss_and_gradients(made, ids), before)


def test_what_is_refused() -> None:
    model, ids = compiled(), batch(0)
    good = drawn(1)
    twice, out_of_range, half = good.clone(), good.clone(), good.clone()
    twice[0, 3, 1] = 5
    out_of_range[0, 3, 1, 0] = EXPERTS
    half[0, 3, 1, 0] = -1

    def replay(given: Any, model: nn.Module = model) -> None:
        with hecate.replay_routing(model, given):
            model(input_ids=ids, labels=ids)

    def nested() -> None:
        with hecate.record_routing(model):
            replay(good)

    for run, said in (
        (lambda: replay(good.float()), "TypeError: hecate.replay_routing: ids are torch.float32, expected integers"),
        (lambda: replay(None), "TypeError: hecate.replay_routing: ids are NoneType, expected integers"),
        (lambda: replay(good[0]), "expected [batch, sequence, layer, k]; ids[None] makes a batch of one"),
        (lambda: replay(good[:, :, :1]), "ids are of 1 layers, and the model has 2 with experts: model.layers.0.mlp"),
        (lambda: replay({"model.layers.0.mlp.experts": good[:, :, 0]}), "there is nothing for model.layers.1.mlp"),
        (
            lambda: replay({"model.layers.0": good[:, :, 0]}),
            "no layer with a router is model.layers.0; these are model",
        ),
        (lambda: replay(twice), "experts of model.layers.1.mlp.experts come twice for a token: [5, 5], of token 3"),
        (lambda: replay(out_of_range), "are not from 0 to 7, or -1: [8"),
        (lambda: replay(half), "have -1 in some places and experts in others"),
        (lambda: replay(good[:, :5]), "sends 192 tokens to 2 experts each, and there are 2 for 60 tokens"),
        (lambda: replay(good[..., :1]), "sends 192 tokens to 2 experts each, and there are 1 for 192 tokens"),
        (lambda: replay(good, build("qwen3_moe")), "was not compiled with hecate.compile"),
        (
            lambda: replay(
                good, hecate.compile(build("qwen3_moe"), hecate.Config(backend="aot_eager", policy="replicate"))
            ),
            "has no sharded experts",
        ),
        (nested, "is recorded or replayed already"),
        (lambda: hecate.Routing({}).ids, "no forward of the model has run inside the block"),
    ):
        assert said in message_of(run), message_of(run)
    # Nothing of it is left.
    with hecate.replay_routing(model, good):
        assert_equal(loss_and_gradients(model, ids), overwritten("qwen3_moe", ids, good))


@pytest.mark.distributed
def test_ranks_replay_their_own_batches() -> None:
    for result in run_ranks("benchmarks.families.replayed:run", 2, name="qwen3_moe"):
        assert result["replay_error"] == 0
        assert result["loss_error"] < 1e-6 and result["gradient_error"] < 1e-6


def replay_on_one_rank() -> str:
    import torch.distributed as dist

    model, ids = compiled(), batch(0)
    model(input_ids=ids, labels=ids)["loss"].backward()
    if dist.get_rank() == 0:
        with hecate.replay_routing(model, drawn(1)):
            return message_of(lambda: model(input_ids=ids, labels=ids))
    return message_of(lambda: model(input_ids=ids, labels=ids))


@pytest.mark.distributed
def test_a_rank_that_replays_alone_is_told() -> None:
    for said in run_ranks(replay_on_one_rank, 2):
        assert "the model is to be traced anew (choices of experts: held) on rank 0" in said
        assert "hecate.replay_routing are entered and left on all ranks" in said
