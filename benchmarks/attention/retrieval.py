"""Recall of key-value pairs among noise, which needs the whole context."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hecate
from hecate.runtime.attention.s2_masks import visible

# Positions, needles, questions, keys, values, other symbols of the recall task.
_LENGTH, _NEEDLES, _ASKED, _KEYS, _VALUES, _NOISE = 128, 12, 8, 24, 24, 16
_HEADS = 4
# What part of dense attention's answers each seed is to give, at least; all others less than the last one.
_BARS = {"S2": 0.98, "first layer dense, then S2": 0.99}
_BELOW = 0.7


def recall_kinds() -> dict[str, hecate.S2Attention | None]:
    small: dict[str, Any] = {"block": 16, "local": 1, "dense_layers": ()}
    return {
        "dense": None,
        "S2": hecate.S2Attention(**small, stride=4),
        "first layer dense, then S2": hecate.S2Attention(**small | {"dense_layers": (0,)}, stride=4),
        "the same pattern in all heads": hecate.S2Attention(**small, stride=4, homogeneous=True, allow_holes=True),
        "twice the stride that heads cover": hecate.S2Attention(**small, stride=8, allow_holes=True),
        # No residue is that of a block that is there; with offset 0 the first head would see block 0.
        "local blocks alone": hecate.S2Attention(**small, stride=10**6, offset=1, allow_holes=True),
    }


def run(steps: int, seeds: int) -> dict[str, list[float]]:
    """The part of the questions that each kind of attention answers, for every seed."""
    data = torch.Generator().manual_seed(0)
    pool = [recall_batch(32, data) for _ in range(40)]
    x_test, y_test = recall_batch(256, data)
    found: dict[str, list[float]] = {}
    for name, attention in recall_kinds().items():
        for seed in range(seeds):
            torch._dynamo.reset()
            torch.manual_seed(1 + seed)
            model = Recall()
            config = hecate.Config(backend="aot_eager", policy="replicate", attention=attention)
            hecate.compile(model, config)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
            renamed = torch.Generator().manual_seed(5 + seed)
            for number in range(steps):
                x, y = pool[number % len(pool)]
                # Other names for keys and values in every step, so that nothing can be learned by heart.
                keys = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(_KEYS, generator=renamed)])
                values = torch.arange(1 + _VALUES + _NOISE)
                values[1 : _VALUES + 1] = 1 + torch.randperm(_VALUES, generator=renamed)
                x = torch.stack([keys[x[..., 0]], values[x[..., 1]]], -1)
                y = torch.where(y >= 0, values[y.clamp(min=0)], y)
                for group in optimizer.param_groups:
                    group["lr"] = 3e-3 * min(1.0, (number + 1) / 50) * (1 - 0.9 * number / steps)
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                right = (model(x_test).argmax(-1) == y_test)[y_test >= 0]
            found.setdefault(name, []).append(float(right.float().mean()))
            print(f"retrieval, {name}, seed {seed}: {found[name][-1]:.3f}", flush=True)
    return found


def table(found: dict[str, list[float]]) -> list[str]:
    lines = ["", f"Recall of {_NEEDLES} pairs among {_LENGTH} positions: questions answered", ""]
    lines += [
        "| attention | part of the context that heads see | answered, each seed | nearest to its bar, / dense |",
        "|---|---|---|---|",
    ]
    for name, answers in found.items():
        options = recall_kinds()[name]
        seen = 1.0
        if options is not None and not options.dense_layers:
            p = options.pattern(_HEADS, _HEADS)
            rows = visible(_HEADS, _ASKED, _LENGTH, p, torch.device("cpu")).any(0)[:, :-_ASKED]
            seen = float(rows.float().mean())
        bar = beside_the_bar(name, answers, found.get("dense", answers))
        lines.append(f"| {name} | {seen:.0%} | {', '.join(f'{x:.3f}' for x in answers)} | {bar} |")
    return lines


def beside_the_bar(name: str, answers: list[float], dense: list[float]) -> str:
    """The seed that is nearest to the wrong side of its bar, in parts of dense attention, and what it should be."""
    mean = statistics.mean(dense)
    if mean == 0:
        return "dense answers none"
    if name == "dense":
        return ""
    if name in _BARS:
        return f"{min(answers) / mean:.3f}, at least {_BARS[name]}"
    return f"{max(answers) / mean:.3f}, below {_BELOW}"


def recall_batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys and values ``[rows, length, 2]``, and the value asked for at each position, -100 for none.

    Needles have a key and a value and stand anywhere; everything else is noise values without a key. The last
    positions have a key alone.
    """
    x = torch.zeros(rows, _LENGTH, 2, dtype=torch.long)
    x[:, :, 1] = _VALUES + 1 + torch.randint(0, _NOISE, (rows, _LENGTH), generator=generator)
    y = torch.full((rows, _LENGTH), -100)
    for row in range(rows):
        keys = 1 + torch.randperm(_KEYS, generator=generator)[:_NEEDLES]
        values = 1 + torch.randint(0, _VALUES, (_NEEDLES,), generator=generator)
        at = torch.randperm(_LENGTH - _ASKED, generator=generator)[:_NEEDLES]
        x[row, at, 0], x[row, at, 1] = keys, values
        asked = torch.randperm(_NEEDLES, generator=generator)[:_ASKED]
        x[row, -_ASKED:, 0], x[row, -_ASKED:, 1] = keys[asked], 0
        y[row, -_ASKED:] = values[asked]
    return x, y


class Recall(nn.Module):
    """Two layers, with a learned position; the value at each place."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        symbols = 1 + _VALUES + _NOISE
        self.keys, self.values = nn.Embedding(_KEYS + 1, hidden), nn.Embedding(symbols, hidden)
        self.position = nn.Parameter(torch.randn(_LENGTH, hidden) * 0.02)
        self.layers = nn.ModuleList(_Layer(hidden) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, symbols, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.keys(x[..., 0]) + self.values(x[..., 1]) + self.position
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.head(self.norm(hidden))
        return out


class _Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, hidden = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, length, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, hidden))
        mlp: Tensor = self.mlp(self.between(x))
        return x + mlp
