"""Publish a step so that it appears in its folder whole or not at all, and from one run alone.

All ranks write to ``step-00000300.tmp-<run>-<nonce>`` and fsync. Rank 0 adds the manifest, renames the folder to
``step-00000300`` and fsyncs its parent; then all hear that it is saved. What is published is never written to again.
The run that began to save last owns the folder, by its token in ``.owner``: workers of earlier ones cannot publish.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
import uuid
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hecate.checkpoints.manifest import Manifest, read_manifest, write_manifest
from hecate.checkpoints.safety.files import CorruptError, FileRecord

_OWNER = ".owner"
# Seconds; what is done under the lock takes less than one, but for the removal of old steps.
_PATIENCE = 60.0
_STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
# The token of this process, for every folder that it saves to.
_run = uuid.uuid4().hex[:12]
_owned: set[Path] = set()


def _be_another_run() -> None:
    """Take another token: processes forked from one that imported hecate must not pass for each other."""
    global _run
    _run = uuid.uuid4().hex[:12]
    _owned.clear()


os.register_at_fork(after_in_child=_be_another_run)


@dataclass(frozen=True)
class Published:
    """A step in a folder, known by its name and manifest alone, which may be one that cannot be read."""

    path: Path
    step: int
    manifest: Manifest | None


def manifest_of(path: Path) -> Manifest:
    """Read the manifest of a step; CorruptError if it cannot be read, or is that of another step."""
    if not path.is_dir():
        raise CorruptError(f"{path} is not there: all ranks must see the same folder")
    name, manifest = _STEP.fullmatch(path.name), read_manifest(path)
    if name is None or manifest.step != int(name[1]):
        raise CorruptError(f"manifest.json says that it is of step {manifest.step}")
    return manifest


def published(folder: Path) -> list[Published]:
    """Return all steps in ``folder``, newest first; before these, by number, those whose manifest cannot be read."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        name = _STEP.fullmatch(path.name)
        if name is None or path.is_symlink() or not path.is_dir():
            continue
        manifest: Manifest | None = None
        with contextlib.suppress(CorruptError):
            manifest = manifest_of(path)
        found.append(Published(path, int(name[1]), manifest))

    def age(one: Published) -> tuple[bool, int, int, str]:
        return one.manifest is None, one.manifest.sequence if one.manifest else 0, one.step, one.path.name

    return sorted(found, key=age, reverse=True)


def open_draft(folder: Path, step: int) -> Path:
    """Make a temporary folder for a step, on rank 0, and remove those of other runs.

    Raise PermissionError if another run has taken the folder over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock", _PATIENCE):
        _take_over(folder)
        for old in folder.glob("step-*.tmp-*"):
            if f".tmp-{_run}-" not in old.name:
                shutil.rmtree(old, ignore_errors=True)
        draft = folder / f"step-{step:08d}.tmp-{_run}-{uuid.uuid4().hex[:8]}"
        draft.mkdir()
    return draft


def publish(draft: Path, *, step: int, ranks: int, files: dict[str, FileRecord], keep: int | None) -> Path:
    """Give a draft its manifest and name, on rank 0, and remove all but the newest ``keep`` steps.

    Raise PermissionError if another run has taken the folder over since the draft was opened.
    """
    folder = draft.parent
    with FileLock(folder / ".lock", _PATIENCE):
        _check_owner(folder)
        known = published(folder)
        sequence = 1 + max((one.manifest.sequence for one in known if one.manifest is not None), default=0)
        write_manifest(Manifest(step=step, sequence=sequence, ranks=ranks, files=files), draft)
        sync(draft)
        final, number = folder / f"step-{step:08d}", 1
        while final.exists():
            number += 1
            final = folder / f"step-{step:08d}.{number}"
        draft.rename(final)
        sync(folder)
        if keep is not None:
            _remove([one for one in published(folder) if one.manifest is not None][keep:])
    return final


def discard(draft: Path) -> None:
    """Remove a draft that came to nothing."""
    shutil.rmtree(draft, ignore_errors=True)


def _remove(steps: list[Published]) -> None:
    for one in steps:
        # A folder that is removed in part must not look like a checkpoint.
        gone = one.path.with_name(f"{one.path.name}.tmp-{_run}-removed")
        with contextlib.suppress(OSError):
            one.path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _take_over(folder: Path) -> None:
    """Make this run the owner of the folder, once; later check that it still is."""
    path = folder / _OWNER
    # Without this file the folder was removed and made again since, and nobody has saved to it.
    if folder.resolve() in _owned and path.exists():
        _check_owner(folder)
        return
    path.write_text(_run)
    sync(path)
    _owned.add(folder.resolve())


def _check_owner(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if (folder / _OWNER).read_text() == _run:
            return
    raise PermissionError(
        f"another run saves to {folder} since this one did, so this one may not: two runs cannot share a folder, nor "
        "two stages of a pipeline"
    )


def sync(path: Path) -> None:
    """See to it that a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FileLock:
    """A lock, held until :meth:`release`, the end of a ``with`` block, or the end of this object or its process.

    The file ``path`` is made and stays. TimeoutError is raised if the lock is not free within ``patience`` seconds.
    """

    def __init__(self, path: Path, patience: float = 0.0) -> None:
        end = time.monotonic() + patience
        file = path.open("w")
        while not _taken(file):
            if time.monotonic() >= end:
                file.close()
                raise TimeoutError(f"another process has held {path} for {patience:.0f} s")
            time.sleep(0.05)
        self._release = weakref.finalize(self, _let_go, file, os.getpid())

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        self._release()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _taken(file: IO[Any]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # The disk knows no locks, like some over a network: nobody is kept out.
        pass
    return True


def _let_go(file: IO[Any], owner: int) -> None:
    with suppress(OSError):
        if os.getpid() == owner:
            # Explicitly: processes that were forked meanwhile have the file too, and would keep the lock.
            fcntl.flock(file, fcntl.LOCK_UN)
        file.close()
