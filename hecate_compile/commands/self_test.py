"""The self-test of ``hecate doctor``: loss and gradients of a small model on two ranks against one process."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

from hecate.compilation import compile
from hecate.config import Config
from hecate.wrap.shard import shard_of

TOLERANCE = 1e-4
_HIDDEN, _EXPERTS = 16, 4


class SmallMoE(nn.Module):
    """Four experts in fused parameters, and a loop over them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = _EXPERTS
        self.router = nn.Linear(_HIDDEN, _EXPERTS, bias=False)
        self.w_in = nn.Parameter(torch.randn(_EXPERTS, _HIDDEN, 32, device="cpu") / 4)
        self.w_out = nn.Parameter(torch.randn(_EXPERTS, 32, _HIDDEN, device="cpu") / 6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(hidden).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(hidden)
        for expert in range(_EXPERTS):
            token, choice = torch.where(chosen == expert)
            rows = nn.functional.silu(hidden[token] @ self.w_in[expert]) @ self.w_out[expert]
            out.index_add_(0, token, rows * weights[token, choice, None])
        return out.square().mean()


def small_model() -> nn.Module:
    """Make the model, equal on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(SmallMoE())


def worst_error() -> float:
    """Return the largest relative difference of loss and gradients from one process with the whole batch."""
    model, reference = compile(small_model(), Config(backend="aot_eager")), small_model()
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    batch = torch.randn(size * 8, _HIDDEN, generator=torch.Generator().manual_seed(1), device="cpu")
    loss = model(batch.chunk(size)[rank])
    loss.backward()
    expected = reference(batch)
    expected.backward()
    mean = loss.detach().clone()
    if size > 1:
        dist.all_reduce(mean)
    worst = float(((mean / size - expected) / expected).abs())
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        wanted, shard = theirs[name].grad, shard_of(parameter)
        assert wanted is not None
        mine = parameter.grad
        if mine is None:
            return float("inf")
        error = (mine - (wanted if shard is None else shard.slice(wanted))).abs()
        if error.numel():
            worst = max(worst, float(error.max() / wanted.abs().max()))
    return worst


def main() -> int:
    """Run the test, and return the exit code: 0 if the numbers are right."""
    warnings.simplefilter("ignore")
    error = worst_error()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if not error < TOLERANCE:
        print(f"loss or gradients are off by {error:.1e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
