"""All that a GPU must show, in one command on one GPU.

    make gpu                                                or
    PYTHONPATH=typings:. python -m benchmarks.gpu_check

In a checkout nothing need be installed: ``typings/hecate`` is a link to the package. ``--no-tests`` measures only,
``--only training`` or ``--only grouped_mm`` is that one alone, in this process, and ``--budget 300`` ends in so many
seconds.

First the tests that need a GPU. Then training steps of a Qwen3-MoE with 1.3 billion parameters in bf16, top 8 of 64:
the model as it ships, with ``torch.compile``, with ``hecate.compile``, and with ``hecate.capture``, which alternate
step by step. Beside them is whether the first loss and the norm of its gradients are the same, how much memory a step
takes, and how often the host waits for the device in one. Then for each kernel in the dtypes that it has: does it
equal its reference, and how long do it, the reference and what torch itself has for this take (with the copies and
zeros that torch's needs; of ``expand_segments`` what the host would do). What decides most comes first. Each kernel
has a process of its own, so one that reads where it must not does not spoil the others.

Candidates alternate; a sample is the mean of a few calls between two CUDA events. A ratio is that of medians, and
quartiles are those of samples. Reading offsets on the host is part of what a reference takes. Beside them runs what
the GPU itself can do: ``copy_`` of as many bytes as a kernel has to read and write, or one dense product, or torch's
own attention; ``of copy`` and ``of mm`` say which part of that rate a kernel reaches.

Results are written to ``gpu_check.json`` and ``gpu_check.txt`` in build/benchmarks (or where ``HECATE_RESULTS``
says), anew after each kernel; those of a running kernel are in ``gpu_check.NAME.json``, anew after each case. Beside
them are ``gpu_check.png``, if matplotlib is there, and for each system a Chrome trace of one step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check import notes
from benchmarks.gpu_check.cases import KERNELS
from benchmarks.gpu_check.measure import measure_kernel
from benchmarks.gpu_check.report import machine, plot, table, text_of, training_table, write
from benchmarks.gpu_check.training import measure_training
from benchmarks.results_folder import results_folder
from hecate.runtime.kernels import launch

# Seconds for all of it, for the tests, for training steps with their compilation, and for one kernel at most.
BUDGET, FOR_TESTS, FOR_TRAINING, FOR_A_KERNEL = 540.0, 200.0, 170.0, 60.0
# Of these seconds a process needs some to end, with what it has.
TO_END = 15.0
# What a process ends with whose results say what is wrong. Python ends with 1 when something else is.
UNEQUAL = 3
# In this order, each in a process of its own, with its share of the time that is left; the longest comes last.
TESTS = {
    "tests/runtime/kernels": 3,
    "tests/hecate_compile/test_one_gpu.py": 5,
    "tests/hecate_compile/test_captured_step.py": 2,
    "tests/hecate_compile/test_parity.py": 5,
}
ROOT = Path(__file__).parents[2]
TRAINING = "training"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every kernel equals its reference and every test passes."""
    parser = argparse.ArgumentParser(description="One GPU: its tests, training steps, kernels.")
    parser.add_argument("--only", choices=[TRAINING, *KERNELS], help="training, or one kernel, in this process")
    parser.add_argument("--to", type=Path, help="with --only: where its results are written")
    parser.add_argument("--no-tests", action="store_true", help="leave out pytest -m gpu")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds after which nothing more begins")
    given = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        print(reason)
        return 2
    if given.only == TRAINING:
        to = given.to or results_folder() / "gpu_check.training.json"
        steps = measure_training(to, given.budget, torch.device("cuda"))
        print(training_table(steps))
        return 0 if all_right(steps) else UNEQUAL
    if given.only:
        found = measure_kernel(given.only, given.to)
        print(table(found))
        return 0 if all_right(found) else UNEQUAL
    return check_all(given.budget, tests=not given.no_tests)


def check_all(budget: float, *, tests: bool) -> int:
    """The tests and all kernels, each in a process of its own, as long as there is time."""
    folder, end = results_folder(), time.monotonic() + budget
    report: dict[str, Any] = {
        "machine": machine(), "environment": _environment(), "tests": None, "training": [], "kernels": [],
    }  # fmt: skip

    def save() -> str:
        text = text_of(report)
        write(folder / "gpu_check.json", json.dumps(report, indent=1))
        write(folder / "gpu_check.txt", text + "\n")
        return text

    def left(most: float) -> float:
        return min(most, end - time.monotonic())

    if tests:
        report["tests"] = []
        for one in run_tests(min(FOR_TESTS, budget)):
            report["tests"].append(one)
            save()
            print(f"{one['file']} done", file=sys.stderr, flush=True)
    report["training"] = in_a_process(TRAINING, folder, left(FOR_TRAINING))
    for name in KERNELS:
        save()
        report["kernels"] += in_a_process(name, folder, left(FOR_A_KERNEL))
        print(f"{name} done", file=sys.stderr, flush=True)
    print(save())
    plot(report, folder / "gpu_check.png")
    right = all_right(report["training"] + report["kernels"]) and all(
        one["code"] == 0 for one in report["tests"] or []
    )
    return 0 if right else 1


def all_right(found: Sequence[dict[str, Any]]) -> bool:
    return all(one.get("equal") and "error" not in one for one in found)


def run_tests(seconds: float) -> Iterator[dict[str, Any]]:
    """``pytest -m gpu`` of the files that have such tests, one after the other: others may need what is not here.

    What a file leaves of its share is the next ones'.
    """
    end, shares = time.monotonic() + seconds, dict(TESTS)
    for file in TESTS:
        left = max(0.0, end - time.monotonic())
        yield run_file(file, left * shares[file] / sum(shares.values()))
        del shares[file]


def run_file(file: str, seconds: float) -> dict[str, Any]:
    """How each of its tests ended, None for those that did not, and what pytest printed."""
    options = ["-m", "gpu", "-v", "--continue-on-collection-errors", "-p", notes.__name__]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "notes")
        # Cases have many widths, and each would be tuned for. What is tuned is compared with its reference below.
        code, output = run(
            [sys.executable, "-m", "pytest", *options, file], seconds,
            {"HECATE_AUTOTUNE": "0", notes.VARIABLE: str(path)},
        )  # fmt: skip
        tests = notes.read_notes(path)
    return {"file": file, "code": code, "seconds": seconds, "tests": tests, "output": output[-20_000:]}


def in_a_process(name: str, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """:func:`measure_kernel` or :func:`measure_training`, which may end its process."""
    what = "system" if name == TRAINING else "kernel"
    if seconds <= 0:
        return [{what: name, "error": "not begun: no time was left"}]
    path = folder / f"gpu_check.{name}.json"
    path.unlink(missing_ok=True)
    budget = str(max(1.0, seconds - TO_END))
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--only", name, "--to", str(path), "--budget", budget]
    code, output = run(command, seconds)
    problem = "" if code in (0, UNEQUAL) and path.exists() else output[-2000:] or str(code)
    if code is None:
        problem = f"no end after {seconds:.0f} s"
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    path.unlink(missing_ok=True)
    return [*found, {what: name, "error": problem}] if problem else found


def run(command: Sequence[str], seconds: float, environment: dict[str, str] | None = None) -> tuple[int | None, str]:
    """The exit code of a command, None after so many seconds, and what it printed."""
    code: int | None = None
    # A file, not a pipe: a process that outlives the command would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
            env=os.environ | (environment or {}),
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            # Tests end the processes that they started, if they are asked to.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # One whose kernel still runs may stay in the driver.
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        output.seek(0)
        return code, output.read()


def why_not() -> str | None:
    """Why nothing can be measured here, if so."""
    if not torch.cuda.is_available():
        return "NO GPU HERE: torch.cuda.is_available() is False. Nothing was run, and nothing was written."
    if not launch.runs_on(torch.device("cuda")):
        return "NO KERNELS HERE: Triton is missing, or HECATE_KERNELS=0. Nothing was run, and nothing was written."
    if launch.INTERPRETED:
        return "TRITON_INTERPRET is set: times would be those of the interpreter. Nothing was run."
    return None


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("HECATE_", "TRITON_", "CUDA_"))}


if __name__ == "__main__":
    sys.exit(main())
