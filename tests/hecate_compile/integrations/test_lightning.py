"""HecateStrategy trains a LightningModule as Lightning's DDP does, and goes on after a kill from one checkpoint of
all ranks; DDP around a compiled model is refused by name."""

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
from torch import nn

import hecate
from hecate.compiled_model import is_compiled
from tests.support.extent import ALL
from tests.support.models import PlainLanguageModel, batch
from tests.support.parity import state_error
from tests.support.ranks import ROOT, message_of, run_ranks, torchrun

pytestmark = pytest.mark.distributed
_STEPS = 4


def _module(**children: nn.Module) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        """Written for one process; it knows nothing of Hecate."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = PlainLanguageModel(layers=1)
            # Frozen, and other ones on each rank until the strategy copies rank 0's.
            self.scale = nn.Parameter(torch.tensor(float(os.environ["RANK"])), requires_grad=False)
            self.register_buffer("steps", torch.zeros(()))
            for name, child in children.items():
                self.add_module(name, child)

        def training_step(self, ids: torch.Tensor, index: int) -> torch.Tensor:
            self.steps += 1
            loss: torch.Tensor = self.model(ids, ids)["loss"] * (1 + self.scale)
            self.log("loss", loss.detach(), sync_dist=True)
            return loss

        def validation_step(self, ids: torch.Tensor, index: int) -> None:
            self.log("validated", self.model(ids, ids)["loss"].detach(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Module()


def _rows() -> torch.utils.data.DataLoader[Any]:
    rows = [row for step in range(4) for row in batch(step, rows=4)]
    return torch.utils.data.DataLoader(rows, batch_size=2)


def _fit(strategy: Any, epochs: int = 2, ckpt_path: Path | None = None, **options: Any) -> tuple[Any, Any]:
    import lightning

    trainer = lightning.Trainer(
        max_epochs=epochs,
        limit_train_batches=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        devices=2,
        gradient_clip_val=0.05,
        accumulate_grad_batches=2,
        limit_val_batches=2,
        strategy=strategy,
        **({"enable_checkpointing": False} | options),
    )
    module = _module()
    trainer.fit(module, _rows(), _rows(), ckpt_path=ckpt_path)
    return trainer, module


def _strategy(**options: Any) -> Any:
    from hecate.lightning import HecateStrategy

    return HecateStrategy(hecate.Config(backend="aot_eager"), **options)


def train(folder: str) -> dict[str, Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    theirs, reference = _fit("ddp")
    expected = {name: value.clone() for name, value in reference.model.state_dict().items()}
    ours, module = _fit(_strategy())
    found: dict[str, Any] = {
        "compiled": is_compiled(module.model),
        "error": state_error(module.model.state_dict(), expected),
        "moved": state_error(expected, _module().model.state_dict()),
        "logged": {
            name: float(theirs.callback_metrics[name]) - float(value) for name, value in ours.callback_metrics.items()
        },
        "sampler": type(ours.train_dataloader.sampler).__name__,
    }
    # The same in two runs, the second of which goes on from what the first saved after its epoch.
    keep = ModelCheckpoint(dirpath=folder, filename="{step}", save_last=True, save_on_train_epoch_end=True)
    _fit(_strategy(), 1, enable_checkpointing=True, callbacks=[keep])
    dist.barrier()
    found["files"] = sorted(path.name for path in Path(folder).iterdir())
    again, module = _fit(_strategy(), ckpt_path=Path(folder, "last.ckpt"))
    found["resumed"] = state_error(module.model.state_dict(), expected)
    found["steps"], found["own"] = again.global_step, [float(module.scale), float(module.steps)]
    validated = again.validate(module, _rows(), ckpt_path=Path(folder, "last.ckpt"), verbose=False)
    found["validated"] = validated[0]["validated"]
    return found


def refuse() -> dict[str, str]:
    import lightning

    def fit(**options: Any) -> str:
        trainer = lightning.Trainer(
            max_steps=1,
            logger=False,
            accelerator="cpu",
            devices=2,
            strategy=_strategy(**options),
            enable_checkpointing=False,
        )
        return message_of(lambda: trainer.fit(_module(head=nn.Linear(2, 2)), _rows()))

    def fit_ddp() -> None:
        module = _module()
        hecate.compile(module.model, hecate.Config(backend="aot_eager"))
        lightning.Trainer(max_steps=1, logger=False, accelerator="cpu", devices=2, strategy="ddp").fit(
            module, _rows()
        )

    return {"which": fit(), "outside": fit(module="model"), "ddp": message_of(fit_ddp)}


def test_it_trains_saves_and_goes_on_as_ddp(tmp_path: Path) -> None:
    first, second = run_ranks(train, 2, folder=str(tmp_path))
    assert first["files"] == second["files"]
    for found in (first, second):
        assert found["compiled"] and found["sampler"] == "DistributedSampler"
        assert found["error"] < 1e-5 < found["moved"]
        assert found["logged"].keys() == {"loss", "validated"}
        assert all(abs(off) < 1e-5 for off in found["logged"].values())
        assert found["files"] == ["last.ckpt", "step=2.ckpt"]
        assert found["resumed"] < 1e-5 and found["steps"] == _STEPS
        assert found["validated"] > 0
        assert found["own"] == [0, 2 * _STEPS], "micro-batches that its own buffer counted in both runs"


def test_what_nobody_would_average_is_refused() -> None:
    for found in run_ranks(refuse, 2):
        assert "2 children with parameters (model, head). Say which is the model" in found["which"]
        assert "HecateStrategy" in found["ddp"]
        assert "head.weight and 1 more parameters are outside of model" in found["outside"]


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


def test_the_example_goes_on_after_a_kill(tmp_path: Path) -> None:
    killed = run_example(tmp_path / "killed", kill_after="last.ckpt/step-00000014")
    assert killed.keys() == {(rank, str(step)) for rank in "01" for step in range(3 * 14)}
    assert killed["0", "41"] < killed["0", "0"] - 1
    assert killed["0", "0"] != killed["1", "0"], "ranks have batches of their own"
    # That losses are those of a run without a kill is tested above, too, without torchrun.
    if ALL:
        whole = run_example(tmp_path / "whole")
        # Replicas, which depend on measured rates, change the order of sums.
        off = max(abs(killed[key] - loss) for key, loss in whole.items())
        assert off < 1e-5, off
