"""Models whose layers no graph can have, each for another reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import dropout, silu
from torch.utils.checkpoint import checkpoint

from tests.hecate_compile.wrap.test_carry_over import CountingExpert, of
from tests.hecate_compile.wrap.test_stack_experts import Expert, ListMoE
from tests.support.models import PlainLanguageModel, PlainMoE


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


class ChosenMoE(nn.Module):
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
            out = out.index_add(0, rows, self.one(tokens[rows], expert) * weights[rows, choice, None])
        return out.view_as(hidden)

    def one(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        return silu(rows @ self.up[expert]) @ self.down[expert]


class FusedMoE(ChosenMoE):
    """The same, kept from the compiler, which would be long at it before it gives up."""

    @torch.compiler.disable
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden)


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


class RecomputedMoE(ChosenMoE):
    """One that runs once more in the backward, up to the last tensor that this needs."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=False)  # type: ignore[no-any-return]


class RecomputedAsOfOldMoE(FusedMoE):
    """The same with a backward of its own in the backward."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=True)  # type: ignore[no-any-return]


class RecomputedByExpertMoE(FusedMoE):
    """Has as many such backwards as a rank's tokens have chosen experts, each with a parameter of all."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.shared = nn.Linear(sizes[0], sizes[0])

    def one(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        inner = super().one
        return checkpoint(lambda rows: inner(self.shared(rows), expert), rows, use_reentrant=True)  # type: ignore[no-any-return]


class EndingModel(PlainLanguageModel):
    """Ends with such a layer: no graph is behind it, and the loss is outside."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        block: Any = self.blocks[0]
        return {"logits": block(self.norms[0](self.embedding(input_ids)))}


class RareMoE(FusedMoE):
    """Has experts of a second kind, which few tokens meet."""

    def __init__(self, hidden: int, intermediate: int, experts: int, choices: int) -> None:
        super().__init__(hidden, intermediate, experts, choices)
        self.rare = nn.ModuleList(Expert(hidden, intermediate) for _ in range(experts))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out, tokens = super().forward(hidden), hidden.flatten(0, -2)
        rows = (tokens[:, 0] > RARE).nonzero().flatten()
        if len(rows):
            for expert in self.rare:
                out = out.view_as(tokens).index_add(0, rows, expert(tokens[rows]))
        return out.view_as(hidden)


class UnevenMoE(nn.Module):
    """Has a layer in it that returns more tensors where it has seen some tokens."""

    class Inner(FusedMoE):
        @torch.compiler.disable
        def forward(self, hidden: torch.Tensor) -> Any:
            return super().forward(hidden), hidden.sum() if (hidden[..., 0] > RARE).any() else 0.0

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.inner = self.Inner(*sizes)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden)[0]  # type: ignore[no-any-return]


# More than a norm of 16 numbers gives nearly all tokens in their first; and a token for which it does.
RARE, RARE_TOKEN = 3.0, 7


def with_rare_token(model: PlainLanguageModel) -> PlainLanguageModel:
    with torch.no_grad():
        model.embedding.weight[RARE_TOKEN, 0] = 30
    return model


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
    "chosen by data": ChosenMoE,
    "kept from the compiler": SkippedMoE,
    "recomputed": RecomputedMoE,
    "changed in place": ChangedMoE,
    "parameters of all, as data want": NormedMoE,
    "for evaluation alone": SwitchingMoE,
    # Loops that leave out experts without rows, which do something else without any.
    "counts calls": of(CountingExpert),
    "asks for the largest": of(BoundedExpert),
}
