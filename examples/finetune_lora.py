"""Fine-tune an MoE model with PEFT's LoRA, on attention and on the experts themselves.

    torchrun --nproc-per-node 2 examples/finetune_lora.py [folder]

Without a hub there are no pretrained weights here: a small model learns one file of Python's standard library, and
the adapters another one. Everything that is Hecate is marked.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import hecate  # 1

RANK, LOCAL_RANK = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
# Ranks share GPUs if there are too few.
DEVICE = f"cuda:{LOCAL_RANK % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"


def batches(name: str, steps: int, rows: int = 8, length: int = 64) -> list[torch.Tensor]:
    """This rank's batches, of the bytes of a file."""
    text = torch.tensor(list(Path(sysconfig.get_path("stdlib"), name).read_bytes()))
    generator = torch.Generator().manual_seed(RANK)
    starts = torch.randint(len(text) - length, (steps, rows), generator=generator)
    return [torch.stack([text[start : start + length] for start in one]) for one in starts.tolist()]


def train(model: torch.nn.Module, name: str, steps: int, lr: float) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for step, batch in enumerate(batches(name, steps), start=1):
        ids = batch.to(DEVICE)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        hecate.clip_grad_norm_(model, 1.0)  # 2
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if RANK == 0 and step % 20 == 0:
            print(f"{name}: steps {step - 19} to {step}, mean loss {sum(losses[-20:]) / 20:.3f}", flush=True)


def build() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_experts=8,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3MoeForCausalLM(config)


torch.manual_seed(0)
config = hecate.Config(backend="aot_eager")  # 3; without it, Inductor
pretrained = hecate.compile(build().to(DEVICE), config)
train(pretrained, "argparse.py", steps=60, lr=5e-3)
weights = pretrained.state_dict()  # on all ranks, whole

model = build().to(DEVICE)
model.load_state_dict(weights)
lora = LoraConfig(
    r=8,
    lora_alpha=16,
    target_modules=["q_proj", "v_proj"],
    target_parameters=["experts.gate_up_proj", "experts.down_proj"],
)
model = hecate.compile(get_peft_model(model, lora), config)  # 4; after get_peft_model
train(model, "ast.py", steps=60, lr=5e-3)

folder = sys.argv[1] if len(sys.argv) > 1 else "build/lora"
model.save_pretrained(folder, is_main_process=RANK == 0)  # on all ranks, because it gathers
if RANK == 0:
    print(f"adapters are in {folder}: {sorted(path.name for path in Path(folder).iterdir())}")
