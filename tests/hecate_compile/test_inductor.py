"""What the other tests check with aot_eager, compiled by Inductor, in one launch.

A compile takes half a minute, so there are three: Qwen3-MoE on a transport that makes races visible (with
HECATE_TESTS=all once more, with every option the other way), a plain model with a loop over experts and sharded dense
parameters, and thirty steps of GPT-OSS in which placements and owners change.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.hecate_compile import test_overlap, test_placement
from tests.hecate_compile.test_parity import REPLICAS, measure
from tests.support.extent import ALL
from tests.support.ranks import RanksFailed, run_ranks

# Half a minute each.
OVERLAP = test_overlap.OPPOSITES if ALL else test_overlap.OPPOSITES[:1]


def measure_all() -> dict[str, Any]:
    """On one rank."""
    return {
        "overlap": test_overlap.train_all("inductor", OVERLAP),
        "plain": measure("plain", backend="inductor", dense="shard", layers=1, changes={"experts": 4}, **REPLICAS),
        "moving": test_placement.thirty_steps(None, calibrates=False, backend="inductor", layers=1) if ALL else None,
    }


@cache
def results() -> list[dict[str, Any]] | RanksFailed:
    """A failure is remembered too, so that it is waited for once."""
    try:
        return run_ranks("tests.hecate_compile.test_inductor:measure_all", 2, timeout=900)
    except RanksFailed as failure:
        return failure


@pytest.fixture
def ranks() -> list[dict[str, Any]]:
    found = results()
    if isinstance(found, RanksFailed):
        pytest.fail(str(found))
    return found


pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1000)]


def test_late_collectives_change_nothing(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for result, combination in zip(rank["overlap"], OVERLAP, strict=True):
            test_overlap.check(result, combination)


def test_a_plain_model_equals_one_process(ranks: list[dict[str, Any]]) -> None:
    for result in (rank["plain"] for rank in ranks):
        assert result["loss"] < 1e-5
        assert result["gradient"] < 1e-5, result["worst"]
        assert (result["graphs"], result["breaks"], result["rewritten"]["exchange_rows"]) == (1, 0, 1)


@pytest.mark.skipif(not ALL, reason="a minute of compiling: with HECATE_TESTS=all")
def test_thirty_steps_equal_one_process(ranks: list[dict[str, Any]]) -> None:
    test_placement.check_thirty_steps([rank["moving"] for rank in ranks])
