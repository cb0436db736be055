"""What :func:`hecate.monitor` writes: a folder that a killed run leaves readable.

One folder for each start of a run (``start000``), in it ``run.json`` and one file for each rank, ``rank0.steps``. It
is a row of chunks, which are only ever appended. A chunk is a head of 12 bytes (magic, length and checksum of what
follows) and a compressed numpy archive of some steps, n. L are layers, E the most experts of a layer:

============================ ========================== ======================================================
``step``                     int64 ``[n]``              number of the training forward
``began``, ``seconds``       float64 ``[n]``            Unix time; until the next forward began
``rows``                     int64 ``[n, L]``           rows that this rank computed
``row_bytes``                int64 ``[n, L]``           of rows that it sent
``expert_bytes``             int64 ``[n, L]``           of experts and their gradients that it sent
``travel``, ``exposed``      float32 ``[n, L + 1]``     seconds of collectives, and in which compute stood still for
                                                        them; last those of no layer. NaN where not measured
``memory``                   int64 ``[n]``              bytes of this process: on a GPU the most in use there
``log.NAME``                 float64 ``[n]``            what the user logged, NaN where nothing
``load``                     uint32 ``[n, L, E]``       rows of each expert from all ranks; rank 0 only
``holders``                  uint16 ``[n, L, E]``       ranks that held it; rank 0 only
``owners_step``, ``owners``  int64 ``[k]``, int32 ``[k, L, E]``  from which step on who owned it; rank 0 only
``span_step``                int64 ``[m]``              spans of a few steps: the step
``span_names``               str ``[m, 3]``             part, operator, subject
``span_times``               float64 ``[m, 5]``         started, begun, ended, waited, ready; from the step's begin
============================ ========================== ======================================================
"""

from __future__ import annotations

import io
import json
import os
import re
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile

import numpy as np

Array = np.ndarray[Any, Any]
Chunk = Mapping[str, Array]

_HEAD = struct.Struct("<4sII")
_MAGIC = b"hrun"
_FORMAT = 1
# A chunk is written after so many steps or seconds, whichever comes first: what a killed run loses.
CHUNK_STEPS, CHUNK_SECONDS = 20, 10.0


class RunError(ValueError):
    """A folder is no run, or what is in it was damaged."""


@dataclass(frozen=True, kw_only=True)
class RunHead:
    """What stands in ``run.json``.

    Attributes:
        model: class of the model.
        policy: what decided about placements.
        device: kind of the ranks' device.
        layers, experts: name of each layer that has experts, and how many.
        nodes: node of each rank, length W.
        started: Unix time.
    """

    model: str
    policy: str
    device: str
    layers: tuple[str, ...]
    experts: tuple[int, ...]
    nodes: tuple[int, ...]
    started: float
    format: int = _FORMAT

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    def write(self, folder: Path, rank: int = 0) -> None:
        """Several ranks may write the same at the same time; who reads sees all of it or nothing."""
        part = folder / f"run.json.part{rank}"
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(part, folder / "run.json")

    @classmethod
    def read(cls, folder: Path) -> RunHead:
        """
        Raises:
            RunError: there is none, or it is of something else.
        """
        path = folder / "run.json"
        try:
            given: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in json.loads(path.read_text()).items()
            }
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise RunError(f"{path} is not what hecate.monitor writes: {error}") from None
        # Nobody reads it, and it is not written any more.
        given.pop("first_step", None)
        if given.get("format") != _FORMAT:
            found = given.get("format")
            raise RunError(f"{path}: format {found!r} is not known here; this version reads format {_FORMAT}")
        if set(given) != set(_KINDS) or not all(_is(given[name], kind) for name, kind in _KINDS.items()):
            wrong = [name for name, kind in _KINDS.items() if name not in given or not _is(given[name], kind)]
            raise RunError(f"{path} is not what hecate.monitor writes: {', '.join(wrong) or 'more than it writes'}")
        head = cls(**given)
        if len(head.layers) != len(head.experts) or not head.nodes:
            raise RunError(f"{path} is not what hecate.monitor writes: layers without experts, or no rank")
        return head


# What stands in run.json; a list of something is a tuple of it here.
_KINDS: dict[str, type | list[type]] = {
    "model": str, "policy": str, "device": str, "layers": [str], "experts": [int], "nodes": [int],
    "started": float, "format": int,
}  # fmt: skip


def _is(value: Any, kind: type | list[type]) -> bool:
    if isinstance(kind, list):
        return isinstance(value, tuple) and all(_is(one, kind[0]) for one in value)
    return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """What one rank wrote.

    Attributes:
        arrays: all chunks, one behind the other.
        problem: what is missing at the end, in words; empty if nothing is.
    """

    arrays: Mapping[str, Array] = field(default_factory=dict)
    problem: str = ""

    @property
    def steps(self) -> int:
        return len(self.arrays["step"]) if "step" in self.arrays else 0


def start_folder(root: Path, number: int) -> Path:
    """Where a start of the run writes."""
    return root / f"start{number:03}"


def rank_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.steps"


def start_numbers(root: Path) -> list[int]:
    """Of all starts that are there, in order."""
    names = [path.name for path in root.glob("start*") if path.is_dir()]
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"start([0-9]{3}|[1-9][0-9]{3,})", name))


def starts_in(root: Path) -> list[Path]:
    """The folders of all starts, in order.

    Raises:
        RunError: there is none.
    """
    found = [start_folder(root, number) for number in start_numbers(root)]
    if not found:
        raise RunError(
            f"{root} is no run: {'it has no start000' if root.is_dir() else 'there is no such folder'}. "
            "hecate.monitor(model, folder) writes one."
        )
    return found


def append_chunk(file: IO[bytes], arrays: Chunk) -> None:
    """Write one chunk and hand it to the operating system, which keeps it when this process is killed."""
    plain = io.BytesIO()
    named: dict[str, Any] = dict(arrays)
    np.savez(plain, **named)
    # The fastest level: most of it is small numbers in wide integers.
    packed = zlib.compress(plain.getbuffer(), 1)
    file.write(_HEAD.pack(_MAGIC, len(packed), zlib.crc32(packed)) + packed)
    file.flush()


def next_step(root: Path, head: RunHead) -> int:
    """The number behind the last step of earlier starts of the same model; 0 if there are none that can be read."""
    for number in reversed(start_numbers(root)):
        folder = start_folder(root, number)
        with suppress(RunError):
            earlier = RunHead.read(folder)
            if (earlier.model, earlier.layers, earlier.experts) != (head.model, head.layers, head.experts):
                return 0
            steps = read_rank(rank_path(folder, 0)).arrays.get("step")
            if steps is not None and len(steps):
                return int(steps[-1]) + 1
    return 0


def read_rank(path: Path) -> RankFile:
    """Everything that a rank wrote, up to what is damaged.

    The last chunk of a run that was killed may be cut off, and is left out.

    Raises:
        RunError: there is no such file, or nothing in it can be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None
    chunks: list[dict[str, Array]] = []
    place, problem = 0, ""
    while place < len(data):
        head, begin = data[place : place + _HEAD.size], place + _HEAD.size
        if len(head) < _HEAD.size:
            problem = "the last chunk is cut off"
            break
        magic, length, checksum = _HEAD.unpack(head)
        packed = data[begin : begin + length]
        if magic == _MAGIC and len(packed) < length:
            problem = "the last chunk is cut off"
            break
        chunk = _unpack(packed) if magic == _MAGIC and zlib.crc32(packed) == checksum else None
        if chunk is None:
            # Where the next one begins is not known for sure.
            if not chunks:
                raise RunError(f"{path} is damaged at byte {place}: what hecate.monitor wrote there was changed")
            problem = f"its file is damaged at byte {place}; what follows is left out"
            break
        chunks.append(chunk)
        place = begin + length
    return RankFile(arrays=_joined(chunks), problem=problem)


def _unpack(packed: bytes) -> dict[str, Array] | None:
    """The arrays of a chunk; None if it is none."""
    try:
        with np.load(io.BytesIO(zlib.decompress(packed)), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, KeyError, EOFError, zlib.error, BadZipFile):
        return None


def _joined(chunks: list[dict[str, Array]]) -> dict[str, Array]:
    """Chunks one behind the other. What was logged in some chunks only is NaN in the others."""
    names = list(dict.fromkeys(name for chunk in chunks for name in chunk))
    joined = {}
    for name in names:
        parts = [
            chunk[name] if name in chunk else np.full(len(chunk["step"]), np.nan)
            for chunk in chunks
            if name in chunk or name.startswith("log.")
        ]
        joined[name] = np.concatenate(parts)
    return joined
