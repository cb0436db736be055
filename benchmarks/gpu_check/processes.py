"""Commands that end in time, whatever they do, with all that they started."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Seconds that a command has to end by itself when it is asked to, and as many when it is killed.
GRACE = 5.0


def run(command: Sequence[str], seconds: float, environment: Mapping[str, str] = {}) -> tuple[int | None, str]:
    """The exit code of a command, None after so many seconds, and what it printed.

    What it started and left behind is killed, also what has a session of its own, as ranks of tests have: on a GPU it
    would be in the way of what is measured next. All of it has a variable of this call in its environment.
    """
    code: int | None = None
    mark = f"HECATE_RUN_{uuid.uuid4().hex}"
    # A file, not a pipe: a process that outlives the command would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
            env={**os.environ, **environment, mark: "1"},
        )
        try:
            code = process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            # Tests end the processes that they started, if they are asked to.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            end_processes(mark)
            # One whose kernel still runs may stay in the driver.
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        output.seek(0)
        return code, output.read()


def end_processes(mark: str, grace: float = 1.0) -> None:
    """Kill what has this variable in its environment, if it does not end by itself, as servers of forks do."""
    end = time.monotonic() + grace
    while (found := list(_marked(mark))) and time.monotonic() < end:
        time.sleep(0.05)
    # One that is killed may just have started another.
    for _ in range(5):
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if not (found := list(_marked(mark))):
            return
        time.sleep(0.05)


def _marked(mark: str) -> Iterator[int]:
    """Running processes that were started with this variable; none where there is no ``/proc``."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        # Of those that have ended meanwhile, and of other users', nothing can be read.
        with suppress(OSError):
            if f"{mark}=".encode() in path.read_bytes():
                yield int(path.parent.name)


def said(code: int | None, output: str, seconds: float) -> str:
    """What is known of a command that did not end well; its last line says it shortly."""
    if code is None:
        how = f"no end after {seconds:.0f} s"
    elif _TIMEOUT in output:
        # First, since a process may crash while it says where its threads are.
        how = "no end in its share of the time"
    elif code < 0:
        how = f"ended by {signal.Signals(-code).name}"
    else:
        how = "" if output.strip() and code else f"exit code {code}"
    return f"{output[-2000:]}\n{how}".strip()


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Say where it is, and end this process, if what is inside takes longer.

    No part of Python need run for that: what hangs may be in a driver.
    """
    faulthandler.dump_traceback_later(max(1.0, seconds), exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


# What that prints first.
_TIMEOUT = "Timeout ("
