"""The manifest of a step: its number, its format, the SHA-256 of every file, and its own."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hecate.checkpoints.safety.files import CorruptError, FileRecord, open_plain

NAME = "manifest.json"
# 1: DCP's pickle says where tensors are. 2: tensors.json does.
FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint. A field that is added has a default, which holds for checkpoints that lack it."""

    step: int
    sequence: int  # One more than the highest in the folder: the newest has the highest.
    ranks: int
    files: dict[str, FileRecord]
    format: int = FORMAT  # A higher one is of a later version of hecate.


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write a manifest to ``folder``, and see to it that it is on the disk."""
    text = json.dumps(asdict(manifest), sort_keys=True)
    with (folder / NAME).open("w") as file:
        file.write(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest; raise CorruptError if it is missing, changed, or of a later format."""
    try:
        with open_plain(folder / NAME) as file:
            content = file.read()
    except OSError as error:
        raise CorruptError(f"{NAME}: {error.strerror}") from error
    try:
        text, digest, rest = content.decode("ascii").split("\n")
        if rest or hashlib.sha256(text.encode()).hexdigest() != digest:
            raise CorruptError(f"{NAME} was changed")
        found: dict[str, Any] = json.loads(text)
        if type(found["format"]) is not int or not 1 <= found["format"] <= FORMAT:
            raise CorruptError(
                f"{NAME} has the format {str(found['format'])[:80]}; this version of hecate reads 1 to {FORMAT}"
            )
        found["files"] = {name: FileRecord(**record) for name, record in found["files"].items()}
        # Fields of a later version that keeps the format are left out.
        manifest = Manifest(**{field.name: found[field.name] for field in fields(Manifest) if field.name in found})
    except CorruptError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{NAME} cannot be read") from error
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """Refuse fields of another type: steps are sorted by these numbers, so one text would hide all the others."""
    numbers = [manifest.step, manifest.sequence, manifest.ranks - 1 if type(manifest.ranks) is int else None]
    numbers += [record.bytes for record in manifest.files.values()]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise CorruptError(f"{NAME} has something else in the place of a number")
    for name in manifest.files:
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise CorruptError(f"{NAME} names a file outside of the folder: {name[:255]!r}")
