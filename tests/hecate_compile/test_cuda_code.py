"""What Inductor makes of a step for a GPU, looked at without one: nothing here runs on a device."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.support.cuda_code import Made, made_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        torch.version.cuda is not None or shutil.which("g++") is None,
        reason="a pretended device needs a build of torch without a real one, and g++ for its guard",
    ),
]


# What lies between two layers is seen in one of them.
CASES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(family="qwen3_moe", layers=2),
    "deepseek_v3": dict(family="deepseek_v3"),
    "gpt_oss": dict(family="gpt_oss"),
    "one rank": dict(family="qwen3_moe", ranks=1),
    "one-sided": dict(family="qwen3_moe", options=["symmetric"]),
}


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Made]]]:
    """All cases, compiled two at a time: each is a process that uses one core."""
    folder = tmp_path_factory.mktemp("cuda_code")
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(made_for, dtype="bfloat16", folder=folder, **case) for name, case in CASES.items()}
        pool.shutdown(cancel_futures=True)


@pytest.fixture(params=["qwen3_moe", "deepseek_v3", "gpt_oss"])
def made(compiling: dict[str, Future[Made]], request: pytest.FixtureRequest) -> Made:
    return compiling[request.param].result()


def test_all_layers_exchange_their_rows_in_one_graph(made: Made) -> None:
    assert made.rewritten["exchange_rows"] == made.layers and made.graph_breaks == 0
    for code in (made.forward, made.backward):
        assert code.steps.count("hecate.exchange_start") == made.layers
        assert code.host_reads == 0, "the host would wait for the device"


def test_results_of_operators_are_loaded_as_wide_as_they_lie(made: Made) -> None:
    assert made.forward.unaligned == made.backward.unaligned == []


def test_only_the_gradient_of_an_embedding_is_added_with_atomics_and_in_float32(made: Made) -> None:
    """In no fixed order, so a step is not repeated bit by bit; everything else is summed in order."""
    assert made.forward.atomics == {}
    ((kernel, dtypes),) = made.backward.atomics.items()
    assert "embedding" in kernel and dtypes == ["fp32"]


def test_rows_are_gathered_while_counts_travel(made: Made) -> None:
    beside = made.forward.between("gather_counts_start", "gather_counts_wait")
    assert len(beside) == made.layers
    for kernels in beside:
        assert any("index" in kernel for kernel in kernels), kernels


def test_experts_compute_behind_the_start_of_the_way_back(made: Made) -> None:
    for kernels in made.backward.between("exchange_back_start", "exchange_back_wait"):
        assert any("weight_grad" in kernel for kernel in kernels), kernels


def test_one_rank_calls_torchs_products_and_masks_nothing(compiling: dict[str, Future[Made]]) -> None:
    made = compiling["one rank"].result()
    steps = made.forward.steps + made.backward.steps
    assert [step for step in steps if step.startswith("hecate.")] == ["hecate.count_rows"]
    assert steps.count("_grouped_mm") == 6
    assert not any(step.startswith("triton_poi_fused_grouped_mm") for step in steps)


def test_one_sided_exchanges_are_compiled_as_well(compiling: dict[str, Future[Made]]) -> None:
    made = compiling["one-sided"].result()
    assert made.rewritten["exchange_rows"] == 1
    assert made.forward.unaligned == made.backward.unaligned == []
    assert made.forward.host_reads == made.backward.host_reads == 0
