"""SHA-256 of every file of a checkpoint, in a file that holds its own."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
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


def record_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """The records of files as they are now."""
    return {name: _record(folder / name) for name in names}


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
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
        content = (folder / NAME).read_bytes()
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
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptError(f"{NAME} cannot be read") from error
    for name in files:
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise CorruptError(f"{NAME} names a file outside of the folder: {name!r}")
    return manifest


def check_files(folder: Path, files: dict[str, FileRecord]) -> None:
    """Compare files with their records.

    Raises:
        CorruptError: names the first that is missing, no plain file, or changed.
    """
    for name, record in files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise CorruptError(f"{name} is {'missing' if not path.exists() else 'not a plain file'}")
        size = path.stat().st_size
        if size != record.bytes:
            raise CorruptError(f"{name} has {size} bytes, {record.bytes} were saved")
        if _record(path) != record:
            raise CorruptError(f"{name} was changed since it was saved")
