"""Indices, manifests and plain data that are untrue, in a step whose hashes agree: refused, and never followed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import hecate
from hecate.checkpoints import manifest
from hecate.checkpoints.coordination import CheckpointError
from hecate.checkpoints.safety.files import CorruptError
from hecate.checkpoints.safety.plain_data import read_plain
from hecate.checkpoints.safety.tensor_index import _check_cover
from tests.hecate_compile.checkpoints.tampering import (
    WEIGHT,
    assert_refused,
    index_of,
    little_memory,
    ran,
    sign,
    write,
)
from tests.hecate_compile.checkpoints.test_damage import Run, bounded, load
from tests.support.extent import ALL

MUTATIONS = 200 if ALL else 40
_MOMENT = "optimizer.state.0.weight.exp_avg"

# --- an index that is untrue ---

PATHS = [
    "../step-00000001/__0_0.distcp",
    "/etc/passwd",
    "",
    ".",
    "..",
    "a\\b",
    "a\0b",
    "x" * 5000,
    "pipe",
    "link",
    "zeros",
    "folder/data",
    "\ud800",
]


def test_paths(run: Run) -> None:
    """They lead nowhere, in the index and in the manifest."""
    honest = index_of(run.newest)
    for path in (*PATHS, 5, None, ["__0_0.distcp"]):
        index = json.loads(json.dumps(honest))
        index[WEIGHT]["chunks"][0][2] = path
        write(run.newest, "tensors.json", index)
        assert_refused(run, "tensors.json: ", "no file of the checkpoint" if isinstance(path, str) else "")
    write(run.newest, "tensors.json", honest)
    # Names in the step that lead elsewhere, or never end.
    os.mkfifo(run.newest / "pipe")
    (run.newest / "link").symlink_to(run.folder / "step-00000001" / "__0_0.distcp")
    (run.newest / "zeros").symlink_to("/dev/zero")
    (run.newest / "folder").symlink_to(run.folder)
    good = manifest.read_manifest(run.newest)
    for path in PATHS:
        manifest.write_manifest(replace(good, files=good.files | {path: good.files["__0_0.distcp"]}), run.newest)
        outside = path in ("", ".", "..") or any(letter in path for letter in "/\\\0")
        assert_refused(run, "names a file outside of the folder" if outside else "")


def _chunks(index: dict[str, Any], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Chunks of the weight, [3, 4], each with a place of its own."""
    _, _, file, start, _ = index[WEIGHT]["chunks"][0]
    index[WEIGHT]["chunks"] = [[o, n, file, start + 100 * number, 100] for number, (o, n) in enumerate(chunks)]


def _place(index: dict[str, Any], **changes: Any) -> None:
    chunk = index[WEIGHT]["chunks"][0]
    for key, value in changes.items():
        chunk[["offsets", "sizes", "file", "start", "length"].index(key)] = value


def _grow(index: dict[str, Any], size: list[int]) -> None:
    """A state of any size fits any parameter: room is made for it before it is read."""
    index[_MOMENT]["size"] = index[_MOMENT]["chunks"][0][1] = size


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no chunks": lambda i: i[WEIGHT].update(chunks=[]),
    "chunks that are none": lambda i: i[WEIGHT].update(chunks=["x"]),
    "a tensor that is none": lambda i: i.update({"model.x": "x"}),
    "a dtype that is none": lambda i: i[WEIGHT].update(dtype="load"),
    "a dtype of nothing": lambda i: i[WEIGHT].update(dtype=[]),
    "a quantized dtype": lambda i: i[_MOMENT].update(dtype="quint8"),
    "a larger dtype": lambda i: i[_MOMENT].update(dtype="complex128"),
    "no size": lambda i: i[WEIGHT].pop("size"),
    "a size of truth values": lambda i: i[WEIGHT].update(size=[True, True]),
    "a size of fractions": lambda i: i[WEIGHT].update(size=[3.0, 4.0]),
    "a negative size": lambda i: i[WEIGHT].update(size=[-3, -4]),
    "a size of 10,000 dimensions": lambda i: i[WEIGHT].update(size=[1] * 10_000),
    "a negative start": lambda i: _place(i, start=-1),
    "a start after the end": lambda i: _place(i, start=10**6),
    "a start of 2**70": lambda i: _place(i, start=2**70),
    "a start that is no number": lambda i: _place(i, start="0"),
    "a length to the end": lambda i: _place(i, length=10**5),
    "a length of one": lambda i: _place(i, length=1),
    "two in one place": lambda i: _place(i, start=i[_MOMENT]["chunks"][0][3]),
    "a state of 2**40": lambda i: _grow(i, [2**20, 2**20]),
    "a state of 2**64, which is 0": lambda i: _grow(i, [2**32, 2**32]),
    "a state of other dimensions": lambda i: _grow(i, [12]),
    "a state turned around": lambda i: _grow(i, [4, 3]),
    "half of it": lambda i: _chunks(i, ((0, 0), (2, 4))),
    "a chunk twice": lambda i: _chunks(i, ((0, 0), (1, 4)), ((0, 0), (2, 4))),
    "rows that overlap": lambda i: _chunks(i, ((0, 0), (2, 4)), ((1, 0), (1, 4))),
    "rows outside": lambda i: _chunks(i, ((0, 0), (2, 4)), ((3, 0), (1, 4))),
    "blocks that overlap": lambda i: _chunks(i, ((0, 0), (3, 2)), ((0, 1), (3, 2))),
    "chunks of other dimensions": lambda i: _chunks(i, ((0,), (12,))),
}


def test_what_an_index_says(run: Run, saved: Run) -> None:
    for name, change in CHANGES.items():
        index = index_of(saved.newest)
        change(index)
        write(run.newest, "tensors.json", index)
        why = assert_refused(run)
        assert "tensors.json: " in why or "__0_0.distcp: " in why, (name, why)
    for content in ("", "null", "[]", "5", "[" * 20_000, '{"a": ' * 10, "1" * 5000, b"\xff\xfe"):
        write(run.newest, "tensors.json", content)
        assert_refused(run, "tensors.json: ")
    (run.newest / "tensors.json").unlink()
    sign(run.newest)
    assert_refused(run, "tensors.json is missing")


def test_chunks_in_any_arrangement() -> None:
    """Blocks that meet are taken, and rows of nothing; a block too few or twice is not."""
    rng = random.Random(0)
    for _ in range(20):
        size = torch.Size([rng.randint(1, 5) for _ in range(rng.randint(0, 4))])
        cuts = [sorted({0, length, *(rng.randint(0, length) for _ in range(2))}) for length in size]
        blocks = itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts))
        chunks = [
            ChunkStorageMetadata(torch.Size([a for a, _ in block]), torch.Size([b - a for a, b in block]))
            for block in blocks
        ]
        _check_cover("x", size, chunks)
        for wrong in (chunks[1:], [*chunks[1:], chunks[-1]]) if len(chunks) > 1 else ():
            with pytest.raises(CorruptError):
                _check_cover("x", size, wrong)


# --- a manifest that is untrue ---


def test_numbers_in_the_manifest(run: Run) -> None:
    """Steps are sorted by them: one that is no number must not hide the others."""
    fields = json.loads((run.newest / manifest.NAME).read_text().split("\n")[0])
    record = fields["files"]["run.json"]
    changes: list[Any] = [
        {key: value}
        for key in ("step", "sequence", "ranks", "format", "files")
        for value in ("x", None, -1, 1.5, True, [], {}, float("nan"))
    ]
    records = [record | {"bytes": "x"}, record | {"bytes": -1}, record | {"bytes": 2**70}, record | {"sha256": 5}]
    changes += [{"files": fields["files"] | {"run.json": other}} for other in (*records, [], None)]
    changes += [{"ranks": 0}, {"ranks": 10**9}, {"step": 7}, {"format": 0}, {"format": manifest.FORMAT + 1}]
    for change in changes:
        _write_manifest(run.newest, json.dumps(fields | change))
        assert_refused(run)
    for content in ("", "null", "[]", "5", '"x"', "[" * 20_000, "{" * 10, '{"format": 1}', "1" * 5000):
        _write_manifest(run.newest, content)
        assert_refused(run, "manifest.json")
    # A field of a later version is no reason.
    _write_manifest(run.newest, json.dumps(fields | {"more": 1}))
    assert load(run.folder)[1] == run.bits[run.step]


def _write_manifest(step: Path, text: str) -> None:
    (step / manifest.NAME).write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")


# --- plain data ---

PLAIN = [
    '{"~": "dtype", "name": "load"}',
    '{"~": "dtype", "name": "onnx"}',
    '{"~": "dtype", "name": "float32.__class__"}',
    '{"~": "dtype", "name": ["float32"]}',
    '{"~": "dtype"}',
    '{"~": "eval", "items": ["1"]}',
    '{"~": ["tuple"], "items": []}',
    '{"~": null}',
    '{"~": "tuple"}',
    '{"~": "tuple", "items": 5}',
    '{"~": "set", "items": [[1]]}',
    '{"~": "deque", "items": [], "most": -1}',
    '{"~": "dict", "items": [[[1], 2]]}',
    '{"~": "dict", "items": [1, 2]}',
    '{"~": "bytes", "base64": "!!!"}',
    '{"~": "int", "hex": "zz"}',
    '{"~": "tensor", "key": "99"}',
    '{"~": "array", "key": []}',
    "1" * 10_000,
    "[" * 20_000,
    '{"a": ',
    "{} {}",
    "__import__('os').system('true')",
]


def test_plain_data(run: Run) -> None:
    """In the place of ``extra`` of a rank, of a field of the run, and of the whole file."""
    for name, field in (("rank0.json", "extra"), ("run.json", "placement")):
        honest = (run.newest / name).read_text()
        for text in PLAIN:
            (run.newest / name).write_text(text)
            with bounded(), little_memory(), pytest.raises(ValueError, match=name):
                read_plain(run.newest / name)
            write(run.newest, name, json.dumps(json.loads(honest) | {field: "@"}).replace('"@"', text))
            assert_refused(run, name)
        for content in (b"\xff\xfe{", "{}".encode("utf-16"), "null", "[]", "5"):
            write(run.newest, name, content)
            assert_refused(run, name)
        write(run.newest, name, honest)
    assert load(run.folder)[1] == run.bits[run.step]


# Plain data, and yet not what hecate.save writes there.
STATES: list[dict[str, Any]] = [
    {"optimizers": [5]},
    {"optimizers": [{}]},
    {"optimizers": [{"groups": []}]},
    {"options": []},
    {"placement": 5},
    {"optimizers": [{"groups": [5], "plain": {}}]},
    {"optimizers": [{"groups": [{"lr": 1.0}], "plain": {}}]},
    {"extra_state": [5]},
    {"extra_state": {"nowhere._extra_state": 5}},
    {"extra_state": {"0._extra_state": 5}},
    {"random": None},
    {"random": {}},
    {"random": {"torch": [], "numpy": [], "python": []}},
]


@pytest.mark.parametrize("change", STATES, ids=str)
def test_state_of_another_form(run: Run, change: dict[str, Any]) -> None:
    name = "rank0.json" if "random" in change else "run.json"
    write(run.newest, name, json.loads((run.newest / name).read_text()) | change)
    with little_memory():
        try:
            found, restored, _ = load(run.folder)
        except CheckpointError:
            return
    assert restored == run.bits[found.step]


def test_a_generator_does_not_read_beyond_its_state(run: Run) -> None:
    """numpy takes any position, and reads there."""
    content = json.loads((run.newest / "rank0.json").read_text())
    content["random"]["numpy"]["items"][2] = 10**6
    write(run.newest, "rank0.json", content)
    with contextlib.suppress(CheckpointError):
        load(run.folder)
    assert np.random.get_state()[2] <= 624


def test_a_file_beside_plain_data(run: Run) -> None:
    """No safetensors, some that say what cannot be, and a link that the manifest does not know."""
    path = run.newest / "rank0.safetensors"
    text = json.dumps({"0": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}}).encode()
    for content in (b"", b"\xff" * 8 + b"{}", struct.pack("<Q", 2**40), struct.pack("<Q", len(text)) + text):
        write(run.newest, path.name, content)
        assert_refused(run, "rank0.json")
    path.unlink()
    sign(run.newest)
    path.symlink_to("/dev/zero")
    assert_refused(run, "rank0.safetensors is not a plain file")


# --- mutations ---


def _mutated(content: bytes, rng: random.Random) -> bytes:
    out = bytearray(content)
    place, kind = rng.randrange(len(out)), rng.randrange(4)
    if kind == 0:
        out[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del out[place : place + rng.randint(1, 8)]
    elif kind == 2:
        out[place:place] = rng.randbytes(rng.randint(1, 8))
    else:
        other, length = rng.randrange(len(out)), rng.randint(1, 32)
        out[place : place + length] = out[other : other + length]
    return bytes(out)


@pytest.mark.parametrize("name", ["tensors.json", "run.json"])
def test_mutations(run: Run, name: str) -> None:
    """Signed again, a step is refused or loaded, in time and memory, and nothing runs."""
    honest, rng = (run.newest / name).read_bytes(), random.Random(0)
    refused = 0
    for _ in range(MUTATIONS):
        write(run.newest, name, _mutated(honest, rng))
        with little_memory():
            try:
                refused += load(run.folder)[0].step != run.step
            except hecate.MismatchError:
                refused += 1
        assert not ran()
    assert refused > MUTATIONS // 2
