"""The check for GPUs, as far as it goes without one."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_check

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", gpu_check.KERNELS)
def test_each_case_compares_two_equal_results(name: str) -> None:
    """Here both are the reference: operands fit, and nothing is changed between the two."""
    for case in gpu_check.cases_of(name, gpu_check.SMALL, CPU):
        assert gpu_check.difference(case) == 0
        if case.torch is not None:
            found, expected = gpu_check._tensors(case.torch()), gpu_check._tensors(case.ours())
            assert [one.shape for one in found] == [one.shape for one in expected]


def test_differences_are_seen() -> None:
    def case(ours: torch.Tensor, theirs: torch.Tensor) -> gpu_check.Case:
        return gpu_check.Case(torch.float32, lambda: ours, lambda: theirs, None, gpu_check.SUMS)

    assert gpu_check.difference(case(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0]))) == 0.25
    assert not gpu_check.difference(case(torch.tensor([torch.nan]), torch.tensor([1.0]))) <= 1
    assert gpu_check.difference(case(torch.zeros(2), torch.zeros(3))) == float("inf")


def test_it_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "NO GPU HERE" in capsys.readouterr().out


def test_the_table() -> None:
    samples = {"kernel": [1.0, 2.0, 3.0], "reference": [4.0, 4.0, 4.0]}
    text = gpu_check.table([
        {"kernel": "gather_rows", "dtype": "float32", "equal": True, "difference": 0.0, "limit": 0.0,
         "samples": samples},
        {"kernel": "grouped_mm", "error": "Traceback\nRuntimeError: out of memory\n"},
    ])  # fmt: skip
    lines = text.splitlines()
    assert lines[1].split()[:3] == ["gather_rows", "float32", "yes"] and lines[1].endswith("2.00")
    assert lines[2].split() == ["grouped_mm", "FAILED", "RuntimeError:", "out", "of", "memory"]
