"""What users put into a model before they compile it: statistics, a bias that balances routing, adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.fuzz.draw import Drawn, build_model
from tests.fuzz.run import prepare_reference
from tests.support.models import PlainLanguageModel, PlainMoE


class Statistics(nn.Module):
    """A norm, behind it the running mean of what came out, as a BatchNorm has it, and a bias of the user's own."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        weight: Any = norm.weight
        self.norm = norm
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros_like(weight))
        self.register_buffer("bias", torch.zeros_like(weight))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(hidden)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(hidden.detach().mean((0, 1)), 0.1)
                self.seen.add_(1)
        return hidden + 0.1 * self.mean + self.bias


class BalancedMoE(PlainMoE):
    """A router with a bias, and the load by which the user's loop changes it between steps."""

    def __init__(self, hidden: int, intermediate: int, experts: int, choices: int) -> None:
        super().__init__(hidden, intermediate, experts, choices)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts))

    def choose(self, tokens: torch.Tensor) -> Any:
        scores = self.router(tokens).softmax(-1)
        chosen = (scores + self.bias).topk(self.choices, dim=-1).indices
        if self.training:
            experts = torch.arange(self.w_in.shape[0])
            self.load.add_((chosen.detach().reshape(-1, 1) == experts).sum(0).to(self.load.dtype))
        return scores.gather(-1, chosen), chosen


@dataclass(frozen=True)
class Dress:
    """What a life's model has besides the drawn one.

    Attributes:
        balanced: its blocks are :class:`BalancedMoE` in place of what was drawn.
        statistics: its last norm is a :class:`Statistics`.
        adapters: LoRA by PEFT on "attention" (or the router), on "experts", on "both", or none.
    """

    balanced: bool
    statistics: bool
    adapters: str | None


def build_dressed(drawn: Drawn, dress: Dress, seed: int) -> nn.Module:
    if dress.balanced:
        torch.manual_seed(seed)
        size = dict(layers=drawn.layers, experts=drawn.experts)
        model: Any = PlainLanguageModel(BalancedMoE, hidden=16, **size)
    else:
        model = build_model(drawn, seed)
    if dress.statistics:
        if isinstance(model, PlainLanguageModel):
            model.norms[-1] = Statistics(model.norms[-1])
        else:
            model.model.norm = Statistics(model.model.norm)
    if dress.adapters is not None:
        model = _adapted(model, dress.adapters)
    return model.double()


def build_reference(drawn: Drawn, dress: Dress, seed: int) -> nn.Module:
    """One that computes without being compiled what the compiled one does."""
    model: Any = build_dressed(drawn, dress, seed)
    prepare_reference(model if dress.adapters is None else model.get_base_model(), drawn)
    return model


def _adapted(model: nn.Module, where: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    experts = {name for name in linear if "experts." in name}
    attention = {name for name in linear if name.endswith(("o_proj", "router")) or name.endswith("blocks.0.gate")}
    fused = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    targets: dict[str, list[str]] = {"target_modules": []}
    if where != "experts":
        targets["target_modules"] += sorted(attention)
    if where != "attention":
        targets["target_modules"] += sorted(experts)
        targets["target_parameters"] = fused
    torch.manual_seed(0)
    found = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, **targets))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                # They start as zeros, and then lora_A has no gradient.
                parameter.normal_(std=0.1)
    return found
