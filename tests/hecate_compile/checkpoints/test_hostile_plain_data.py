"""JSON and safetensors by somebody who means harm, in a step that is signed again: refused, or loaded as saved."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import numpy as np
import pytest

from hecate.checkpoints import manifest
from hecate.checkpoints.coordination import CheckpointError
from hecate.checkpoints.plain_data import read_plain
from tests.hecate_compile.checkpoints.payloads import DEEP, RUNNING
from tests.hecate_compile.checkpoints.tampering import assert_refused, little_memory, sign
from tests.hecate_compile.checkpoints.test_damage import Run, bounded, load

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
    "deep": "[" * DEEP + "]" * DEEP,
    "deep and open": "[" * DEEP,
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
