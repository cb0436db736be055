"""Lightning: SingleDeviceStrategy in every rank trains as one process; its DDP strategy is refused by name."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hecate
from tests.support.models import PlainLanguageModel, batch
from tests.support.parity import state_error
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.integrations.test_lightning"
_STEPS, _CLIP = 3, 0.05


def plain() -> PlainLanguageModel:
    torch.manual_seed(0)
    return PlainLanguageModel(layers=1)


def fit(strategy: Any) -> PlainLanguageModel:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = hecate.compile(plain(), hecate.Config(backend="aot_eager"))

        def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
            return self.model(ids, ids)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)

    rank = int(os.environ["RANK"])
    mine = [row for step in range(_STEPS) for row in batch(step, rows=4).chunk(2)[rank]]
    trainer = lightning.Trainer(
        max_steps=_STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        gradient_clip_val=_CLIP, use_distributed_sampler=False, **strategy,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(mine, batch_size=2))
    return module.model


def train() -> dict[str, Any]:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    model = fit({"strategy": SingleDeviceStrategy(torch.device("cpu"))})
    reference = plain()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.9)
    for step in range(_STEPS):
        optimizer.zero_grad()
        ids = batch(step, rows=4)
        reference(ids, ids)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), _CLIP)
        optimizer.step()
    state = model.state_dict()
    error = state_error(state, reference.state_dict())
    moved = state_error(state, plain().state_dict())
    dist.barrier()
    return {"error": error, "moved": moved, "ddp": message_of(lambda: fit({"strategy": "ddp", "devices": 2}))}


@pytest.mark.distributed
def test_lightning() -> None:
    for found in run_ranks(f"{_HERE}:train", 2):
        assert found["error"] < 1e-6 < found["moved"]
        assert "SingleDeviceStrategy" in found["ddp"]
