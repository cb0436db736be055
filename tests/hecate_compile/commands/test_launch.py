"""Ranks that a command starts: their code, their output, and that none is left."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from hecate.commands import launch
from hecate.commands.launch import run_ranks
from tests.support.ranks import lives

# A child in a session of its own, as torchrun starts ranks; neither ends when it is asked to.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
with open(sys.argv[1] + ".part", "w") as file:
    print(os.getpid(), child.pid, file=file)
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(60)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    (tmp_path / "fails.py").write_text("import os, sys\nprint('rank', os.environ.get('RANK'))\nsys.exit(3)\n")
    return os.environ | {"PYTHONPATH": str(tmp_path)}


def test_code_and_output(environment: dict[str, str]) -> None:
    assert run_ranks("fails", [], ranks=1, timeout=30, environment=environment) == (3, "rank None\n")


@pytest.mark.parametrize("interrupted", [False, True])
def test_nothing_is_left_behind(
    interrupted: bool, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.3)
    pids, wait = tmp_path / "pids", subprocess.Popen.wait

    def wait_until_started(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout != 77:
            return wait(process, timeout)
        while not pids.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt if interrupted else subprocess.TimeoutExpired("stubborn", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_until_started)
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            run_ranks("stubborn", [str(pids)], ranks=1, timeout=77, environment=environment)
    else:
        assert run_ranks("stubborn", [str(pids)], ranks=1, timeout=77, environment=environment) == (None, "")
    started = list(map(int, pids.read_text().split()))
    end = time.monotonic() + 5
    while any(map(lives, started)) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(started) == 2 and not any(map(lives, started))
