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
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import hecate  # 1

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "build/lightning")
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DEVICE = torch.device("cpu")
if torch.cuda.is_available():
    DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        model = Qwen3MoeForCausalLM(
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
        # 2; without the Config it is compiled by Inductor
        self.model = hecate.compile(model.to(DEVICE), hecate.Config(backend="aot_eager"))

    def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        print(f"rank {RANK} epoch {self.current_epoch} step {self.global_step} loss {loss.item():.9f}", flush=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        schedule = LinearLR(optimizer, total_iters=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_fit_start(self) -> None:
        loaded = hecate.load(FOLDER, self.model, self.optimizers().optimizer, required=False)  # 3
        if loaded is not None:
            self.lr_schedulers().load_state_dict(loaded.extra["schedule"])
            self.trainer.fit_loop.load_state_dict(loaded.extra["loop"])

    def on_train_epoch_end(self) -> None:
        extra = {"schedule": self.lr_schedulers().state_dict(), "loop": self.trainer.fit_loop.state_dict()}
        hecate.save(  # 4
            FOLDER, self.model, self.optimizers().optimizer, step=self.global_step, extra=extra, keep=2
        )


def sequences(name: str, length: int = 64) -> torch.Tensor:
    """The bytes of a file of Python's standard library, cut into pieces."""
    text = torch.tensor(list(Path(sysconfig.get_path("stdlib"), name).read_bytes()))
    return text[: len(text) // length * length].view(-1, length)


lightning.seed_everything(0)
module = Module()
data = sequences("shlex.py")
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=RANKS, rank=RANK))  # 5
trainer = lightning.Trainer(
    strategy=SingleDeviceStrategy(DEVICE),
    max_epochs=3,
    gradient_clip_val=1.0,
    enable_checkpointing=False,
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(module, loader)
