"""What is run, in which order, and which part of the time each may take.

Each stage runs in processes of its own, so what hangs or dies takes its own share with it and no other's. What is
cheap and basic comes first, what may not end last, and training steps, which are the main result, in front of the
times of single kernels.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import notes
from benchmarks.gpu_check.cases import KERNELS
from benchmarks.gpu_check.place import PRETENDED, SPOILED, Place
from benchmarks.gpu_check.processes import run, said
from benchmarks.gpu_check.results import NO_TIME, UNENDED, Results
from benchmarks.gpu_check.training import SYSTEMS

COMMAND = [sys.executable, "-m", "benchmarks.gpu_check"]
# What a process ends with whose results say what is wrong. Python ends with 1 when something else is.
UNEQUAL = 3
# Seconds that a process needs to end with what it has, and with less than which none is begun.
TO_END = 3.0
# Processes that test side by side on one GPU: they wait for compilers, and for the host.
SIDE_BY_SIDE = 8


@dataclass(frozen=True)
class Pytest:
    """``pytest -m gpu`` of some files.

    Attributes:
        share: of the time, in comparison with the other stages.
        chosen: what ``-k`` takes.
    """

    files: Sequence[str]
    share: float
    chosen: str = ""
    into: str = field(default="tests", init=False)

    @property
    def name(self) -> str:
        return " ".join([*self.files, *([f"-k '{self.chosen}'"] if self.chosen else [])])

    def run(self, seconds: float, path: Path, place: Place) -> list[dict[str, Any]]:
        """How each test ended, None for those that did not, and what pytest printed; ``path`` is not needed."""
        options = ["-m", "gpu", "-v", "--continue-on-collection-errors", "-p", notes.__name__]
        options += ["-k", self.chosen] if self.chosen else []
        if (workers := side_by_side()) > 1:
            options += ["-n", str(workers), "--dist", "worksteal"]
        with tempfile.TemporaryDirectory() as folder:
            noted = Path(folder, "notes")
            # Cases have many widths, and each would be tuned for. What is tuned is compared with its reference later.
            environment = {"HECATE_AUTOTUNE": "0", "TORCHINDUCTOR_COMPILE_THREADS": "4", notes.VARIABLE: str(noted)}
            code, output = run([sys.executable, "-m", "pytest", *options, *self.files], seconds, environment)
            tests = notes.read_notes(noted)
        found = {"code": code, "seconds": seconds, "tests": tests, "output": output[-20_000:]}
        return [{"tests of": self.name, **found}]


def side_by_side() -> int:
    """How many processes test at once; one where pytest-xdist is missing."""
    return min(SIDE_BY_SIDE, (os.cpu_count() or 1) // 2) if importlib.util.find_spec("xdist") else 1


@dataclass(frozen=True)
class Measured:
    """Rows of results for each of some names.

    One process goes through them until it dies, since each costs seconds of imports. Another one begins behind what
    killed it.

    Attributes:
        into: the part of the report.
        what: the key of a name in its row.
    """

    into: str
    what: str
    names: Sequence[str]
    share: float
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.into

    def run(self, seconds: float, path: Path, place: Place) -> list[dict[str, Any]]:
        """All rows, which ``path`` has while they come, too."""
        end, problem, found = time.monotonic() + seconds, NO_TIME, Results(path)
        found.save()
        while left := self._without_rows(found):
            known, remaining = len(found.rows), end - time.monotonic()
            if remaining <= TO_END:
                break
            code, output = run(self._command(left, path, remaining - TO_END, place), remaining, self.environment)
            found, problem = Results(path, goes_on=True), said(code, output, remaining)
            unended = [row for row in found.rows if row.get("error") == UNENDED]
            for row in unended:
                row["error"] = problem
            if len(found.rows) == known:
                # Whatever it is, it would be no other for the next.
                break
            if code not in (0, UNEQUAL, SPOILED) and not unended:
                found.add({self.what: self.into, "error": problem})
            problem = NO_TIME
            found.save()
        for name in self._without_rows(found):
            found.add({self.what: name, "error": problem})
        return found.rows

    def _without_rows(self, found: Results) -> list[str]:
        there = {row[self.what] for row in found.rows}
        return [name for name in self.names if name not in there]

    def _command(self, names: Sequence[str], path: Path, budget: float, place: Place) -> list[str]:
        options = [*self.options, *(["--pretend"] if place is PRETENDED else [])]
        return [*COMMAND, "--only", *names, "--to", str(path), "--here", "--budget", f"{budget:.1f}", *options]


_ONE_RANK = "aot_eager and (on_cuda or one_rank)"
_SHARED = "processes_that_share_a_gpu"
# Shares are about the seconds of the default budget.
STAGES: Sequence[Pytest | Measured] = (
    Measured("compared", "kernel", [*KERNELS], 50, ["--no-times"], {"HECATE_AUTOTUNE": "0"}),
    Pytest(["tests/runtime/kernels", "tests/runtime/one_sided/test_transport.py"], 70, f"not {_SHARED}"),
    Pytest(["tests/hecate_compile/test_parity.py", "tests/hecate_compile/test_captured_step.py"], 55, _ONE_RANK),
    Measured("training", "system", [*SYSTEMS], 105),
    Measured("kernels", "kernel", [*KERNELS], 85),
    Pytest(
        [
            "tests/hecate_compile/test_parity.py",
            "tests/hecate_compile/test_one_gpu.py",
            "tests/hecate_compile/test_captured_step.py",
            "tests/runtime/one_sided/test_transport.py",
        ],
        85,
        f"not ({_ONE_RANK}) and not streams_of_one_process",
    ),
)
