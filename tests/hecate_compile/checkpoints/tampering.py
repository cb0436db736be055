"""Steps that were changed and signed again, so that their hashes agree, and a canary that notices whatever runs."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from hecate.checkpoints import manifest
from tests.hecate_compile.checkpoints.test_damage import Run, load

# What code that runs would leave behind: an entry here, an environment variable, or a file.
RAN: list[str] = []
VARIABLE = "HECATE_TEST_CANARY"
# More address space than a load takes, and less than a bomb asks for.
_ROOM = 3 * 2**30


def run_canary(*_: Any) -> None:
    RAN.append("called")


also_run_canary = third_canary = run_canary


class Canary:
    """Whatever is done to it, it notices."""

    def __setstate__(self, state: Any) -> None:
        RAN.append("__setstate__")

    @property
    def trap(self) -> None:
        return None

    @trap.setter
    def trap(self, value: Any) -> None:
        RAN.append("property")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return run_canary, ()


class Trap:
    trap = Canary.trap


HERE = __name__


def ran() -> list[str]:
    """What ran since the last time that this was asked."""
    found = list(RAN)
    RAN.clear()
    if os.environ.pop(VARIABLE, None) is not None:
        found.append("environment")
    if CANARY.exists():
        found.append("file")
        CANARY.unlink()
    return found


# In the working folder's place: payloads must know it when they are made.
CANARY = Path(f"/tmp/hecate-test-canary-{os.getpid()}")


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

WEIGHT = MetadataIndex("model.0.weight", torch.Size([0, 0]))


def sign(step: Path, **changes: Any) -> None:
    """Give a step a manifest of its files as they are now."""
    old = json.loads((step / manifest.NAME).read_text().split("\n")[0])
    names = [path.name for path in step.iterdir() if path.name != manifest.NAME]
    fields: dict[str, Any] = {key: old[key] for key in ("step", "sequence", "ranks")}
    fields["files"] = manifest.record_files(step, names)
    manifest.write_manifest(manifest.Manifest(**(fields | changes)), step)


def metadata_of(step: Path) -> Metadata:
    found: Metadata = pickle.loads((step / ".metadata").read_bytes())
    return found


def write_metadata(step: Path, metadata: Any) -> None:
    (step / ".metadata").write_bytes(metadata if isinstance(metadata, bytes) else pickle.dumps(metadata))
    sign(step)


def set_place(metadata: Metadata, index: MetadataIndex, **changes: Any) -> None:
    metadata.storage_data[index] = replace(metadata.storage_data[index], **changes)


def restore(run: Run, saved: Run) -> None:
    shutil.rmtree(run.newest)
    shutil.copytree(saved.newest, run.newest)


def assert_refused(run: Run, *words: str) -> str:
    """The newest step is refused, nothing of it ran, and the one before is loaded. Returns why."""
    with little_memory():
        found, restored, told = load(run.folder)
    assert ran() == []
    assert found.step == run.step - 1
    assert restored == run.bits[run.step - 1]
    assert len(told) == 1 and run.newest.name in told[0]
    (why,) = found.skipped
    # Nor was more memory asked for than there is.
    assert len(why) < 1000 and "MemoryError" not in why, why
    for word in words:
        assert word in why, why
    return why
