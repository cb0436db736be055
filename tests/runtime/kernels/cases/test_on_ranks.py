"""Operators and whole steps on three ranks that interpret kernels."""

from __future__ import annotations

import pytest

from tests.runtime.kernels.device import INTERPRETED
from tests.runtime.kernels.ranks import MODELS, run
from tests.support.ranks import run_ranks

# Ranks that share a GPU are in tests/hecate_compile.
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="for ranks on the CPU")

MOVING = {"expand_segments", "gather_rows", "pack_experts", "scatter_rows", "sum_replicas"}
# bf16 has 8 bits, and the interpreter cuts off the others where torch rounds: neighbours differ by up to 2^-7, and
# sums of rows by a few of those.
ROUNDED = 5e-2


def test_ranks_with_kernels_equal_ranks_without() -> None:
    """Replicas, their gradients and rows; then loss and every gradient of models, with random replicas."""
    # Forked from a server that starts here, so that it interprets kernels too.
    ranks = run_ranks(run, 3)
    assert {name for of_rank in ranks for name in of_rank["launched by operators"]} == MOVING
    for model in MODELS:
        limit = ROUNDED if "bf16" in model else 1e-5
        # A rank need not send experts.
        launched = {name for of_rank in ranks for name in of_rank[model]["launched"]}
        assert launched == MOVING | {"grouped_mm", "weight_grads"}, model
        for of_rank in ranks:
            found = of_rank[model]
            assert not found["missing"] and "loss" in found["errors"], model
            assert max(found["errors"].values()) < limit, (model, found["errors"])
            assert found["one process"] < limit, model
