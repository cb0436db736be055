"""All that a GPU must show, in one command on one GPU.

    make gpu                                                or
    PYTHONPATH=typings:. python -m benchmarks.gpu_check

In a checkout nothing need be installed: ``typings/hecate`` is a link to the package. ``--no-tests`` measures only,
``--only training`` (or ``kernels``, or ``grouped_mm weight_grads``) is that alone (``--here`` in this process), and
``--budget 300`` ends in so many seconds. ``--pretend`` lets a CPU stand for the GPU, with small sizes: to see that
all of it runs.

First every kernel is compared with its reference, in the dtypes that it has, before anything is tuned. Then the tests
that need a GPU and little else. Then training steps of a Qwen3-MoE with 0.6 billion parameters in bf16, top 8 of 64:
the model as it ships, with ``hecate.compile``, with ``torch.compile``, and with ``hecate.capture``. Each makes some
steps alone as soon as it is there, and then they alternate step by step. Beside them is whether the first loss and
the norm of its gradients are the same, how much memory a step takes, and how often the host waits for the device in
one. Then kernels are tuned, compared again and timed: how long do a kernel, its reference and what torch itself has
for this take (with the copies and zeros that torch's needs; of ``expand_segments`` what the host would do)? Where
torch's computes the same, as the products of bf16 that a model runs, it is compared with the reference, too. At last
the tests that take longest, and those of several ranks on the GPU.

One process measures one thing after the other until it dies; then another begins behind what killed it.

Candidates alternate; a sample is the mean of a few calls between two CUDA events. A ratio is that of medians, and
quartiles are those of samples. Reading offsets on the host is part of what a reference takes. Beside them runs what
the GPU itself can do: ``copy_`` of as many bytes as a kernel has to read and write, or one dense product, or torch's
own attention; ``of copy`` and ``of mm`` say which part of that rate a kernel reaches.

Results are written to ``gpu_check.json`` and ``gpu_check.txt`` in build/benchmarks (or where ``HECATE_RESULTS``
says), anew after each stage; those of a running stage are in ``gpu_check.STAGE.json``, anew after each case or step.
Beside them are ``gpu_check.png``, if matplotlib is there, and for each system a Chrome trace of one step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check import BEGUN
from benchmarks.gpu_check.cases import KERNELS
from benchmarks.gpu_check.measure import measure_kernels
from benchmarks.gpu_check.place import GPU, PRETENDED, Place
from benchmarks.gpu_check.processes import GRACE, ended_after
from benchmarks.gpu_check.report import all_passed, machine, plot, table, text_of, training_table, write
from benchmarks.gpu_check.results import Results
from benchmarks.gpu_check.stages import STAGES, UNEQUAL, Measured
from benchmarks.gpu_check.training import SYSTEMS, measure_training
from benchmarks.results_folder import results_folder
from hecate.runtime.kernels import launch

# Seconds for all of it, with its imports.
BUDGET = 450.0
# What the last stage may take to be killed, and the report to be written.
TO_END = 2 * GRACE + 3.0
# Less is of no use to a stage: its imports alone take some seconds.
LEAST = 8.0
TRAINING, ALL_KERNELS = "training", "kernels"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every kernel equals its reference and every test passes."""
    parser = argparse.ArgumentParser(description="One GPU: its tests, training steps, kernels.")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[TRAINING, ALL_KERNELS, *SYSTEMS, *KERNELS],
        metavar="NAME",
        help="training or kernels, or some systems or some kernels",
    )
    parser.add_argument("--to", type=Path, help="with --only: where its results are written")
    parser.add_argument("--no-times", action="store_true", help="with --only: compare kernels, and do not time them")
    parser.add_argument("--here", action="store_true", help="with --only: in this process, behind what --to has")
    parser.add_argument("--no-tests", action="store_true", help="leave out pytest -m gpu")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds after which all of it has ended")
    parser.add_argument("--pretend", action="store_true", help="a CPU stands for the GPU, with small sizes")
    given = parser.parse_args(arguments)
    place = PRETENDED if given.pretend else GPU
    if place.is_gpu and (reason := why_not()) is not None:
        print(reason)
        return 2
    # What ends this process also ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    until = BEGUN + given.budget
    if not given.only:
        return check_all(until, place, tests=not given.no_tests)
    systems = [name for name in SYSTEMS if name in given.only or TRAINING in given.only]
    kernels = [name for name in KERNELS if name in given.only or ALL_KERNELS in given.only]
    if systems and kernels:
        parser.error("--only: training steps or kernels, not both")
    to = given.to or results_folder() / "gpu_check.only.json"
    if given.here:
        found = Results(to, goes_on=True)
        if systems:
            measure_training(systems, found, until, place, limited=ended_after)
        measure_kernels(kernels, found, until, place, timed=not given.no_times, limited=ended_after)
        rows = found.rows
    else:
        options = ["--no-times"] if given.no_times else []
        of_what = "system" if systems else "kernel"
        stage = Measured(" ".join(given.only), of_what, systems or kernels, 1, options)
        rows = stage.run(until - time.monotonic(), to, place)
    print(training_table(rows) if systems else table(rows))
    return 0 if all_right(rows) else UNEQUAL


def check_all(until: float, place: Place, *, tests: bool) -> int:
    """All stages, each with its share of the time that is left; what one leaves is the next ones'."""
    folder, until = results_folder(), until - TO_END
    stages = [stage for stage in STAGES if tests or isinstance(stage, Measured)]
    report: dict[str, Any] = {
        "machine": machine(place.device),
        "environment": _environment(),
        "seconds": {},
        "compared": [],
        "tests": [],
        "training": [],
        "kernels": [],
    }

    def save() -> str:
        text = text_of(report)
        write(folder / "gpu_check.json", json.dumps(report, indent=1))
        write(folder / "gpu_check.txt", text + "\n")
        return text

    try:
        for number, stage in enumerate(stages):
            begun = time.monotonic()
            left, share = until - begun, stage.share / sum(later.share for later in stages[number:])
            path = folder / f"gpu_check.{stage.into}.json"
            report[stage.into] += stage.run(max(0.0, min(left, max(LEAST, left * share))), path, place)
            report["seconds"][stage.name] = time.monotonic() - begun
            save()
            path.unlink(missing_ok=True)
            print(f"{stage.name}: {report['seconds'][stage.name]:.0f} s", file=sys.stderr, flush=True)
    finally:
        print(save(), flush=True)
    plot(report, folder / "gpu_check.png")
    measured = [row for stage in stages if isinstance(stage, Measured) for row in report[stage.into]]
    return 0 if all_right(measured) and all(map(all_passed, report["tests"])) else 1


def all_right(found: Sequence[dict[str, Any]]) -> bool:
    return all(one.get("equal") and "error" not in one for one in found)


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
