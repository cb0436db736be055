"""Metadata and manifests that are untrue, in a step that is signed again: refused, and never followed elsewhere."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import hecate
from hecate.checkpoints import manifest
from hecate.checkpoints.coordination import CheckpointError
from hecate.checkpoints.safe_metadata import _check_cover, read_metadata
from tests.hecate_compile.checkpoints.payloads import DEEP
from tests.hecate_compile.checkpoints.tampering import (
    WEIGHT,
    assert_refused,
    little_memory,
    metadata_of,
    ran,
    set_place,
    sign,
    write_metadata,
)
from tests.hecate_compile.checkpoints.test_damage import Run, bits, bounded, trained
from tests.support.extent import ALL

MUTATIONS = 200 if ALL else 40
MOMENT = MetadataIndex("optimizer.state.0.weight.exp_avg", torch.Size([0, 0]))

PATHS = [
    "../step-00000001/__0_0.distcp", "/etc/passwd", "/dev/zero", "", ".", "..", "a\\b", "..\\step-00000001", "a\0b",
    "x" * 5000, "./__0_0.distcp", "sub/../__0_0.distcp", "__0_0.distcp/", "pipe", "link", "zeros", "folder/data",
    "manifest.json", "\ud800", "~/x", "%2e%2e", "__0_0.distcp\n",
]  # fmt: skip


def _traps(run: Run) -> None:
    """Names in a step that lead elsewhere, or never end."""
    os.mkfifo(run.newest / "pipe")
    (run.newest / "link").symlink_to(run.folder / "step-00000001" / "__0_0.distcp")
    (run.newest / "zeros").symlink_to("/dev/zero")
    (run.newest / "folder").symlink_to(run.folder)


def test_paths_in_metadata(run: Run) -> None:
    metadata = metadata_of(run.newest)
    honest = dict(metadata.storage_data)
    files = manifest.read_manifest(run.newest).files
    for path in PATHS:
        metadata.storage_data = honest | {WEIGHT: replace(honest[WEIGHT], relative_path=path)}
        write_metadata(run.newest, metadata)
        assert_refused(run, ".metadata", "which is no file of the checkpoint" if path != "manifest.json" else "")
    _traps(run)
    for path in ("pipe", "link", "zeros", "folder"):
        # Listed in the manifest too.
        metadata.storage_data = honest | {WEIGHT: replace(honest[WEIGHT], relative_path=path)}
        (run.newest / ".metadata").write_bytes(pickle.dumps(metadata))
        listed = manifest.record_files(run.newest, files) | {path: files["__0_0.distcp"]}
        manifest.write_manifest(manifest.Manifest(step=2, sequence=9, ranks=1, files=listed), run.newest)
        assert_refused(run, f"{path} is not a plain file")
    for path in (5, None, b"__0_0.distcp", ("__0_0.distcp",)):
        metadata.storage_data = honest | {WEIGHT: replace(honest[WEIGHT], relative_path=path)}
        (run.newest / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(manifest.CorruptError, match=r"^\.metadata"):
            read_metadata(run.newest, files)


def test_paths_in_the_manifest(run: Run) -> None:
    _traps(run)
    good = manifest.read_manifest(run.newest)
    for path in PATHS:
        record = good.files["__0_0.distcp"]
        manifest.write_manifest(replace(good, files=good.files | {path: record}), run.newest)
        outside = path in ("", ".", "..") or any(letter in path for letter in "/\\\0")
        assert_refused(run, "names a file outside of the folder" if outside else "")


def test_numbers_in_the_manifest(run: Run) -> None:
    """Steps are sorted by them: one that is no number must not hide the others."""
    text = (run.newest / manifest.NAME).read_text().split("\n")[0]
    fields = json.loads(text)
    record = fields["files"]["run.json"]
    changes: list[Any] = [
        {key: value}
        for key in ("step", "sequence", "ranks", "format", "files")
        for value in ("x", None, -1, 1.5, True, [], {}, float("nan"))
        # Which is 1.
        if (key, value) != ("format", True)
    ]
    changes += [{"files": fields["files"] | {"run.json": other}} for other in (
        record | {"bytes": "x"}, record | {"bytes": -1}, record | {"sha256": 5}, record | {"more": 1}, [], None,
        record | {"bytes": 2**70},
    )]  # fmt: skip
    changes += [{"more": 1}, {"ranks": 0}, {"ranks": 10**9}, {"step": 7}]
    for change in changes:
        _write_signed(run.newest, json.dumps(fields | change))
        assert_refused(run)
    for content in ("", "null", "[]", "5", '"x"', "[" * DEEP, "{" * 10, '{"format": 1}', "1" * 5000):
        _write_signed(run.newest, content)
        assert_refused(run, "manifest.json")


def _write_signed(step: Path, text: str) -> None:
    digest = hashlib.sha256(text.encode()).hexdigest()
    (step / manifest.NAME).write_text(f"{text}\n{digest}\n")


def _tensor(metadata: Metadata, name: str) -> TensorStorageMetadata:
    found = metadata.state_dict_metadata[name]
    assert isinstance(found, TensorStorageMetadata)
    return found


def _add(metadata: Metadata, name: Any, tensor: Any) -> None:
    metadata.state_dict_metadata[name] = tensor
    metadata.planner_data[name] = (name,)


def _grow(metadata: Metadata, index: MetadataIndex, size: tuple[int, ...]) -> None:
    """A state of any size fits any parameter: room is made for it before it is read."""
    tensor = _tensor(metadata, index.fqn)
    tensor.size = tensor.chunks[0].sizes = torch.Size(size)


def _chunks(metadata: Metadata, *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Chunks of the weight, [3, 4], each with a place of its own."""
    tensor = _tensor(metadata, "model.0.weight")
    tensor.chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in chunks]
    info = metadata.storage_data.pop(WEIGHT)
    for number, chunk in enumerate(tensor.chunks):
        metadata.storage_data[MetadataIndex("model.0.weight", chunk.offsets)] = replace(
            info, offset=info.offset + 100 * number, length=100
        )


CHANGES: dict[str, Callable[[Metadata], Any]] = {
    "another path": lambda m: m.planner_data.update({"model.0.weight": ("model", "0", "bias")}),
    "a path too many": lambda m: m.planner_data.update({"x": ("x",)}),
    "a path too few": lambda m: m.planner_data.pop("model.0.weight"),
    "a path of tuples": lambda m: m.planner_data.update({"model.0.weight": (("model",), "0.weight")}),
    "paths that are none": lambda m: setattr(m, "planner_data", [1]),
    "no tensors": lambda m: setattr(m, "state_dict_metadata", None),
    "no places": lambda m: setattr(m, "storage_data", None),
    "a version of another kind": lambda m: setattr(m, "version", 5),
    "transformed": lambda m: set_place(m, WEIGHT, transform_descriptors=["x"]),
    "a negative offset": lambda m: set_place(m, WEIGHT, offset=-1),
    "a negative length": lambda m: set_place(m, WEIGHT, length=-1),
    "an offset after the end": lambda m: set_place(m, WEIGHT, offset=10**6),
    "an offset of 2**70": lambda m: set_place(m, WEIGHT, offset=2**70),
    "an offset that is no number": lambda m: set_place(m, WEIGHT, offset="0"),
    "an offset that is a truth value": lambda m: set_place(m, WEIGHT, offset=False),
    "a length to the end": lambda m: set_place(m, WEIGHT, length=10**5),
    "a length of 2**70": lambda m: set_place(m, WEIGHT, length=2**70),
    "a length of one": lambda m: set_place(m, WEIGHT, length=1),
    "two in one place": lambda m: m.storage_data.update({WEIGHT: m.storage_data[MOMENT]}),
    "a place of nothing": lambda m: m.storage_data.update({MetadataIndex("x"): m.storage_data[MOMENT]}),
    "no place": lambda m: m.storage_data.pop(WEIGHT),
    "a place under a text": lambda m: m.storage_data.update({"x": m.storage_data.pop(WEIGHT)}),
    "a place that is none": lambda m: m.storage_data.update({WEIGHT: "x"}),
    "a byte item": lambda m: m.state_dict_metadata.update({"model.0.weight": BytesStorageMetadata()}),
    "another byte item": lambda m: _add(m, "model.x", BytesStorageMetadata()),
    "a tensor that is none": lambda m: _add(m, "model.x", "x"),
    "a tensor without chunks": lambda m: _add(m, "model.x", replace(_tensor(m, "model.0.weight"), chunks=[])),
    "chunks that are none": lambda m: setattr(_tensor(m, "model.0.weight"), "chunks", ["x"]),
    "chunks that are a text": lambda m: setattr(_tensor(m, "model.0.weight"), "chunks", "x"),
    "no properties": lambda m: setattr(_tensor(m, "model.0.weight"), "properties", None),
    "a dtype that is none": lambda m: setattr(_tensor(m, "model.0.weight").properties, "dtype", "float32"),
    "another dtype": lambda m: setattr(_tensor(m, MOMENT.fqn).properties, "dtype", torch.float64),
    "another dtype of the same size": lambda m: setattr(_tensor(m, MOMENT.fqn).properties, "dtype", torch.int32),
    "a quantized dtype": lambda m: setattr(_tensor(m, MOMENT.fqn).properties, "dtype", torch.quint8),
    "a size that is none": lambda m: setattr(_tensor(m, "model.0.weight"), "size", [3, 4]),
    "a negative size": lambda m: setattr(_tensor(m, "model.0.weight"), "size", torch.Size([-3, -4])),
    "a state of 2**40": lambda m: _grow(m, MOMENT, (2**20, 2**20)),
    "a state of 2**80": lambda m: _grow(m, MOMENT, (2**40, 2**40)),
    "a state of 2**64, which is 0": lambda m: _grow(m, MOMENT, (2**32, 2**32)),
    "a state of other dimensions": lambda m: _grow(m, MOMENT, (12,)),
    "a state turned around": lambda m: _grow(m, MOMENT, (4, 3)),
    "a smaller state": lambda m: _grow(m, MOMENT, (2, 4)),
    "half of it": lambda m: _chunks(m, ((0, 0), (2, 4))),
    "a chunk twice": lambda m: _chunks(m, ((0, 0), (1, 4)), ((0, 0), (2, 4))),
    "rows that overlap": lambda m: _chunks(m, ((0, 0), (2, 4)), ((1, 0), (1, 4))),
    "rows outside": lambda m: _chunks(m, ((0, 0), (2, 4)), ((3, 0), (1, 4))),
    "blocks that overlap": lambda m: _chunks(m, ((0, 0), (3, 2)), ((0, 1), (3, 2))),
    "blocks that leave a corner": lambda m: _chunks(m, ((0, 0), (2, 3)), ((1, 2), (2, 2)), ((0, 3), (1, 1)),
                                                    ((2, 0), (1, 1))),
    "negative offsets": lambda m: _chunks(m, ((-1, 0), (3, 4))),
    "chunks of other dimensions": lambda m: _chunks(m, ((0,), (12,))),
}  # fmt: skip


def test_what_metadata_says(run: Run) -> None:
    honest = (run.newest / ".metadata").read_bytes()
    for name, change in CHANGES.items():
        metadata = pickle.loads(honest)
        change(metadata)
        write_metadata(run.newest, metadata)
        why = assert_refused(run)
        assert ".metadata" in why or "__0_0.distcp" in why, (name, why)


def test_chunks_in_any_arrangement(run: Run) -> None:
    """What is no overlap is taken: blocks that meet, and rows of nothing."""
    rng = random.Random(0)
    for _ in range(20):
        size = torch.Size([rng.randint(1, 5) for _ in range(rng.randint(0, 4))])
        cuts = [sorted({0, length, *(rng.randint(0, length) for _ in range(2))}) for length in size]
        blocks = itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts))
        chunks = [
            ChunkStorageMetadata(torch.Size([a for a, _ in block]), torch.Size([b - a for a, b in block]))
            for block in blocks
        ]
        _check_cover("x", TensorStorageMetadata(TensorProperties(), size, chunks))
        if len(chunks) > 1:
            with pytest.raises(manifest.CorruptError):
                _check_cover("x", TensorStorageMetadata(TensorProperties(), size, chunks[1:]))
            with pytest.raises(manifest.CorruptError):
                _check_cover("x", TensorStorageMetadata(TensorProperties(), size, [*chunks[1:], chunks[1]]))


def test_many_chunks_end_soon(run: Run) -> None:
    """One list of chunks for all tensors is small on the disk."""
    metadata = metadata_of(run.newest)
    tensor = _tensor(metadata, "model.0.weight")
    chunks = [ChunkStorageMetadata(torch.Size([n, 0]), torch.Size([1, 4])) for n in range(5000)]
    for number in range(5000):
        _add(metadata, f"model.{number}", replace(tensor, chunks=chunks))
    write_metadata(run.newest, metadata)
    assert_refused(run, "chunks")


# --- mutations ---


def _mutated(content: bytes, rng: random.Random) -> bytes:
    out = bytearray(content)
    place = rng.randrange(len(out))
    kind = rng.randrange(6)
    if kind == 0:
        out[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        out[place] = rng.randrange(256)
    elif kind == 2:
        del out[place : place + rng.randint(1, 8)]
    elif kind == 3:
        out[place:place] = rng.randbytes(rng.randint(1, 8))
    elif kind == 4:
        other, length = rng.randrange(len(out)), rng.randint(1, 32)
        out[place : place + length] = out[other : other + length]
    else:
        for _ in range(rng.randint(2, 5)):
            out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


def test_mutated_metadata(run: Run) -> None:
    """Signed again, it is refused, or what is loaded is what was saved: then the byte means nothing."""
    path = run.newest / ".metadata"
    honest, rng = path.read_bytes(), random.Random(0)
    counts = {"refused": 0, "of another model": 0, "the same": 0}
    for number in range(MUTATIONS):
        content = _mutated(honest, rng)
        while content == honest:
            content = _mutated(honest, rng)
        path.write_bytes(content)
        if number < MUTATIONS // 2 or ALL:
            assert_refused(run, ".metadata was changed" if len(content) == len(honest) else ".metadata has")
        sign(run.newest)
        model, optimizer = trained(77)
        with bounded(), little_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = hecate.load(run.folder, model, optimizer)
            except CheckpointError as error:
                assert isinstance(error, hecate.MismatchError)
                counts["of another model"] += 1
            else:
                assert bits(model, optimizer) == run.bits[found.step], number
                counts["the same" if found.step == run.step else "refused"] += 1
        assert ran() == []
        path.write_bytes(honest)
        sign(run.newest)
    assert counts["refused"] > MUTATIONS // 2, counts
