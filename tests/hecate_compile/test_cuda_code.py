"""What Inductor makes of a step for a GPU, looked at without one: nothing here runs on a device."""

from __future__ import annotations

import shutil
from pathlib import Path

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda_code")


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "gpt_oss"])
def made(request: pytest.FixtureRequest, folder: Path) -> Made:
    return made_for(request.param, "bfloat16", folder=folder)


def test_both_layers_exchange_their_rows_in_one_graph(made: Made) -> None:
    assert made.rewritten["exchange_rows"] == 2 and made.graph_breaks == 0
    for code in (made.forward, made.backward):
        assert code.steps.count("hecate.exchange_start") == 2
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
    assert len(beside) == 2
    for kernels in beside:
        assert any("index" in kernel for kernel in kernels), kernels


def test_experts_compute_behind_the_start_of_the_way_back(made: Made) -> None:
    for kernels in made.backward.between("exchange_back_start", "exchange_back_wait"):
        assert any("weight_grad" in kernel for kernel in kernels), kernels


def test_one_rank_calls_torchs_products_and_masks_nothing(folder: Path) -> None:
    made = made_for("qwen3_moe", "bfloat16", folder=folder, ranks=1)
    steps = made.forward.steps + made.backward.steps
    assert [step for step in steps if step.startswith("hecate.")] == ["hecate.count_rows"] * 2
    assert steps.count("_grouped_mm") == 12
    assert not any(step.startswith("triton_poi_fused_grouped_mm") for step in steps)


def test_one_sided_exchanges_are_compiled_as_well(folder: Path) -> None:
    made = made_for("qwen3_moe", "bfloat16", folder=folder, options=["symmetric"])
    assert made.rewritten["exchange_rows"] == 2
    assert made.forward.unaligned == made.backward.unaligned == []
    assert made.forward.host_reads == made.backward.host_reads == 0
