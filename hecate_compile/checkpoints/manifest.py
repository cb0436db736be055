"""SHA-256 of every file of a checkpoint, in a file that holds its own."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

NAME = "manifest.json"
FORMAT = 1


class CorruptError(ValueError):
    """A checkpoint is not what was saved: files are missing, changed, or not what this version reads."""


@dataclass(frozen=True)
class FileRecord:
    """Length in bytes and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is in a checkpoint.

    Attributes:
        step: as the user counts.
        sequence: how many were published in the folder before; the highest is the newest.
        ranks: how many saved it.
        files: by name.
    """

    step: int
    sequence: int
    ranks: int
    files: dict[str, FileRecord]


@contextlib.contextmanager
def open_plain(path: Path) -> Iterator[BufferedReader]:
    """Open a file of a checkpoint. A link would lead elsewhere, a pipe be waited for, a device never end.

    Raises:
        CorruptError: it is missing, or no plain file.
    """
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
    """The records of files as they are now."""
    return {name: _record(folder / name) for name in names}


def _record(path: Path) -> FileRecord:
    with open_plain(path) as file:
        return _record_of(file)


def _record_of(file: BufferedReader) -> FileRecord:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(os.fstat(file.fileno()).st_size, digest)


def _text(manifest: Manifest) -> str:
    return json.dumps({"format": FORMAT, **asdict(manifest)}, sort_keys=True)


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write it, and see to it that it is on the disk."""
    text = _text(manifest)
    with (folder / NAME).open("w") as file:
        file.write(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, if it is whole.

    Raises:
        CorruptError: it is missing, changed, or of another format.
    """
    try:
        with open_plain(folder / NAME) as file:
            content = file.read()
    except OSError as error:
        raise CorruptError(f"{NAME}: {error.strerror}") from error
    try:
        text, digest, rest = content.decode("ascii").split("\n")
        if rest or hashlib.sha256(text.encode()).hexdigest() != digest:
            raise CorruptError(f"{NAME} was changed")
        fields: dict[str, Any] = json.loads(text)
        if fields.pop("format") != FORMAT:
            raise CorruptError(f"{NAME} has another format than {FORMAT}, the one of this version of hecate")
        files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
        manifest = Manifest(files=files, **fields)
    except CorruptError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{NAME} cannot be read") from error
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """That everything has its type: steps are sorted by these numbers, so one text would hide all the others."""
    numbers = [manifest.step, manifest.sequence, manifest.ranks - 1 if type(manifest.ranks) is int else None]
    numbers += [record.bytes for record in manifest.files.values()]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise CorruptError(f"{NAME} has something else in the place of a number")
    for name in manifest.files:
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise CorruptError(f"{NAME} names a file outside of the folder: {name[:255]!r}")


def check_files(folder: Path, files: dict[str, FileRecord]) -> None:
    """Compare files with their records.

    Raises:
        CorruptError: names the first that is missing, no plain file, or changed.
    """
    for name, record in files.items():
        with open_plain(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.bytes:
                raise CorruptError(f"{name} has {size} bytes, {record.bytes} were saved")
            if _record_of(file) != record:
                raise CorruptError(f"{name} was changed since it was saved")
