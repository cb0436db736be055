"""A tiny language model around each layer of :data:`LAYERS`: two of them, few experts, random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.packages.layers import LAYERS, SEQUENCES, WIDTH

VOCABULARY, LENGTH, DEPTH = 64, 12, 2
AUX_WEIGHT = 0.01


@dataclass(frozen=True, kw_only=True)
class PackageModel:
    """A model of a package.

    Attributes:
        requirements: the package, then what else must be installed beside it without dependencies, each pinned.
        make: makes one MoE layer.
        tolerance: how far off it may be, relative to the largest; more where it computes in bfloat16.
        evaluates: whether evaluation is compared, too. BatchNorm evaluates by statistics of rank 0's batches, as with
            DDP, and in one process by those of all.
    """

    requirements: tuple[str, ...]
    make: Callable[[], nn.Module]
    tolerance: float
    evaluates: bool = True


class LanguageModel(nn.Module):
    """Embedding, residual MoE layers behind norms, head; no attention."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(DEPTH))
        self.layers = nn.ModuleList(make() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        total = hidden.new_zeros(())
        for norm, layer in zip(self.norms, self.layers, strict=True):
            out, aux = layer(norm(hidden))
            hidden, total = hidden + out, total + aux
        logits = self.head(hidden)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss + AUX_WEIGHT * total, "logits": logits}


def build(name: str) -> nn.Module:
    """The model with equal weights in every process."""
    make = MODELS[name].make
    # Imports draw numbers, too, so a first layer is made before the seed is set.
    make()
    torch.manual_seed(0)
    return LanguageModel(make).train()


def batch(name: str, number: int) -> dict[str, Tensor]:
    """Tokens that differ from those of every other number."""
    ids = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids.clone()}


# What must be installed, by the first word of a model's name.
_REQUIREMENTS = """
torchtitan: torchtitan==0.3.0 spmd-types==0.2.3 tyro==1.0.17 typeguard==4.6.1 docstring-parser==0.17.0
litgpt: litgpt==0.5.13
mistral-inference: mistral-inference==1.6.0 simple-parsing==0.1.7 docstring-parser==0.17.0
pytorch-mixtures: pytorch-mixtures==0.1.5
deepspeed: deepspeed==0.19.8 hjson==3.1.0 einops==0.8.1 msgpack==1.2.4
fairscale: fairscale==0.4.13
torchscale: torchscale==0.3.0
soft-moe-pytorch: soft-moe-pytorch==0.1.9 einops==0.8.1
st-moe-pytorch: st-moe-pytorch==0.1.8 einops==0.8.1 beartype==0.22.2 colt5-attention==0.11.1
st-moe-pytorch: local-attention==1.11.2 hyper-connections==0.3.1
nemo-automodel: nemo-automodel==0.7.0
olmo-core: ai2-olmo-core==3.0.0 dataclass-extensions==0.5.0
sparrow-mlp: sparrow-mlp==3.0.2
ibm-fms: ibm-fms==1.13.1
mixture-of-experts: mixture-of-experts==0.2.3
esmoe: esmoe==1.1.0
mixlora: mixlora==0.2.3
latent-moe: latent-moe==0.0.3
mh-moe: mh-moe==0.0.2
cluster-moe: cluster-moe==0.0.2 loguru==0.7.3
megatron-core: megatron-core==0.16.1
"""


def _requirements(name: str) -> tuple[str, ...]:
    lines = (line.partition(": ") for line in _REQUIREMENTS.splitlines())
    return tuple(need for package, _, needs in lines if package == name.split()[0] for need in needs.split())


_BFLOAT16 = ("torchtitan", "torchtitan gpt-oss", "nemo-automodel torch_mm")
MODELS = {
    name: PackageModel(
        requirements=_requirements(name),
        make=make,
        tolerance=2e-2 if name in _BFLOAT16 else 1e-5,
        evaluates=name.split()[0] != "esmoe",
    )
    for name, make in LAYERS.items()
}
