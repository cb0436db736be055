"""Plain files of a checkpoint, and the SHA-256 of each."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path


class CorruptError(ValueError):
    """A checkpoint is not what was saved: files are missing, changed, or not what this version reads."""


@dataclass(frozen=True)
class FileRecord:
    """Length in bytes and SHA-256 of one file."""

    bytes: int
    sha256: str


@contextlib.contextmanager
def open_plain(path: Path) -> Iterator[BufferedReader]:
    """Open a file of a checkpoint if it is plain: a link may lead elsewhere, a pipe block, a device never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", errno.EINVAL)
        if number in (errno.ELOOP, errno.ENXIO, errno.EINVAL):
            raise CorruptError(f"{path.name} is not a plain file") from error
        if number in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise CorruptError(f"{path.name[:255]} is missing") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptError(f"{path.name} is not a plain file")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def record_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Return the records of files, from their present content."""
    records = {}
    for name in names:
        with open_plain(folder / name) as file:
            records[name] = _record_of(file)
    return records


def check_files(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Raise CorruptError for the first file that is missing, no plain file, or not as its record says."""
    for name, record in files.items():
        with open_plain(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.bytes:
                raise CorruptError(f"{name} has {size} bytes, {record.bytes} were saved")
            if _record_of(file) != record:
                raise CorruptError(f"{name} was changed since it was saved")


def _record_of(file: BufferedReader) -> FileRecord:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(os.fstat(file.fileno()).st_size, digest)


def short(error: Exception) -> str:
    """Describe an error in one line of at most 200 letters: it may quote a whole file."""
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
