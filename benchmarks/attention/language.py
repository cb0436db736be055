"""What a byte-level language model learns, dense and with S2."""

from __future__ import annotations

import statistics
import sysconfig
from pathlib import Path
from typing import Any

import torch

import hecate


def run(steps: int) -> dict[str, Any]:
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
                vocab_size=256,
                hidden_size=96,
                moe_intermediate_size=96,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=4,
                head_dim=24,
                num_experts=8,
                num_experts_per_tok=2,
                max_position_embeddings=length,
                use_cache=False,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
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


def table(found: dict[str, Any]) -> list[str]:
    at = list(next(iter(found.values())))
    lines = ["", "Loss of a byte-level model on text that it has not seen (nats); the bar is 2 %", ""]
    lines += ["| attention | " + " | ".join(f"step {n}" for n in at) + " | last / dense - 1 |"]
    lines += ["|---" * (len(at) + 2) + "|"]
    for name, losses in found.items():
        more = losses[at[-1]] / found["dense"][at[-1]] - 1
        lines.append(f"| {name} | " + " | ".join(f"{x:.3f}" for x in losses.values()) + f" | {more:+.1%} |")
    return lines
