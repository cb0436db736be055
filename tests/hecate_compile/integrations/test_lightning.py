"""Lightning: SingleDeviceStrategy in every rank trains as one process, and goes on after a kill as if there had been
none; its DDP strategy is refused by name."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hecate
from tests.support.models import PlainLanguageModel, batch
from tests.support.parity import state_error
from tests.support.ranks import ROOT, message_of, run_ranks, torchrun

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
        max_steps=_STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accelerator="cpu",
        gradient_clip_val=_CLIP,
        use_distributed_sampler=False,
        **strategy,
    )
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


def run_example(folder: Path, *, kill_after: str = "") -> dict[tuple[str, ...], float]:
    """The losses of each rank and step of the example, as last said; a rank is killed once ``kill_after`` exists."""
    command = [
        *torchrun(2),
        "--max-restarts",
        str(int(bool(kill_after))),
        "--monitor-interval",
        "0.1",
        str(ROOT / "examples" / "lightning_module.py"),
        str(folder),
    ]
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        agent = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            if kill_after:
                end = time.monotonic() + 150
                while not (folder / kill_after).exists() and agent.poll() is None and time.monotonic() < end:
                    time.sleep(0.02)
                workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
                os.kill(int(workers[-1]), signal.SIGKILL)
            code = agent.wait(200)
        finally:
            agent.terminate()
    said = log.read_text()
    assert code == 0, said[-4000:]
    assert said.count("rank 0 epoch 0 step 0 ") == 1, said[-4000:]
    losses = re.findall(r"rank (\d) epoch \d step (\d+) loss (\d+\.\d{9})", said)
    return {(rank, step): float(loss) for rank, step, loss in losses}


@pytest.mark.distributed
def test_the_example_goes_on_after_a_kill(tmp_path: Path) -> None:
    whole = run_example(tmp_path / "whole")
    killed = run_example(tmp_path / "killed", kill_after="step-00000014")
    assert len(whole) == 2 * 3 * 14 and whole.keys() == killed.keys()
    # Replicas, which depend on measured rates, change the order of sums.
    off = max(abs(killed[key] - loss) for key, loss in whole.items())
    assert off < 1e-5, off
    assert whole["0", "41"] < whole["0", "0"] - 1
    assert whole["0", "0"] != whole["1", "0"], "ranks have batches of their own"
