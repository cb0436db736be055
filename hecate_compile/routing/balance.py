"""Biases by which routers choose, moved towards equal loads: balance without a loss."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hecate.compiled_model import CompiledModel, compiled_model_of
from hecate.private import buffers_of, parameters_of
from hecate.routing.routers import layers_with_routers
from hecate.runtime.comm import collectives
from hecate.runtime.comm.history import doing
from hecate.runtime.comm.warn import warn_together
from hecate.runtime.state.layer import Layer
from hecate.wrap.shard import shard_of

_NAME = "balance_bias"


def balance_bias(model: nn.Module, *, rate: float = 1e-3) -> BiasBalance:
    """Move the biases by which routers choose after each optimizer step, so that experts get equally many tokens.

        model = hecate.compile(model)
        optimizer = torch.optim.AdamW(model.parameters())
        hecate.balance_bias(model)

    An expert to which fewer rows went than to the mean of its layer, over all ranks and all forwards for training
    since the step before (of a layer that is called again in a forward, in its last call), gets ``rate`` more, one
    with more rows ``rate`` less. Only the choice of experts depends on the bias, not the weights of their results, so
    that no gradient pulls the model away from its task. Every rank knows all counts and moves its own copy, the same
    to the bit; in several groups of ranks a step is one all-reduce. Biases are buffers or frozen parameters of the
    model, so checkpoints and state dicts have them.

    Args:
        model: compiled, with a correction bias ``[E]`` in float32 beside experts, such as ``e_score_correction_bias``
            of DeepSeek-V3 and its kin. Layers without one stay as they are, with a warning.
        rate: how far a bias moves in one step, in units of scores.

    Raises:
        ValueError: the model was not compiled, has no such bias, or one that cannot be moved, or its biases are
            balanced already; or the rate is not positive. At the end of a forward: a layer gathers its experts, so
            that nobody counts rows.

    Source: "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (2024).
    """
    state = compiled_model_of(model, _NAME)
    if not (isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 < rate < math.inf):
        raise ValueError(f"hecate.{_NAME}: rate={rate!r}, expected a positive number")
    if _NAME in state.forward.after:
        raise ValueError(f"hecate.{_NAME}: the biases of this model are balanced already")
    layers = layers_with_routers(state)
    if not layers:
        raise ValueError(f"hecate.{_NAME}: this model has no sharded experts, so nobody counts their rows")
    if state.policy_without_placement == "gather":
        raise ValueError(f'hecate.{_NAME}: with policy="gather" nobody counts the rows of experts')
    found = {layer: bias for layer in layers.values() if (bias := _bias_of(model, layer)) is not None}
    without = [name for name, layer in layers.items() if layer not in found]
    if not found:
        raise ValueError(
            f"hecate.{_NAME}: no layer has a bias of its experts' scores, a buffer or a frozen parameter beside "
            f"{', '.join(layers)}: routers choose by scores alone"
        )
    if without:
        warn_together(f"hecate.{_NAME}: {', '.join(without)} have no bias and stay as they are", state.world.rank)
    return BiasBalance(model, state, found, float(rate))


class BiasBalance:
    """Biases that follow the loads of a model until :meth:`remove`."""

    def __init__(
        self, model: nn.Module, state: CompiledModel, biases: dict[Layer, tuple[nn.Module, str]], rate: float
    ) -> None:
        # Weak: torch holds the hook, and with it this.
        self._model, self._forward, self._mesh = weakref.ref(model), weakref.ref(state.forward), state.mesh
        self._biases, self._rate = biases, rate
        self._rows: dict[Layer, Tensor] = {}
        # What was counted last, as a layer that does not run keeps it.
        self._seen: dict[Layer, Tensor | None] = {}
        self._backend = state.backend
        state.forward.after[_NAME] = self._count
        self._hook = register_optimizer_step_post_hook(self._after_step)
        weakref.finalize(model, self._hook.remove).atexit = False

    def remove(self) -> None:
        """Leave biases as they are from now on."""
        self._hook.remove()
        forward = self._forward()
        if forward is not None:
            forward.after.pop(_NAME, None)

    def _count(self) -> None:
        model = self._model()
        if model is None or not model.training or not torch.is_grad_enabled():
            return
        gathering = {skip.where: skip.reason for _, skip in self._backend.skips if skip.fallback}
        for layer in self._biases:
            if layer.name in gathering:
                raise ValueError(
                    f"hecate.{_NAME}: {layer.name} gathers its experts, so that its rows are not counted: "
                    f"{gathering[layer.name]}"
                )
            if layer.counts is None or layer.counted is self._seen.get(layer):
                continue
            self._seen[layer] = layer.counted
            rows = layer.counts.sum(0)
            self._rows[layer] = self._rows[layer] + rows if layer in self._rows else rows

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        model = self._model()
        if model is None or not self._rows or not _has_parameters_of(optimizer, model):
            return
        rows, self._rows = self._of_all_groups(), {}
        for layer, counts in rows.items():
            owner, key = self._biases[layer]
            # Looked up each time: ``load_state_dict(assign=True)`` makes another tensor.
            bias = dict(_fixed_tensors(owner))[key]
            # Whole numbers, so that no rounding depends on the order of ranks: the sum is E times the mean.
            missing = torch.sign(counts.sum() - counts * counts.numel())
            bias.add_((missing.to(bias.device, bias.dtype) * self._rate).view(bias.shape))

    def _of_all_groups(self) -> dict[Layer, Tensor]:
        twins = self._mesh.twins
        if twins.group is None:
            return self._rows
        twins.queue.drain()
        flat = torch.cat([rows.to(twins.control_device) for rows in self._rows.values()])
        with doing(f"hecate.{_NAME}"):
            collectives.all_reduce(flat, twins)
        parts = flat.split([rows.numel() for rows in self._rows.values()])
        return dict(zip(self._rows, parts, strict=True))


def _has_parameters_of(optimizer: Optimizer, model: nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def _bias_of(model: nn.Module, layer: Layer) -> tuple[nn.Module, str] | None:
    """Return the module that has a layer's correction bias, and its name there; None if it has none."""
    around, _, own = layer.name.rpartition(".")
    # A module that is in a list has its router inside; others have it beside.
    inside = layer.name if own.isdigit() else around
    found = {
        f"{name}.{key}".removeprefix("."): (owner, key, tensor)
        for name, owner in model.get_submodule(inside).named_modules(prefix=inside)
        for key, tensor in _fixed_tensors(owner)
        # The bias of a linear layer is in the weights of experts, too.
        if "bias" in key and key != "bias" and tensor.numel() == layer.num_experts
    }
    if not found:
        return None
    if len(found) > 1:
        raise ValueError(
            f"hecate.{_NAME}: expected one bias of {layer.num_experts} numbers beside {layer.name}, and there are "
            f"{', '.join(found)}"
        )
    ((name, (owner, key, tensor)),) = found.items()
    if tensor.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"hecate.{_NAME}: {name} is {tensor.dtype}, in which small steps are lost. Keep it in float32"
        )
    if shard_of(tensor) is not None:
        raise ValueError(f'hecate.{_NAME}: {name} is split by Config(dense="shard"); keep dense parameters whole')
    return owner, key


def _fixed_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a module and its parameters that are not trained."""
    yield from ((key, tensor) for key, tensor in buffers_of(module).items() if tensor is not None)
    frozen = ((key, p) for key, p in parameters_of(module).items() if p is not None and not p.requires_grad)
    yield from ((key, tensor) for key, tensor in frozen if tensor.is_floating_point())
