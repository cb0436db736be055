"""A strategy for Lightning's Trainer: ranks have data of their own, and write one checkpoint together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from hecate import Config, compile, load, save
from hecate.compiled_model import is_compiled
from hecate.private import is_persistent
from hecate.runtime.comm.start import start_process_group


class HecateStrategy(DDPStrategy):
    """Trains a LightningModule whose model is compiled by :func:`hecate.compile`, on the ranks that torchrun started.

    >>> trainer = lightning.Trainer(devices=2, strategy=HecateStrategy())  # doctest: +SKIP

    Samplers, loggers, ``self.log(sync_dist=True)``, accumulation and clipping are as with Lightning's ``"ddp"``. A
    checkpoint is a folder that :func:`hecate.save` writes, and is gone on from on any number of ranks.

    Args:
        config: how the model is compiled; by default as :class:`Config` is.
        module: the name of the model in the LightningModule. By default the only child that has parameters, or the
            one that was compiled already.
        options: those of ``DDPStrategy`` about the process group.

    ``Trainer.fit`` raises ValueError if parameters are outside of the model, whose gradients nobody would average.
    """

    strategy_name = "hecate"

    def __init__(self, config: Config | None = None, *, module: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._config, self._name = config, module

    @property
    def compiled(self) -> Any:
        """The compiled model in the LightningModule."""
        assert self.lightning_module is not None and self._name is not None
        return self.lightning_module.get_submodule(self._name)

    def setup_distributed(self) -> None:
        if "TORCHELASTIC_RUN_ID" in os.environ and not dist.is_initialized():
            # Lightning's own start finds the addresses of dead ranks when torchrun starts all of them again.
            start_process_group("", lambda _: self._get_process_group_backend(), timeout=self._timeout)
        super().setup_distributed()

    def setup(self, trainer: pl.Trainer) -> None:
        # Not that of DDPStrategy, which copies rank 0's parameters, and so its experts, where it does not wrap them.
        Strategy.setup(self, trainer)

    def _setup_model(self, model: nn.Module) -> Any:
        self._name = self._name or _name_of_model(model)
        assert self.lightning_module is not None
        if self._layer_sync is not None:
            raise ValueError("hecate: sync_batchnorm is not there; buffers are rank 0's in each forward, as with DDP")
        inside = {id(parameter) for parameter in self.compiled.parameters()}
        outside = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
        if outside and self._is_fitting:
            raise ValueError(
                f"hecate: {outside[0]} and {len(outside) - 1} more parameters are outside of {self._name}, which is "
                "compiled, so nobody would average their gradients. Put them into it, or freeze them."
            )
        if not is_compiled(self.compiled):
            compile(self.compiled, self._config)
        if dist.is_initialized():
            for tensor in self.lightning_module_state_dict().values():
                dist.broadcast(tensor, 0)
        return model

    @property
    def _is_fitting(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.compiled.no_sync():
            yield

    # --- checkpoints: Hecate has the model and its optimizers, Lightning all else ---

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return what the LightningModule has besides the model, such as buffers of metrics and frozen parameters."""
        assert self.lightning_module is not None
        inside, found = {*self.compiled.modules()}, dict[str, Any]()
        for name, part in self.lightning_module.named_modules():
            if part not in inside:
                own = {key: parameter.detach() for key, parameter in part.named_parameters(recurse=False)}
                own |= {key: value for key, value in part.named_buffers(recurse=False) if is_persistent(part, key)}
                found |= {f"{name}.{key}".lstrip("."): value for key, value in own.items()}
        return found

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder. All ranks call it together, as ``Trainer.save_checkpoint`` does."""
        if storage_options is not None:
            raise ValueError("hecate: a checkpoint has no storage_options; it is written to a folder")
        optimizers = self.optimizers if "optimizer_states" in checkpoint else None
        path, whole = Path(filepath), Path(filepath).exists()
        # Lightning takes a path that is there for a checkpoint, so it must not appear before it is one.
        folder = path if whole else path.with_name(f".{path.name}.part")
        self.barrier()
        save(folder, self.compiled, optimizers, step=checkpoint["global_step"], extra=checkpoint, keep=1)
        if not whole and self.is_global_zero:
            folder.rename(path)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the model, and in ``fit`` its optimizers, and return what Lightning knows; a collective."""
        loaded = load(Path(checkpoint_path), self.compiled, self.optimizers if self._is_fitting else None)
        checkpoint: dict[str, Any] = loaded.extra
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)


def _name_of_model(module: nn.Module) -> str:
    """Return the name of the child that is compiled, or to be."""
    compiled = [name for name, part in module.named_modules() if is_compiled(part)]
    children = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    for names in (compiled, children):
        if len(names) == 1:
            return names[0]
    raise ValueError(
        f"hecate: {type(module).__name__} has {len(compiled)} compiled models and {len(children)} children with "
        f"parameters ({', '.join(children) or 'none'}). Say which is the model: HecateStrategy(module=...)"
    )
