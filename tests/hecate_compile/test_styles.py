"""Ways to write experts that packages and repositories have, each of which exchanges rows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn.functional import one_hot, silu

import hecate
from tests.hecate_compile.wrap.test_stack_experts import ListMoE
from tests.support.adversaries import Anything
from tests.support.extent import ALL, OLD_TORCH
from tests.support.models import PlainLanguageModel, PlainMoE, batch
from tests.support.parity import state_error, train_both
from tests.support.ranks import run_ranks


class AddedByNumber(ListMoE):
    """``out[rows] += y`` with numbers of rows, as mistral-inference and DeepSeek's own code."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.view(-1, hidden.shape[-1])
        weights, chosen = self.choose(tokens)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen == number)
            out[rows] += weights[rows, nth, None] * expert(tokens[rows])
        return out.view_as(hidden)


class MaskOfAllExperts(ListMoE):
    """Masks of all experts at once, as litgpt."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.view(-1, hidden.shape[-1])
        weights, chosen = self.choose(tokens)
        masks = (chosen.unsqueeze(-1) == torch.arange(len(self.experts), device=hidden.device)).permute(2, 0, 1)
        out = torch.zeros_like(tokens)
        for mask, expert in zip(masks, self.experts, strict=True):
            rows, nth = torch.where(mask)
            out[rows] += weights[rows, nth, None] * expert(tokens[rows])
        return out.view_as(hidden)


class GuardedByView(ListMoE):
    """A view of a mask is asked, as in makeMoE."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.router(hidden)
        top, chosen = logits.topk(self.choices, dim=-1)
        gates = torch.full_like(logits, float("-inf")).scatter(-1, chosen, top).softmax(-1)
        out = torch.zeros_like(hidden)
        flat_hidden, flat_gates = hidden.view(-1, hidden.shape[-1]), gates.view(-1, gates.shape[-1])
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(dim=-1)
            flat = mask.view(-1)
            if flat.any():
                done = expert(flat_hidden[flat])
                gate = flat_gates[flat, number].unsqueeze(1)
                out[mask] += (done * gate).squeeze(1)
        return out


class NumbersBehindGuard(ListMoE):
    """Tokens are looked up behind the guard, as in latent-moe."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.choose(tokens)
        of_choice = torch.arange(len(tokens), device=hidden.device).repeat_interleave(self.choices)
        flat, out = chosen.reshape(-1), torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            choice = (flat == number).nonzero(as_tuple=True)[0]
            if choice.numel() == 0:
                continue
            rows = of_choice[choice]
            out.index_add_(0, rows, expert(tokens[rows]) * weights.reshape(-1)[choice].unsqueeze(-1))
        return out.view_as(hidden)


class Capacities(ListMoE):
    """Chunks of ``[1, E, C, d]``, as DeepSpeed, fairscale and torchscale."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens, experts = hidden.reshape(-1, hidden.shape[-1]), len(self.experts)
        capacity, gates = len(tokens), self.router(tokens).softmax(-1)
        mask = one_hot(gates.argmax(-1), experts)
        place = ((mask.cumsum(0) - 1) * mask).sum(1)
        gate = (gates * mask).sum(1)
        combine = torch.einsum("s,se,sc->sec", gate, mask.to(gate.dtype), one_hot(place, capacity).to(gate.dtype))
        rows = torch.einsum("sec,sm->ecm", combine.bool().to(tokens.dtype), tokens).reshape(1, experts, capacity, -1)
        parts = rows.chunk(experts, dim=1)
        done = torch.cat([expert(part) for part, expert in zip(parts, self.experts, strict=True)], dim=1)
        return torch.einsum("sec,ecm->sm", combine, done.reshape(experts, capacity, -1)).view_as(hidden)


class Slices(ListMoE):
    """Slices of sorted rows by counts, as in latent-moe."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.choose(tokens)
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        rows, start = tokens[order // self.choices], 0
        done = torch.empty_like(rows)
        for number, count in enumerate(torch.bincount(flat, minlength=len(self.experts)).tolist()):
            if count == 0:
                continue
            end = start + count
            done[start:end] = self.experts[number](rows[start:end])
            start = end
        done = done * weights.reshape(-1)[order, None]
        return torch.zeros_like(tokens).index_add(0, order // self.choices, done).view_as(hidden)


class AllOfThem(ListMoE):
    """Every expert computes every token, as in sparrow-mlp."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.choose(hidden)
        gates = torch.zeros_like(self.router(hidden)).scatter(-1, chosen, weights)
        return sum(expert(hidden) * gates[..., n, None] for n, expert in enumerate(self.experts))


class LookedUp(PlainMoE):
    """Matrices looked up for every token, as in gpt-fast and gpt-oss."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.choose(tokens)
        h = silu(torch.einsum("td,tkdf->tkf", tokens, self.w_in[chosen]))
        h = torch.einsum("tkf,tkfd->tkd", h, self.w_out[chosen, ...])
        h += self.b_out[chosen]
        return torch.einsum("tkd,tk->td", h, weights).view_as(hidden)


STYLES = [AddedByNumber, MaskOfAllExperts, GuardedByView, NumbersBehindGuard, Capacities, Slices, AllOfThem, LookedUp]
# They ask how many tokens there are: another number is another graph.
OF_LENGTHS = STYLES if ALL else [NumbersBehindGuard, Capacities]


def train(kind: type[PlainMoE]) -> dict[str, Any]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(PlainLanguageModel(kind, hidden=16, layers=1, experts=5))
    model, reference = models
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hecate.compile(model, hecate.Config(backend="aot_eager", policy=Anything(reshard_every=2)))
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, eps=1e-3) for one in models]
        gradients = []
        for step in range(2):
            # Few tokens, so that some experts have none.
            ids = batch(step, rows=2)[:, : 4 + 4 * step * (kind in OF_LENGTHS)]
            gradients.append(train_both(model, reference, optimizers, ids).gradient)
    return {
        "gradients": gradients,
        "off": state_error(model.state_dict(), reference.state_dict()),
        "told": [str(one.message) for one in told if "hecate" in str(one.message)],
    }


def train_all() -> dict[str, dict[str, Any]]:
    return {kind.__name__: train(kind) for kind in STYLES}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(train_all, 2)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [kind.__name__ for kind in STYLES])
def test_they_exchange_rows_and_train_as_in_one_process(ranks: list[dict[str, dict[str, Any]]], kind: str) -> None:
    for found in (every[kind] for every in ranks):
        assert max(found["gradients"]) < 1e-4 and found["off"] < 1e-5, found
        # Torch before 2.12 cannot trace writes to slices whose bounds are data: these run as Python, and are told.
        assert found["told"] == [] or OLD_TORCH
