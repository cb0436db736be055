"""Buffers are what they are under DistributedDataParallel: rank 0's, in training, in evaluation, and on disk."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hecate
from tests.support.models import VOCABULARY, PlainMoE, batch
from tests.support.parity import rank_and_size, state_error
from tests.support.ranks import lives, message_of, run_ranks

_HERE = "tests.hecate_compile.training.test_buffers"


class BalancedMoE(PlainMoE):
    """A bias that balances load, as users write it: ``"own"`` follows what its own rank routes."""

    def __init__(self, way: str, experts: int) -> None:
        super().__init__(16, 16, experts, 2)
        self.way = way
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("passing", torch.zeros(experts), persistent=False)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int32))
        self.register_buffer("table", torch.ones(3), persistent=False)

    def choose(self, tokens: Tensor) -> Any:
        scores = self.router(tokens).softmax(-1)
        chosen = (scores + self.bias + self.passing).topk(self.choices, dim=-1).indices
        if self.way == "own" and self.training:
            load = (chosen.reshape(-1, 1) == torch.arange(len(self.bias))).sum(0).float()
            self.bias.add_(0.05 * torch.sign(load.mean() - load))
            self.passing.add_(0.01 * torch.sign(load - load.mean()))
            self.forwards.add_(1)
        return scores.gather(-1, chosen), chosen


class Model(nn.Module):
    """BatchNorm in the trunk, and layers of experts."""

    def __init__(self, way: str, *, checkpoints: bool = False, layers: int = 1, experts: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(VOCABULARY, 16), nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(BalancedMoE(way, experts) for _ in range(layers))
        self.head, self.checkpoints = nn.Linear(16, VOCABULARY), checkpoints

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(ids).flatten(0, 1)).view(*ids.shape, 16)
        for block in self.blocks:
            hidden = hidden + (checkpoint(block, hidden, use_reentrant=False) if self.checkpoints else block(hidden))
        return nn.functional.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(model: nn.Module, inner: nn.Module, *, evaluations: Sequence[int], micro: int = 1) -> list[float]:
    """Six steps, each with so many evaluations on each rank; losses of this rank."""
    rank, size = rank_and_size()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(6):
        model.train()
        optimizer.zero_grad()
        for part in range(micro):
            # Other lengths, so that ranks route other loads.
            ids = batch(10 * step + part).chunk(size)[rank]
            with model.no_sync() if part < micro - 1 else nullcontext():
                loss = model(ids)
                loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        if inner.blocks[0].way == "first" and rank == 0:
            for block in inner.blocks:
                block.bias[step % 4] += 0.3
        model.eval()
        # Behind the last step all evaluate: rank 0 would send what nobody takes. So they do behind the first, where
        # DistributedDataParallel is not yet sure of its buckets.
        for part in range(evaluations[rank if 0 < step < 5 else 0]):
            with torch.no_grad():
                losses.append(float(model(batch(90 + part))))
    return losses


# What a rank adds itself, what rank 0 alone adds; accumulated, checkpointed, without a collective in forwards.
CASES: dict[str, dict[str, Any]] = {
    "own, two layers, accumulated": {"way": "own", "layers": 2, "micro": 2},
    "first, checkpointed, accumulated": {"way": "first", "checkpoints": True, "micro": 3},
    "whole, ranks evaluate other numbers of batches": {"way": "own", "policy": "replicate", "evaluations": (3, 1)},
    "whole, one rank evaluates": {"way": "first", "policy": "replicate", "evaluations": (1, 0)},
}


def beside_ddp(backend: str = "aot_eager") -> dict[str, Any]:
    dist.init_process_group("gloo")
    found = {}
    for name, case in CASES.items():
        case = dict(case)
        policy, micro = case.pop("policy", "static"), case.pop("micro", 1)
        evaluations = case.pop("evaluations", (2, 2))
        plain = Model(**case)
        wrapped = DistributedDataParallel(plain)
        ours = hecate.compile(Model(**case), hecate.Config(backend=backend, policy=policy))
        assert DistributedDataParallel(ours) is ours
        losses = [
            train(model, inner, evaluations=evaluations, micro=micro)
            for model, inner in ((wrapped, plain), (ours, ours))
        ]
        error = max(abs(a - b) for a, b in zip(*losses, strict=True))
        theirs, states = plain.state_dict(), ours.state_dict()
        found[name] = {
            "loss": error,
            "state": state_error(states, theirs),
            "evaluated": losses[1][-evaluations[0] :],
            "counts": all(torch.equal(states[n], t) for n, t in theirs.items() if not t.is_floating_point()),
            "graphs": len(hecate.explain(ours).graphs),
        }
    return found


@pytest.mark.distributed
def test_training_and_evaluation_equal_ddp() -> None:
    ranks = run_ranks(f"{_HERE}:beside_ddp", 2)
    for found in ranks:
        for name, result in found.items():
            assert result["loss"] < 1e-5, name
            assert result["state"] < 1e-5, name
            assert result["counts"], name
            assert result["graphs"] <= 3, name
    for name in ("own, two layers, accumulated", "first, checkpointed, accumulated"):
        assert ranks[0][name]["evaluated"] == ranks[1][name]["evaluated"], name


def saved(folder: str) -> dict[str, Any]:
    """What is on disk is rank 0's, also if ranks changed theirs since the last forward; ranks' own stay theirs."""
    dist.init_process_group("gloo")
    rank, size = rank_and_size()
    found: dict[str, Any] = {}
    for shares in (True, False):
        model = hecate.compile(
            Model("none", layers=2, experts=2),
            hecate.Config(backend="aot_eager", policy="static", broadcast_buffers=shares),
        )
        block, second = model.blocks[0], model.blocks[1]
        block.bias.fill_(1.0 + rank)
        block.passing.fill_(1.0 + rank)
        second.bias = torch.full((2,), 1.0 + rank)
        # A table that grows with the batch of a rank, and one that was replaced by one of the same size.
        block.table = torch.full((3 + rank,), 7.0 + rank)
        second.passing = torch.full((2,), 7.0 + rank)
        model(batch(0).chunk(size)[rank]).backward()
        after = [float(b[0]) for b in (block.bias, block.passing, second.bias, block.table, second.passing)]
        if rank:
            block.bias.fill_(9.0)
        hecate.save(f"{folder}/{shares}", model, step=1)
        again = Model("none", layers=2, experts=2)
        hecate.compile(again, hecate.Config(backend="aot_eager", policy="static"))
        hecate.load(f"{folder}/{shares}", again)
        # A module that came later.
        model.late = nn.BatchNorm1d(3)
        model.late.running_mean.fill_(1.0 + rank)
        model(batch(1).chunk(size)[rank])
        late = float(model.late.running_mean[0])
        found[str(shares)] = {"after": after, "loaded": float(again.blocks[0].bias[0]), "late": late}
    return found


@pytest.mark.distributed
def test_saved_are_those_of_the_first_rank(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(f"{_HERE}:saved", 2, folder=str(tmp_path))):
        own, theirs = 1.0 + rank, 7.0 + rank
        assert found["True"] == {"after": [1.0, 1.0, 1.0, theirs, theirs], "loaded": 1.0, "late": 1.0}
        assert found["False"] == {"after": [own, own, own, theirs, theirs], "loaded": 1.0, "late": own}


def added_after_an_evaluation() -> str:
    """One rank evaluates between two steps, and both add a module behind that."""
    dist.init_process_group("gloo")
    rank, size = rank_and_size()
    model = hecate.compile(Model("own", experts=2), hecate.Config(backend="aot_eager", policy="replicate"))
    model(batch(0).chunk(size)[rank]).backward()
    if rank == 0:
        with torch.no_grad():
            model(batch(1))
    model.late = nn.BatchNorm1d(3)
    model.late.running_mean.fill_(1.0 + rank)
    said = message_of(lambda: model(batch(2).chunk(size)[rank]).backward())
    return f"{said}, {float(model.late.running_mean[0])}"


@pytest.mark.distributed
def test_a_broadcast_that_one_rank_has_behind_it_comes_before_what_both_add() -> None:
    assert run_ranks(f"{_HERE}:added_after_an_evaluation", 2, timeout=120) == ["no error, 1.0"] * 2


def alone(last: int) -> list[Any]:
    """One rank evaluates when the other has ended."""
    dist.init_process_group("gloo")
    rank, size = rank_and_size()
    model = hecate.compile(Model("own", experts=2), hecate.Config(backend="aot_eager", policy="replicate"))
    model(batch(0).chunk(size)[rank]).backward()
    kept = [buffer.clone() for buffer in model.buffers()]
    said: list[str] = []
    pids = [torch.zeros((), dtype=torch.int64) for _ in range(size)]
    dist.all_gather(pids, torch.tensor(os.getpid()))
    if rank == last:
        while lives(int(pids[1 - rank])):
            time.sleep(0.05)
        model.eval()
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            said += [message_of(lambda part=part: model(batch(90 + part))) for part in range(2)]
        said += [str(one.message) for one in caught if "hecate" in str(one.message)]
        said.append(message_of(lambda: model(batch(0).chunk(size)[rank]).backward()))
        assert all(map(torch.equal, kept, model.buffers()))
    dist.destroy_process_group()
    return said


@pytest.mark.distributed
@pytest.mark.parametrize("last", [0, 1])
def test_a_rank_evaluates_alone_when_the_others_have_ended(last: int) -> None:
    first, second, warned, trained = run_ranks(f"{_HERE}:alone", 2, last=last, timeout=90)[last]
    assert first == second == "no error"
    assert f"rank {1 - last}" in warned and "This rank evaluates with its own buffers" in warned
    assert trained.startswith("RankEndedError: ") and f"rank {1 - last}" in trained
