"""Steps by somebody who means harm, signed again so that hashes agree: nothing in them runs, and what is untrue is
refused before anything else is read or changed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import resource
import shutil
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import hecate
from hecate.checkpoints import manifest
from hecate.checkpoints.coordination import CheckpointError
from hecate.checkpoints.safety.files import CorruptError, record_files
from hecate.checkpoints.safety.old_metadata import read_old_metadata
from hecate.checkpoints.safety.plain_data import read_plain
from hecate.checkpoints.safety.tensor_index import _check_cover
from tests.hecate_compile.checkpoints.test_damage import FILES, Run, bounded, load, save_run, trained
from tests.hecate_compile.checkpoints.test_formats import KEPT, STEP, small
from tests.support.extent import ALL

MUTATIONS = 200 if ALL else 40
# More address space than a load takes, and less than a bomb asks for.
_ROOM = 3 * 2**30
_HERE = __name__
_WEIGHT = "model.0.weight"
_MOMENT = "optimizer.state.0.weight.exp_avg"

# --- what code that runs would leave behind ---

_RAN: list[str] = []
_TOUCHED = Path(f"/tmp/hecate-test-canary-{os.getpid()}")


def run_canary(*_: Any) -> None:
    _RAN.append("called")


class Canary:
    """Whatever is done to it, it notices."""

    def __setstate__(self, state: Any) -> None:
        _RAN.append("__setstate__")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return run_canary, ()


def ran() -> bool:
    """Whether anything ran since the last time that this was asked."""
    found = bool(_RAN) or _TOUCHED.exists()
    _RAN.clear()
    _TOUCHED.unlink(missing_ok=True)
    return found


def _named(module: str, name: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"


def _call(module: str, name: str, *arguments: Any) -> bytes:
    return _named(module, name) + pickle.dumps(arguments, protocol=3)[2:-1] + b"R"


_TOUCH = f"touch {_TOUCHED}"
_CODE = f"__import__({_HERE!r}, fromlist=['x']).run_canary()"
# The inside of a pickle, without PROTO and STOP. With plain pickle each of these runs.
RUNNING: dict[str, bytes] = {
    "os.system": _call("os", "system", _TOUCH),
    "posix.system by an old name": f"cposix\nsystem\n(V{_TOUCH}\ntR".encode(),
    "eval": _call("builtins", "eval", _CODE),
    "getattr": _named("builtins", "getattr")
    + _call("importlib", "import_module", _HERE)
    + b"\x8c\nrun_canary\x86R)R",
    "functools.partial": _named("functools", "partial") + _named(_HERE, "run_canary") + b"\x85R)R",
    "a list elsewhere": _named(_HERE, "_RAN") + b"\x8c\x01xa",
    "open": _call("io", "open", str(_TOUCHED), "w"),
    "torch.os.system": _call("torch", "os.system", _TOUCH),
    "DCP's own os": _call("torch.distributed.checkpoint.metadata", "os.system", _TOUCH),
    "a nested pickle": _call("pickle", "loads", b"\x80\x04" + _call(_HERE, "run_canary") + b"."),
    "BUILD": _named(_HERE, "Canary") + b")\x81}b",
    "INST": f"(i{_HERE}\nrun_canary\n".encode(),
    "OBJ": b"(" + _named(_HERE, "run_canary") + b"o",
    "__reduce_ex__": pickle.dumps(Canary(), protocol=4)[2:-1],
}
# Pickles that change classes of torch for the rest of the process, or ask for all memory.
OTHERS: dict[str, bytes] = {
    "BUILD of a class": _named("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata")
    + b"N}\x8c\x05sizesK\x01s\x86b",
    "REDUCE of a class": _call("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    "a dtype that is called": _named("torch", "float32") + b")R",
    "a memo of 16 GiB": b"Nr\xff\xff\xff\x7f",
    "a text of 4 GiB": b"X\xff\xff\xff\xff",
    "an extension": b"\x82\xf0",
    "a frame of 2**62": b"\x95" + struct.pack("<Q", 2**62) + b"N",
    "a persistent id": b"K\x01Q",
    "deep": b"]" * 20_000 + b"a" * 19_999,
    "nothing on the stack": b"R",
    "an unknown opcode": b"\xff",
    "no metadata": b"N",
}


@contextmanager
def little_memory() -> Iterator[None]:
    """A bomb ends as a MemoryError, and not with this machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# --- a step, changed and signed again ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return save_run(tmp_path_factory.mktemp("saved"), 2)


@pytest.fixture
def run(saved: Run, tmp_path: Path) -> Iterator[Run]:
    folder = tmp_path / "run"
    shutil.copytree(saved.folder, folder)
    ran()
    yield Run(folder, saved.bits)
    assert not ran()


def sign(step: Path, **changes: Any) -> None:
    """Give a step a manifest of its files as they are now."""
    old = manifest.read_manifest(step)
    names = [path.name for path in step.iterdir() if path.name != manifest.NAME]
    manifest.write_manifest(replace(old, **{"files": record_files(step, names)} | changes), step)


def index_of(step: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((step / "tensors.json").read_text())
    return found


def write(step: Path, name: str, content: Any) -> None:
    """Bytes, a text, or data as JSON, signed."""
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    (step / name).write_bytes(content)
    sign(step)


def assert_refused(run: Run, *words: str) -> str:
    """The newest step is refused, nothing of it ran, and the one before is loaded. Returns why."""
    with little_memory():
        found, restored, told = load(run.folder)
    assert not ran()
    assert (found.step, restored) == (run.step - 1, run.bits[run.step - 1])
    assert len(told) == 1 and run.newest.name in told[0]
    (why,) = found.skipped
    # Nor was more memory asked for than there is.
    assert len(why) < 1000 and "MemoryError" not in why, why
    for word in words:
        assert word in why, why
    return why


# --- code ---


def test_the_canary_works(run: Run) -> None:
    """With plain pickle each payload runs, and DCP's own reader runs it: else the tests below would show nothing."""
    for name, code in RUNNING.items():
        for start in (b"\x80\x04", b"\x80\x02"):
            with bounded(), contextlib.suppress(Exception):
                pickle.loads(start + code + b".")
        assert ran(), name
    write(run.newest, ".metadata", b"\x80\x04" + RUNNING["os.system"] + b".")
    with contextlib.suppress(Exception):
        FileSystemReader(run.newest).read_metadata()
    assert ran()


def test_signing_again_is_enough(run: Run) -> None:
    """The manifest is not why a step below is refused."""
    write(run.newest, "run.json", (run.newest / "run.json").read_text() + " ")
    assert load(run.folder)[1] == run.bits[run.step]


@pytest.mark.parametrize("name", [name for name in FILES if name != "manifest.json"])
def test_pickles_in_the_place_of_a_file(run: Run, name: str) -> None:
    for code in RUNNING.values():
        write(run.newest, name, b"\x80\x04" + code + b".")
        if name == ".metadata":
            # Only other programs read it.
            assert load(run.folder)[1] == run.bits[run.step]
        else:
            assert_refused(run)


def _archive(content: bytes, data: bytes = bytes(48)) -> bytes:
    """As ``torch.save`` writes one."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
        entries = {"data.pkl": content, "byteorder": sys.byteorder.encode(), "data/0": data, "version": b"3\n"}
        for name, inner in entries.items():
            file.writestr(f"archive/{name}", inner)
    return out.getvalue()


def _saved(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


BLOBS: dict[str, bytes] = {
    **{f"a pickle of {name}": _archive(b"\x80\x02" + code + b".") for name, code in RUNNING.items()},
    **{f"a plain pickle of {name}": b"\x80\x02" + code + b"." for name, code in RUNNING.items()},
    "a canary in the old format": _saved(Canary(), _use_new_zipfile_serialization=False),
    "a number": _saved(5),
    "another dtype": _saved(torch.zeros(3, 4, dtype=torch.int32)),
    "a list": _saved([torch.zeros(3, 4)]),
    "a tensor on no device": _saved(torch.zeros(3, 4, device="meta")),
    "another shape": _saved(torch.zeros(4, 3)),
    "other dimensions": _saved(torch.zeros(12)),
    "less data than the tensor": _archive(
        zipfile.ZipFile(io.BytesIO(_saved(torch.zeros(3, 4)))).read("archive/data.pkl"), b""
    ),
    "a storage of 2**40": _archive(b"\x80\x02ctorch\nFloatStorage\n\x8a\x06" + bytes(5) + b"\x01\x85R."),
    "an empty archive": b"PK\x05\x06" + bytes(18),
    "nothing": b"",
    "zeros": bytes(1000),
}


def test_pickles_in_the_place_of_a_tensor(run: Run, saved: Run) -> None:
    for name, blob in BLOBS.items():
        data = (saved.newest / "__0_0.distcp").read_bytes()
        (run.newest / "__0_0.distcp").write_bytes(data + blob)
        index = index_of(saved.newest)
        index[_WEIGHT]["chunks"][0][3:] = [len(data), len(blob)]
        write(run.newest, "tensors.json", index)
        why = assert_refused(run)
        assert f"__0_0.distcp: {_WEIGHT} cannot be read" in why or "is larger than its file" in why, (name, why)


# --- the pickle of format 1 ---


class _Raw:
    """Opcodes in the place of a value."""

    def __init__(self, code: bytes) -> None:
        self.code = code


class _RawPickler(pickle._Pickler):
    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, _Raw):
            self.write(obj.code)
        else:
            super().save(obj, save_persistent_id)


def _why_unreadable(folder: Path, content: bytes) -> str:
    """Why a whole step of format 1 with this index is refused; its reader alone must refuse it as well."""
    (folder / STEP / ".metadata").write_bytes(content)
    sign(folder / STEP)
    with bounded(), little_memory():
        with pytest.raises(CorruptError, match=r"^\.metadata: "):
            read_old_metadata(folder / STEP, manifest.read_manifest(folder / STEP).files)
        with pytest.raises(hecate.NoCheckpointError) as error, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hecate.load(folder, small(seed=1))
    assert not ran()
    return str(error.value)


def test_pickles_in_an_old_index(tmp_path: Path) -> None:
    shutil.copytree(KEPT / "format1", tmp_path / "run")
    honest = pickle.loads((tmp_path / "run" / STEP / ".metadata").read_bytes())
    for name, code in (RUNNING | OTHERS).items():
        assert ".metadata: " in _why_unreadable(tmp_path / "run", b"\x80\x04" + code + b"."), name
        if name != "no metadata" and name != "deep":
            # In the middle of it, in a field that nobody reads.
            out = io.BytesIO()
            _RawPickler(out, protocol=4).dump(replace(honest, storage_meta=_Raw(code)))
            assert ".metadata: " in _why_unreadable(tmp_path / "run", out.getvalue()), name
    # Nothing of torch was changed for the rest of this process.
    assert "sizes" not in vars(ChunkStorageMetadata) and pickle.loads(pickle.dumps(honest)) == honest


def test_an_untrue_old_index(tmp_path: Path) -> None:
    """It is looked at like the index of now."""
    shutil.copytree(KEPT / "format1", tmp_path / "run")
    honest = (tmp_path / "run" / STEP / ".metadata").read_bytes()
    for change, word in (
        (lambda m: m.state_dict_metadata["model.norms.0.bias"].chunks.pop(), "elements"),
        (lambda m: m.storage_data.popitem(), "KeyError"),
        (lambda m: m.state_dict_metadata["model.norms.0.bias"].chunks.append("x"), "AttributeError"),
        (
            lambda m: setattr(next(iter(m.storage_data.values())), "relative_path", "../x"),
            "no file of the checkpoint",
        ),
    ):
        metadata = pickle.loads(honest)
        change(metadata)
        assert word in _why_unreadable(tmp_path / "run", pickle.dumps(metadata))


# --- an index that is untrue ---

PATHS = [
    "../step-00000001/__0_0.distcp", "/etc/passwd", "/dev/zero", "", ".", "..", "a\\b", "a\0b", "x" * 5000,
    "./__0_0.distcp", "sub/../__0_0.distcp", "__0_0.distcp/", "pipe", "link", "zeros", "folder/data", "\ud800",
    "~/x", "%2e%2e", "__0_0.distcp\n",
]  # fmt: skip


def _traps(run: Run) -> None:
    """Names in a step that lead elsewhere, or never end."""
    os.mkfifo(run.newest / "pipe")
    (run.newest / "link").symlink_to(run.folder / "step-00000001" / "__0_0.distcp")
    (run.newest / "zeros").symlink_to("/dev/zero")
    (run.newest / "folder").symlink_to(run.folder)


def test_paths(run: Run) -> None:
    """They lead nowhere, in the index and in the manifest."""
    honest = index_of(run.newest)
    for path in (*PATHS, 5, None, ["__0_0.distcp"]):
        index = json.loads(json.dumps(honest))
        index[_WEIGHT]["chunks"][0][2] = path
        write(run.newest, "tensors.json", index)
        assert_refused(run, "tensors.json")
    write(run.newest, "tensors.json", honest)
    _traps(run)
    good = manifest.read_manifest(run.newest)
    for path in PATHS:
        manifest.write_manifest(replace(good, files=good.files | {path: good.files["__0_0.distcp"]}), run.newest)
        outside = path in ("", ".", "..") or any(letter in path for letter in "/\\\0")
        assert_refused(run, "names a file outside of the folder" if outside else "")


def _chunks(index: dict[str, Any], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Chunks of the weight, [3, 4], each with a place of its own."""
    _, _, file, start, _ = index[_WEIGHT]["chunks"][0]
    index[_WEIGHT]["chunks"] = [[o, n, file, start + 100 * number, 100] for number, (o, n) in enumerate(chunks)]


def _place(index: dict[str, Any], **changes: Any) -> None:
    chunk = index[_WEIGHT]["chunks"][0]
    for key, value in changes.items():
        chunk[["offsets", "sizes", "file", "start", "length"].index(key)] = value


def _grow(index: dict[str, Any], size: list[int]) -> None:
    """A state of any size fits any parameter: room is made for it before it is read."""
    index[_MOMENT]["size"] = index[_MOMENT]["chunks"][0][1] = size


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no chunks": lambda i: i[_WEIGHT].update(chunks=[]),
    "chunks that are none": lambda i: i[_WEIGHT].update(chunks=["x"]),
    "a tensor that is none": lambda i: i.update({"model.x": "x"}),
    "a dtype that is none": lambda i: i[_WEIGHT].update(dtype="load"),
    "a dtype of nothing": lambda i: i[_WEIGHT].update(dtype=[]),
    "a quantized dtype": lambda i: i[_MOMENT].update(dtype="quint8"),
    "a larger dtype": lambda i: i[_MOMENT].update(dtype="complex128"),
    "no size": lambda i: i[_WEIGHT].pop("size"),
    "a size of truth values": lambda i: i[_WEIGHT].update(size=[True, True]),
    "a size of fractions": lambda i: i[_WEIGHT].update(size=[3.0, 4.0]),
    "a negative size": lambda i: i[_WEIGHT].update(size=[-3, -4]),
    "a size of 10,000 dimensions": lambda i: i[_WEIGHT].update(size=[1] * 10_000),
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
    changes += [{"files": fields["files"] | {"run.json": other}} for other in (
        record | {"bytes": "x"}, record | {"bytes": -1}, record | {"sha256": 5}, [], None, record | {"bytes": 2**70},
    )]  # fmt: skip
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
    '{"~": "dtype", "name": "load"}', '{"~": "dtype", "name": "onnx"}', '{"~": "dtype", "name": "float32.__class__"}',
    '{"~": "dtype", "name": ["float32"]}', '{"~": "dtype"}', '{"~": "eval", "items": ["1"]}',
    '{"~": ["tuple"], "items": []}', '{"~": null}', '{"~": "tuple"}', '{"~": "tuple", "items": 5}',
    '{"~": "set", "items": [[1]]}', '{"~": "deque", "items": [], "most": -1}', '{"~": "dict", "items": [[[1], 2]]}',
    '{"~": "dict", "items": [1, 2]}', '{"~": "bytes", "base64": "!!!"}', '{"~": "int", "hex": "zz"}',
    '{"~": "tensor", "key": "99"}', '{"~": "array", "key": []}', "1" * 10_000, "[" * 20_000, '{"a": ', "{} {}",
    "__import__('os').system('true')",
]  # fmt: skip


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
    {"optimizers": [5]}, {"optimizers": [{}]}, {"optimizers": [{"groups": [5], "plain": {}}]}, {"options": []},
    {"optimizers": [{"groups": [{"lr": 1.0}], "plain": {}}]}, {"placement": 5}, {"extra_state": [5]},
    {"extra_state": {"nowhere._extra_state": 5}}, {"extra_state": {"0._extra_state": 5}}, {"random": None},
    {"random": {}}, {"random": {"torch": [], "numpy": [], "python": []}},
]  # fmt: skip


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
    entry = {"0": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}}
    text = json.dumps(entry).encode()
    for content in (b"", b"\xff" * 8 + b"{}", struct.pack("<Q", 2**40), struct.pack("<Q", len(text)) + text):
        write(run.newest, path.name, content)
        assert_refused(run, "rank0.json")
    path.unlink()
    files = manifest.read_manifest(run.newest).files
    files.pop(path.name)
    path.symlink_to("/dev/zero")
    manifest.write_manifest(replace(manifest.read_manifest(run.newest), files=files), run.newest)
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
        model, optimizer = trained(77)
        with bounded(), little_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                refused += hecate.load(run.folder, model, optimizer).step != run.step
            except hecate.MismatchError:
                refused += 1
        assert not ran()
    assert refused > MUTATIONS // 2
