"""Tensors by somebody who means harm, in a step that is signed again; and honest ones, which are read as by torch."""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hecate.checkpoints.tensor_file import read_tensor
from tests.hecate_compile.checkpoints.payloads import DEEP, RUNNING, TUPLES, body
from tests.hecate_compile.checkpoints.tampering import (
    WEIGHT,
    Canary,
    assert_refused,
    metadata_of,
    restore,
    set_place,
    write_metadata,
)
from tests.hecate_compile.checkpoints.test_damage import Run, load, trained


def tensor_pickle(
    rebuild: str = "torch._utils\n_rebuild_tensor_v2", storage: str = "torch\nFloatStorage", numel: Any = 12,
    offset: Any = 0, size: Any = (3, 4), stride: Any = (4, 1), key: str = "0", location: str = "cpu",
    kind: str = "storage", hooks: bytes = b"ccollections\nOrderedDict\n)R", end: bytes = b"tR.",
) -> bytes:  # fmt: skip
    """As torch writes it."""
    return (
        b"\x80\x02c" + rebuild.encode() + b"\n((" + body(kind) + b"c" + storage.encode() + b"\n" + body(key)
        + body(location) + body(numel) + b"tQ" + body(offset) + body(size) + body(stride) + b"\x89" + hooks + end
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
    "a key that takes for ever to hash": archive(b"\x80\x02}" + TUPLES + b"Ns."),
    "a memo of 16 GiB": archive(b"\x80\x02Nr\xff\xff\xff\x7f."),
    "deep": archive(b"\x80\x02)" + b"\x85" * DEEP + b"."),
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
    set_place(metadata, WEIGHT, offset=len(data), length=len(content))
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
