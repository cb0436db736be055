"""Models that torch.compile takes apart: right where ranks need not run the same graphs, else refused at once."""

from __future__ import annotations

import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hecate
from tests.hecate_compile.wrap.test_stack_experts import ListMoE
from tests.support.models import PlainLanguageModel, PlainMoE, batch, build
from tests.support.parity import clear_gradients, compare, rank_and_size, run_step, state_error, step_both
from tests.support.ranks import message_of, run_ranks

EAGER = hecate.Config(backend="aot_eager")


class AfterBreak(ListMoE):
    """What begins behind a graph break reads its experts in a graph of its own."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(hidden)


def cut_off(scores: torch.Tensor, most: float) -> torch.Tensor:
    """Branches on the data of one rank, without an effect on what it computes."""
    if scores.max() > most:
        scores = scores.clamp(max=most)
    return scores


class Branching(ListMoE):
    """Scores are cut off at ``most``."""

    most = float("inf")

    def choose(self, tokens: torch.Tensor) -> Any:
        return cut_off(self.router(tokens), self.most).softmax(-1).topk(self.choices)


def _pair(moe: Any, config: hecate.Config = EAGER, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A compiled model, and one to compare it with."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(PlainLanguageModel(moe, hidden=8, **{"layers": 1, "experts": 4, **options}))
    return hecate.compile(made[0], config), made[1]


def _step(model: nn.Module, reference: nn.Module, ids: torch.Tensor) -> float:
    """A step of gradient descent by both; the worst error of the loss and of all weights."""
    loss_error = step_both(model, reference, ids)
    for one in (model, reference):
        torch.optim.SGD(one.parameters(), lr=0.5).step()
    return max(loss_error, state_error(model.state_dict(), reference.state_dict()))


def uneven_owners() -> float:
    """Of three experts one rank owns two."""
    pairs = [_pair(AfterBreak, experts=3), _pair(EveryExpert, experts=3)]
    return max(_step(*pair, batch(step)) for pair in pairs for step in range(2))


def branches() -> dict[str, Any]:
    """In the first step one rank takes the branch, then the other one, then both."""
    model, reference = _pair(Branching)
    seen: list[float] = []
    reference.blocks[0].router.register_forward_hook(lambda module, args, out: seen.append(float(out.max())))
    rank, size = rank_and_size()
    errors, taken = [], []
    for step in range(3):
        ids = batch(step, rows=2, length=6)
        if step == 1:
            # The rank with the larger scores is another one now.
            ids = torch.cat([*reversed(ids.chunk(size))])
        for part in ids.chunk(size):
            reference(part)
        maxima = seen[-size:]
        # Written into the instance: a number that guards compare.
        most = sum(maxima) / size if step < 2 else min(maxima) / 2
        model.blocks[0].most = reference.blocks[0].most = most
        taken.append(maxima[rank] > most)
        errors.append(_step(model, reference, ids))
    return {"error": max(errors), "taken": taken}


class Guarded(ListMoE):
    """Leaves out experts without rows and counts the others, so the loop is not rewritten, and runs as Python."""

    def one(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        return self.experts[number](rows)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.choose(tokens)
        out, self.used = torch.zeros_like(tokens), 0
        for number in range(len(self.experts)):
            row, choice = torch.where(chosen == number)
            if row.numel() > 0:
                self.used += 1
                out.index_add_(0, row, self.one(number, tokens[row]) * weights[row, choice, None])
        return out.view_as(hidden)


class EveryExpert(ListMoE):
    """A loop that Dynamo leaves to Python, too, but with the same experts on all ranks, and a look at one more."""

    scale = 0.5
    left_out = (2,)

    def penalty(self) -> torch.Tensor:
        return self.experts[1].w1.weight.square().mean()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.choose(tokens)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            torch._dynamo.graph_break()
            if number in self.left_out:
                continue
            if self.training and self.scale > 0:
                out = out + expert(tokens) * (weights * (chosen == number)).sum(-1, keepdim=True)
        torch._dynamo.graph_break()
        out = out + self.experts[0](tokens) * self.scale
        return (out + self.penalty()).view_as(hidden)


def loops() -> dict[str, Any]:
    """Steps of models whose loop is not traced and leaves experts out, with the experts sharded and whole."""
    errors = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for config in (EAGER, hecate.Config(backend="aot_eager", policy="replicate")):
            pair = _pair(Guarded, config, layers=2)
            errors += [_step(*pair, batch(step)) for step in range(2)]
    return {"errors": errors, "told": [str(one.message) for one in told if "runs as Python" in str(one.message)]}


class BreakInside(PlainMoE):
    """Picks the parameters of one expert for each token, behind a graph break."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        torch._dynamo.graph_break()
        inner = torch.einsum("th,thf->tf", tokens, self.w_in[chosen]).relu()
        out = torch.einsum("tf,tfh->th", inner, self.w_out[chosen]) + self.b_out[chosen]
        return (out * weight[:, None]).view_as(hidden)


def test_what_gathers_because_of_a_graph_break_names_it() -> None:
    model, reference = _pair(BreakInside)
    with pytest.warns(UserWarning, match=rf"graph at {__file__}:\d+: torch\._dynamo\.graph_break\(\)\)"):
        assert _step(model, reference, batch(0)) < 1e-5
    assert "torch.compile broke the graph at" in str(hecate.explain(model))


class Tower(nn.Module):
    """Cuts patches into images at numbers that data give, whose own number data give, too."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.project = nn.Linear(hidden, hidden)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        lengths = torch.repeat_interleave(torch.tensor([2, 1]), patches[:2].sum((1, 2)).gt(-1e9).long() + 1)
        parts = torch.split(self.project(patches), lengths.tolist()[:3], dim=1)
        return torch.cat([part.mean(1) for part in parts], -1)[..., : patches.shape[-1], None].transpose(1, 2)


class WithTower(PlainLanguageModel):
    """A language model that sees images. Positions are made in plain Python, too."""

    def __init__(self, moe: Any, hidden: int, **options: Any) -> None:
        super().__init__(moe, hidden, **options)
        self.tower = Tower(hidden)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = super().forward(input_ids, labels)
        patches = self.embedding(input_ids[:, :5])
        out["loss"] = out["loss"] + self.tower(patches).square().mean()
        kept = input_ids[0][input_ids[0] > 10].tolist()
        out["loss"] = out["loss"] + sum(position % 3 for position in kept) * 0 * out["logits"].sum()
        return out


def tower() -> float:
    torch.manual_seed(0)
    made = [WithTower(PlainMoE, hidden=8, layers=1, experts=4) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    model = hecate.compile(made[0], EAGER)
    return max(_step(model, made[1], batch(step)) for step in range(2))


def recorded_in_checkpoints(folder: str) -> dict[str, Any]:
    """Router logits, which hooks append to a list, of layers that are computed again in the backward."""
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    reference, model = (build("qwen3_moe", layers=1, **options) for _ in range(2))
    model.train()
    model.gradient_checkpointing_enable()
    hecate.compile(model, hecate.Config(backend="aot_eager", dump=folder))
    worst = 0.0
    for step in range(2):
        clear_gradients(model, reference)
        ids = batch(step)
        loss = run_step(model, ids)
        # The loss that balances load is no mean over tokens.
        expected = sum(reference(input_ids=part, labels=part)["loss"] for part in ids.chunk(2)) / 2
        expected.backward()
        worst = max(worst, compare(model, loss, reference, expected.detach()).gradient)
    # As captured, which rank 0 writes.
    dist.barrier()
    captured = Path(folder, "rank0", "graph0", "00_model.py").read_text()
    (graph,) = hecate.explain(model).graphs
    return {
        "worst": worst,
        "exchanged": sum(record.rewritten for record in graph.passes if record.name == "exchange_rows"),
        "checkpoints": captured.count("tag_activation_checkpoint"),
    }


class WithImages(PlainLanguageModel):
    def __init__(self) -> None:
        super().__init__(hidden=8, layers=1, experts=4)
        self.tower = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, image: torch.Tensor | None = None) -> Any:
        out = super().forward(ids, labels)
        if image is not None:
            out["loss"] = out["loss"] + self.tower(image).pow(2).mean()
        return out


def images_on_one_rank() -> list[str]:
    """From the first step on, and only after both kinds of batches have been seen by all ranks."""

    def train(alone: int) -> None:
        torch.manual_seed(0)
        model = hecate.compile(WithImages(), EAGER)
        for step in range(3):
            image = step == 0 if step != alone else rank_and_size()[0] == 0
            ids = batch(step).chunk(2)[rank_and_size()[0]]
            model(ids, ids, torch.ones(2, 8) if image else None)["loss"].backward()

    return [message_of(lambda alone=alone: train(alone)) for alone in (0, 2)]


def everything(folder: str) -> dict[str, Any]:
    """On one rank, in one launch."""
    return {
        "uneven": uneven_owners(),
        "branches": branches(),
        "loops": loops(),
        "tower": tower(),
        "recorded": recorded_in_checkpoints(folder),
        "images": images_on_one_rank(),
    }


@cache
def results() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(everything, 2, folder=folder)


@pytest.mark.distributed
def test_ranks_that_own_other_numbers_of_experts_agree_on_graphs_behind_a_break() -> None:
    assert max(rank["uneven"] for rank in results()) < 1e-5


@pytest.mark.distributed
def test_ranks_may_take_other_branches_where_nothing_is_communicated() -> None:
    one, other = (rank["branches"] for rank in results())
    assert one["taken"][0] != other["taken"][0], "ranks part in the first step"
    assert one["error"] < 1e-5 and other["error"] < 1e-5


@pytest.mark.distributed
def test_a_loop_that_leaves_experts_out_runs_as_python() -> None:
    for rank, found in enumerate(rank["loops"] for rank in results()):
        assert max(found["errors"]) < 1e-5, found
        # Rank 0 says it.
        assert len(found["told"]) == (rank == 0), found["told"]
    (told,) = results()[0]["loops"]["told"]
    assert told.startswith("hecate: the code around blocks.0.experts, blocks.1.experts runs as Python"), told
    assert f"{__file__}:" in told and "self.one(number, tokens[row])" in told and "if row.numel() > 0:" in told, told
    assert "Dynamo broke the graph here" in told


@pytest.mark.distributed
def test_numbers_of_data_outside_of_experts_stay_python() -> None:
    assert max(rank["tower"] for rank in results()) < 1e-5


@pytest.mark.distributed
def test_what_checkpointed_layers_append_outside_of_them_breaks_no_graph() -> None:
    for found in (rank["recorded"] for rank in results()):
        assert found["worst"] < 1e-5
        assert found["exchanged"] == 1 and found["checkpoints"] >= 1


@pytest.mark.distributed
def test_an_input_that_one_rank_alone_is_given_is_told_with_the_way_out() -> None:
    for first, late in (rank["images"] for rank in results()):
        assert "DisagreementError: hecate: ranks disagree on collective" in late
        assert "a forward took an input that others did without, such as images" in late
        assert "DisagreementError: hecate: ranks disagree on graph 0" in first and "input L['image']" in first
        assert "inputs that only some ranks are given, such as images" in first
