"""hecate.balance_bias: loads become equal, and biases are those of a loop by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hecate
from tests.support.extent import ALL
from tests.support.models import PlainLanguageModel, PlainMoE, batch, build
from tests.support.parity import rank_and_size
from tests.support.ranks import message_of, run_ranks

RATE, EXPERTS, STEPS = 0.01, 8, 200 if ALL else 60


def made(**changes: Any) -> nn.Module:
    """A model whose routers have favourites."""
    model = build("deepseek_v3", n_group=1, topk_group=1, **changes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[:2] += 0.5 * layer.mlp.gate.weight[:1].sign()
            layer.mlp.gate.e_score_correction_bias += torch.linspace(0.3, 0.0, EXPERTS)
    return model


def biases_of(model: nn.Module) -> list[Tensor]:
    return [layer.mlp.gate.e_score_correction_bias for layer in model.model.layers]


def max_violation(rows: Tensor) -> Tensor:
    """How many rows more than the mean the busiest expert has, relative to it, ``[..., expert] -> [...]``."""
    return rows.amax(-1) / rows.double().mean(-1) - 1


def balanced(folder: str = "", *, lr: float = 1e-3, steps: int = STEPS, accumulate: int = 1, **options: Any) -> Any:
    """Train with balanced biases: these after each step, and rows ``[step, layer, expert]`` of all ranks."""
    model = hecate.compile(made(), hecate.Config(backend="aot_eager", **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    hecate.balance_bias(model, rate=RATE)
    rank, size = rank_and_size()
    seen, losses, kept = [], [], []
    for step in range(steps):
        rows = torch.zeros(2, EXPERTS, dtype=torch.int64)
        for part in range(accumulate):
            ids = batch(step * accumulate + part).chunk(size)[rank]
            loss = model(input_ids=ids, labels=ids).loss
            (loss / accumulate).backward()
            rows += torch.tensor([layer.expert_rows for layer in hecate.stats(model).layers])
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            # What is evaluated does not count.
            model.eval()
            model(input_ids=ids)
            model.train()
        if size > 1 and options.get("expert_group"):
            dist.all_reduce(rows)
            rows //= options["expert_group"]
        seen.append(rows.tolist())
        kept.append([bias.tolist() for bias in biases_of(model)])
    if folder:
        hecate.save(folder, model, optimizer, step=steps)
    return {"biases": kept, "rows": seen, "loss": losses}


def by_hand(*, lr: float, steps: int, accumulate: int = 1) -> Any:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    rows: dict[int, Tensor] = {}

    def count(number: int, router: nn.Module) -> None:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            (ids,) = (one for one in out if not one.is_floating_point())
            rows[number] += torch.bincount(ids.flatten(), minlength=EXPERTS)

        router.register_forward_hook(hook)

    for number, layer in enumerate(model.model.layers):
        count(number, layer.mlp.gate)
    kept = []
    for step in range(steps):
        rows.update({0: torch.zeros(EXPERTS, dtype=torch.int64), 1: torch.zeros(EXPERTS, dtype=torch.int64)})
        for part in range(accumulate):
            ids = batch(step * accumulate + part)
            (model(input_ids=ids, labels=ids).loss / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for number, bias in enumerate(biases_of(model)):
                bias += RATE * torch.sign(rows[number].double().mean() - rows[number]).float()
        kept.append([bias.tolist() for bias in biases_of(model)])
    return kept


def test_one_process_is_a_loop_by_hand() -> None:
    assert balanced(steps=6, accumulate=2)["biases"] == by_hand(lr=1e-3, steps=6, accumulate=2)


def assert_become_equal(rows: list[Any]) -> None:
    # A few tokens are never spread evenly, whatever the biases are.
    first, last = (max_violation(torch.tensor(part).sum(0)) for part in (rows[:5], rows[-20:]))
    assert (first > 0.5).all() and (last < 0.2).all(), (first, last)


def test_loads_become_equal() -> None:
    assert_become_equal(balanced()["rows"])


@pytest.mark.distributed
@pytest.mark.skipif(not ALL, reason="200 steps on four ranks: with HECATE_TESTS=all")
def test_loads_become_equal_on_ranks() -> None:
    for ranks in (2, 4):
        results = run_ranks(balanced, ranks, timeout=500)
        assert all(result["biases"] == results[0]["biases"] for result in results)
        assert_become_equal(results[0]["rows"])


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (4, {"expert_group": 2})] if ALL else [(2, {})])
def test_ranks_have_the_biases_of_one_process(ranks: int, options: dict[str, Any]) -> None:
    """To the bit, while parameters stand still: other sums may send a token elsewhere."""
    expected = by_hand(lr=0.0, steps=12, accumulate=2)
    for result in run_ranks(balanced, ranks, lr=0.0, steps=12, accumulate=2, **options):
        assert result["biases"] == expected


def resumed(folder: str) -> Any:
    model = hecate.compile(made(), hecate.Config(backend="aot_eager"))
    optimizer = torch.optim.AdamW(model.parameters())
    hecate.load(folder, model, optimizer)
    return [bias.tolist() for bias in biases_of(model)]


def test_checkpoints_have_them(tmp_path: Path) -> None:
    assert balanced(str(tmp_path / "run"), steps=3)["biases"][-1] == resumed(str(tmp_path / "run"))


def test_layers_without_a_bias_are_named() -> None:
    model = made()
    del model.model.layers[0].mlp.gate.e_score_correction_bias
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    with pytest.warns(UserWarning, match=r"model\.layers\.0\.mlp\.experts have no bias and stay as they are"):
        hecate.balance_bias(model)


def test_what_is_refused() -> None:
    model = hecate.compile(made(), hecate.Config(backend="aot_eager"))
    other = hecate.compile(build("qwen3_moe"), hecate.Config(backend="aot_eager"))
    plain = hecate.compile(made(), hecate.Config(backend="aot_eager", policy="replicate"))
    half = hecate.compile(made().to(torch.bfloat16), hecate.Config(backend="aot_eager"))
    half.model.layers[0].mlp.gate.e_score_correction_bias.data = torch.zeros(EXPERTS, dtype=torch.bfloat16)
    handle = hecate.balance_bias(model)
    for run, said in (
        (lambda: hecate.balance_bias(model), "are balanced already"),
        (lambda: hecate.balance_bias(model, rate=0), "rate=0, expected a positive number"),
        (lambda: hecate.balance_bias(other), "no layer has a bias of its experts' scores"),
        (lambda: hecate.balance_bias(plain), "no sharded experts"),
        (lambda: hecate.balance_bias(half), "is torch.bfloat16, in which small steps are lost"),
        (lambda: hecate.balance_bias(made()), "was not compiled"),
    ):
        assert said in message_of(run), message_of(run)
    handle.remove()
    hecate.balance_bias(model).remove()
    gathering = hecate.compile(made(), hecate.Config(backend="aot_eager", policy="gather"))
    assert 'with policy="gather" nobody counts' in message_of(lambda: hecate.balance_bias(gathering))
    # Known only when graphs are there.
    one_by_one, ids = made(), batch(0)
    hecate.compile(one_by_one, hecate.Config(backend="aot_eager", disable_passes=["normalize_matmuls"]))
    hecate.balance_bias(one_by_one)
    said = message_of(lambda: one_by_one(input_ids=ids, labels=ids))
    assert "model.layers.0.mlp.experts gathers its experts, so that its rows are not counted: " in said


class Biased(PlainMoE):
    """A router with a correction bias inside the module that has the experts."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("correction_bias", torch.linspace(0.2, 0.0, EXPERTS))

    def choose(self, tokens: Tensor) -> Any:
        scores = self.router(tokens).softmax(-1)
        chosen = (scores + self.correction_bias).topk(self.choices, dim=-1).indices
        return scores.gather(-1, chosen), chosen


def test_each_layer_has_its_own_bias() -> None:
    """Also where the experts are in a module of a list, and its neighbours have biases of the same name."""
    torch.manual_seed(0)
    model, ids = hecate.compile(PlainLanguageModel(Biased), hecate.Config(backend="aot_eager")), batch(0)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.0), model.blocks[0].correction_bias.clone()
    hecate.balance_bias(model, rate=RATE)
    model(ids, ids)["loss"].backward()
    rows = torch.tensor([layer.expert_rows for layer in hecate.stats(model).layers])
    optimizer.step()
    for block, own in zip(model.blocks, rows, strict=True):
        moved = RATE * torch.sign(own.double().mean() - own).float()
        torch.testing.assert_close(block.correction_bias, before + moved)
    # A step without a forward moves nothing.
    kept = model.blocks[1].correction_bias.clone()
    optimizer.step()
    assert torch.equal(model.blocks[1].correction_bias, kept)


def test_the_bias_of_a_linear_layer_is_no_correction() -> None:
    model = build("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.router.bias.requires_grad_(False)
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    assert "no layer has a bias of its experts' scores" in message_of(lambda: hecate.balance_bias(model))
