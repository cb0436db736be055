"""Balance experts without a load-balancing loss: biases of the routers follow the loads.

    torchrun --nproc-per-node 2 examples/aux_free.py
    torchrun --nproc-per-node 2 examples/aux_free.py --rate 0     biases stand still

A small DeepSeek-V3 with random weights, whose routers have favourites, learns the bytes of Python's standard library.
MaxVio is by how much the busiest expert of a layer has more rows than the mean, relative to it. Everything that is
Hecate is marked.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import hecate  # 1

ROWS, LENGTH = 16, 64


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1e-2, help="how far a bias moves in a step")
    parser.add_argument("--backend", choices=["inductor", "aot_eager"], default="aot_eager")
    return parser.parse_args()


def build() -> DeepseekV3ForCausalLM:
    """The same weights in every process; some experts have larger scores than others."""
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        first_k_dense_replace=0,
        n_routed_experts=16,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.e_score_correction_bias += torch.linspace(0.2, 0.0, config.n_routed_experts)
    return model


def main() -> None:
    args = parse_arguments()
    folder = Path(sysconfig.get_path("stdlib"))
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:40])))
    model = build()
    if torch.cuda.is_available():
        model.to(f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}")
    hecate.compile(model, hecate.Config(backend=args.backend))  # 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if args.rate:
        hecate.balance_bias(model, rate=args.rate)  # 3
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = next(model.parameters()).device
    for step in range(args.steps):
        starts = torch.randint(len(text) - LENGTH, (ROWS, 1), generator=torch.Generator().manual_seed(step))
        ids = text[starts + torch.arange(LENGTH)].tensor_split(size)[rank].to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.steps - 1:
            violations = [layer.max_violation for layer in hecate.stats(model).layers]  # 4
            mean = loss.detach()
            if size > 1:
                dist.all_reduce(mean)
            if rank == 0:
                shown = " ".join(f"{violation:.2f}" for violation in violations)
                print(f"step {step}: loss {float(mean) / size:.3f}, MaxVio of layers {shown}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
