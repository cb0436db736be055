"""A router that replays a trace: the same tokens go to the same experts, whatever system runs the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.models.qwen2_moe import modeling_qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe

Ints = NDArray[np.int64]
_ROUTERS = (modeling_qwen3_moe.Qwen3MoeTopKRouter, modeling_qwen2_moe.Qwen2MoeTopKRouter)


def deal(counts: Ints, tokens: int, top_k: int, rng: np.random.Generator) -> Ints:
    """Experts for every token, so that expert e occurs ``counts[e]`` times: int64 ``[E] -> [tokens, top_k]``.

    A token's experts differ unless one expert has more rows than there are tokens.
    """
    experts = np.repeat(np.arange(len(counts)), counts)
    return rng.permutation(experts.reshape(top_k, tokens).T)


def _forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A top-k router's forward, with the choice taken from ``self.replayed`` int64 ``[tokens, top_k]``."""
    logits = nn.functional.linear(hidden_states.reshape(-1, self.weight.shape[1]), self.weight)
    scores = torch.softmax(logits, -1, dtype=torch.float).gather(1, self.replayed)
    scores = scores / scores.sum(-1, keepdim=True)
    return logits, scores.to(logits.dtype), self.replayed


@contextmanager
def replayed_routers() -> Iterator[None]:
    """Inside the block, routers of the benchmark's models replay."""
    with mock.patch.object(_ROUTERS[0], "forward", _forward), mock.patch.object(_ROUTERS[1], "forward", _forward):
        yield


def prepare(model: nn.Module, tokens: int) -> list[torch.Tensor]:
    """Give every router of ``model`` room for a batch's choices; returns those tensors, int64 ``[tokens, top_k]``.

    They are plain attributes and not buffers, which every system would take for the same on all ranks.
    """
    routers = [module for module in model.modules() if isinstance(module, _ROUTERS)]
    for router in routers:
        # Systems that share a model share what it replays.
        if not hasattr(router, "replayed"):
            every = torch.arange(tokens * router.top_k) % router.num_experts
            router.replayed = every.view(tokens, router.top_k)
    return [router.replayed for router in routers]
