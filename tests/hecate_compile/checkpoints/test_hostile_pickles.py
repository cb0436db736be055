"""Pickles by somebody who means harm in a step's metadata, with hashes that agree: nothing in them runs or hangs."""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, ChunkStorageMetadata, Metadata

from hecate.checkpoints import manifest
from hecate.checkpoints.safe_metadata import read_metadata
from tests.hecate_compile.checkpoints.payloads import OTHERS, RUNNING, named
from tests.hecate_compile.checkpoints.tampering import (
    HERE,
    assert_refused,
    little_memory,
    metadata_of,
    ran,
    write_metadata,
)
from tests.hecate_compile.checkpoints.test_damage import Run, bounded, load
from tests.support.extent import ALL


def test_signing_again_is_enough(run: Run) -> None:
    """None of the hostile tests would show anything if the manifest were why a step is refused."""
    metadata = metadata_of(run.newest)
    metadata.version = "9"
    write_metadata(run.newest, metadata)
    assert load(run.folder)[1] == run.bits[run.step]


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
    code = named("hecate_canary", "x")
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
