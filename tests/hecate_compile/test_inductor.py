"""What the other tests check with aot_eager, compiled by Inductor, in one launch.

A compile takes half a minute, so there are few: Qwen3-MoE on a transport that makes races visible (with
HECATE_TESTS=all once more, with every option the other way), a plain model with a loop over experts and sharded dense
parameters, and thirty steps of GPT-OSS in which placements and owners change. Then Qwen3-MoE piecewise, with empty
caches, and once more with what rank 0 has compiled.
"""

from __future__ import annotations

import base64
import os
import tempfile
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from tests.hecate_compile import test_overlap, test_placement
from tests.hecate_compile.test_parity import REPLICAS, measure
from tests.support.extent import ALL
from tests.support.ranks import RanksFailed, run_ranks

# Half a minute each.
OVERLAP = test_overlap.OPPOSITES if ALL else test_overlap.OPPOSITES[:1]


PIECEWISE: dict[str, Any] = dict(piecewise=True, dense="shard", layers=3, **REPLICAS)


def measure_all() -> dict[str, Any]:
    """On one rank."""
    return {
        "piecewise": measure_with_empty_caches(None),
        "artefacts": saved_artefacts(),
        "overlap": test_overlap.train_all("inductor", OVERLAP),
        "plain": measure("plain", backend="inductor", dense="shard", layers=1, changes={"experts": 4}, **REPLICAS),
        "moving": test_placement.thirty_steps(None, calibrates=False, backend="inductor", layers=1) if ALL else None,
    }


def saved_artefacts() -> str:
    artefacts = torch.compiler.save_cache_artifacts()
    assert artefacts is not None
    return base64.b64encode(artefacts[0]).decode()


def measure_with_empty_caches(artefacts: str | None) -> dict[str, Any]:
    """On one rank: Qwen3-MoE, piecewise, with what another run has compiled or without anything."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
    ):
        if artefacts is not None:
            torch.compiler.load_cache_artifacts(base64.b64decode(artefacts))
        found = measure("qwen3_moe", backend="inductor", **PIECEWISE)
    counted = torch._dynamo.utils.counters["inductor"]
    return found | {name: counted[f"fxgraph_cache_{name}"] for name in ("hit", "miss")}


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
    for rank in ranks:
        check(rank["plain"], layers=1)


def test_a_model_in_pieces_equals_one_process(ranks: list[dict[str, Any]]) -> None:
    for result in (rank["piecewise"] for rank in ranks):
        check(result, layers=PIECEWISE["layers"])
        assert sum(different for _, different in result["pieces"]) == result["miss"]
        assert all(different < pieces for pieces, different in result["pieces"])


@pytest.mark.skipif(not ALL, reason="a minute of compiling: with HECATE_TESTS=all")
def test_thirty_steps_equal_one_process(ranks: list[dict[str, Any]]) -> None:
    test_placement.check_thirty_steps([rank["moving"] for rank in ranks])


def test_what_one_rank_has_compiled_serves_all(ranks: list[dict[str, Any]]) -> None:
    where, artefacts = "tests.hecate_compile.test_inductor:measure_with_empty_caches", ranks[0]["artefacts"]
    for result in run_ranks(where, 2, timeout=300, artefacts=artefacts):
        check(result, layers=PIECEWISE["layers"])
        assert (result["miss"], result["hit"]) == (0, ranks[0]["piecewise"]["miss"])


def check(result: dict[str, Any], *, layers: int) -> None:
    assert result["loss"] < 1e-5
    assert result["gradient"] < 1e-5, result["worst"]
    assert (result["graphs"], result["breaks"], result["rewritten"]["exchange_rows"]) == (1, 0, layers)
