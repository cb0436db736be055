"""Replace every dense parameter by this rank's rows of it.

A shard is a plain ``nn.Parameter`` ``[ceil(d / W), ...]`` under the parameter's old name, with a
:class:`hecate.runtime.ops.dense.DenseShard` record attached. The model's ``state_dict()`` still shows one full
``[d, ...]`` tensor per name, and ``load_state_dict()`` takes it back.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hecate.runtime.comm import collectives
from hecate.runtime.ops.dense import DenseShard, add_dense_shard
from hecate.runtime.ops.gradients import GradientSync
from hecate.wrap.find_experts import ExpertsModule

_SHARD = "_hecate_dense_shard"


def dense_shard_of(parameter: torch.Tensor | None) -> DenseShard | None:
    """The record of a dense parameter's shard; None for every other tensor."""
    return getattr(parameter, _SHARD, None)


class Places:
    """Where the parameters of a model hang: ``(module, key)``, several for a tied one."""

    def __init__(self, model: nn.Module) -> None:
        # By id, so that a parameter's memory is free as soon as it is replaced.
        self._of: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._of.setdefault(id(parameter), []).append((module, key))

    def of(self, parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
        return self._of[id(parameter)]

    def replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Hang ``new`` wherever ``old`` is."""
        self._of[id(new)] = self._of.pop(id(old))
        for module, key in self.of(new):
            module._parameters[key] = new


class DenseSharding:
    """Shards the dense parameters of one model, one module at a time."""

    def __init__(self, found: Sequence[ExpertsModule], places: Places, sync: GradientSync) -> None:
        self._experts = {id(e.module): e.parameters for e in found}
        self._places, self._sync = places, sync
        # Tied parameters are one tensor in a state dict too.
        self._gathered: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def keys(self, module: nn.Module) -> tuple[str, ...]:
        """The module's own parameters that are to be sharded.

        Not those with fewer than two rows, and not those of ``nn.LSTM`` and its kin, which keep and read their
        parameters elsewhere.
        """
        return tuple(
            key
            for key, parameter in module._parameters.items()
            if parameter is not None
            and key not in self._experts.get(id(module), ())
            and dense_shard_of(parameter) is None
            and parameter.ndim > 0
            and parameter.shape[0] > 1
            and parameter.numel() > 0
            and not any(hasattr(holder, "_flat_weights") for holder, _ in self._places.of(parameter))
        )

    def shard_all(self, model: nn.Module) -> None:
        """:meth:`shard` every module of ``model``."""
        for name, module in model.named_modules():
            self.shard(name, module)

    def shard(self, name: str, module: nn.Module) -> None:
        """Keep this rank's rows of the module's dense parameters, with rank 0's values, and free the rest.

        A collective. Parameters may be on the meta device on ranks other than 0.
        """
        for key in self.keys(module):
            full = module._parameters[key]
            if full is not None and dense_shard_of(full) is None:
                self._shard_parameter(f"{name}.{key}".lstrip("."), full)
        firsts = {
            key: self._places.of(parameter)[0]
            for key, parameter in module._parameters.items()
            if parameter is not None and dense_shard_of(parameter) is not None
        }
        if firsts:
            _keep_state_dict_full(module, firsts, self._gathered)

    def _shard_parameter(self, name: str, full: nn.Parameter) -> None:
        world = self._sync.world
        record = add_dense_shard(name, full.shape, self._sync)
        with torch.no_grad():
            local = torch.zeros(record.shape, dtype=full.dtype, device=world.device)
            mine = local[: record.counts[world.rank]]
            collectives.scatter_rows(full.detach() if world.rank == 0 else None, mine, record.counts, world)
        self._places.replace(full, _as_shard(local, record, requires_grad=full.requires_grad))


def _as_shard(local: torch.Tensor, record: DenseShard, *, requires_grad: bool) -> nn.Parameter:
    parameter = nn.Parameter(local, requires_grad=requires_grad)
    setattr(parameter, _SHARD, record)
    return parameter


# --- one logical tensor in state_dict ---


def _keep_state_dict_full(
    module: nn.Module,
    firsts: dict[str, tuple[nn.Module, str]],
    gathered: weakref.WeakValueDictionary[int, torch.Tensor],
) -> None:
    """``firsts`` has the module's keys, and the first place of the parameter: another one if it is tied."""

    def gather(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key, first in firsts.items():
            parameter = state.get(prefix + key)
            if parameter is None:
                continue
            record = _record(module, prefix, key)
            full = gathered.get(record.id)
            if first == (module, key) or full is None or not any(value is full for value in state.values()):
                (full,) = torch.ops.hecate.gather_dense([parameter.detach()], [record.id], None)
                gathered[record.id] = full
            state[prefix + key] = full

    def slice(
        module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        for key, (first, first_key) in firsts.items():
            current, full = module._parameters[key], state.get(prefix + key)
            if full is None or current is None:
                continue
            record = _record(module, prefix, key)
            if tuple(full.shape) != tuple(record.full_shape):
                errors.append(
                    f"{prefix + key}: the checkpoint has {list(full.shape)}, the model {list(record.full_shape)}. "
                    "hecate models load full tensors; every rank slices its rows itself."
                )
                del state[prefix + key]
                continue
            loaded = first._parameters[first_key]
            if metadata.get("assign_to_params_buffers") and loaded is not current:
                # The first place of a tied parameter has its new shard already. A second one would train apart.
                state[prefix + key] = loaded
            else:
                local = record.slice(full.detach())
                state[prefix + key] = _as_shard(local, record, requires_grad=current.requires_grad)

    module.register_state_dict_post_hook(gather)
    module.register_load_state_dict_pre_hook(slice)


def _record(module: nn.Module, prefix: str, key: str) -> DenseShard:
    record = dense_shard_of(module._parameters[key])
    if record is None:
        raise RuntimeError(
            f"hecate: {prefix + key} is no longer the shard that hecate.compile made; something replaced the "
            "parameter. Load weights with load_state_dict."
        )
    return record
