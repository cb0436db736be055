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
# Rounds of swaps until no token has an expert twice.
_TRIES = 200
_ROUTERS = (modeling_qwen3_moe.Qwen3MoeTopKRouter, modeling_qwen2_moe.Qwen2MoeTopKRouter)


def deal(counts: Ints, tokens: int, top_k: int, rng: np.random.Generator) -> Ints:
    """Experts for every token, so that expert e occurs ``counts[e]`` times: int64 ``[E] -> [tokens, top_k]``.

    Which of them meet in a token is chance, as far as a token's experts differ; they do unless one expert has more
    rows than there are tokens. (Were they dealt in the order of their numbers, every token would have one on each
    node, and no two of its rows could cross together.)
    """
    # Side by side an expert's rows are in no token twice. The hottest first, so that it is in one column.
    hottest = int(np.argmax(counts))
    order = np.concatenate([[hottest], rng.permutation(np.delete(np.arange(len(counts)), hottest))])
    apart = np.repeat(order, counts[order]).reshape(top_k, tokens)
    mixed = rng.permuted(apart, axis=1)
    for _ in range(_TRIES):
        column, token = _second_ones(mixed)
        if not len(token):
            return mixed.T
        # Another token's in the same column takes its place; that may be no better, so there are several tries.
        other = rng.integers(0, tokens, len(token))
        for c, one, two in zip(column.tolist(), token.tolist(), other.tolist(), strict=True):
            mixed[c, one], mixed[c, two] = mixed[c, two], mixed[c, one]
    return rng.permutation(apart.T)


def _second_ones(choices: Ints) -> tuple[Ints, Ints]:
    """Column and token of each choice ``[top_k, tokens]`` that an earlier column of its token has too."""
    again = np.zeros(choices.shape, dtype=bool)
    for column in range(1, len(choices)):
        again[column] = (choices[:column] == choices[column]).any(0)
    column, token = np.nonzero(again)
    return column, token


def _forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A top-k router's forward, with the choice taken from ``self.replayed`` int64 ``[tokens, top_k]``."""
    logits = nn.functional.linear(hidden_states.reshape(-1, self.weight.shape[1]), self.weight)
    # Nobody knows a choice before its logits. Without them in it, counts of rows leave while attention computes.
    no_logits = torch.isnan(logits[:, :1]).to(self.replayed.dtype)
    # A remainder, so that transformers 5.17's masks of numbers beyond the last expert are seen to mask nothing.
    chosen = (self.replayed + no_logits) % self.num_experts
    scores = torch.softmax(logits, -1, dtype=torch.float).gather(1, chosen)
    scores = scores / scores.sum(-1, keepdim=True)
    return logits, scores.to(logits.dtype), chosen


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
