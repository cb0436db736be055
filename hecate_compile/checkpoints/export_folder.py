"""A folder that appears whole, also in the place of an earlier one.

It is written beside, as ``<name>.tmp-<nonce>``, and renamed. An earlier one is renamed to ``<name>.replaced-<nonce>``
a moment before, because no rename replaces a folder that is not empty. A kill in that moment leaves both whole and
none under the name; the next export puts the earlier one back, and goes on from there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from hecate.checkpoints.publish import sync

RECORD = "hecate_export.json"


class ExportFolder:
    """Where an export goes; of the one rank that writes.

    Attributes:
        draft: written to between :meth:`open` and :meth:`publish`.
    """

    def __init__(self, folder: Path) -> None:
        self._final = folder
        self.draft = folder
        self._lock: int | None = None

    def open(self) -> None:
        """Make the draft; removes those of processes that are gone.

        Raises:
            FileExistsError: the folder holds something else than an export.
            OSError: there cannot be one.
        """
        self._final = final = self._final.resolve()
        final.parent.mkdir(parents=True, exist_ok=True)
        self._put_back()
        self._check_replaceable()
        for left in self._beside("tmp"):
            if not _in_use(left):
                shutil.rmtree(left, ignore_errors=True)
        draft = final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")
        draft.mkdir()
        self.draft = draft
        # Goes with the process, however it ends.
        self._lock = os.open(draft, os.O_RDONLY)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def publish(self) -> None:
        """Give the draft its name. What is in the folder and not of an export moves along."""
        final, draft = self._final, self.draft
        self._check_replaceable()
        files = sorted(path.name for path in draft.iterdir())
        (draft / RECORD).write_text(json.dumps({"format": 1, "files": [*files, RECORD]}) + "\n")
        for path in draft.iterdir():
            sync(path)
        if final.exists():
            for other in final.iterdir():
                if other.name not in _files_of(final) and not (draft / other.name).exists():
                    _copy(other, draft / other.name)
        sync(draft)
        old = final.with_name(f"{final.name}.replaced-{uuid.uuid4().hex[:8]}")
        replaces = final.exists()
        if replaces:
            final.rename(old)
        try:
            draft.rename(final)
        except OSError:
            if replaces:
                old.rename(final)
            raise
        sync(final.parent)
        self._unlock()
        for left in self._beside("replaced"):
            shutil.rmtree(left, ignore_errors=True)

    def discard(self) -> None:
        """Remove the draft, if it was not published."""
        if self._lock is not None:
            shutil.rmtree(self.draft, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _put_back(self) -> None:
        if not self._final.exists():
            for left in self._beside("replaced"):
                left.rename(self._final)
                return

    def _check_replaceable(self) -> None:
        final = self._final
        if not final.exists():
            return
        if not final.is_dir():
            raise FileExistsError(f"{final} is a file")
        if any(final.iterdir()) and not _files_of(final):
            raise FileExistsError(
                f"{final} is not empty, and no export: it has no {RECORD}. Give another folder, or empty it"
            )

    def _beside(self, kind: str) -> Iterator[Path]:
        pattern = re.compile(re.escape(self._final.name) + rf"\.{kind}-[0-9a-f]{{8}}")
        for path in list(self._final.parent.iterdir()):
            if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                yield path


def _files_of(folder: Path) -> set[str]:
    """Names of what an export wrote there; nothing, if none did."""
    try:
        record = json.loads((folder / RECORD).read_text())
        return {str(name) for name in record["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _in_use(draft: Path) -> bool:
    """Whether the process that writes it lives; also if that cannot be known."""
    try:
        descriptor = os.open(draft, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _copy(source: Path, target: Path) -> None:
    """By links: the earlier folder stays whole until it is gone, and nothing is written twice."""
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=_link)
    else:
        _link(source, target)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
