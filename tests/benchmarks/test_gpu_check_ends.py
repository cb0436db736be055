"""The check for GPUs ends in time with what it has, whatever a part of it does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import processes, report, stages, training
from benchmarks.gpu_check.place import PRETENDED
from benchmarks.gpu_check.results import UNENDED
from benchmarks.gpu_check.stages import Measured, Pytest
from tests.benchmarks import faulty_check


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """How the second of three kernels, and of three systems, goes wrong."""
    how: str = request.param
    monkeypatch.setattr(stages, "COMMAND", [sys.executable, "-m", faulty_check.__name__, how])
    return how


@pytest.fixture(scope="module")
def imports() -> float:
    """Seconds until a process of the check begins its work. On a slow or busy machine it is twice that of others."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-m", faulty_check.__name__, "hang", "--help"], cwd=processes.ROOT, check=True)
    return time.monotonic() - begun


def go_wrong(*faults: str) -> pytest.MarkDecorator:
    """One test for each fault. The one that never ends takes all of its time, so it is among the slow tests."""
    marked = [pytest.param(how, marks=[pytest.mark.slow] if how == "hang" else []) for how in faults]
    return pytest.mark.parametrize("faulty", marked, indirect=True)


@go_wrong(*faulty_check.FAULTS)
def test_kernels_behind_one_that_kills_its_process(faulty: str, tmp_path: Path, imports: float) -> None:
    """It is named with how it ended, what it had compared is there, and another process goes on behind it."""
    stage = Measured("compared", "kernel", faulty_check.KERNELS, 1, ["--no-times"])
    # One that hangs has half of what its process has behind its imports; the other half is the next process's.
    seconds, begun = 5 * imports + stages.TO_END, time.monotonic()
    found = stage.run(seconds, tmp_path / "rows.json", PRETENDED)
    assert time.monotonic() - begun < seconds + 2 * processes.GRACE
    assert json.loads((tmp_path / "rows.json").read_text()) == found
    (problem,) = (one for one in found if "error" in one)
    assert problem["kernel"] == "bad" and faulty_check.SAID[faulty] in problem["error"].splitlines()[-1]
    assert {one["kernel"] for one in found if one.get("equal")} == set(faulty_check.KERNELS)


@go_wrong("hang", "spoil")
def test_systems_behind_one_that_kills_its_process(faulty: str, tmp_path: Path, imports: float) -> None:
    """Or whose set-up never ends: the others have times."""
    stage = Measured("training", "system", faulty_check.SYSTEMS, 1)
    seconds, begun = 5 * imports + stages.TO_END, time.monotonic()
    found = stage.run(seconds, tmp_path / "rows.json", PRETENDED)
    assert time.monotonic() - begun < seconds + 2 * processes.GRACE
    first, bad, last = found
    assert [first["system"], bad["system"], last["system"]] == [*faulty_check.SYSTEMS]
    assert faulty_check.SAID[faulty] in bad["error"].splitlines()[-1] and not bad["seconds alone"]
    for one in (first, last):
        assert one["equal"] and len(one["seconds alone"]) == training.ALONE and "error" not in one
    # The last one's rounds are none of the first one's.
    assert len([one for one in last["seconds"] if one is not None]) > 1


def test_the_end_of_a_share_is_said_though_the_process_dies_of_saying_where_it_is() -> None:
    assert processes.said(-11, "Timeout (0:00:10)!\nThread 0x1", 10).endswith("no end in its share of the time")
    assert processes.said(-11, "Thread 0x1", 10).endswith("ended by SIGSEGV")


def test_a_process_that_cannot_begin_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stages, "COMMAND", [sys.executable, "-c", "raise ImportError('no torch')"])
    found = Measured("kernels", "kernel", ["a", "b"], 1).run(30, tmp_path / "rows.json", PRETENDED)
    assert [one["kernel"] for one in found] == ["a", "b"]
    assert all(one["error"].endswith("ImportError: no torch") for one in found)


def test_a_command_ends_in_time_with_all_that_it_started(tmp_path: Path) -> None:
    """Also what has a session of its own, as ranks of tests have, and what a command that ended well left behind."""
    program = """
import subprocess, sys, time
left = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(left.pid, flush=True)
time.sleep({})
"""
    for seconds, code in ((100, None), (0, 0)):
        found, output = processes.run([sys.executable, "-c", program.format(seconds)], 2)
        assert found == code and not runs(int(output.split()[0]))
    assert processes.run([sys.executable, "-c", "print('done')"], 60) == (0, "done\n")


def runs(process: int, seconds: float = 5.0) -> bool:
    """Whether a process still runs after so long. One that was killed ends a moment later, perhaps as a zombie."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.05)
    return True


def test_who_ends_the_check_ends_what_it_started(tmp_path: Path) -> None:
    """And has what was there, with what says where it was."""
    program = f"""
import sys
from benchmarks.gpu_check import __main__ as command, stages
from tests.benchmarks import faulty_check
stages.COMMAND[:] = [sys.executable, "-m", faulty_check.__name__, "hang"]
command.STAGES = [stages.Measured("kernels", "kernel", {faulty_check.KERNELS!r}, 1)]
sys.exit(command.main(["--pretend", "--no-tests"]))
"""
    environment = os.environ | {"HECATE_RESULTS": str(tmp_path)}
    check = subprocess.Popen([sys.executable, "-c", program], cwd=processes.ROOT, env=environment)
    running = tmp_path / "gpu_check.kernels.json"
    for _ in range(300):
        if running.exists() and UNENDED in running.read_text() and '"sound"' in running.read_text():
            break
        time.sleep(0.1)
    children = Path(f"/proc/{check.pid}/task/{check.pid}/children").read_text().split()
    check.terminate()
    assert check.wait(20) != 0 and children and not any(runs(int(child)) for child in children)
    assert json.loads((tmp_path / "gpu_check.json").read_text())["kernels"] == []
    assert UNENDED in running.read_text()


# One of its tests is skipped so that there is one to count.
PROGRAM = """
import os, signal, time, pytest
pytestmark = pytest.mark.gpu
def test_a(): pass
def test_b(): pytest.skip("not here")
def test_c(): {}
def test_d(): assert {}
"""


def test_a_file_of_tests_without_end_is_said_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stages, "side_by_side", lambda: 1)
    slow, quick = tmp_path / "test_slow.py", tmp_path / "test_quick.py"
    slow.write_text(PROGRAM.format("time.sleep(1000)", True))
    quick.write_text(PROGRAM.format("pass", False))
    (first,) = Pytest([str(slow)], 1).run(5, tmp_path, PRETENDED)
    (second,) = Pytest([str(quick)], 1, "test_b or test_c or test_d").run(30, tmp_path, PRETENDED)
    assert first["code"] is None
    assert list(first["tests"].values()) == ["passed", "skipped", None, None]
    assert second["code"] == 1 and list(second["tests"].values()) == ["skipped", "passed", "failed"]
    empty: dict[str, Any] = {"machine": {}, "training": [], "kernels": [], "compared": []}
    said = report.text_of(empty | {"tests": [first, second]})
    # pytest names a file from a folder that it has in common with the checkout, if both lie in one.
    assert "test_slow.py: NO END within 5 s" in said
    assert re.search(r"NOT ENDED (\S*/)?test_slow\.py::test_d$", said, re.MULTILINE)
    assert "test_quick.py -k 'test_b or test_c or test_d': FAILED" in said
    assert re.search(r"passed    (\S*/)?test_quick\.py::test_c$", said, re.MULTILINE)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "how", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGSEGV)", "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_tests_that_kill_their_process(
    how: str, workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Side by side another worker comes for the one that died, and goes on."""
    monkeypatch.setattr(stages, "side_by_side", lambda: workers)
    file = tmp_path / "test_dies.py"
    file.write_text(PROGRAM.format(how, True))
    (found,) = Pytest([str(file)], 1).run(30, tmp_path, PRETENDED)
    ended = ["passed", "skipped", *([None, None] if workers == 1 else ["failed", "passed"])]
    assert list(found["tests"].values()) == ended
    # A process that ends as if all were well has tests that did not end.
    assert found["code"] != 0 or (workers == 1 and "_exit" in how and not report.all_passed(found))


def test_tests_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is noted once, by whichever worker; and one test waits for the other, which runs beside it."""
    monkeypatch.setattr(stages, "side_by_side", lambda: 2)
    wait = "[None for _ in range(200) if not os.path.exists(r'{}') and not time.sleep(0.05)]; open(r'{}', 'w')"
    here, there = tmp_path / "here", tmp_path / "there"
    for name, program in (
        ("one", f"open(r'{here}', 'w'); {wait.format(there, here)}; assert os.path.exists(r'{there}')"),
        ("two", f"open(r'{there}', 'w'); {wait.format(here, there)}; assert os.path.exists(r'{here}')"),
    ):
        (tmp_path / f"test_{name}.py").write_text(PROGRAM.format(program, name == "one"))
    files = [str(tmp_path / f"test_{name}.py") for name in ("one", "two")]
    (found,) = Pytest(files, 1).run(60, tmp_path, PRETENDED)
    assert "2 workers" in found["output"] and found["code"] == 1
    by_name = {name.rpartition("/")[2]: ended for name, ended in found["tests"].items()}
    assert by_name == {
        f"test_{name}.py::test_{one}": ended
        for name, last in (("one", "passed"), ("two", "failed"))
        for one, ended in zip("abcd", ("passed", "skipped", "passed", last), strict=True)
    }
    assert all(notes_of not in found["output"] for notes_of in ("INTERNALERROR",))


def test_a_worker_with_a_spoiled_gpu_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise all its other tests would fail."""
    monkeypatch.setattr(stages, "side_by_side", lambda: 2)
    file = tmp_path / "test_spoils.py"
    file.write_text(f"""
import pytest, torch
pytestmark = pytest.mark.gpu
class spoiled: bad = False
def wait():
    if spoiled.bad: raise RuntimeError("CUDA error: an illegal memory access")
torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, wait
@pytest.mark.parametrize("number", range({(count := 8)}))
def test_one(number):
    spoiled.bad |= number == 1
    wait()
""")
    (found,) = Pytest([str(file)], 1).run(60, tmp_path, PRETENDED)
    assert [*found["tests"].values()].count("failed") == 1 and len(found["tests"]) == count


@pytest.mark.slow
def test_a_short_time_with_a_cpu_that_stands_for_a_gpu(tmp_path: Path, imports: float) -> None:
    """The command itself, from kernels to tests; the middle ones hang, and all others have results."""
    # The shares below, in imports, and the end of the check. Tests have far more than they need, and come last: they
    # end by themselves, and no stage behind them would wait as long as they leave.
    budget, begun = 18 * imports + 10 + command.TO_END, time.monotonic()
    program = """
import runpy, sys
from benchmarks.gpu_check import stages
stages.STAGES = [stage for stage in stages.STAGES if stage.into != "tests"]
stages.STAGES.append(stages.Pytest(["tests/runtime/one_sided/test_transport.py"], 12, "streams_of_one_process"))
stages.COMMAND[1:] = ["-m", "tests.benchmarks.faulty_check", "hang"]
for stage in stages.STAGES:
    if stage.into != "tests":
        names = ("reference", "wrong", "other") if stage.into == "training" else ("first", "bad", "last")
        object.__setattr__(stage, "names", names)
        object.__setattr__(stage, "share", 2)
sys.argv[1:] = ["--pretend", "--budget", "{budget}"]
runpy.run_module("benchmarks.gpu_check", run_name="__main__")
"""
    environment = os.environ | {"HECATE_RESULTS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program.replace("{budget}", str(budget))],
        cwd=processes.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=budget + 40,
    )
    assert done.returncode == 1, done.stderr[-3000:]
    assert time.monotonic() - begun < budget + imports
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    for stage, what, names in (
        ("compared", "kernel", faulty_check.KERNELS),
        ("training", "system", faulty_check.SYSTEMS),
        ("kernels", "kernel", faulty_check.KERNELS),
    ):
        # The stage itself is among them if its share ended before one of them began.
        assert {*names} <= {one[what] for one in found[stage]} <= {*names, stage}, stage
        # The share of a stage may end before those behind it.
        hung, *_ = (one for one in found[stage] if "error" in one)
        assert hung[what] == names[1] and faulty_check.SAID["hang"] in hung["error"], stage
    assert found["tests"][0]["code"] == 0 and len(found["tests"]) == 1
    assert (tmp_path / "gpu_check.txt").read_text().strip() == done.stdout.strip()
