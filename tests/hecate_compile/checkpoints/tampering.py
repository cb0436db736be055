"""Steps that are changed and signed again, so that hashes agree, and a canary that notices whatever runs."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hecate.checkpoints import manifest
from hecate.checkpoints.safety.files import record_files
from tests.hecate_compile.checkpoints.test_damage import Run, load

# More address space than a load takes, and less than a bomb asks for.
_ROOM = 3 * 2**30
HERE = __name__
WEIGHT = "model.0.weight"

# --- what code that runs would leave behind ---

RAN: list[str] = []
TOUCHED = Path(f"/tmp/hecate-test-canary-{os.getpid()}")


def run_canary(*_: Any) -> None:
    RAN.append("called")


class Canary:
    """Whatever is done to it, it notices."""

    def __setstate__(self, state: Any) -> None:
        RAN.append("__setstate__")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return run_canary, ()


def ran() -> bool:
    """Whether anything ran since the last time that this was asked."""
    found = bool(RAN) or TOUCHED.exists()
    RAN.clear()
    TOUCHED.unlink(missing_ok=True)
    return found


@contextmanager
def little_memory() -> Iterator[None]:
    """A bomb ends as a MemoryError, and not with this machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# --- a step, changed and signed again ---


def sign(step: Path) -> None:
    """Give a step a manifest of its files as they are now."""
    old = manifest.read_manifest(step)
    names = [path.name for path in step.iterdir() if path.name != manifest.NAME]
    manifest.write_manifest(replace(old, files=record_files(step, names)), step)


def index_of(step: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((step / "tensors.json").read_text())
    return found


def write(step: Path, name: str, content: Any) -> None:
    """Bytes, a text, or data as JSON, signed."""
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    (step / name).write_bytes(content)
    sign(step)


def assert_refused(run: Run, *words: str) -> str:
    """The newest step is refused, nothing of it ran, and the one before is loaded. Returns why."""
    with little_memory():
        found, restored, told = load(run.folder)
    assert not ran()
    assert (found.step, restored) == (run.step - 1, run.bits[run.step - 1])
    assert len(told) == 1 and run.newest.name in told[0]
    (why,) = found.skipped
    # Nor was more memory asked for than there is.
    assert len(why) < 1000 and "MemoryError" not in why, why
    for word in words:
        assert word in why, why
    return why
