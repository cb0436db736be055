"""Checkpoints by somebody who means harm, with hashes that agree: nothing in them runs, hangs or leads elsewhere."""

from __future__ import annotations

import contextlib
import copyreg
import hashlib
import io
import itertools
import json
import math
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
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
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
from hecate.checkpoints.plain_data import read_plain
from hecate.checkpoints.safe_metadata import _check_cover, read_metadata
from hecate.checkpoints.tensor_file import read_tensor
from tests.hecate_compile.checkpoints.test_damage import Run, bits, bounded, load, save_run, trained
from tests.support.extent import ALL

MUTATIONS = 200 if ALL else 40
# What code that runs would leave behind: an entry here, an environment variable, or a file.
RAN: list[str] = []
_VARIABLE = "HECATE_TEST_CANARY"
# More address space than a load takes, and less than a bomb asks for.
_ROOM = 3 * 2**30


def run_canary(*_: Any) -> None:
    RAN.append("called")


also_run_canary = third_canary = run_canary


class Canary:
    """Whatever is done to it, it notices."""

    def __setstate__(self, state: Any) -> None:
        RAN.append("__setstate__")

    @property
    def trap(self) -> None:
        return None

    @trap.setter
    def trap(self, value: Any) -> None:
        RAN.append("property")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return run_canary, ()


class Trap:
    trap = Canary.trap


HERE = __name__


def ran() -> list[str]:
    """What ran since the last time that this was asked."""
    found = list(RAN)
    RAN.clear()
    if os.environ.pop(_VARIABLE, None) is not None:
        found.append("environment")
    if CANARY.exists():
        found.append("file")
        CANARY.unlink()
    return found


# In the working folder's place: payloads must know it when they are made.
CANARY = Path(f"/tmp/hecate-test-canary-{os.getpid()}")


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


def sign(step: Path, **changes: Any) -> None:
    """Give a step a manifest of its files as they are now."""
    old = json.loads((step / manifest.NAME).read_text().split("\n")[0])
    names = [path.name for path in step.iterdir() if path.name != manifest.NAME]
    fields: dict[str, Any] = {key: old[key] for key in ("step", "sequence", "ranks")}
    fields["files"] = manifest.record_files(step, names)
    manifest.write_manifest(manifest.Manifest(**(fields | changes)), step)


def metadata_of(step: Path) -> Metadata:
    found: Metadata = pickle.loads((step / ".metadata").read_bytes())
    return found


def write_metadata(step: Path, metadata: Any) -> None:
    (step / ".metadata").write_bytes(metadata if isinstance(metadata, bytes) else pickle.dumps(metadata))
    sign(step)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return save_run(tmp_path_factory.mktemp("saved"), 2)


@pytest.fixture
def run(saved: Run, tmp_path: Path) -> Iterator[Run]:
    folder = tmp_path / "run"
    shutil.copytree(saved.folder, folder)
    ran()
    yield Run(folder, saved.bits)
    assert ran() == []


def restore(run: Run, saved: Run) -> None:
    shutil.rmtree(run.newest)
    shutil.copytree(saved.newest, run.newest)


def assert_refused(run: Run, *words: str) -> str:
    """The newest step is refused, nothing of it ran, and the one before is loaded. Returns why."""
    with little_memory():
        found, restored, told = load(run.folder)
    assert ran() == []
    assert found.step == run.step - 1
    assert restored == run.bits[run.step - 1]
    assert len(told) == 1 and run.newest.name in told[0]
    (why,) = found.skipped
    # Nor was more memory asked for than there is.
    assert len(why) < 1000 and "MemoryError" not in why, why
    for word in words:
        assert word in why, why
    return why


def test_signing_again_is_enough(run: Run) -> None:
    """All the tests below would show nothing if the manifest were why a step is refused."""
    metadata = metadata_of(run.newest)
    metadata.version = "9"
    write_metadata(run.newest, metadata)
    assert load(run.folder)[1] == run.bits[run.step]


# --- pickles in the metadata ---


def _body(value: Any) -> bytes:
    """The opcodes that push a value; those of honest metadata, so that no other one is why it is refused."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=3)
    # Without a memo.
    pickler.fast = True
    pickler.dump(value)
    return out.getvalue()[2:-1]


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _name(module: str, name: str) -> bytes:
    """Protocol 4, which takes dotted names."""
    return _text(module) + _text(name) + b"\x93"


def _old_name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _call(module: str, name: str, *arguments: Any, old: bool = False) -> bytes:
    return (_old_name if old else _name)(module, name) + _body(arguments) + b"R"


def _code(expression: str) -> str:
    return f"__import__({HERE!r}, fromlist=['x']).run_canary({expression})"


def _shell() -> str:
    return f"touch {CANARY}"


# Each is the inside of a pickle, without PROTO and STOP. With plain pickle these do run.
RUNNING: dict[str, bytes] = {
    "os.system": _call("os", "system", _shell()),
    "posix.system": _call("posix", "system", _shell(), old=True),
    "os.putenv": _call("os", "environ.__setitem__", _VARIABLE, "1"),
    "subprocess.run": _call("subprocess", "run", ["touch", str(CANARY)]),
    "subprocess.check_output": _call("subprocess", "check_output", ["touch", str(CANARY)]),
    "subprocess.Popen.wait": _call("subprocess", "call", ["touch", str(CANARY)]),
    "eval": _call("builtins", "eval", _code("1")),
    "exec": _call("builtins", "exec", _code("2")),
    "old name of exec": _call("__builtin__", "eval", _code("3"), old=True),
    "compile": _name("builtins", "eval") + _call("builtins", "compile", _code("4"), "x", "eval") + b"\x85R",
    "getattr": _name("builtins", "getattr") + _call("importlib", "import_module", HERE) + _body("run_canary")
    + b"\x86R)R",
    "__import__": _name("builtins", "getattr") + _call("builtins", "__import__", HERE) + _body("__doc__") + b"\x86R0"
    + _call(HERE, "run_canary"),
    "map": _name("builtins", "list") + _name("builtins", "map") + _name(HERE, "run_canary") + _body([1])
    + b"\x86R\x85R",
    "functools.partial": _name("functools", "partial") + _name(HERE, "run_canary") + b"\x85R)R",
    "functools.reduce": _name("functools", "reduce") + _name(HERE, "run_canary") + _body([1, 2]) + b"\x86R",
    "operator.methodcaller": _call("operator", "methodcaller", "append", "called") + _name(HERE, "RAN") + b"\x85R",
    "operator.attrgetter": _call("operator", "attrgetter", "run_canary") + _call("importlib", "import_module", HERE)
    + b"\x85R)R",
    "operator.iadd": _name("operator", "iadd") + _name(HERE, "RAN") + _body(["called"]) + b"\x86R",
    "a list elsewhere, APPEND": _name(HERE, "RAN") + _body("called") + b"a",
    "a list elsewhere, APPENDS": _name(HERE, "RAN") + b"(" + _body("called") + b"e",
    "a dict elsewhere, SETITEM": _name("os", "environ") + _body(_VARIABLE) + _body("1") + b"s",
    "a dict elsewhere, SETITEMS": _name("os", "environ") + b"(" + _body(_VARIABLE) + _body("1") + b"u",
    "pathlib": _name("pathlib", "Path.write_text") + _call("pathlib", "PosixPath", str(CANARY)) + _body("x")
    + b"\x86R",
    "open": _call("io", "open", str(CANARY), "w"),
    "codecs.open": _call("codecs", "open", str(CANARY), "w"),
    "sys.modules": _call("sys", "modules.__getitem__", HERE) + b"0" + _call(HERE, "RAN.append", "called"),
    "torch.os.system": _call("torch", "os.system", _shell()),
    "torch.serialization.os.system": _call("torch.serialization", "os.system", _shell()),
    "torch.storage.io.open": _call("torch.storage", "io.open", str(CANARY), "w"),
    "torch.distributed.checkpoint.metadata.os": _call(
        "torch.distributed.checkpoint.metadata", "os.system", _shell()
    ),
    "torch.builtins.eval": _call("torch", "builtins.eval", _code("5")),
    "nested pickle": _call("pickle", "loads", b"\x80\x04" + _call(HERE, "run_canary") + b"."),
    "nested pickle, in Python": _call("pickle", "_loads", b"\x80\x04" + _call(HERE, "run_canary") + b"."),
    "BUILD, __setstate__": _name(HERE, "Canary") + b")\x81" + _body({"a": 1}) + b"b",
    "BUILD, property": _name(HERE, "Trap") + b")\x81" + _body((None, {"trap": 1})) + b"b",
    "INST": f"(i{HERE}\nrun_canary\n".encode(),
    "OBJ": b"(" + _name(HERE, "run_canary") + b"o",
    "NEWOBJ_EX": _name(HERE, "Canary") + b")}\x92" + _body(1) + b"b",
    "EXT1": b"\x82\xf0" + b")R",
    "EXT2": b"\x83\xf0\xf0" + b")R",
    "EXT4": b"\x84\xf0\xf0\xf0\x00" + b")R",
    "__reduce_ex__": pickle.dumps(Canary(), protocol=4)[2:-1],
    "__reduce__, protocol 0": pickle.dumps(Canary(), protocol=0)[:-1],
    "timeit": _call("timeit", "repeat", _code("6"), "pass", 1, 1)[:-1] + b"0" + _call(HERE, "run_canary"),
    "InteractiveInterpreter": _name("code", "InteractiveInterpreter.runsource") + b"("
    + _call("code", "InteractiveInterpreter") + _body(_code("7")) + b"tR",
}  # fmt: skip

# Of these plain pickle runs something too, or fails, hangs or takes all memory.
_DEEP = 20_000
_TUPLES = b")\x85" + b"2\x86" * 200
OTHERS: dict[str, bytes] = {
    "torch.load": _call("torch", "load", "/dev/zero"),
    "torch.hub.load": _call("torch", "hub.load", "a/b", "c"),
    "torch.hub": _name("torch", "hub"),
    "torch.jit.load": _call("torch", "jit.load", "/dev/null"),
    "torch.ops.load_library": _call("torch", "ops.load_library", "/tmp/x.so"),
    "torch.classes.load_library": _call("torch", "classes.load_library", "/tmp/x.so"),
    "torch.storage._load_from_bytes": _call("torch.storage", "_load_from_bytes", b"x"),
    "torch._utils._rebuild_parameter": _name("torch._utils", "_rebuild_parameter"),
    "torch.utils.cpp_extension.load": _name("torch.utils.cpp_extension", "load"),
    "torch._dynamo": _name("torch", "_dynamo"),
    "a dtype by another name": _name("torch", "float32.__class__"),
    "a dtype's methods": _name("torch", "float32.__reduce__"),
    "a dtype that is called": _name("torch", "float32") + b")R",
    "hecate's own imports": _call("hecate.checkpoints.publish", "shutil.rmtree", "/nowhere"),
    "hecate.load": _call("hecate", "load", "/nowhere"),
    "importlib.reload": _name("importlib", "reload"),
    "SourceFileLoader": _call("importlib.machinery", "SourceFileLoader", "x", "/tmp/x.py"),
    "ctypes": _call("ctypes", "CDLL", "/nowhere.so"),
    "marshal": _call("marshal", "loads", b"N"),
    "types.FunctionType": _name("types", "FunctionType"),
    "shutil.rmtree": _call("shutil", "rmtree", "/nowhere"),
    "os.remove": _call("os", "remove", "/nowhere"),
    "pty.spawn": _name("pty", "spawn"),
    "webbrowser.open": _name("webbrowser", "open"),
    "numpy.load": _call("numpy", "load", "/dev/null", None, True),
    "numpy reconstruct": _name("numpy._core.multiarray", "_reconstruct"),
    "numpy.core": _name("numpy.core.multiarray", "_reconstruct"),
    "codecs.encode": _call("_codecs", "encode", "x", "rot13"),
    "OrderedDict": _call("collections", "OrderedDict"),
    "defaultdict": _name("collections", "defaultdict") + _name("os", "system") + b"\x85R",
    "copyreg._reconstructor": _call("copyreg", "_reconstructor"),
    "sys.modules": _name("sys", "modules"),
    "an empty module": _name("", "system"),
    "an empty name": _name("os", ""),
    "dots": _name("os", "..system"),
    "names that are no texts": b"K\x01K\x02\x93",
    "persistent id": _body("x") + b"Q",
    "persistent id as text": b"Px\n",
    "STRING": b"S'x'\n",
    "UNICODE": b"Vx\n",
    "INT": b"I1\n",
    "FLOAT": b"F1\n",
    "BINFLOAT": b"G" + bytes(8),
    "a set": b"\x8f",
    "a frozenset": b"(K\x01\x91",
    "POP": b"N0N",
    "POP_MARK": b"(N1N",
    "DUP": b"N2\x86",
    "EXT of nobody": b"\x82\x01",
    "a memo of 16 GiB": b"Nr\xff\xff\xff\x7f",
    "a memo of nothing": b"j\xff\xff\xff\x0f",
    "a memo of nothing, the last": b"j\xff\xff\xff\xff",
    "a text of 4 GiB": b"X\xff\xff\xff\xff",
    "a text of 2**63": b"\x8d" + struct.pack("<Q", 2**63 - 1),
    "bytes of 2**62": b"\x8e" + struct.pack("<Q", 2**62),
    "a bytearray of 2**40": b"\x96" + struct.pack("<Q", 2**40),
    "a frame of 2**62": b"\x95" + struct.pack("<Q", 2**62) + b"N",
    "a frame of 2**64": b"\x95" + b"\xff" * 8 + b"N",
    "a frame in a frame": b"\x95" + struct.pack("<Q", 20) + b"\x95" + struct.pack("<Q", 20) + b"N",
    "a long of 2 GiB": b"\x8b" + struct.pack("<i", 2**31 - 1),
    "a long of less than nothing": b"\x8b" + struct.pack("<i", -1),
    "out of band buffers": b"\x97",
    "deep tuples": b")" + b"\x85" * _DEEP,
    "deep lists": b"]" * _DEEP + b"a" * (_DEEP - 1),
    "deep dicts": b"}N" * _DEEP + b"}" + b"s" * _DEEP,
    "deep marks": b"(" * _DEEP,
    "a key that takes for ever to hash": b"}" + _TUPLES + b"Ns",
    "the same without DUP": b"})\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60)) + b"Ns",
    "the same, SETITEMS": b"}()\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60)) + b"Nu",
    "the same in a size": _name("torch", "Size") + b")\x94"
    + b"".join(b"h%ch%c\x86\x94" % (n + 2, n + 2) for n in range(60)) + b"\x85R",
    "a list in itself": b"]\x94h\x00a",
    "a size of texts": _name("torch", "Size") + _body((("a",),)) + b"R",
    "a size of 10,000 dimensions": _name("torch", "Size") + _body(((1,) * 10_000,)) + b"R",
    "a size of an iterator": _name("torch", "Size") + _body(([1],)) + b"R",
    "a size without arguments": _name("torch", "Size") + b")R",
    "a class as a value": _name("torch", "Size") + b")\x81",
    "NEWOBJ of a function": _name("torch.serialization", "_get_layout") + b")\x81",
    "NEWOBJ with arguments": _name("torch.distributed.checkpoint.metadata", "MetadataIndex") + b"(Nt\x81",
    "REDUCE of a class": _name("torch.distributed.checkpoint.metadata", "BytesStorageMetadata") + b")R",
    "REDUCE of a class, with an argument": _call("torch.distributed.checkpoint.metadata", "MetadataIndex", "x"),
    "REDUCE of a text": _body("x") + b")R",
    "another layout": _call("torch.serialization", "_get_layout", "torch.sparse_coo"),
    "no layout": _call("torch.serialization", "_get_layout", ["torch.strided"]),
    "no memory format": _call("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", 99),
    "BUILD of a class": _name("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata")
    + _body((None, {"sizes": 1})) + b"b",
    "BUILD of a class, as a dict": _name("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata")
    + _body({"sizes": 1}) + b"b",
    "BUILD of an enumeration": _call("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", 0)
    + _body({"_value_": 99, "_name_": "X"}) + b"b",
    "BUILD of a function": _name("torch.serialization", "_get_layout") + _body((None, {"__doc__": "x"})) + b"b",
    "BUILD of a dtype": _name("torch", "float32") + _body({"x": 1}) + b"b",
    "BUILD of other fields": _name("torch.distributed.checkpoint.metadata", "MetadataIndex") + b")\x81"
    + _body({"__class__": 1}) + b"b",
    "BUILD with slots": _name("torch.distributed.checkpoint.metadata", "MetadataIndex") + b")\x81"
    + _body((None, {"fqn": "x"})) + b"b",
    "BUILD of properties": _name("torch.distributed.checkpoint.metadata", "TensorProperties") + b")\x81"
    + _body(("a", "b")) + b"b",
    "an unknown opcode": b"\xff",
    "nothing on the stack": b"R",
    "no mark": b"t",
    "no end": b"N" * 3 + b"\x95",
    "None": b"N",
    "a dict": b"}",
    "Metadata of nothing": _name("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81",
    "bytes that are no opcodes": bytes(range(256)),
}  # fmt: skip


class Raw:
    """Opcodes in the place of a value."""

    def __init__(self, code: bytes) -> None:
        self.code = code


class RawPickler(pickle._Pickler):
    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Raw):
            self.write(obj.code)
        else:
            super().save(obj, save_persistent_id)


def inside(metadata: Metadata, code: bytes) -> bytes:
    """Honest metadata with opcodes in the middle of it, in a field that nobody reads."""
    out = io.BytesIO()
    RawPickler(out, protocol=4).dump(replace(metadata, storage_meta=Raw(code)))
    return out.getvalue()


@pytest.fixture(autouse=True, scope="module")
def extensions() -> Iterator[None]:
    """Numbers that plain pickle takes for the canary."""
    known = [("run_canary", 0xF0), ("also_run_canary", 0xF0F0), ("third_canary", 0xF0F0F0)]
    for name, number in known:
        copyreg.add_extension(HERE, name, number)
    yield
    for name, number in known:
        copyreg.remove_extension(HERE, name, number)


def test_the_canary_works() -> None:
    """With plain pickle each payload runs, so that the tests below would see it."""
    ran()
    for name, code in RUNNING.items():
        for start in (b"\x80\x04", b"\x80\x02"):
            with bounded(), contextlib.suppress(Exception):
                pickle.loads(start + code + b".")
        assert ran(), name


def test_no_module_is_imported(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is enough: to look it up is to import its module."""
    (tmp_path / "hecate_canary.py").write_text(f"import {HERE} as here\nhere.run_canary()\nx = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    code = _name("hecate_canary", "x")
    assert pickle.loads(b"\x80\x04" + code + b".") == 1 and ran() == ["called"]
    del sys.modules["hecate_canary"]
    write_metadata(run.newest, inside(metadata_of(run.newest), code))
    assert_refused(run, ".metadata names hecate_canary.x")
    assert "hecate_canary" not in sys.modules


def test_torch_runs_it(run: Run) -> None:
    """What the reader is for."""
    write_metadata(run.newest, inside(metadata_of(run.newest), RUNNING["os.system"]))
    with contextlib.suppress(Exception):
        torch.distributed.checkpoint.FileSystemReader(run.newest).read_metadata()
    assert ran() == ["file"]


def _assert_unreadable(run: Run, content: bytes) -> None:
    (run.newest / ".metadata").write_bytes(content)
    with bounded(), little_memory(), pytest.raises(manifest.CorruptError, match=r"^\.metadata"):
        read_metadata(run.newest, manifest.read_manifest(run.newest).files)


@pytest.mark.parametrize("payloads", [RUNNING, OTHERS], ids=["running", "others"])
def test_pickles(run: Run, payloads: dict[str, bytes]) -> None:
    honest = metadata_of(run.newest)
    for name, code in payloads.items():
        for whole in (b"\x80\x04" + code + b".", code + b".", code):
            _assert_unreadable(run, whole)
            assert ran() == [], name
        content = inside(honest, code)
        if name in _HARMLESS:
            write_metadata(run.newest, content)
            assert load(run.folder)[1] == run.bits[run.step]
        elif payloads is RUNNING or ALL:
            write_metadata(run.newest, content)
            assert_refused(run, ".metadata")
        else:
            _assert_unreadable(run, content)
        assert ran() == [], name
    # Nothing of torch was changed for the rest of this process.
    assert pickle.dumps(honest) == pickle.dumps(pickle.loads(pickle.dumps(honest)))
    assert _MEM_FORMAT_ENCODING(0).value == 0 and "sizes" not in vars(ChunkStorageMetadata)


# Values as plain as any, where nobody looks.
_HARMLESS = {"None", "a dict", "Metadata of nothing", "deep tuples", "deep lists", "a list in itself"}


# --- what metadata says ---

WEIGHT = MetadataIndex("model.0.weight", torch.Size([0, 0]))
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
    for content in ("", "null", "[]", "5", '"x"', "[" * _DEEP, "{" * 10, '{"format": 1}', "1" * 5000):
        _write_signed(run.newest, content)
        assert_refused(run, "manifest.json")


def _write_signed(step: Path, text: str) -> None:
    digest = hashlib.sha256(text.encode()).hexdigest()
    (step / manifest.NAME).write_text(f"{text}\n{digest}\n")


def _tensor(metadata: Metadata, name: str) -> TensorStorageMetadata:
    found = metadata.state_dict_metadata[name]
    assert isinstance(found, TensorStorageMetadata)
    return found


def _place(metadata: Metadata, index: MetadataIndex, **changes: Any) -> None:
    metadata.storage_data[index] = replace(metadata.storage_data[index], **changes)


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
    "transformed": lambda m: _place(m, WEIGHT, transform_descriptors=["x"]),
    "a negative offset": lambda m: _place(m, WEIGHT, offset=-1),
    "a negative length": lambda m: _place(m, WEIGHT, length=-1),
    "an offset after the end": lambda m: _place(m, WEIGHT, offset=10**6),
    "an offset of 2**70": lambda m: _place(m, WEIGHT, offset=2**70),
    "an offset that is no number": lambda m: _place(m, WEIGHT, offset="0"),
    "an offset that is a truth value": lambda m: _place(m, WEIGHT, offset=False),
    "a length to the end": lambda m: _place(m, WEIGHT, length=10**5),
    "a length of 2**70": lambda m: _place(m, WEIGHT, length=2**70),
    "a length of one": lambda m: _place(m, WEIGHT, length=1),
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


# --- tensors ---


def tensor_pickle(
    rebuild: str = "torch._utils\n_rebuild_tensor_v2", storage: str = "torch\nFloatStorage", numel: Any = 12,
    offset: Any = 0, size: Any = (3, 4), stride: Any = (4, 1), key: str = "0", location: str = "cpu",
    kind: str = "storage", hooks: bytes = b"ccollections\nOrderedDict\n)R", end: bytes = b"tR.",
) -> bytes:  # fmt: skip
    """As torch writes it."""
    return (
        b"\x80\x02c" + rebuild.encode() + b"\n((" + _body(kind) + b"c" + storage.encode() + b"\n" + _body(key)
        + _body(location) + _body(numel) + b"tQ" + _body(offset) + _body(size) + _body(stride) + b"\x89" + hooks + end
    )  # fmt: skip


def archive(content: bytes, data: bytes = bytes(48), *, compress: bool = False, **more: bytes) -> bytes:
    out = io.BytesIO()
    entries = {"data.pkl": content, "byteorder": sys.byteorder.encode(), "data/0": data, "version": b"3\n"} | more
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as file:
        for name, inner in entries.items():
            file.writestr(f"archive/{name}", inner)
    return out.getvalue()


def _legacy(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


def _saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _oversized(field: int) -> bytes:
    """An archive whose directory says that something is of 4 GiB."""
    content = bytearray(archive(tensor_pickle(numel=2**30 - 4)))
    entry = content.index(b"PK\x01\x02", content.rindex(b"archive/data/0") - 60)
    content[entry + field : entry + field + 4] = struct.pack("<I", 2**32 - 16)
    return bytes(content)


BLOBS: dict[str, bytes] = {
    **{
        f"a pickle of {name}": archive(b"\x80\x02" + code + b".")
        for name, code in RUNNING.items()
        if name in ("os.system", "posix.system", "eval", "pathlib", "nested pickle", "BUILD, __setstate__", "INST")
    },
    "os.system beside": archive(tensor_pickle(hooks=RUNNING["posix.system"])),
    "os.system for storage": archive(tensor_pickle(storage="os\nsystem")),
    "os.system for rebuild": archive(tensor_pickle(rebuild="os\nsystem")),
    "os.system after it": archive(tensor_pickle(end=b"tR0" + RUNNING["posix.system"] + b".")),
    "os.system, old format": _legacy(Canary()),
    "a tensor, old format": _legacy(torch.zeros(3, 4)),
    "a plain pickle": b"\x80\x04" + RUNNING["os.system"] + b".",
    "constants.pkl": archive(b"\x80\x02N.", **{"constants.pkl": b"\x80\x02" + RUNNING["posix.system"] + b"."}),
    "a bytearray of 2**40": archive(b"\x80\x02c__builtin__\nbytearray\n\x8a\x06" + struct.pack("<q", 2**40)[:6]
                                    + b"\x85R."),
    "a storage of 2**40": archive(b"\x80\x02ctorch\nFloatStorage\n\x8a\x06" + struct.pack("<q", 2**40)[:6]
                                  + b"\x85R."),
    "a number": _saved(5),
    "a list": _saved([torch.zeros(3, 4)]),
    "a dict": _saved({"a": torch.zeros(3, 4)}),
    "a parameter": _saved(torch.nn.Parameter(torch.zeros(3, 4))),
    "a sparse tensor": _saved(torch.zeros(3, 4).to_sparse()),
    "a quantized tensor": archive(tensor_pickle("torch._utils\n_rebuild_qtensor", "torch\nQUInt8Storage")),
    "a quantized storage": archive(tensor_pickle(storage="torch\nQUInt8Storage"), bytes(12)),
    "a tensor on no device": _saved(torch.zeros(3, 4, device="meta")),
    "another dtype": _saved(torch.zeros(3, 4, dtype=torch.int32)),
    "another dtype, new form": _saved(torch.zeros(3, 4, dtype=torch.uint16)),
    "another shape": _saved(torch.zeros(4, 3)),
    "other dimensions": _saved(torch.zeros(12)),
    "more storage than data": archive(tensor_pickle(numel=2**28)),
    "2**62 elements": archive(tensor_pickle(numel=2**62)),
    "less storage than the tensor": archive(tensor_pickle(numel=11), bytes(44)),
    "an offset": archive(tensor_pickle(offset=1)),
    "a negative offset": archive(tensor_pickle(offset=-1)),
    "a stride outside": archive(tensor_pickle(stride=(2**40, 1))),
    "a negative stride": archive(tensor_pickle(stride=(-4, 1), offset=8)),
    "a stride too few": archive(tensor_pickle(stride=(1,))),
    "a negative size": archive(tensor_pickle(size=(-3, -4))),
    "a negative storage": archive(tensor_pickle(numel=-12)),
    "a size of texts": archive(tensor_pickle(size=("3", "4"))),
    "a size of truth values": archive(tensor_pickle(size=(True, True))),
    "1,000 dimensions": archive(tensor_pickle(size=(1,) * 1000, stride=(1,) * 1000)),
    "another device": archive(tensor_pickle(location="cuda:0")),
    "another kind": archive(tensor_pickle(kind="module")),
    "another key": archive(tensor_pickle(key="../../__0_0.distcp")),
    "another storage": archive(tensor_pickle(storage="torch\nload")),
    "a dtype that is none": archive(tensor_pickle(
        rebuild="torch._utils\n_rebuild_tensor_v3", storage="torch.storage\nUntypedStorage", numel=48,
        end=b"ctorch\nload\ntR.",
    )),
    "a dtype too many": archive(tensor_pickle(end=b"ctorch\nfloat32\ntR.")),
    "a key that takes for ever to hash": archive(b"\x80\x02}" + _TUPLES + b"Ns."),
    "a memo of 16 GiB": archive(b"\x80\x02Nr\xff\xff\xff\x7f."),
    "deep": archive(b"\x80\x02)" + b"\x85" * _DEEP + b"."),
    "an unknown opcode": archive(b"\xff"),
    "an empty pickle": archive(b""),
    "a pickle without an end": archive(tensor_pickle()[:-1]),
    "compressed": archive(tensor_pickle(numel=2**26), bytes(2**28), compress=True),
    "data of 4 GiB": _oversized(24),
    "data of 4 GiB, compressed size": _oversized(20),
    "a header elsewhere": _oversized(42),
    "another order of bytes": archive(tensor_pickle(), byteorder=b"big"),
    "no data": archive(tensor_pickle(), b""),
    "too much data": archive(tensor_pickle(), bytes(52)),
    "an empty archive": b"PK\x05\x06" + bytes(18),
    "nothing": b"",
    "zeros": bytes(1000),
}  # fmt: skip


def write_blob(step: Path, content: bytes) -> None:
    """Put ``content`` in the place of the weight."""
    metadata = metadata_of(step)
    data = (step / "__0_0.distcp").read_bytes()
    _place(metadata, WEIGHT, offset=len(data), length=len(content))
    (step / "__0_0.distcp").write_bytes(data + content)
    write_metadata(step, metadata)


def test_tensors(run: Run, saved: Run) -> None:
    weight = trained(2)[0].state_dict()["0.weight"]
    for name, code in BLOBS.items():
        write_blob(run.newest, code)
        why = assert_refused(run)
        assert "__0_0.distcp: model.0.weight" in why or "model.0.weight is larger than its file" in why, (name, why)
        restore(run, saved)
    for honest in (
        archive(tensor_pickle(), weight.numpy().tobytes()),
        archive(tensor_pickle(numel=24, offset=12), bytes(48) + weight.numpy().tobytes()),
        archive(tensor_pickle(stride=(1, 3)), weight.t().contiguous().numpy().tobytes()),
        _saved(weight),
    ):
        write_blob(run.newest, honest)
        assert load(run.folder)[1] == run.bits[run.step]
        restore(run, saved)


@pytest.mark.parametrize("dtype", [
    torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
    torch.complex128,
])  # fmt: skip
def test_a_tensor_is_as_torch_reads_it(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (3, 0), (5,), (2, 3), (2, 3, 4), (1, 2, 1, 2, 1)):
        size = math.prod(shape) * dtype.itemsize
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
        tensor = (raw.view(dtype) if size else torch.empty(0, dtype=dtype)).view(shape)
        for one in (tensor, tensor.transpose(0, -1) if tensor.ndim else tensor):
            found = read_tensor(io.BytesIO(_saved(one)))
            assert found.dtype == dtype and found.shape == one.shape and found.stride() == one.stride()
            same = found.contiguous().view(-1).view(torch.uint8), one.contiguous().view(-1).view(torch.uint8)
            assert torch.equal(*same)


def test_a_tensor_without_check_sums() -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        assert torch.equal(read_tensor(io.BytesIO(_saved(torch.arange(5)))), torch.arange(5))
    finally:
        torch.serialization.set_crc32_options(before)


# --- plain data ---

PLAIN: dict[str, str] = {
    "a dtype that is torch.load": '{"~": "dtype", "name": "load"}',
    "a dtype that is torch.hub": '{"~": "dtype", "name": "hub"}',
    "a module that is imported when it is asked for": '{"~": "dtype", "name": "onnx"}',
    "a dtype that is dotted": '{"~": "dtype", "name": "float32.__class__"}',
    "a dtype that is no text": '{"~": "dtype", "name": ["float32"]}',
    "a dtype without a name": '{"~": "dtype"}',
    "eval": '{"~": "eval", "items": ["1"]}',
    "a kind that is a list": '{"~": ["tuple"], "items": []}',
    "a kind that is a dict": '{"~": {"~": "tuple", "items": []}}',
    "a kind that is nothing": '{"~": null}',
    "no items": '{"~": "tuple"}',
    "items that are a number": '{"~": "tuple", "items": 5}',
    "a set of lists": '{"~": "set", "items": [[1]]}',
    "a set of dicts": '{"~": "frozenset", "items": [{}]}',
    "a deque of less than nothing": '{"~": "deque", "items": [], "most": -1}',
    "a deque of a text": '{"~": "deque", "items": [], "most": "x"}',
    "a key that is a list": '{"~": "dict", "items": [[[1], 2]]}',
    "a dict of numbers": '{"~": "dict", "items": [1, 2]}',
    "a dict of triples": '{"~": "dict", "items": [[1, 2, 3]]}',
    "bytes that are none": '{"~": "bytes", "base64": "!!!"}',
    "bytes of a number": '{"~": "bytes", "base64": 5}',
    "bytes beyond ASCII": '{"~": "bytes", "base64": "\u00e9"}',
    "a number that is none": '{"~": "int", "hex": "zz"}',
    "a number of a list": '{"~": "int", "hex": []}',
    "a tensor that is not there": '{"~": "tensor", "key": "99"}',
    "a tensor of a list": '{"~": "tensor", "key": []}',
    "an array that is not there": '{"~": "array", "key": "x"}',
    "an array of bf16": '{"~": "array", "key": "99"}',
    "10,000 digits": "1" * 10_000,
    "deep": "[" * _DEEP + "]" * _DEEP,
    "deep and open": "[" * _DEEP,
    "deep dicts": '{"a":' * 5000 + "1" + "}" * 5000,
    "nothing": "",
    "half": '{"a": ',
    "two": "{} {}",
    "not JSON": "__import__('os').system('true')",
}


def test_plain_data(run: Run) -> None:
    """In the place of ``extra`` of a rank, of a field of the run, and of the whole file."""
    for name in ("rank0.json", "run.json"):
        honest = (run.newest / name).read_text()
        field = "extra" if name == "rank0.json" else "placement"
        for text in PLAIN.values():
            (run.newest / name).write_text(text)
            with bounded(), little_memory(), pytest.raises(ValueError, match=name):
                read_plain(run.newest / name)
            if not text:
                continue
            (run.newest / name).write_text(json.dumps(json.loads(honest) | {field: "@"}).replace('"@"', text))
            sign(run.newest)
            assert_refused(run, name)
        for content in (
            b"\xff\xfe{",
            b"\x80\x04" + RUNNING["os.system"] + b".",
            "{}".encode("utf-16"),
            b"null",
            b"[]",
            b"5",
        ):
            (run.newest / name).write_bytes(content)
            sign(run.newest)
            assert_refused(run, name)
        (run.newest / name).write_text(honest)
    sign(run.newest)
    assert load(run.folder)[1] == run.bits[run.step]


# Plain data, and yet not what hecate.save writes there.
STATES: dict[str, Any] = {
    "optimizers of numbers": {"optimizers": [5]},
    "no groups": {"optimizers": [{}]},
    "groups of numbers": {"optimizers": [{"groups": [5], "plain": {}}]},
    "groups without parameters": {"optimizers": [{"groups": [{"lr": 1.0}], "plain": {}}]},
    "options that are a list": {"options": []},
    "a placement that is a number": {"placement": 5},
    "extra state of no module": {"extra_state": {"nowhere._extra_state": 5}},
    "extra state of a module that takes none": {"extra_state": {"0._extra_state": 5}},
    "extra state that is a list": {"extra_state": [5]},
    "random numbers of nothing": {"random": None},
    "random numbers without torch": {"random": {}},
    "a generator's state that is too short": {"random": {"torch": [], "numpy": [], "python": []}},
}


@pytest.mark.parametrize("name", STATES)
def test_state_of_another_form(run: Run, name: str) -> None:
    change = STATES[name]
    path = run.newest / ("rank0.json" if "random" in change else "run.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    sign(run.newest)
    with little_memory():
        try:
            found, restored, _ = load(run.folder)
        except CheckpointError:
            return
    assert restored == run.bits[found.step]


def test_a_generator_does_not_read_beyond_its_state(run: Run) -> None:
    """numpy takes any position, and reads there."""
    path = run.newest / "rank0.json"
    content = json.loads(path.read_text())
    content["random"]["numpy"]["items"][2] = 10**6
    path.write_text(json.dumps(content))
    sign(run.newest)
    with contextlib.suppress(CheckpointError):
        load(run.folder)
    assert np.random.get_state()[2] <= 624


def _header(header: Any, data: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(**changes: Any) -> dict[str, Any]:
    return {"0": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]} | changes}


HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "a header of 2**63": b"\xff" * 8 + b"{}",
    "a header of 2**40": struct.pack("<Q", 2**40) + b"{}",
    "a header after the end": struct.pack("<Q", 100) + b"{}",
    "no header": struct.pack("<Q", 0),
    "not JSON": _header(b"x"),
    "a list": _header([]),
    "a pickle": b"\x80\x04" + RUNNING["os.system"] + b".",
    "deep": _header(b'{"a":' * 10_000),
    "an offset after the end": _header(_entry(data_offsets=[0, 2**40], shape=[2**40])),
    "a negative offset": _header(_entry(data_offsets=[-1, 63])),
    "offsets turned around": _header(_entry(data_offsets=[64, 0])),
    "a shape of 2**64": _header(_entry(shape=[2**32, 2**32])),
    "a shape of 2**40": _header(_entry(shape=[2**40])),
    "a negative shape": _header(_entry(shape=[-64])),
    "a shape of texts": _header(_entry(shape=["64"])),
    "a dtype that is none": _header(_entry(dtype="load")),
    "an object": _header(_entry(dtype="O")),
    "two in one place": _header(_entry() | {"1": _entry()["0"]}),
    "a hole": _header(_entry(data_offsets=[8, 64], shape=[56])),
    "metadata of numbers": _header(_entry() | {"__metadata__": {"a": 5}}),
    "more data": _header(_entry(), bytes(65)),
    "other names": _header({"x": _entry()["0"]}),
}


def test_safetensors(run: Run) -> None:
    path = run.newest / "rank0.safetensors"
    for content in HEADERS.values():
        path.write_bytes(content)
        sign(run.newest)
        assert_refused(run, "rank0.json")
    path.unlink()
    path.symlink_to("/dev/zero")
    files = manifest.read_manifest(run.newest).files
    # Not in the manifest, and yet asked for by rank0.json.
    files.pop("rank0.safetensors")
    manifest.write_manifest(manifest.Manifest(step=2, sequence=9, ranks=1, files=files), run.newest)
    assert_refused(run, "rank0.safetensors is not a plain file")


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
