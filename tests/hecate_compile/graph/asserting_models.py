"""Models that assert, in a file of their own: pytest rewrites assertions in the files of tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, EXPERTS, TOKENS = 8, 4, 24


def _check_finite(values: Tensor, name: str) -> None:
    assert values.isfinite().all(), f"{name} of {tuple(values.shape)} is not finite"


class ExpertChoice(nn.Module):
    """Experts choose tokens; the router's weights are checked, as pytorch-mixtures does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids % TOKENS).flatten(0, 1)
        weights, chosen = self.router(hidden).t().topk(5)
        weights = weights.softmax(-1)
        _check_finite(weights, "weights")
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            tokens = chosen[number]
            out[tokens] += weights[number, :, None] * expert(hidden[tokens])
        logits = self.head(hidden + out)
        return {"loss": nn.functional.cross_entropy(logits, (labels % TOKENS).flatten())}


class Asserting(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.kept = nn.Linear(WIDTH, WIDTH), how, [torch.ones(1, device="cpu")]

    def check(self, y: Tensor, name: str) -> None:
        assert y.isfinite().all(), f"{name} is not finite"

    def forward(self, x: Tensor, name: str = "x") -> Tensor:
        y = self.linear(x)
        match self.how:
            case "values":
                assert y.isfinite().all(), f"{name} is not finite"
            case "size":
                assert x.shape[0] > 1, f"{name} has {x.shape[0]} rows"
            case "list":
                assert self.kept, f"{name} has kept nothing"
            case "branch":
                assert y.isfinite().all(), f"{name} is {'finite' if x.isfinite().all() else 'not finite'}"
            case "negated":
                assert not y.isnan().any(), f"{name} is not finite"
            case "both":
                assert y.shape[0] > 1 and y.isfinite().all(), f"{name} is not finite"
            case "caught":
                try:
                    self.check(y, name)
                except AssertionError:
                    return torch.zeros(1, device="cpu")
            case "other error":
                if not y.isfinite().all():
                    raise ValueError(f"{name} is not finite")
        return y * 2
