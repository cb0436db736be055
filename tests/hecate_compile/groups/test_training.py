"""Models in groups of ranks against one process: loss, every gradient, and what an optimizer makes of them."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.runtime.placement.topology import Topology
from tests.hecate_compile.groups.models import EXACT, built
from tests.support.adversaries import Anything
from tests.support.models import batch
from tests.support.parity import (
    compiled_on_free_links,
    state_error,
    step_and_compare,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

_HERE = "tests.hecate_compile.groups.test_training"


def _differ_by_rank(model: nn.Module) -> nn.Module:
    """Other weights on every rank but the first, whose weights win."""
    if int(os.environ["RANK"]):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
    return model


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "replicas": ("qwen3_moe", {"replicas": 2}),
    "sharded dense": ("qwen3_moe", {"replicas": 2, "dense": "shard"}),
    "static": ("qwen3_moe", {"policy": "static"}),
    "gather": ("qwen3_moe", {"policy": "gather", "dense": "shard"}),
    "any placement, and owners move": ("qwen3_moe", {"policy": "anything", "dense": "shard"}),
    "a list, and owners move": ("list", {"policy": "anything"}),
    "layers in Python": ("rejecting", {"policy": "static"}),
    "groups of one": ("qwen3_moe", {"expert_group": 1, "dense": "shard"}),
    "two nodes": ("qwen3_moe", {"replicas": 2, "topology": Topology((0, 0, 1, 1))}),
    "a node in two groups": ("qwen3_moe", {"replicas": 2, "topology": Topology((0, 0, 0, 0))}),
}


def trained(name: str) -> dict[str, Any]:
    """Three steps of a model in groups against one process: loss and gradients, and the parameters afterwards."""
    family, options = CASES[name]
    # Two for what travels from layer to layer.
    layers = 2 if name in ("replicas", "sharded dense") else 1
    if options.get("policy") == "anything":
        # Groups have other placements, and would have other owners.
        policy = Anything(reshard_every=1)
        policy._random.seed(int(os.environ["RANK"]) // 2)
        options = options | {"policy": policy}
    reference, model = built(family, layers=layers), _differ_by_rank(built(family, layers=layers))
    compiled_on_free_links(model, **({"expert_group": 2} | options))
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference))
    found = []
    for step in range(4):
        difference = step_and_compare(model, reference, batch(step))
        found.append(max(difference.loss, difference.gradient))
        ours.step()
        theirs.step()
    state = compiled_model_of(model, "test")
    mesh = state.mesh
    return {
        "errors": found,
        "state": state_error(model.state_dict(), reference.state_dict()),
        "graphs": len(hecate.explain(model).graphs),
        "sizes": [mesh.everyone.size, mesh.group.size, mesh.twins.size],
        "nodes": state.placer.topology.num_nodes,
        "moves": len(state.owner_mover.moves),
        "head": str(hecate.explain(model)).splitlines()[0],
    }


def all_trained() -> dict[str, dict[str, Any]]:
    return {name: trained(name) for name in CASES}


@cache
def _all_trained() -> dict[str, dict[str, Any]]:
    return run_ranks(f"{_HERE}:all_trained", 4, timeout=600)[0]


@pytest.mark.parametrize("name", CASES)
def test_groups_train_as_one_process_does(name: str) -> None:
    found = _all_trained()[name]
    assert max(found["errors"]) < EXACT and found["state"] < EXACT, found
    assert found["graphs"] == 1 or name == "layers in Python"
    size = CASES[name][1].get("expert_group", 2)
    assert found["sizes"] == [4, size, 4 // size]
    assert f"rank 0 of 4: {4 // size} groups of {size}" in found["head"]
    assert found["nodes"] == 1
    assert found["moves"] == (3 if "owners move" in name else 0)
