"""Attention with the mask that transformers passes, beside attention that is causal by hand.

    python -m benchmarks.attention_mask            about 6 minutes on one core
    python -m benchmarks.attention_mask --launches 1 --length 2048

Forward and backward of a Qwen3-MoE in which attention is most of the work, 4,096 tokens, one thread, Inductor:

    hecate         the model as it is; drop_causal_masks finds out that its mask is causal
    without        the same with that pass switched off, so attention gets the mask
    by hand        the user's own attention function, which passes is_causal=True and takes no mask
    by hand, gqa   the same, with grouped keys and values instead of repeated ones

Systems alternate step by step in one process. A ratio is that of two steps of the same round; its median over all
rounds of all launches is given with the quartiles, and with the lowest and highest median of a launch. Samples are
written to build/benchmarks/attention_mask.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.results_folder import results_folder

BASELINE = "by hand"


def by_hand(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """Attention as a user of transformers writes it who knows that nothing is padded."""
    from transformers.integrations.sdpa_attention import repeat_kv

    groups = module.num_key_value_groups
    return _causal(query, repeat_kv(key, groups), repeat_kv(value, groups), options["scaling"])


def by_hand_grouped(
    module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    return _causal(query, key, value, options["scaling"], enable_gqa=True)


def _causal(query: Any, key: Any, value: Any, scale: float, **options: Any) -> tuple[torch.Tensor, None]:
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, **options)
    return out.transpose(1, 2).contiguous(), None


# Name of the attention function, passes that are off.
SYSTEMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hecate": ("sdpa", ()),
    "without": ("sdpa", ("drop_causal_masks",)),
    "by hand": ("by_hand", ()),
    "by hand, gqa": ("by_hand_grouped", ()),
}


def build_model(attention: str, length: int) -> torch.nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=128,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=length,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation=attention,
        )
    )


def launch(length: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of forward and backward for each system, in one process."""
    from transformers import AttentionInterface

    import hecate

    torch.set_num_threads(1)
    AttentionInterface.register("by_hand", by_hand)
    AttentionInterface.register("by_hand_grouped", by_hand_grouped)
    models = {
        name: hecate.compile(build_model(attention, length), hecate.Config(disable_passes=off))
        for name, (attention, off) in SYSTEMS.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in models}
    losses: dict[str, float] = {}
    ids = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(0))
    for index in range(rounds + 1):
        for name, model in models.items():
            start = time.perf_counter()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            # The first round compiles.
            if index:
                samples[name].append(time.perf_counter() - start)
            losses[name] = loss.item()
            model.zero_grad()
    assert max(losses.values()) - min(losses.values()) < 1e-5, losses
    return samples


def run_child(length: int, rounds: int, caches: str) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        numbers = ["--length", str(length), "--rounds", str(rounds)]
        subprocess.run(
            [sys.executable, "-m", "benchmarks.attention_mask", *numbers, "--child", str(out)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": caches},
            check=True,
            timeout=1200,
        )
        found: dict[str, list[float]] = json.loads(out.read_text())
        return found


def table(launches: list[dict[str, list[float]]]) -> str:
    """Median times, and ratios to attention by hand, as Markdown."""
    lines = [f"| system | forward + backward, s | ratio to {BASELINE} | launches |", "|---|---|---|---|"]
    for system in SYSTEMS:
        times = [value for samples in launches for value in samples[system]]
        by_launch = [[a / b for a, b in zip(samples[system], samples[BASELINE], strict=True)] for samples in launches]
        low, ratio, high = statistics.quantiles([r for ratios in by_launch for r in ratios], n=4, method="inclusive")
        medians = [statistics.median(ratios) for ratios in by_launch]
        lines.append(
            f"| {system} | {statistics.median(times):.2f} | {ratio:.3f} ({low:.3f} - {high:.3f}) | "
            f"{min(medians):.3f} - {max(medians):.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="tokens")
    parser.add_argument("--rounds", type=int, default=6, help="steps of each system in a launch")
    parser.add_argument("--launches", type=int, default=3, help="processes, one after another")
    parser.add_argument("--child", metavar="OUT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        Path(args.child).write_text(json.dumps(launch(args.length, args.rounds)))
        return
    with tempfile.TemporaryDirectory() as caches:
        launches = [run_child(args.length, args.rounds, caches) for _ in range(args.launches)]
    results = {"length": args.length, "torch": torch.__version__, "launches": launches}
    (results_folder() / "attention_mask.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(launches))


if __name__ == "__main__":
    main()
