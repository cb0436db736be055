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
