"""Lightning on a compiled model: train, save after each epoch, go on after a kill.

    torchrun --nproc-per-node 2 examples/lightning_module.py [folder]

Everything that is Hecate is marked.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import hecate  # 1
from hecate.lightning import HecateStrategy  # 2

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "build/lightning")
HERE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=256,
                hidden_size=64,
                moe_intermediate_size=64,
                num_hidden_layers=2,
                num_experts=8,
                num_experts_per_tok=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                bos_token_id=None,
                eos_token_id=None,
            )
        )

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        where = f"rank {self.global_rank} epoch {self.current_epoch} step {self.global_step}"
        print(f"{where} loss {loss.item():.9f}", flush=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        schedule = LinearLR(optimizer, total_iters=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def sequences(name: str, length: int = 64) -> torch.Tensor:
    """The bytes of a file of Python's standard library, cut into pieces."""
    text = torch.tensor(list(Path(sysconfig.get_path("stdlib"), name).read_bytes()))
    return text[: len(text) // length * length].view(-1, length)


lightning.seed_everything(0)
trainer = lightning.Trainer(
    # 3; without the Config the model is compiled by Inductor
    strategy=HecateStrategy(hecate.Config(backend="aot_eager")),
    devices=HERE,
    num_nodes=int(os.environ.get("WORLD_SIZE", 1)) // HERE,
    callbacks=[ModelCheckpoint(FOLDER, save_last=True)],
    max_epochs=3,
    gradient_clip_val=1.0,
    enable_progress_bar=False,
    logger=False,
)
last = FOLDER / "last.ckpt"
trainer.fit(
    Module(), DataLoader(sequences("shlex.py"), batch_size=8, shuffle=True), ckpt_path=last if last.exists() else None
)
