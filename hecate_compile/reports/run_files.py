"""What :func:`hecate.monitor` writes: a folder that a killed run leaves readable.

One folder for each start of a run (``start000``), in it ``run.json`` and one file for each rank, ``rank0.steps``. It
is a row of chunks, which are only ever appended. A chunk is a head of 12 bytes (magic, length and checksum of what
follows) and a compressed numpy archive of some steps, n. L are layers, E the most experts of a layer:

============================ ========================== ======================================================
``step``                     int64 ``[n]``              number of the training forward
``began``, ``seconds``       float64 ``[n]``            Unix time; until the next forward began
``rows``                     int64 ``[n, L]``           rows that this rank computed
``row_bytes``, ``node_bytes`` int64 ``[n, L]``          of rows that it sent; those of them to other nodes
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
import struct
import zlib
from collections.abc import Mapping
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
        first_step: number of the first step.
        started: Unix time.
    """

    model: str
    policy: str
    device: str
    layers: tuple[str, ...]
    experts: tuple[int, ...]
    nodes: tuple[int, ...]
    first_step: int
    started: float
    format: int = _FORMAT

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    def write(self, folder: Path) -> None:
        (folder / "run.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

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
            head = cls(**given)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise RunError(f"{path} is not what hecate.monitor writes: {error}") from None
        if head.format != _FORMAT or len(head.layers) != len(head.experts) or not head.nodes:
            raise RunError(f"{path}: format {head.format} is not known here; this version reads format {_FORMAT}")
        return head


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


def starts_in(root: Path) -> list[Path]:
    """The folders of all starts, in order.

    Raises:
        RunError: there is none.
    """
    found = sorted(path for path in root.glob("start[0-9]*") if path.is_dir())
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


def read_rank(path: Path) -> RankFile:
    """Everything that a rank wrote; the last chunk of a run that was killed may be cut off, and is left out.

    Raises:
        RunError: there is no such file, or a chunk before the last one is damaged.
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
        if magic != _MAGIC or zlib.crc32(packed) != checksum:
            raise RunError(f"{path} is damaged at byte {place}: what hecate.monitor wrote there was changed")
        chunks.append(_unpack(packed, path, place))
        place = begin + length
    return RankFile(arrays=_joined(chunks), problem=problem)


def _unpack(packed: bytes, path: Path, place: int) -> dict[str, Array]:
    try:
        with np.load(io.BytesIO(zlib.decompress(packed)), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, KeyError, EOFError, zlib.error, BadZipFile) as error:
        raise RunError(f"{path} cannot be read at byte {place}: {error}") from None


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
