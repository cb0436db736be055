"""S2-Attention beside dense attention: alone, in generation, in a training step, and what models learn with it.

    python -m benchmarks.attention                          alone, decode and step; about 10 minutes on one core
    python -m benchmarks.attention --full                   lengths up to 32,768; about 40 minutes
    python -m benchmarks.attention alone --flex             compiled flex_attention too, forward only: torch 2.13 has
                                                            no backward of it on CPUs
    python -m benchmarks.attention language retrieval       quality; about an hour

Parts:

    alone       forward, and forward with backward, against scaled_dot_product_attention(is_causal=True)
    decode      one new token: dense attention to all keys, S2 to what the sparse cache keeps; bytes of both
    step        a training step of a small Qwen3-MoE in which attention is most of the work, 8,192 tokens
    language    a byte-level language model, dense and with S2, from the same seed to the same step
    retrieval   recall of key-value pairs among noise, which needs the whole context: 5 kinds of attention, 3 seeds

One thread, and CPU time of this process: other programs on the machine hardly show. Systems alternate call by call,
in the other order in every second round; a ratio is that of two calls of the same round, its median is given with the
lowest and the highest. Beside it stands the bound: one over the share of blocks that are computed. Samples are
written to build/benchmarks/attention.json, each part with the commit that made it, and beside them a plot of what
ran.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sysconfig
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hecate
from benchmarks.results_folder import results_folder
from hecate.runtime.attention.pattern import Pattern
from hecate.runtime.ops.s2_masks import visible

PARTS = ("alone", "decode", "step", "language", "retrieval")
Call = Callable[[], Any]
Samples = dict[str, list[float]]

# What others say, to be read beside these numbers; other hardware, other baselines.
PAPER = (
    "paper (arXiv 2407.17678, version 7): attention 8.8, 15.9 and 25.3 times as fast as FlashAttention-2 at 128k, "
    "inference 4.5 times (7B); workshop abstract (OpenReview AhlE339I7o): training 2.8 (1.3B) and 2.5 (7B) times. "
    "The stride bounds all of it, and heads with patterns of their own bound the stride: with 16 local blocks of 64, "
    "attention at 128k is at most 13.0 times as fast with a stride of 16, 21.6 with 32 and 32.3 with 64"
)


def measure(systems: dict[str, Call], rounds: int) -> Samples:
    """Seconds of each call; the first round warms up."""
    samples: Samples = {name: [] for name in systems}
    for number in range(rounds + 1):
        order = list(systems.items())
        # Whoever comes second finds other caches.
        for name, call in order if number % 2 else reversed(order):
            start = time.process_time()
            call()
            if number:
                samples[name].append(time.process_time() - start)
    return samples


def ratios(samples: Samples, system: str, baseline: str) -> list[float]:
    """How many times as fast, in each round."""
    return [b / a for a, b in zip(samples[system], samples[baseline], strict=True)]


def said(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} - {max(values):.2f})"


# --- attention alone ---


def pattern_of(length: int, heads: int) -> Pattern:
    """An eighth of the blocks: every 16th block, and one in 32 as local ones."""
    return Pattern(block=64, local=max(1, length // 64 // 32), stride=heads, offset=0, patterns=heads)


def flex(q: Tensor, k: Tensor, v: Tensor, p: Pattern) -> Call:
    """Compiled flex_attention with the same blocks."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    n = p.blocks_of(q.shape[2])
    seen = visible(p.patterns, n, n, Pattern(1, p.local, p.stride, p.offset, p.patterns), q.device)[None]
    whole = seen.tril(-1)
    diagonal = (seen & ~whole).int()
    order = whole.int().argsort(-1, descending=True, stable=True).int()
    own = diagonal.argsort(-1, descending=True, stable=True).int()
    mask = BlockMask.from_kv_blocks(
        diagonal.sum(-1).int(), own, whole.sum(-1).int(), order, BLOCK_SIZE=p.block,
        mask_mod=lambda b, h, query, key: query >= key,
    )  # fmt: skip
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask)


def alone(lengths: list[int], rounds: int, *, with_flex: bool, heads: int = 16, width: int = 64) -> list[Any]:
    """Forward and backward at every length."""
    found = []
    for length in lengths:
        torch.manual_seed(0)
        # Token by token in memory, as projections make them.
        q, k, v, grad = (torch.randn(1, length, heads, width).transpose(1, 2) for _ in range(4))
        p = pattern_of(length, heads)
        scale = width**-0.5

        def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def sparse(q: Tensor, k: Tensor, v: Tensor, p: Pattern = p, scale: float = scale) -> Tensor:
            out: Tensor = torch.ops.hecate.s2_attention(q, k, v, None, p.numbers, scale)[0]
            return out

        with torch.no_grad():
            systems: dict[str, Call] = {
                "dense": lambda q=q, k=k, v=v, f=dense: f(q, k, v),
                "s2": lambda q=q, k=k, v=v, f=sparse: f(q, k, v),
            }
            if with_flex:
                systems["flex"] = flex(q, k, v, p)
                error = float((systems["flex"]() - systems["s2"]()).abs().max())
                assert error < 1e-4, error
            forward = measure(systems, rounds)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def both(f: Callable[..., Tensor], leaves: list[Tensor] = leaves, grad: Tensor = grad) -> Call:
            return lambda: torch.autograd.grad(f(*leaves), leaves, grad)

        # Dense attention forward and backward at 32,768 tokens takes minutes.
        backward = measure({"dense": both(dense), "s2": both(sparse)}, rounds if length <= 16384 else 1)
        found.append(
            {"length": length, "share": p.share(length), "pattern": p.numbers, "forward": forward, "both": backward}
        )
        print(f"alone, {length}: done", flush=True)
    return found


def table_of_alone(rows: list[Any]) -> list[str]:
    lines = [
        "", "16 heads of 64, float32: times as fast as causal SDPA, in brackets the rounds", "",
        "| tokens | blocks | bound | forward | forward and backward | of the bound | flex, forward |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        forward, both = (ratios(row[key], "s2", "dense") for key in ("forward", "both"))
        bound = 1 / row["share"]
        other = said(ratios(row["forward"], "flex", "dense")) if "flex" in row["forward"] else "-"
        lines.append(
            f"| {row['length']:,} | {row['share']:.1%} | {bound:.1f} | {said(forward)} | {said(both)} | "
            f"{statistics.median(both) / bound:.0%} | {other} |"
        )
    return [*lines, "", PAPER]


# --- one token behind many ---


def decode(lengths: list[int], rounds: int, *, width: int = 64) -> list[Any]:
    """One query for each head against a cache of some length, and the cache's own step."""
    found = []
    for heads, key_heads, local in ((16, 16, 4), (16, 8, 4)):
        for length in lengths:
            torch.manual_seed(0)
            p = Pattern(block=64, local=local, stride=min(16, key_heads), offset=0, patterns=key_heads)
            q = torch.randn(1, heads, 1, width)
            k, v = (torch.randn(1, key_heads, length, width) for _ in range(2))
            kept = [torch.ops.hecate.s2_store(None, x, 0, p.numbers) for x in (k, v)]
            token = torch.randn(1, key_heads, 1, width)
            grouped = q.view(1, key_heads, heads // key_heads, width)
            with torch.no_grad():
                samples = measure(
                    {
                        "dense": lambda g=grouped, k=k, v=v: F.scaled_dot_product_attention(g, k, v),
                        "s2": lambda q=q, c=kept, n=length, p=p: torch.ops.hecate.s2_decode(
                            q, *c, n, None, p.numbers, width**-0.5
                        ),
                        "dense, appended": lambda k=k, t=token: torch.cat([k, t], 2),
                        "s2, appended": lambda c=kept, t=token, n=length, p=p: torch.ops.hecate.s2_store(
                            c[0], t, n, p.numbers
                        ),
                    },
                    rounds,
                )
            size = [sum(x.numel() * x.element_size() for x in pair) for pair in ((k, v), kept)]
            found.append({"length": length, "heads": [heads, key_heads], "bytes": size, "samples": samples})
    return found


def table_of_decode(rows: list[Any]) -> list[str]:
    lines = [
        "", "One new token, float32, blocks of 64, 4 local: times as fast, and the cache of one layer", "",
        "| keys | heads, of keys | attention | appending | cache, MB | part |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        before, after = row["bytes"]
        attention = said(ratios(row["samples"], "s2", "dense"))
        appending = said(ratios(row["samples"], "s2, appended", "dense, appended"))
        lines.append(
            f"| {row['length']:,} | {row['heads'][0]}, {row['heads'][1]} | {attention} | {appending} | "
            f"{before / 1e6:.0f} to {after / 1e6:.1f} | {after / before:.1%} |"
        )
    return lines


# --- a training step ---


def step(length: int, rounds: int) -> dict[str, Any]:
    """A small model end to end, dense and with S2 in both layers, compiled by Inductor."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    layers, heads, width = 2, 16, 64
    p = pattern_of(length, heads)
    options = hecate.S2Attention(block=p.block, local=p.local, stride=p.stride, dense_layers=())
    systems: dict[str, Call] = {}
    for name, attention in (("dense", None), ("s2", options)):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=64, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=heads, head_dim=width, num_experts=8,
                num_experts_per_tok=2, max_position_embeddings=length, use_cache=False, bos_token_id=None,
                eos_token_id=None,
            )
        )  # fmt: skip
        hecate.compile(model, hecate.Config(attention=attention))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        ids = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(0))

        def run(model: nn.Module = model, optimizer: Any = optimizer, ids: Tensor = ids) -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        systems[name] = run
    q, k, v, grad = (torch.randn(1, length, heads, width).transpose(1, 2).requires_grad_() for _ in range(4))

    def attention_alone() -> None:
        for _ in range(layers):
            torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

    samples = measure(systems | {"attention of dense": attention_alone}, rounds)
    return {"length": length, "share": p.share(length), "samples": samples}


def table_of_step(found: dict[str, Any]) -> list[str]:
    samples, share = found["samples"], found["share"]
    part = statistics.median([a / b for a, b in zip(samples["attention of dense"], samples["dense"], strict=True)])
    times = {name: statistics.median(values) for name, values in samples.items()}
    return [
        "", f"A training step of 2 layers, {found['length']:,} tokens, 16 heads of 64: dense {times['dense']:.1f} s, "
        f"S2 {times['s2']:.1f} s, {said(ratios(samples, 's2', 'dense'))} times as fast. Attention is {part:.0%} of "
        f"the dense step, so with {share:.1%} of the blocks the bound is {1 / (1 - part + part * share):.1f}",
    ]  # fmt: skip


# --- what models learn ---


def language(steps: int) -> dict[str, Any]:
    """The byte-level model of examples/train.py, on text that it has not seen, at the same steps."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from examples.train import read_text, sample_batch

    length, rows = 512, 8
    text = read_text(Path(sysconfig.get_path("stdlib")))
    train, test = text[: -len(text) // 10], text[-len(text) // 10 :]
    kinds = {
        "dense": None,
        "S2, all layers": hecate.S2Attention(block=32, local=2, stride=4, dense_layers=()),
        "S2, first layer dense": hecate.S2Attention(block=32, local=2, stride=4, dense_layers=(0,)),
    }
    found: dict[str, Any] = {}
    for name, attention in kinds.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=256, hidden_size=96, moe_intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=4, head_dim=24, num_experts=8, num_experts_per_tok=2,
                max_position_embeddings=length, use_cache=False, bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
        hecate.compile(model, hecate.Config(attention=attention))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses: dict[int, float] = {}
        for number in range(1, steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, number / 20) * (1 - 0.9 * number / steps)
            ids = sample_batch(train, rows, length, number)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % max(1, steps // 5) == 0:
                with torch.no_grad():
                    parts = [sample_batch(test, rows, length, 10**6 + part) for part in range(4)]
                    losses[number] = statistics.mean(float(model(input_ids=x, labels=x).loss) for x in parts)
        found[name] = losses
        print(f"language, {name}: {losses}", flush=True)
    return found


def table_of_language(found: dict[str, Any]) -> list[str]:
    at = list(next(iter(found.values())))
    lines = ["", "Loss of a byte-level model on text that it has not seen (nats); the bar is 2 %", ""]
    lines += ["| attention | " + " | ".join(f"step {n}" for n in at) + " | last / dense - 1 |"]
    lines += ["|---" * (len(at) + 2) + "|"]
    for name, losses in found.items():
        more = losses[at[-1]] / found["dense"][at[-1]] - 1
        lines.append(f"| {name} | " + " | ".join(f"{x:.3f}" for x in losses.values()) + f" | {more:+.1%} |")
    return lines


# Positions, needles, questions, keys, values, other symbols of the recall task.
_LENGTH, _NEEDLES, _ASKED, _KEYS, _VALUES, _NOISE = 128, 12, 8, 24, 24, 16
_HEADS = 4


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


# What part of dense attention's answers each seed is to give, at least; the others less than the last one.
_BARS = {"dense": 1.0, "S2": 0.98, "first layer dense, then S2": 0.99}
_BELOW = 0.7


def beside_the_bar(name: str, answers: list[float], dense: list[float]) -> str:
    """The seed that is nearest to the wrong side of its bar, in parts of dense attention, and what it should be."""
    mean = statistics.mean(dense)
    if mean == 0:
        return "dense answers none"
    if name in _BARS:
        worst = min(answers) / mean
        return f"{worst:.3f}, at least {_BARS[name]}" if name != "dense" else f"{worst:.3f}"
    return f"{max(answers) / mean:.3f}, below {_BELOW}"


def retrieval(steps: int, seeds: int) -> dict[str, list[float]]:
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


def table_of_retrieval(found: dict[str, list[float]]) -> list[str]:
    lines = ["", f"Recall of {_NEEDLES} pairs among {_LENGTH} positions: questions answered", ""]
    lines += [
        "| attention | part of the context that heads see | answered, each seed | worst seed / dense, and the bar |",
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


# --- output ---


def plot(results: dict[str, Any], path: Path) -> None:
    """Times as fast over length, beside the bound; and bytes of the cache."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install 'hecate-compile[benchmarks]'")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    rows = results.get("alone") or []
    if rows:
        lengths = [row["length"] for row in rows]
        left.plot(lengths, [1 / row["share"] for row in rows], "k--", label="bound by blocks")
        for key, label in (("forward", "forward"), ("both", "forward and backward")):
            values = [statistics.median(ratios(row[key], "s2", "dense")) for row in rows]
            left.plot(lengths, values, marker="o", label=label)
        if all("flex" in row["forward"] for row in rows):
            values = [statistics.median(ratios(row["forward"], "flex", "dense")) for row in rows]
            left.plot(lengths, values, marker="s", label="flex_attention, forward")
        left.set(xscale="log", xlabel="tokens", ylabel="times as fast as causal SDPA", ylim=(0, None))
        left.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
        left.legend()
    for heads in sorted({tuple(row["heads"]) for row in results.get("decode") or []}):
        mine = [row for row in results["decode"] if tuple(row["heads"]) == heads]
        values = [statistics.median(ratios(row["samples"], "s2", "dense")) for row in mine]
        right.plot([row["length"] for row in mine], values, marker="o", label=f"{heads[1]} heads of keys")
        kept = [row["bytes"][0] / row["bytes"][1] for row in mine]
        right.plot([row["length"] for row in mine], kept, "--", label=f"{heads[1]} heads of keys, bytes")
    right.set(xlabel="keys", ylabel="one token: times as fast, and times fewer bytes", ylim=(0, None))
    if results.get("decode"):
        right.legend()
    figure.savefig(path, dpi=120)


def write(path: Path, part: str, result: Any) -> None:
    """Put one part's samples into the file, which may hold other parts of other commits."""
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    kept = {name: one for name, one in kept.items() if name in PARTS and "commit" in one}
    kept[part] = {"commit": found.stdout.strip() or "unknown", "torch": torch.__version__, "result": result}
    path.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; by default the first three")
    parser.add_argument("--full", action="store_true", help="lengths up to 32,768, and more rounds")
    parser.add_argument("--flex", action="store_true", help="compiled flex_attention beside it, forward only")
    parser.add_argument("--rounds", type=int, help="calls of each system")
    parser.add_argument("--lengths", type=int, nargs="*", help="tokens, instead of the usual ones")
    parser.add_argument("--steps", type=int, help="of training, for quality: 1,000 of retrieval, 600 of language")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(PARTS)}")
    torch.set_num_threads(1)
    parts = args.parts or PARTS[:3]
    rounds = args.rounds or (7 if args.full else 5)
    lengths = args.lengths or [2048, 4096, 8192, *([16384, 32768] if args.full else [])]
    path = results_folder() / "attention.json"
    run: dict[str, Call] = {
        "alone": lambda: alone(lengths, rounds, with_flex=args.flex),
        "decode": lambda: decode(args.lengths or [8192, 32768, *([131072] if args.full else [])], 5 * rounds),
        "step": lambda: step(args.lengths[0] if args.lengths else 8192, rounds),
        "language": lambda: language(args.steps or 600),
        "retrieval": lambda: retrieval(args.steps or 1000, args.seeds),
    }
    results: dict[str, Any] = {}
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        # What would be measured is dense.
        warnings.filterwarnings("error", message=".*attention stays dense")
        for part in parts:
            results[part] = run[part]()
            write(path, part, results[part])
    tables = {
        "alone": table_of_alone, "decode": table_of_decode, "step": table_of_step, "language": table_of_language,
        "retrieval": table_of_retrieval,
    }  # fmt: skip
    for part in parts:
        print("\n".join(tables[part](results[part])))
    plot(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
