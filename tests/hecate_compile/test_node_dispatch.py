"""With ``dispatch="nodes"`` a token's row crosses to each node once, and everything else is as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.hecate_compile.test_parity import measure
from tests.support.ranks import run_ranks

# What is exchanged by nodes, in nodes of even and of uneven size, with random replicas in every step.
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "mixtral": {"nodes": (0, 1)},
        "gpt_oss": {"nodes": (0, 1)},
        "split": {"nodes": (0, 1)},
    },
    3: {"plain": {"nodes": (0, 1, 1)}},
    4: {
        "qwen3_moe": {"nodes": (0, 0, 1, 1), "rematerialize": True, "layers": 2},
        "plain": {"nodes": (0, 0, 1, 1)},
        "deepseek_v3": {"nodes": (1, 0, 1, 0)},
    },
}


def measure_all(size: int) -> dict[str, Any]:
    """On one rank: every case of one world size, in one set of processes."""
    from hecate import Topology

    found = {}
    for family, options in CASES[size].items():
        options = {"layers": 1} | options
        topology = Topology(tuple(options.pop("nodes")))
        found[family] = measure(family, policy="anything", dispatch="nodes", topology=topology, **options)
        found[family]["recompiles"] = len(torch._dynamo.utils.counters["recompiles"])
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("size", CASES)
def test_equals_one_process(size: int) -> None:
    for ranks in run_ranks("tests.hecate_compile.test_node_dispatch:measure_all", size, timeout=900, size=size):
        for family, result in ranks.items():
            assert result["skipped"] == [], (family, result["skipped"])
            assert result["loss"] < 1e-5, family
            assert result["gradient"] < 1e-5, (family, result["worst"])
            assert (result["graphs"], result["breaks"], result["recompiles"]) == (1, 0, 0), family
            assert min(result["replicas"]) > 0, family


def measure_others() -> dict[str, Any]:
    """On one of two ranks, each a node: what else rows by node must get along with."""
    from hecate import Topology

    options: dict[str, Any] = {
        "policy": "anything", "dispatch": "nodes", "topology": Topology((0, 1)), "layers": 1, "steps": 2,
    }  # fmt: skip
    return {
        "inductor": measure("qwen3_moe", backend="inductor", **options),
        "owners only": measure("plain", **(options | {"policy": "static"})),
        "wire": measure("qwen3_moe", wire_dtype=torch.bfloat16, **options),
        "bf16": measure("qwen3_moe", dtype="bfloat16", **options),
        "one-hot": measure("qwen3_moe", one_hot=True, **options),
    }


@pytest.mark.distributed
def test_with_other_options() -> None:
    for ranks in run_ranks("tests.hecate_compile.test_node_dispatch:measure_others", 2, timeout=600):
        for name, result in ranks.items():
            # bf16 has 8 bits; see test_parity.
            rounded = name in ("wire", "bf16")
            assert result["skipped"] == [], (name, result["skipped"])
            assert result["loss"] < (1e-2 if rounded else 1e-5), name
            assert result["gradient"] < (5e-2 if rounded else 1e-5), (name, result["worst"])
            assert (result["gradient"] > 1e-5) == rounded, "it is bf16"
            assert (result["graphs"], result["breaks"]) == (1, 0), name
