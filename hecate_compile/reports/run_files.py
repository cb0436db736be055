"""The files of :func:`hecate.monitor`: a folder that a killed run leaves readable.

One folder for each start of a run (``start000``), in it ``run.json`` and one file for each rank, ``rank0.steps``. It
is a row of numpy arrays of bytes, which are only ever appended; each is an ``.npz`` archive of some steps, a chunk:

    with open("rank0.steps", "rb") as file:
        chunk = np.load(io.BytesIO(np.load(file).tobytes()))  # and again for the next one
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import numpy as np

Array = np.ndarray[Any, Any]
Chunk = Mapping[str, Array]

# Raise the format for a change that older readers would get wrong. A new field or column needs no other format:
# readers give it a default.
FORMAT = 2
# A chunk is written after so many steps or seconds, whichever comes first; a killed run loses no more.
CHUNK_STEPS, CHUNK_SECONDS = 20, 10.0

# Each array of a chunk: its type, its shape, and its content. n steps, L layers, T layers and one entry for
# collectives of no layer, E the most experts of a layer, k changes of owners, m collectives of a few steps.
COLUMNS: dict[str, tuple[Any, str, str]] = {
    "step": (np.int64, "n", "number of the training forward"),
    "began": (np.float64, "n", "Unix time"),
    "seconds": (np.float64, "n", "until the next forward began"),
    "memory": (np.int64, "n", "bytes of this process; on a GPU the most in use there"),
    "rows": (np.int64, "nL", "rows that this rank computed"),
    "row_bytes": (np.int64, "nL", "of rows that it sent"),
    "expert_bytes": (np.int64, "nL", "of experts and their gradients that it sent"),
    "travel": (np.float32, "nT", "seconds of collectives; NaN where not measured"),
    "exposed": (np.float32, "nT", "seconds in which compute stood still for them"),
    "load": (np.uint32, "nLE", "rows of each expert from all ranks; rank 0 only"),
    "holders": (np.uint16, "nLE", "ranks that held it; rank 0 only"),
    "owners_step": (np.int64, "k", "from which step on who owned it; rank 0 only"),
    "owners": (np.int32, "kLE", "its owner, -1 for experts that a layer does not have; rank 0 only"),
    "span_step": (np.int64, "m", "the step of a collective"),
    "span_names": (np.str_, "m3", "part, operator, subject"),
    "span_times": (np.float64, "m5", "started, begun, ended, waited, ready; from the step's begin"),
}
# Numbers that the user logged, "log.loss" for instance; NaN where nothing was logged.
LOGGED = (np.float64, "n", "")


class RunError(ValueError):
    """A folder is no run, or files in it were damaged."""


@dataclass(frozen=True, kw_only=True)
class RunHead:
    """The content of ``run.json``: names, experts of each layer, node of each rank ``[W]``, Unix time of start.

    Ranks of each of ``groups`` groups follow one another, and the first of a group has the loads of its experts.
    """

    model: str
    policy: str
    device: str
    layers: tuple[str, ...]
    experts: tuple[int, ...]
    nodes: tuple[int, ...]
    started: float
    format: int = FORMAT
    groups: int = 1

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    def write(self, folder: Path, rank: int = 0) -> None:
        """Write the file. Several ranks may write the same at the same time; readers see all of it or nothing."""
        part = folder / f"run.json.part{rank}"
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(part, folder / "run.json")

    @classmethod
    def read(cls, folder: Path) -> RunHead:
        """Read the file; RunError if there is none, or it is of something else."""
        path = folder / "run.json"
        try:
            given = json.loads(path.read_text())
            found = given["format"]
            if found == FORMAT:
                return cls(**{one.name: _as(one.type, given[one.name]) for one in fields(cls) if one.name in given})
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise RunError(f"{path} is not what hecate.monitor writes: {type(error).__name__}: {error}") from None
        raise RunError(
            f"{path}: a run in format {found!r}, which this release of hecate-compile cannot read; it reads format "
            f"{FORMAT}. The release that wrote the run draws it: hecate report"
        )

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.experts) or not self.nodes:
            raise ValueError("layers without experts, or no rank")
        if self.groups < 1 or self.world_size % self.groups:
            raise ValueError(f"{self.world_size} ranks in {self.groups} groups")


_KINDS: dict[str, Any] = {"str": str, "int": int, "float": (int, float)}


def _as(annotation: Any, value: Any) -> Any:
    """Return a value of ``run.json`` as an attribute of :class:`RunHead`, whose annotations are text."""
    many = annotation.startswith("tuple[")
    kind = _KINDS[annotation.removeprefix("tuple[").removesuffix(", ...]")]
    values = value if many else [value]
    if not isinstance(values, list) or not all(isinstance(one, kind) and not isinstance(one, bool) for one in values):
        raise ValueError(f"{value!r} where {annotation} is expected")
    return tuple(values) if many else value


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """All chunks of one rank's file, joined, and the problem at its end in words, or ""."""

    arrays: Mapping[str, Array] = field(default_factory=dict)
    problem: str = ""

    @property
    def steps(self) -> int:
        return len(self.arrays.get("step", ()))


def start_folder(root: Path, number: int) -> Path:
    """Return the folder that a start of the run writes to."""
    return root / f"start{number:03}"


def rank_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.steps"


def start_numbers(root: Path) -> list[int]:
    """Return the numbers of all starts in the folder, in order."""
    names = [path.name for path in root.glob("start*") if path.is_dir()]
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"start([0-9]{3}|[1-9][0-9]{3,})", name))


def starts_in(root: Path) -> list[Path]:
    """Return the folders of all starts, in order; RunError if there is none."""
    found = [start_folder(root, number) for number in start_numbers(root)]
    if not found:
        raise RunError(
            f"{root} is no run: {'it has no start000' if root.is_dir() else 'there is no such folder'}. "
            "hecate.monitor(model, folder) writes one."
        )
    return found


def next_step(root: Path, head: RunHead) -> int:
    """Return the number after the last step of earlier starts of the same model; 0 if none can be read."""
    for number in reversed(start_numbers(root)):
        folder = start_folder(root, number)
        with suppress(RunError):
            earlier = RunHead.read(folder)
            if (earlier.model, earlier.layers, earlier.experts) != (head.model, head.layers, head.experts):
                return 0
            read = read_rank(rank_path(folder, 0), earlier)
            if read.steps:
                return int(read.arrays["step"][-1]) + 1
    return 0


def append_chunk(file: IO[bytes], arrays: Chunk) -> None:
    """Write one chunk and hand it to the operating system, which keeps it when this process is killed."""
    archive = io.BytesIO()
    named: dict[str, Any] = dict(arrays)
    np.savez_compressed(archive, **named)
    np.save(file, np.frombuffer(archive.getbuffer(), np.uint8))
    file.flush()


def read_rank(path: Path, head: RunHead) -> RankFile:
    """Read a rank's file up to a damaged or cut chunk, as a killed run may leave; RunError if nothing can be read."""
    chunks: list[Chunk] = []
    try:
        with path.open("rb") as file:
            while file.peek(1):
                place = file.tell()
                try:
                    chunks.append(_read_chunk(file, head))
                # A damaged archive may raise nearly anything.
                except Exception as error:
                    why = f"damaged or cut off at byte {place} ({type(error).__name__}: {error})"
                    if not chunks:
                        raise RunError(f"{path} is {why}") from None
                    return RankFile(arrays=_joined(chunks), problem=f"its file is {why}; what follows is left out")
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None
    return RankFile(arrays=_joined(chunks))


def _read_chunk(file: IO[bytes], head: RunHead) -> Chunk:
    """Read the next chunk, of the types and shapes of ``COLUMNS``; columns of later releases are left out."""
    packed = np.lib.format.read_array(file, allow_pickle=False)
    with np.load(io.BytesIO(packed.tobytes()), allow_pickle=False) as archive:
        kinds = {name: LOGGED if name.startswith("log.") else COLUMNS.get(name) for name in archive.files}
        chunk = {name: archive[name] for name, kind in kinds.items() if kind is not None}
    layers = len(head.layers)
    sizes = {"n": len(chunk["step"]), "L": layers, "T": layers + 1, "E": max(head.experts, default=0), "3": 3, "5": 5}
    for name, array in chunk.items():
        dtype, letters, _ = kinds[name] or LOGGED
        # The first array with "k" or "m" in its shape decides how many there are.
        wanted = tuple(sizes.setdefault(letter, len(array)) for letter in letters)
        if array.shape != wanted or array.dtype.kind != np.dtype(dtype).kind:
            raise ValueError(
                f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} {list(wanted)}"
            )
    for name, (dtype, letters, _) in COLUMNS.items():
        if name not in chunk and letters in ("n", "nL", "nT"):
            shape = tuple(sizes[letter] for letter in letters)
            chunk[name] = np.full(shape, np.nan if dtype in (np.float32, np.float64) else 0, dtype)
    return chunk


def _joined(chunks: list[Chunk]) -> dict[str, Array]:
    """Join chunks, one after the other. Numbers that were logged in some chunks only are NaN in the others."""
    names = dict.fromkeys(name for chunk in chunks for name in chunk)
    return {
        name: np.concatenate(
            [
                chunk[name] if name in chunk else np.full(len(chunk["step"]), np.nan)
                for chunk in chunks
                if name in chunk or name.startswith("log.")
            ]
        )
        for name in names
    }
