"""The check for GPUs, as far as it goes without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import measure, report, training
from benchmarks.gpu_check.case import SMALL, SUMS, Case
from benchmarks.gpu_check.cases import KERNELS, cases_of
from hecate.runtime.kernels import launch

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", KERNELS)
def test_each_case_compares_two_equal_results(name: str) -> None:
    """Here both are the reference: operands fit, and nothing is changed between the two."""
    for case in cases_of(name, SMALL, CPU):
        # Of attention the CPU has an algorithm of its own.
        limit = case.limits[case.dtype] if name.startswith("s2_") else 0
        assert measure.difference(case) <= limit
        assert (case.flops > 0) != (case.bytes > 0)
        for call in (*(case.timed or ()), measure._bound_of(case, CPU)):
            if call is not None:
                call()
        if case.torch is not None:
            found, expected = measure._tensors(case.torch()), measure._tensors(case.ours())
            assert [one.shape for one in found] == [one.shape for one in expected]


def test_differences_are_seen() -> None:
    def case(ours: torch.Tensor, theirs: torch.Tensor) -> Case:
        return Case(torch.float32, lambda: ours, lambda: theirs, None, SUMS)

    assert measure.difference(case(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0]))) == 0.25
    assert not measure.difference(case(torch.tensor([torch.nan]), torch.tensor([1.0]))) <= 1
    assert measure.difference(case(torch.zeros(2), torch.zeros(3))) == float("inf")


def test_it_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "NO GPU HERE" in capsys.readouterr().out


def test_the_table() -> None:
    samples = {"kernel": [1.0, 2.0, 3.0], "reference": [4.0, 4.0, 4.0], "bound": [1.8, 1.8, 1.8]}
    one = {"dtype": "float32", "equal": True, "difference": 0.0, "limit": 0.0, "samples": samples}
    text = report.table([
        {"kernel": "gather_rows", "bytes": 4_000_000, **one},
        {"kernel": "weight_grads", "note": "two", "flops": 6 * 10**9, **one},
        {"kernel": "grouped_mm", "error": "Traceback\nRuntimeError: out of memory\n"},
        {"kernel": "balance_rows", "bytes": 1, "most_ms": 2.5, **one},
        {"kernel": "balance_rows", "bytes": 1, "most_ms": 1.5, **one},
    ])  # fmt: skip
    lines = text.splitlines()
    assert lines[1].split()[:3] == ["gather_rows", "float32", "yes"] and lines[1].endswith("2.00")
    assert "2 GB/s" in lines[1] and "90% of copy" in lines[1]
    assert "3.0 TFLOP/s" in lines[2] and "90% of mm" in lines[2] and "two" in lines[2]
    assert lines[3].split() == ["grouped_mm", "FAILED", "RuntimeError:", "out", "of", "memory"]
    assert "under 2.5 ms" in lines[4] and "OVER 1.5 ms" in lines[5]


TINY = training.Shape(
    layers=1, hidden=32, inner=16, experts=8, choices=2, heads=2, key_heads=1, head_width=16, vocabulary=64, batch=2,
    length=16, dtype=torch.float32,
)  # fmt: skip


def test_training_steps_of_all_systems_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    to = tmp_path / "training.json"
    found = {one["system"]: one for one in training.measure_training(to, 300, CPU, TINY, "aot_eager", rounds=2)}
    assert [*found] == ["transformers", "hecate", "torch.compile", "hecate.capture"]
    assert "CUDA graphs need a model on a GPU" in found.pop("hecate.capture")["error"]
    for name, one in found.items():
        assert one["equal"] and len(one["seconds"]) == 2 and one["waits"] == {} and "error" not in one
        assert (tmp_path / f"gpu_check.{name.replace('.', '-')}.trace.json.gz").stat().st_size > 1000
    assert [one["system"] for one in json.loads(to.read_text())] == [*training.SYSTEMS]
    # Another model has other numbers, and no time leaves all but the first undone.
    monkeypatch.setattr(training, "SYSTEMS", {"transformers": training.System, "other": Other, "late": Other})
    monkeypatch.setattr(training, "SETUP", 1.0)
    clock = iter([0.0, 0.0, 0.0, 2.0, *[3.0] * 9])
    # Not in the module time itself: other threads look at clocks, too.
    own = SimpleNamespace(monotonic=lambda: next(clock), perf_counter=time.perf_counter)
    monkeypatch.setattr(training, "time", own)
    _, other, late = training.measure_training(to, 1.0, CPU, TINY, "aot_eager")
    assert other["equal"] is False and other["seconds"] == []
    assert late["error"] == "not begun: no time was left"


class Other(training.System):
    def prepare(self, backend: str) -> None:
        with torch.no_grad():
            next(self.model.parameters()).mul_(2.0)


def test_the_table_of_training_steps() -> None:
    one = {
        "tokens": 1000, "loss": 2.5, "gradient norm": 1.0, "equal": True, "peak": 3e9, "first step": 60.0,
        "waits": {"cudaStreamSynchronize": 2, "cudaMemcpy": 1},
    }  # fmt: skip
    text = report.training_table([
        {"system": "torch.compile", "seconds": [0.2, 0.2, 0.3], **one},
        {"system": "hecate", "seconds": [0.1, 0.1, 0.1], **one, "error": "Traceback\nRuntimeError: later"},
        {"system": "hecate.capture", "error": "Traceback\nRuntimeError: no graph"},
    ])  # fmt: skip
    lines = text.splitlines()
    assert "yes (2.5000, 1.0000)" in lines[1] and "5000" in lines[1] and "1.00 (1.00..1.00)" in lines[1]
    assert "100.0 (100.0..100.0)" in lines[2] and "2.00 (2.00..3.00)" in lines[2]
    assert lines[2].split()[-3:] == ["3.0", "3", "60"]
    assert lines[3].split() == ["hecate", "FAILED", "later", "RuntimeError:", "later"]
    assert lines[4].split() == ["hecate.capture", "FAILED", "RuntimeError:", "no", "graph"]
    assert report.training_table([]) == ""


def test_the_hosts_waits_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those inside the step alone; here stands another operator for what CUDA calls."""
    monkeypatch.setattr(training, "WAITS", ("aten::add",))
    torch.ones(2).add(1)
    waits = training._waits(lambda: [torch.ones(2).add(1) for _ in range(3)], tmp_path / "trace.json.gz", CPU)
    assert waits == {"aten::add": 3}


def test_what_is_measured_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After each kernel, also if time runs out; those that did not begin are named."""
    monkeypatch.setenv("HECATE_RESULTS", str(tmp_path))
    monkeypatch.setattr(command, "machine", lambda: {"gpu": "none"})
    unfinished = {"file": "one.py", "code": None, "seconds": 60.0, "tests": {"one.py::slow": None}, "output": ""}
    monkeypatch.setattr(command, "run_tests", lambda seconds: iter([unfinished]))
    seen = []

    def ran(arguments: list[str], seconds: float) -> tuple[int, str]:
        name = arguments[arguments.index("--only") + 1]
        written = json.loads((tmp_path / "gpu_check.json").read_text())
        seen.append([one["kernel"] for one in written["kernels"]])
        assert name == "training" or [one["system"] for one in written["training"]] == ["hecate", "training"]
        if name == "training":
            Path(arguments[arguments.index("--to") + 1]).write_text(json.dumps([{"system": "hecate"}]))
        if len(seen) == 3:
            clock[0] += 1000
        return 1, "slow"

    clock = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(command, "run", ran)
    assert command.check_all(540, tests=True) == 1
    first, second, *others = KERNELS
    assert seen == [[], [], [first]]
    found = json.loads((tmp_path / "gpu_check.json").read_text())["kernels"]
    assert [one["kernel"] for one in found] == [first, second, *others]
    assert [one["error"] for one in found[:2]] == ["slow", "slow"]
    assert all("no time was left" in one["error"] for one in found[2:])
    text = (tmp_path / "gpu_check.txt").read_text()
    assert "hecate           FAILED too few steps" in text and "training         FAILED slow" in text
    assert (tmp_path / "gpu_check.png").stat().st_size > 1000
    assert "one.py: NO END within 60 s" in text and "NOT ENDED one.py::slow" in text


def test_a_case_that_cannot_be_made_is_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cases(name: str, sizes: Any, device: torch.device) -> Iterator[Case]:
        yield Case(torch.float32, *(2 * [lambda: torch.ones(2)]), None, SUMS)
        raise MemoryError("no room for float16")

    monkeypatch.setattr(measure, "cases_of", cases)
    monkeypatch.setattr(measure, "times", lambda candidates: {name: [1.0, 1.0] for name in candidates})
    found = measure.measure_kernel("gather_rows", tmp_path / "found.json")
    assert [one.get("equal") for one in found] == [True, None] and "no room for float16" in found[1]["error"]
    assert json.loads((tmp_path / "found.json").read_text()) == found
    assert not command.all_right(found)
    # A process that dies of something else says so, whatever it had written.
    monkeypatch.setattr(command, "run", lambda *given: (1, "Traceback"))
    assert command.in_a_process("gather_rows", tmp_path, 5) == [{"kernel": "gather_rows", "error": "Traceback"}]


def test_a_command_ends_in_time() -> None:
    code, output = command.run([sys.executable, "-uc", "print('begun'); import time; time.sleep(100)"], 2)
    assert code is None and output.startswith("begun")
    assert command.run([sys.executable, "-c", "print('done')"], 60) == (0, "done\n")


def test_a_file_of_tests_without_end_is_said_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # What is run here; one of its tests is skipped so that there is one to count.
    program = """
import time, pytest
pytestmark = pytest.mark.gpu
def test_a(): pass
def test_b(): pytest.skip("not here")
def test_c(): time.sleep({})
def test_d(): assert not {}
"""
    slow, quick = tmp_path / "test_slow.py", tmp_path / "test_quick.py"
    slow.write_text(program.format(1000, 0))
    quick.write_text(program.format(0, 1))
    monkeypatch.setattr(command, "TESTS", {str(slow): 1, str(quick): 3})
    first, second = command.run_tests(40)
    assert first["code"] is None and 9 < first["seconds"] <= 10 < second["seconds"]
    assert list(first["tests"].values()) == ["passed", "skipped", None, None]
    assert second["code"] == 1 and list(second["tests"].values()) == ["passed", "skipped", "passed", "failed"]
    said = report.text_of({"machine": {}, "training": [], "kernels": [], "tests": [first, second]})
    # pytest names a file from a folder that it has in common with the checkout, if both lie in one.
    assert "test_slow.py: NO END within 10 s" in said
    assert re.search(r"NOT ENDED (\S*/)?test_slow\.py::test_d$", said, re.MULTILINE)
    assert "test_quick.py: FAILED" in said
    assert re.search(r"passed    (\S*/)?test_quick\.py::test_c$", said, re.MULTILINE)


def test_tests_for_gpus_need_no_more_than_a_gpu_has() -> None:
    """They are found where torch's own tests cannot be imported, and pytest-timeout is missing."""
    program = """
import sys, torch, pytest
sys.modules["expecttest"] = None
torch.cuda.is_available = lambda: True
options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:timeout", "-m", "gpu"]
sys.exit(pytest.main([*options, *sys.argv[1:]]))
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, "-c", program, *command.TESTS], cwd=command.ROOT, env=kept, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "test_on_a_gpu" in done.stdout and "test_equals_one_process_on_cuda" in done.stdout
    assert "test_ranks_over_nccl" in done.stdout
    assert launch.triton is None or "cases/test_rows.py" in done.stdout
