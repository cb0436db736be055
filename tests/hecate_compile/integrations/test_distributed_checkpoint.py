"""torch.distributed.checkpoint as its tutorials use it: get_state_dict, save, load, set_state_dict."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hecate
from tests.hecate_compile.wrap.test_stack_experts import small
from tests.support.adversaries import Restless
from tests.support.models import batch, build
from tests.support.parity import state_error
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.integrations.test_distributed_checkpoint"


def plain(kind: str, seed: int = 0) -> nn.Module:
    return small(seed=seed, layers=1) if kind == "list" else build(kind, seed=seed, layers=1)


def compiled(kind: str, dense: Any, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    config = hecate.Config(backend="aot_eager", dense=dense, policy=Restless(reshard_every=2))
    model = hecate.compile(plain(kind, seed), config)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: list[int]) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for number in numbers:
        mine = batch(number, rows=4).chunk(size)[rank]
        model(input_ids=mine, labels=mine)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def save_and_load(kind: str, dense: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = compiled(kind, dense)
    steps(model, optimizer, [0, 1, 2])
    weights, state = get_state_dict(model, optimizer)
    shapes = {name: tuple(value.shape) for name, value in plain(kind).named_parameters()}
    moments = {name: tuple(one["exp_avg"].shape) for name, one in state["state"].items() if name in shapes}
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder[0])

    other, second = compiled(kind, dense, seed=1)
    steps(other, second, [5])
    empty, blank = get_state_dict(other, second)
    loaded = {"model": empty, "optimizer": blank}
    dcp.load(loaded, checkpoint_id=folder[0])
    set_state_dict(other, second, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    # Both go on alike, experts that move included.
    for one, its in ((model, optimizer), (other, second)):
        steps(one, its, [3, 4, 6])
    ours, theirs = model.state_dict(), other.state_dict()
    found = {
        "whole": all(moments[name] == shapes[name] for name in moments),
        "moments": len(moments),
        "names": list(weights) == list(plain(kind).state_dict()),
        "error": state_error(ours, theirs),
        "moved": state_error(ours, weights),
    }
    experts = model.blocks[0].experts[3].w1 if kind == "list" else model.model.layers[0].mlp.experts
    key = "weight" if kind == "list" else "gate_up_proj"
    found["outside"] = message_of(lambda: getattr(experts, key).mean())
    ids = torch.zeros(3, 16 if kind == "list" else 32)
    call = experts if kind == "list" else lambda x: experts(x, torch.zeros(3, 2).long(), torch.ones(3, 2))
    found["alone"] = message_of(lambda: call(ids))
    return found


@cache
def results(kind: str, dense: str) -> list[dict[str, Any]]:
    return run_ranks(f"{_HERE}:save_and_load", 2, kind=kind, dense=dense)


@pytest.mark.distributed
@pytest.mark.parametrize("kind, dense", [("qwen3_moe", "replicate"), ("list", "shard")])
def test_whole_tensors_go_to_disk_and_come_back(kind: str, dense: str) -> None:
    for found in results(kind, dense):
        assert found["whole"] and found["moments"] > 5 and found["names"]
        assert found["error"] < 1e-6 < found["moved"]


@pytest.mark.distributed
def test_whoever_computes_with_a_part_is_told() -> None:
    for found in (*results("qwen3_moe", "replicate"), *results("list", "shard")):
        assert all("this rank holds only" in found[how] for how in ("outside", "alone"))
