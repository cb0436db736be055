"""Pickles that run code, in the place of each file and tensor of a step whose hashes agree: nothing runs."""

from __future__ import annotations

import contextlib
import io
import pickle
import shutil
import struct
import sys
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import hecate
from hecate.checkpoints import manifest
from hecate.checkpoints.safety.files import CorruptError
from hecate.checkpoints.safety.tensor_index import read_index
from tests.hecate_compile.checkpoints.tampering import (
    HERE,
    TOUCHED,
    WEIGHT,
    Canary,
    assert_refused,
    index_of,
    little_memory,
    ran,
    sign,
    write,
)
from tests.hecate_compile.checkpoints.test_damage import FILES, Run, bounded, load
from tests.hecate_compile.checkpoints.test_formats import KEPT, STEP, small


def _named(module: str, name: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"


def _call(module: str, name: str, *arguments: Any) -> bytes:
    return _named(module, name) + pickle.dumps(arguments, protocol=3)[2:-1] + b"R"


_TOUCH = f"touch {TOUCHED}"
# The inside of a pickle, without PROTO and STOP. With plain pickle each of these runs.
RUNNING: dict[str, bytes] = {
    "os.system": _call("os", "system", _TOUCH),
    "posix.system by an old name": f"cposix\nsystem\n(V{_TOUCH}\ntR".encode(),
    "getattr": _named("builtins", "getattr") + _call("importlib", "import_module", HERE) + b"\x8c\nrun_canary\x86R)R",
    "functools.partial": _named("functools", "partial") + _named(HERE, "run_canary") + b"\x85R)R",
    "a list elsewhere": _named(HERE, "RAN") + b"\x8c\x01xa",
    "torch.os.system": _call("torch", "os.system", _TOUCH),
    "DCP's own os": _call("torch.distributed.checkpoint.metadata", "os.system", _TOUCH),
    "a nested pickle": _call("pickle", "loads", b"\x80\x04" + _call(HERE, "run_canary") + b"."),
    "BUILD": _named(HERE, "Canary") + b")\x81}b",
    "INST": f"(i{HERE}\nrun_canary\n".encode(),
    "OBJ": b"(" + _named(HERE, "run_canary") + b"o",
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
        index[WEIGHT]["chunks"][0][3:] = [len(data), len(blob)]
        write(run.newest, "tensors.json", index)
        why = assert_refused(run)
        assert f"__0_0.distcp: {WEIGHT} cannot be read" in why or "is larger than its file" in why, (name, why)


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
            read_index(folder / STEP, manifest.read_manifest(folder / STEP).files, format=1)
        with pytest.raises(hecate.NoCheckpointError) as error, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hecate.load(folder, small(seed=1))
    assert not ran() and "MemoryError" not in str(error.value)
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
