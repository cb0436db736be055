"""What users give as ``extra`` comes back equal, and what is no plain data is refused by its place."""

from __future__ import annotations

import collections
import enum
import math
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hecate
from hecate.checkpoints.safety.plain_data import check_plain, read_plain, write_plain
from tests.support.extent import ALL
from tests.support.ranks import message_of


class Color(enum.IntEnum):
    RED = 3


class Word(enum.StrEnum):
    YES = "yes"


class Plain(enum.Enum):
    ONE = 1


class Point(NamedTuple):
    x: int
    y: float


def same(a: Any, b: Any) -> bool:
    """Equal in every bit and in type; nan is nan, whatever its sign, and -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a != a and b != b) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, torch.Tensor):
        plain = a.detach().contiguous().reshape(-1), b.detach().contiguous().reshape(-1)
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*(one.view(torch.uint8) for one in plain))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple, collections.deque)):
        if isinstance(a, collections.deque) and a.maxlen != b.maxlen:
            return False
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(k, j) and same(x, y) for (k, x), (j, y) in pairs)
    return bool(a == b)


def back(value: Any, folder: Path) -> Any:
    path = folder / "x.json"
    for old in folder.glob("x.*"):
        old.unlink()
    write_plain(value, path)
    return read_plain(path)


# What is drawn below is left out here.
EXACT: list[Any] = [
    1 << 20_000,
    sys.float_info.max,
    math.nan,
    "é\U0001f600",
    "\ud800",
    {"a", 1, (2, 3)},
    {frozenset({1}), frozenset({2, 3})},
    {1.5: "x", -0.0: "y"},
    {"1": "text", 1: "number"},
    collections.deque([1, 2], maxlen=2),
    torch.float8_e4m3fn,
    torch.tensor(1.5),
    torch.empty(3, 0, dtype=torch.int8),
    torch.tensor([math.nan, math.inf, -0.0]),
    torch.arange(6).view(2, 3).t()[::2],
    torch.ones(1).expand(4),
    torch.randn(3).bfloat16(),
    torch.randn(3).to(torch.float8_e5m2),
    torch.tensor([1 + 2j]),
    torch.Generator().manual_seed(5).get_state(),
    np.array(1.5),
    np.arange(6).reshape(2, 3).T[::-2],
    np.float16([1.5]),
    np.array([math.nan, -0.0]),
    np.array([1 + 2j], dtype=np.complex64),
    np.array([2**63], dtype=np.uint64),
    np.random.get_state(),
    random.getstate(),
    np.random.default_rng(5).bit_generator.state,
]


# A type that is no plain one becomes the plain one that it is like.
LIKE: list[tuple[Any, Any]] = [
    (np.float32(0.1), float(np.float32(0.1))),
    (np.float16(math.nan), math.nan),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (np.bool_(True), True),
    (np.str_("x"), "x"),
    (np.bytes_(b"x"), b"x"),
    (Color.RED, 3),
    (Word.YES, "yes"),
    ({Color.RED: Word.YES}, {3: "yes"}),
    (Point(1, 2.5), (1, 2.5)),
    (torch.Size([2, 3]), (2, 3)),
    (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    (collections.defaultdict(list, {"a": [1]}), {"a": [1]}),
    (collections.Counter("aab"), {"a": 2, "b": 1}),
    (np.arange(3, dtype=">i4"), np.arange(3, dtype="<i4")),
    (torch.ones(2, requires_grad=True) * 1, torch.ones(2)),
    (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
    (torch.tensor([1 + 2j]).conj().imag, torch.tensor([-2.0])),
]


def test_values(tmp_path: Path) -> None:
    for value, wanted in [*((exact, exact) for exact in [*EXACT, {"all": EXACT}, [torch.ones(2)] * 3]), *LIKE]:
        check_plain(value, "extra")
        assert same(back(value, tmp_path), wanted), value


KEYS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.tuples(st.integers(), st.text(max_size=3)),
    st.frozensets(st.integers(), max_size=3),
    st.just("~"),
)
LEAVES = st.one_of(
    KEYS,
    st.floats(),
    st.integers(-(2**9000), 2**9000),
    st.lists(st.floats(width=32), max_size=4).map(lambda numbers: torch.tensor(numbers, dtype=torch.float32)),
    st.lists(st.integers(0, 255), max_size=4).map(lambda numbers: np.array(numbers, dtype=np.uint8)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(KEYS, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=4).map(collections.deque),
        st.dictionaries(st.sampled_from(["~", "items", "key", "name", "most", "hex"]), inner, max_size=4),
    ),
    max_leaves=12,
)


def test_any_value(tmp_path: Path) -> None:
    @settings(max_examples=1500 if ALL else 60, deadline=None, database=None)
    @given(VALUES)
    def check(value: Any) -> None:
        check_plain(value, "extra")
        assert same(back(value, tmp_path), value)

    check()


# --- what is refused ---


class Subclass(torch.Tensor):
    pass


def _in_itself() -> list[Any]:
    value: list[Any] = []
    value.append({"a": value})
    return value


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


REFUSED: dict[str, Any] = {
    "a object": object(),
    "a function": _deep,
    "a LambdaLR": torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), float),
    "a Plain": Plain.ONE,
    "a complex": 1 + 2j,
    "a longdouble": np.longdouble(1),
    "a datetime": np.datetime64("2020-01-01T00:00:00"),
    "a ndarray": np.array(["x"]),
    "an array of float128": np.ones(1, dtype=np.longdouble) if np.dtype(np.longdouble).itemsize == 16 else None,
    "an array of complex128": np.ones(1, dtype=np.complex128),
    "a Subclass": torch.ones(2).as_subclass(Subclass),
    "layout torch.sparse_coo": torch.ones(2).to_sparse(),
    "on meta": torch.ones(2, device="meta"),
    "a tensor of torch.complex128": torch.ones(2, dtype=torch.complex128),
    "more than 100 deep": _deep(150),
    "or contains itself": _in_itself(),
}


def test_refused(tmp_path: Path) -> None:
    """Before anything is written, by its place."""
    for name, value in REFUSED.items():
        if value is None:
            continue
        for extra, place in (
            (value, "extra"),
            ({"a": [1, {"b": value}]}, "extra['a'][1]['b']"),
            ((1, value), "extra[1]"),
            ({5: value}, "extra[5]"),
            ({"~": value}, "extra['~']"),
        ):
            said = message_of(partial(hecate.save, tmp_path / "run", step=1, extra=extra))
            assert said.startswith("TypeError: ") and place in said and name in said, (name, said)
    for extra, place in (
        ({Path("/"): 1}, "a key of extra"),
        ({1: {len: 1}}, "a key of extra[1]"),
        ({len}, "extra[0]"),
    ):
        with pytest.raises(TypeError) as error:
            hecate.save(tmp_path / "run", step=1, extra=extra)
        assert place in str(error.value), error.value
    extra = {"scheduler": REFUSED["a LambdaLR"]}
    said = message_of(partial(hecate.async_save, tmp_path / "run", step=1, extra=extra))
    assert "extra['scheduler'] is a LambdaLR" in said and "Save its state_dict" in said
    assert not (tmp_path / "run").exists()


def test_deep_is_written_and_read_alike(tmp_path: Path) -> None:
    for make in (list, tuple, lambda items: {"a": items[0]}, lambda items: {1: items[0]}):
        value: Any = 1
        for _ in range(99):
            value = make([value])
        assert same(back(value, tmp_path), value)


# --- through a checkpoint ---


def _schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    lr = torch.optim.lr_scheduler
    return [
        lr.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lr.StepLR(optimizer, 2),
        lr.MultiStepLR(optimizer, [1, 3]),
        lr.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False),
        lr.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False),
        lr.ReduceLROnPlateau(optimizer, patience=0),
        lr.SequentialLR(optimizer, [lr.LinearLR(optimizer), lr.CosineAnnealingLR(optimizer, 5)], [2]),
        lr.ChainedScheduler([lr.LinearLR(optimizer), lr.ExponentialLR(optimizer, 0.9)]),
        torch.optim.swa_utils.SWALR(optimizer, 0.05),
    ]


def _advance(schedulers: list[Any], optimizer: torch.optim.Optimizer, count: int) -> list[list[float]]:
    rates = []
    for number in range(count):
        for scheduler in schedulers:
            optimizer.step()
            metrics = (float(number),) if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else ()
            scheduler.step(*metrics)
            rates.append(scheduler.get_last_lr())
    return rates


def test_schedulers_go_on(tmp_path: Path) -> None:
    for number in range(len(_schedulers(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)))):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        one = [_schedulers(optimizer)[number]]
        _advance(one, optimizer, 3)
        state = one[0].state_dict()
        hecate.save(tmp_path, model, optimizer, step=number, extra={"scheduler": state}, keep=1)
        other = nn.Linear(2, 2)
        second = torch.optim.AdamW(other.parameters(), lr=0.1)
        two = [_schedulers(second)[number]]
        found = hecate.load(tmp_path, other, second).extra["scheduler"]
        assert found.keys() == state.keys()
        two[0].load_state_dict(found)
        assert _advance(two, second, 4) == _advance(one, optimizer, 4), type(one[0])


def test_extra_through_a_checkpoint(tmp_path: Path) -> None:
    """Without a model too; twice the same object is two equal ones."""
    shared = torch.arange(3)
    extra = {
        "values": [value for value in EXACT if not (isinstance(value, float) and value != value)],
        "a": shared,
        "b": [shared, shared[1:]],
    }
    hecate.save(tmp_path, step=1, extra=extra)
    found = hecate.load(tmp_path)
    assert same(found.extra, extra) and same(found.extras, (extra,))
    assert (found.step, found.ranks) == (1, 1)
    # What was read belongs to the reader.
    found.extra["a"] += 1
    assert torch.equal(found.extra["b"][0], shared)
    for extra in (None, [], {}, 0):
        hecate.save(tmp_path, step=2, extra=extra)
        assert same(hecate.load(tmp_path).extra, extra)
