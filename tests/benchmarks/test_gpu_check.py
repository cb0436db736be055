"""The check for GPUs, as far as it goes without one."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import measure, processes, report, stages, training
from benchmarks.gpu_check.case import SMALL, SUMS, Case
from benchmarks.gpu_check.cases import KERNELS, cases_of
from benchmarks.gpu_check.place import PRETENDED
from benchmarks.gpu_check.results import NO_TIME, UNENDED, Results
from benchmarks.gpu_check.stages import STAGES, Pytest
from hecate.runtime.kernels import launch
from tests.benchmarks import faulty_check

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", KERNELS)
def test_each_case_compares_two_equal_results(name: str) -> None:
    """Here both are the reference: operands fit, and nothing is changed between the two."""
    for case in cases_of(name, SMALL, CPU):
        # Of attention the CPU has an algorithm of its own.
        limit = case.limits[case.dtype] if name.startswith("s2_") else 0
        found: dict[str, Any] = {"limit": limit}
        measure.compare(case, found)
        assert found["equal"] or (case.same and found["difference"] <= limit)
        # Torch's own way rounds otherwise.
        assert found.get("torch difference", 0.0) <= case.limits[case.dtype]
        assert (case.flops > 0) != (case.bytes > 0)
        for call in (*(case.timed or ()), measure._bound_of(case, CPU)):
            if call is not None:
                call()
        if case.torch is not None:
            found, expected = measure._tensors(case.torch()), measure._tensors(case.ours())
            assert [one.shape for one in found] == [one.shape for one in expected]


def test_differences_are_seen() -> None:
    def difference(ours: list[float], theirs: list[float]) -> float:
        return measure.difference([torch.tensor(ours)], [torch.tensor(theirs)])

    assert difference([1.0, 3.0], [1.0, 4.0]) == 0.25
    assert not difference([torch.nan], [1.0]) <= 1
    assert difference([0.0, 0.0], [0.0, 0.0, 0.0]) == float("inf")


def test_what_torch_computes_is_compared_where_it_is_the_same() -> None:
    """In bf16 with one operand it is what a model runs, with what clears slots without rows and rows behind them."""
    compared = set()
    for name in KERNELS:
        for case in cases_of(name, SMALL, CPU):
            found = measure.measure(case, PRETENDED, timed=False)
            assert found["equal"] and "samples" not in found
            if "torch difference" in found:
                compared.add((name, found["dtype"], found["note"]))
    products = {("grouped_mm", "bfloat16", "own, replicas"), ("grouped_mm", "bfloat16", "one operand")}
    assert compared >= products | {("weight_grads", "bfloat16", ""), ("expand_segments", "int64", "")}
    assert not any(name.startswith("s2_") for name, _, _ in compared), "dense attention is another computation"
    ones, twos = (lambda: torch.ones(2)), (lambda: torch.full((2,), 2.0))
    found = measure.measure(Case(torch.float32, ones, ones, twos, SUMS, same=True), PRETENDED, timed=False)
    assert (found["equal"], found["difference"], found["torch difference"]) == (False, 0.0, 1.0)
    assert "NO (0.0e+00, torch 1.0e+00, of 1e-05)" in report.table([{"kernel": "grouped_mm", **found}])
    other = measure.measure(Case(torch.float32, ones, ones, twos, SUMS), PRETENDED, timed=False)
    assert other["equal"] is True


def test_it_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "NO GPU HERE" in capsys.readouterr().out


def test_the_table() -> None:
    samples = {"kernel": [1.0, 2.0, 3.0], "reference": [4.0, 4.0, 4.0], "bound": [1.8, 1.8, 1.8]}
    one = {"dtype": "float32", "equal": True, "difference": 0.0, "limit": 0.0, "samples": samples}
    text = report.table(
        [
            {"kernel": "gather_rows", "bytes": 4_000_000, **one},
            {"kernel": "weight_grads", "note": "two", "flops": 6 * 10**9, **one},
            {"kernel": "grouped_mm", "error": "Traceback\nRuntimeError: out of memory\n"},
            {"kernel": "balance_rows", "bytes": 1, "most_ms": 2.5, **one},
            {"kernel": "balance_rows", "bytes": 1, "most_ms": 1.5, **one},
        ]
    )
    lines = text.splitlines()
    assert lines[1].split()[:3] == ["gather_rows", "float32", "yes"] and lines[1].endswith("2.00")
    assert "2 GB/s" in lines[1] and "90% of copy" in lines[1]
    assert "3.0 TFLOP/s" in lines[2] and "90% of mm" in lines[2] and "two" in lines[2]
    assert lines[3].split() == ["grouped_mm", "FAILED", "RuntimeError:", "out", "of", "memory"]
    assert "under 2.5 ms" in lines[4] and "OVER 1.5 ms" in lines[5]


def measured(names: list[str], to: Path, seconds: float = 300, **more: Any) -> dict[str, dict[str, Any]]:
    results = Results(to)
    training.measure_training(names, results, time.monotonic() + seconds, PRETENDED, **more)
    assert json.loads(to.read_text()) == results.rows
    return {one["system"]: one for one in results.rows}


def test_training_steps_of_all_systems_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = measured([*training.SYSTEMS], tmp_path / "training.json", rounds=2)
    assert [*found] == ["transformers", "hecate", "torch.compile", "hecate.capture"]
    assert "CUDA graphs need a model on a GPU" in found.pop("hecate.capture")["error"]
    for name, one in found.items():
        assert one["equal"] and one["waits"] == {} and "error" not in one
        assert len(one["seconds alone"]) == training.ALONE and len(one["seconds"]) == 4
        assert (tmp_path / f"gpu_check.{name.replace('.', '-')}.trace.json.gz").stat().st_size > 1000
    # Another model has other numbers.
    monkeypatch.setattr(training, "SYSTEMS", {"transformers": training.System, "other": Other})
    _, other = measured(["transformers", "other"], tmp_path / "other.json", rounds=1).values()
    assert other["equal"] is False and len(other["seconds"]) == 2
    # Without time nothing begins.
    (late,) = measured(["other"], tmp_path / "late.json", seconds=0).values()
    assert late["error"] == NO_TIME


def test_the_late_system_begins_behind_rounds_of_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rounds that it was not there for are empty, and ratios are those of rounds with both."""
    monkeypatch.setattr(training, "build", faulty_check.build)
    monkeypatch.setattr(training, "REFERENCE", "sound")
    seen = []

    class Late(training.System):
        def prepare(self, backend: str) -> None:
            (sound,) = (one for one in json.loads((tmp_path / "found.json").read_text()) if one["system"] == "sound")
            seen.append(len(sound["seconds"]))

    monkeypatch.setattr(training, "SYSTEMS", {"sound": training.System, training.LATE: Late})
    sound, late = measured(["sound", training.LATE], tmp_path / "found.json", rounds=3).values()
    assert seen == [3] and len(sound["seconds"]) == len(late["seconds"]) == 6
    assert late["seconds"][:3] == [None] * 3 and None not in sound["seconds"] + late["seconds"][3:]
    of_all = {"tokens": 1, "loss": 2.0, "gradient norm": 1.0, "equal": True, "waits": {}, "first step": 1.0}
    rounds = [
        {"system": "torch.compile", "seconds": [9.0, 4.0, 6.0], **of_all},
        {"system": training.LATE, "seconds": [None, 2.0, 3.0], **of_all},
        {"system": "hecate", "seconds": [], "seconds alone": [1.0, 1.0], **of_all, "error": "it died"},
    ]
    lines = report.training_table(rounds).splitlines()
    assert "2500.0 (" in lines[2] and "2.00 (2.00..2.00)" in lines[2]
    assert "1000.0 (" in lines[3] and lines[4].endswith("FAILED later it died")
    rounds[0] |= {"seconds": [], "seconds alone": [3.0, 3.0]}
    assert "3.00 alone" in report.training_table(rounds).splitlines()[3]


class Other(training.System):
    def prepare(self, backend: str) -> None:
        with torch.no_grad():
            next(self.model.parameters()).mul_(2.0)


def test_the_table_of_training_steps() -> None:
    one = {
        "tokens": 1000,
        "loss": 2.5,
        "gradient norm": 1.0,
        "equal": True,
        "peak": 3e9,
        "first step": 60.0,
        "waits": {"cudaStreamSynchronize": 2, "cudaMemcpy": 1},
    }
    text = report.training_table(
        [
            {"system": "torch.compile", "seconds": [0.2, 0.2, 0.3], **one},
            {"system": "hecate", "seconds": [0.1, 0.1, 0.1], **one, "error": "Traceback\nRuntimeError: later"},
            {"system": "hecate.capture", "error": "Traceback\nRuntimeError: no graph"},
        ]
    )
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
    waits = training._waits(lambda: [torch.ones(2).add(1) for _ in range(3)], tmp_path / "trace.json.gz", PRETENDED)
    assert waits == {"aten::add": 3}


def test_what_is_measured_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After each stage; each has its share of what is left, and those that did not begin are named."""
    monkeypatch.setenv("HECATE_RESULTS", str(tmp_path))
    seen: list[tuple[str, float]] = []

    def ran(arguments: list[str], seconds: float, environment: Any = None) -> tuple[int | None, str]:
        clock[0] += seconds
        if "pytest" in arguments:
            seen.append(("tests", seconds))
            return None, "slow"
        names = arguments[arguments.index("--only") + 1 : arguments.index("--to")]
        seen.append((names[0], seconds))
        if names[0] == "transformers":
            Path(arguments[arguments.index("--to") + 1]).write_text(json.dumps([{"system": "transformers"}]))
        return 1, "Traceback\nslow"

    clock = [0.0]
    for module in (command.time, stages.time):
        monkeypatch.setattr(module, "monotonic", lambda: clock[0])
    monkeypatch.setattr(stages, "run", ran)
    assert command.check_all(command.TO_END + 450, PRETENDED, tests=True) == 1
    assert [name for name, _ in seen] == ["grouped_mm", *["tests"] * 2, "transformers", "grouped_mm", "tests"]
    assert [round(seconds) for _, seconds in seen] == [stage.share for stage in STAGES] and round(clock[0]) == 450
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [one["kernel"] for one in found["compared"]] == [one["kernel"] for one in found["kernels"]] == [*KERNELS]
    assert all(one["error"].endswith("slow") for one in found["kernels"])
    systems = ["transformers", "training", "hecate", "torch.compile", "hecate.capture"]
    assert [one["system"] for one in found["training"]] == systems
    assert [one["code"] for one in found["tests"]] == [None] * 3
    text = (tmp_path / "gpu_check.txt").read_text()
    assert "transformers     FAILED too few steps" in text and "training         FAILED slow" in text
    assert (tmp_path / "gpu_check.png").stat().st_size > 1000
    assert "before tuning 0 of 19 cases equal their references" in text
    # A budget of a minute is no less than imports take for what comes first, and nothing begins when it is spent.
    seen.clear()
    command.check_all(clock[0] + command.TO_END + 18, PRETENDED, tests=False)
    assert [round(seconds) for _, seconds in seen] == [8, 8]


def test_a_case_that_cannot_be_made_is_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cases(name: str, sizes: Any, device: torch.device) -> Iterator[Case]:
        yield Case(torch.float32, *(2 * [lambda: torch.ones(2)]), None, SUMS)
        raise MemoryError("no room for float16")

    monkeypatch.setattr(measure, "cases_of", cases)
    results = Results(tmp_path / "found.json")
    measure.measure_kernels(["gather_rows"], results, time.monotonic() + 60, PRETENDED)
    found = results.rows
    assert [one.get("equal") for one in found] == [True, None] and "no room for float16" in found[1]["error"]
    assert len(found[0]["samples"]["kernel"]) == measure.ROUNDS
    assert json.loads((tmp_path / "found.json").read_text()) == found
    assert not command.all_right(found)
    measure.measure_kernels(["gather_rows"], results, time.monotonic(), PRETENDED)
    assert found[2] == {"kernel": "gather_rows", "error": NO_TIME}


def test_it_is_written_what_is_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Case by case, so that it is known where a process died."""
    seen = []

    def cases(name: str, sizes: Any, device: torch.device) -> Iterator[Case]:
        for note in ("one", "two"):
            seen.append([(one["kernel"], one.get("note"), one.get("error")) for one in json.loads(to.read_text())])
            yield Case(torch.float32, *(2 * [lambda: torch.ones(2)]), None, SUMS, note=note)

    to = tmp_path / "found.json"
    monkeypatch.setattr(measure, "cases_of", cases)
    measure.measure_kernels(["a", "b"], Results(to), time.monotonic() + 60, PRETENDED, timed=False)
    of_a = [("a", "one", None), ("a", "two", None)]
    assert seen == [
        [("a", None, UNENDED)],
        [("a", None, UNENDED), of_a[0]],
        [*of_a, ("b", None, UNENDED)],
        [*of_a, ("b", None, UNENDED), ("b", "one", None)],
    ]
    assert [one.get("note") for one in json.loads(to.read_text())] == ["one", "two", "one", "two"]


@pytest.fixture(scope="module")
def chosen() -> dict[str, list[str]]:
    """What each call of pytest takes, of the check itself and of docs/gpu.md, where there is little but a GPU.

    Torch's own tests cannot be imported there, and pytest-timeout is missing.
    """
    program = """
import contextlib, io, json, sys, torch, pytest
sys.modules["expecttest"] = None
torch.cuda.is_available = lambda: True
found = {}
for name, given in json.loads(sys.argv[1]).items():
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:timeout", "-m", "gpu"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main([*options, *given])
    found[name] = [line for line in said.getvalue().splitlines() if "::" in line] if code == 0 else said.getvalue()
print(json.dumps(found))
"""
    stages_of_tests = [one for one in STAGES if isinstance(one, Pytest)]
    calls = {one.name: [*one.files, *(["-k", one.chosen] if one.chosen else [])] for one in stages_of_tests}
    for line in (processes.ROOT / "docs" / "gpu.md").read_text().splitlines():
        if " -m pytest " in line:
            given = shlex.split(line.partition(" -m pytest ")[2])
            files = [one for one in given if one.startswith("tests/")]
            calls[line] = [*files, *(["-k", given[given.index("-k") + 1]] if "-k" in given else [])]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    command = [sys.executable, "-c", program, json.dumps(calls)]
    done = subprocess.run(command, cwd=processes.ROOT, env=kept, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def functions(tests: list[str]) -> list[str]:
    """Each once, in order."""
    return [*dict.fromkeys(test.rpartition("::")[2].partition("[")[0] for test in tests)]


def test_tests_for_gpus_need_no_more_than_a_gpu_has(chosen: dict[str, list[str]]) -> None:
    kernels, one_rank, others = (chosen[one.name] for one in STAGES if isinstance(one, Pytest))
    assert "test_on_a_gpu" in functions(kernels)
    assert launch.triton is None or any("cases/test_rows.py" in test for test in kernels)
    assert functions(kernels)[-1] == "test_ranks_on_streams_of_one_process"
    assert "test_processes_that_share_a_gpu" not in functions(kernels)
    # What is cheap and basic comes first, and nothing is left out or run twice.
    assert functions(one_rank) == ["test_equals_one_process_on_cuda", "test_graphs_of_one_rank_equal_the_model"]
    assert len(one_rank) == 8 and all("aot_eager" in test for test in one_rank)
    assert functions(others) == [
        "test_equals_one_process_on_cuda",
        "test_ranks_that_share_a_gpu_equal_one_process",
        "test_jobs_on_a_stream_equal_one_process",
        "test_ranks_over_nccl_equal_one_process",
        "test_graphs_of_one_rank_equal_the_model",
        "test_graphs_of_two_ranks_follow_placements",
        "test_processes_that_share_a_gpu",
    ]
    assert not {*one_rank} & {*others}
    on_cuda = [test for test in one_rank + others if "one_process_on_cuda" in test]
    assert ["aot_eager" in test for test in on_cuda] == [True] * 7 + [False] * 7


def test_calls_that_the_page_names_take_tests(chosen: dict[str, list[str]]) -> None:
    """Each those of one function, but for the one that takes all kernels."""
    calls = set(chosen) - {one.name for one in STAGES}
    numbers = sorted(len(functions(chosen[call])) for call in calls)
    assert numbers[:-1] == [1] * 8 and numbers[-1] > 1


@pytest.mark.parametrize("what", [["training"], ["grouped_mm"], ["kernels"], ["weight_grads", "gather_rows"]])
def test_one_thing_alone(
    what: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In processes that go on behind what fails, with rows where they are wanted."""
    seen = []

    def ran(arguments: list[str], seconds: float, environment: Any) -> tuple[int, str]:
        names = arguments[arguments.index("--only") + 1 : arguments.index("--to")]
        seen.append(names)
        assert "--here" in arguments and 0 < seconds <= 50
        monkeypatch.setattr(command, "BEGUN", time.monotonic())
        return 0, ""

    to = tmp_path / "rows.json"
    monkeypatch.setattr(stages, "run", ran)
    monkeypatch.setattr(command, "BEGUN", time.monotonic())
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    assert command.main(["--pretend", "--only", *what, "--to", str(to), "--budget", "50"]) == stages.UNEQUAL
    names = {"training": [*training.SYSTEMS], "kernels": [*KERNELS]}.get(what[0], what)
    assert seen == [names]
    assert [one.get("system") or one["kernel"] for one in json.loads(to.read_text())] == names
    monkeypatch.setenv("HECATE_RESULTS", str(tmp_path))
    with pytest.raises(SystemExit):
        command.main(["--pretend", "--only", "training", "grouped_mm"])
    assert "not both" in capsys.readouterr().err
