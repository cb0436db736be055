"""A plugin for pytest: which tests were chosen and how each ended, noted while they run.

A run that is cut off has written what it did not come to: lines of JSON, in the file that ``HECATE_TEST_NOTES``
names. Those of workers of pytest-xdist all write to it, and what is noted twice counts once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

VARIABLE = "HECATE_TEST_NOTES"


def pytest_collection_finish(session: Any) -> None:
    for item in session.items:
        _note(test=item.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    # What fails or is skipped in its setup is never called.
    if report.when == "call" or report.outcome != "passed":
        _note(test=report.nodeid, ended=report.outcome)
    if report.outcome == "failed" and os.environ.get("PYTEST_XDIST_WORKER"):
        _end_if_spoiled()


def _end_if_spoiled() -> None:
    """End this worker, for which another one comes, if a kernel has spoiled its GPU for the tests behind this one."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:
        os._exit(1)


def _note(**what: str) -> None:
    with open(os.environ[VARIABLE], "a") as file:
        file.write(json.dumps(what) + "\n")


def read_notes(path: Path) -> dict[str, str | None]:
    """How each test ended, in order; None for one that did not."""
    found: dict[str, str | None] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        note = json.loads(line)
        test, ended = note["test"], note.get("ended")
        # One that passes and fails in its teardown has failed.
        if found.get(test) in (None, "passed"):
            found[test] = ended or found.get(test)
    return found
