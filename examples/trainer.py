"""transformers.Trainer as it is, on a compiled model: train, evaluate, save.

    torchrun --nproc-per-node 2 examples/trainer.py [folder]

Everything that is Hecate is marked.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

import hecate  # 1


def sequences(name: str, length: int = 64) -> list[dict[str, list[int]]]:
    """The bytes of a file of Python's standard library, cut into pieces."""
    text = list(Path(sysconfig.get_path("stdlib"), name).read_bytes())
    pieces = [text[start : start + length] for start in range(0, len(text) - length, length)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


model = Qwen3MoeForCausalLM(
    Qwen3MoeConfig(
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
)
if torch.cuda.is_available():
    # Where the Trainer will want it: behind hecate.compile a model stays where it is.
    model.to(f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}")
hecate.compile(model, hecate.Config(backend="aot_eager"))  # 2; without the Config it is compiled by Inductor
trainer = Trainer(
    model,
    TrainingArguments(
        sys.argv[1] if len(sys.argv) > 1 else "build/trainer",
        max_steps=40,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        report_to="none",
    ),
    train_dataset=sequences("argparse.py"),
    eval_dataset=sequences("shlex.py"),
)
trainer.train()
trainer.save_model()
