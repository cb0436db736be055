"""What the functions with kernels refuse, and what they are where no kernel runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hecate.runtime.kernels import launch
from hecate.runtime.kernels.clear_rows import clear_empty_slots, clear_rows_behind
from hecate.runtime.kernels.expand_segments import expand_segments
from hecate.runtime.kernels.gather_rows import gather_rows
from hecate.runtime.kernels.grouped_mm import CONFIGS, fits_registers, grouped_mm, takes_products
from hecate.runtime.kernels.launch import tl
from hecate.runtime.kernels.pack_experts import pack_experts, unpack_experts
from hecate.runtime.kernels.scatter_rows import scatter_rows
from hecate.runtime.kernels.sum_replicas import sum_replicas
from hecate.runtime.kernels.weight_grads import CONFIGS as weight_grads_configs
from hecate.runtime.kernels.weight_grads import weight_grads
from hecate.runtime.one_sided.balance_rows import balance_rows
from hecate.runtime.one_sided.links import Chunk, Rows
from hecate.runtime.one_sided.post_words import post_words
from hecate.runtime.one_sided.put_rows import put_rows
from hecate.runtime.one_sided.split_rows import split_rows
from hecate.runtime.one_sided.take_rows import take_rows
from hecate.runtime.one_sided.ticket_segments import ticket_segments
from hecate.runtime.one_sided.wait_words import wait_words
from hecate.runtime.placement.planner import rounds_of

ROOT = Path(__file__).parents[3]
ROWS, INDEX = torch.zeros(3, 4), torch.arange(2)
SHORT = torch.zeros(2, dtype=torch.int32)
META = torch.zeros(2, dtype=torch.int64, device="meta")
OWN = torch.zeros(2, 4, 5)
OFFS = torch.tensor([1, 3])
LONG = torch.zeros(2, 3, dtype=torch.int64)
LINKS = Chunk(INDEX, INDEX, INDEX, INDEX, 0)
WINDOW = torch.zeros(2, 2, 128, dtype=torch.uint8)

Refused = dict[str, tuple[Callable[[], object], str]]

WRONG_TYPES: Refused = {
    "int32": (lambda: gather_rows(ROWS, SHORT), "expected an index of int64, got torch.int32"),
    "two dtypes": (lambda: pack_experts([ROWS, ROWS.half()], INDEX), "float32 and torch.float16"),
    "another dtype": (lambda: unpack_experts(ROWS[:2].half(), [ROWS], INDEX), "comes into tensors of"),
    "half rows": (lambda: split_rows(LONG, LONG.t().half(), INDEX, INDEX, 0), "numbers of int64"),
    "whole rows as floats": (
        lambda: put_rows(Rows(LONG), LINKS, [WINDOW] * 2, INDEX, 0, torch.float32),
        "do not travel as",
    ),
    "half links": (lambda: post_words(Chunk(SHORT, *[INDEX] * 3, 0), [LONG, LONG], INDEX, 0), "numbers of int64"),
    "counts that are floats": (lambda: balance_rows(LONG.float(), torch.arange(3), INDEX, LONG), "numbers of int64"),
    "half of what arrives": (lambda: ticket_segments(LONG.t(), LONG.half(), torch.arange(3), INDEX), "of int64"),
    "matrices of two dtypes": (lambda: grouped_mm(ROWS, OWN, OWN[:0].half(), OFFS), "dtypes differ"),
    "offsets that are floats": (lambda: grouped_mm(ROWS, OWN, OWN[:0], OFFS.float()), "int32 or int64"),
}
WRONG_VALUES: Refused = {
    "rows without dimensions": (lambda: gather_rows(torch.tensor(1.0), INDEX), r"rows \[R, ...\]"),
    "index of two dimensions": (lambda: gather_rows(ROWS, INDEX.view(1, 2)), r"got \[1, 2\]"),
    "two devices": (lambda: gather_rows(ROWS, META), "the index is on meta, the rows are on cpu"),
    "rows without places": (lambda: scatter_rows(ROWS, INDEX, 5), "3 rows, but an index of 2"),
    "too few places": (lambda: scatter_rows(ROWS[:2], INDEX, 1), "2 rows for 1 places"),
    "no tensors": (lambda: pack_experts([], INDEX), "got none"),
    "numbers of experts": (lambda: pack_experts([ROWS, ROWS[:2]], INDEX), r"\[3\] and \[2\] experts"),
    "others behind": (lambda: pack_experts([ROWS], INDEX, behind=[OWN]), "behind"),
    "another width": (lambda: unpack_experts(ROWS[:2], [OWN], INDEX), r"expected \[2, 20\]"),
    "gaps": (lambda: unpack_experts(ROWS[:2, :2], [ROWS[:, :2]], INDEX), "contiguous tensors only"),
    "starts": (lambda: sum_replicas(ROWS, ROWS[:2], INDEX, INDEX), "4 rows, but an index of 2"),
    "parts": (lambda: sum_replicas(ROWS[:1], ROWS, INDEX, INDEX), r"expected parts \[2, 4\]"),
    "totals": (
        lambda: sum_replicas(torch.zeros(3, 2).t(), ROWS[:2, :3], torch.arange(3), INDEX),
        "contiguous totals only",
    ),
    "numbers of no ranges": (lambda: expand_segments(INDEX[:0], INDEX[:0], 3), "3 numbers of 0 ranges"),
    "ends": (lambda: expand_segments(INDEX, INDEX[:1], 3), "2 rows, but an index of 1"),
    "experts and ranks": (lambda: split_rows(LONG, LONG, INDEX, INDEX, 0), r"got \[2, 3\], \[2, 3\]"),
    "nodes of other ranks": (lambda: split_rows(LONG, LONG.t(), INDEX, INDEX[:1], 0), "index of 1"),
    "a rank too many": (lambda: split_rows(LONG, LONG.t(), INDEX, INDEX, 2), "rank 2 of 2"),
    "short segments": (lambda: take_rows(WINDOW[:, :, :8], Rows(ROWS), LINKS, torch.float32), "a multiple of 128"),
    "rows to gaps": (lambda: take_rows(WINDOW, Rows(ROWS.t()), LINKS, torch.float32), "into contiguous rows"),
    "fewer links": (
        lambda: wait_words(LONG, Chunk(INDEX, INDEX, INDEX[:1], INDEX, 0), seconds=0),
        "one number for each link",
    ),
    "links with gaps": (
        lambda: post_words(Chunk(LONG.t()[0], INDEX, INDEX, INDEX, 0), [LONG], INDEX, 0),
        "have gaps",
    ),
    "too many ranks": (
        lambda: post_words(Chunk(*[torch.zeros(129, dtype=torch.int64)] * 4, 0), [LONG], INDEX, 0),
        "at most 128",
    ),
    "counts of no ranks": (lambda: balance_rows(LONG[:0], INDEX, INDEX, LONG), r"got \[0, 3\]"),
    "owners of other experts": (lambda: balance_rows(LONG, INDEX, INDEX, LONG), "an index of 2"),
    "parts of other ranks": (
        lambda: balance_rows(LONG, torch.arange(3), INDEX, LONG[:, :2]),
        r"expected parts \[2, 3\]",
    ),
    "what arrives": (lambda: ticket_segments(LONG.t(), LONG.t(), torch.arange(3), INDEX), r"got \[3, 2\], "),
    "what arrives elsewhere": (lambda: ticket_segments(LONG.t(), LONG.to("meta"), torch.arange(3), INDEX), "on meta"),
    "inner sizes": (lambda: grouped_mm(ROWS[:, :3], OWN, OWN[:0], OFFS), r"got \[3, 3\], \[2, 4, 5\]"),
    "offsets of other slots": (lambda: grouped_mm(ROWS, OWN, OWN, OFFS), r"4 slots, but offsets \[2\]"),
    "offsets elsewhere": (lambda: grouped_mm(ROWS, OWN, OWN[:0], META), "offsets are on meta"),
    "rows with gaps": (lambda: clear_rows_behind(ROWS[:, ::2], OFFS), r"contiguous \[R, N\] and slots"),
    "no slots": (lambda: clear_rows_behind(ROWS, OFFS[:0]), "and slots"),
    "matrices of other slots": (lambda: clear_empty_slots(OWN[:1], OFFS), "1 slots"),
    "matrices with gaps": (lambda: clear_empty_slots(OWN[..., ::2], OFFS), "contiguous"),
    "gradients of another shape": (
        lambda: weight_grads(ROWS, ROWS, OFFS, OWN, OWN[:0]),
        r"expected \[R, A\], \[R, B\]",
    ),
    "gradients with gaps": (
        lambda: weight_grads(ROWS, torch.zeros(3, 5), OFFS, torch.zeros(2, 5, 4).transpose(1, 2), OWN[:0]),
        "contiguous tensors only",
    ),
}


@pytest.mark.parametrize("name", WRONG_TYPES | WRONG_VALUES)
def test_what_cannot_be_is_refused(name: str) -> None:
    call, message = (WRONG_TYPES | WRONG_VALUES)[name]
    with pytest.raises(TypeError if name in WRONG_TYPES else ValueError, match=message):
        call()


def test_other_dtypes_take_the_reference() -> None:
    rows = torch.arange(6).view(3, 2)
    assert gather_rows(rows, torch.tensor([2, 0])).tolist() == [[4, 5], [0, 1]]
    assert scatter_rows(rows[:1].bool(), torch.tensor([2]), 3).tolist() == [[False, False]] * 2 + [[False, True]]
    assert pack_experts([rows], torch.tensor([1])).tolist() == [[2, 3]]


def test_products_are_taken_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not takes_products(ROWS, OWN), "no kernel runs on the CPU"
    monkeypatch.setattr("hecate.runtime.kernels.grouped_mm.runs_on", lambda _: True)
    assert takes_products(ROWS, OWN)
    assert not takes_products(ROWS, OWN.half())
    assert not takes_products(ROWS.double(), OWN.double())


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "triton", launch.triton or object())
    assert launch.runs_on(torch.device("cuda"))
    assert not launch.runs_on(torch.device("cpu")) and not launch.runs_on(torch.device("meta"))
    monkeypatch.setattr(launch, "_ALLOWED", False)
    assert not launch.runs_on(torch.device("cuda"))


def test_float32_has_small_tiles() -> None:
    def left(dtype: torch.dtype, precision: str) -> list[int]:
        given = {"x": torch.zeros(1, dtype=dtype), "PRECISION": precision}
        return [index for index, config in enumerate(CONFIGS) if fits_registers({**given, **config})]

    assert left(torch.bfloat16, "ieee") == left(torch.float32, "tf32") == list(range(len(CONFIGS)))
    assert left(torch.float32, "ieee") == [0, 1, 3]
    kept = [config for config in weight_grads_configs if fits_registers({**FLOAT32, **config})]
    assert kept and kept != list(weight_grads_configs)


FLOAT32 = {"x": torch.zeros(1), "PRECISION": "ieee"}


@pytest.mark.skipif(launch.triton is None, reason="needs Triton, which is for Linux")
def test_a_configuration_that_does_not_compile_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton's own tuner ends with it. Other errors are raised: a GPU without memory would keep a slow choice."""
    problem = "PassManager::run failed"

    def kernel(count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        pass

    class Compiled:
        def run(self, count: int, **options: int) -> int:
            if options["BLOCK"] == 1:
                raise RuntimeError(problem)
            return options["BLOCK"]

    def benchmarker(run: Callable[[], object], quantiles: tuple[float, ...]) -> list[float]:
        run()
        return [1.0] * len(quantiles)

    def tune() -> object:
        tuner = launch.tuned([{"BLOCK": 1}, {"BLOCK": 2}], key=[])(kernel)
        tuner.fn, tuner.cache_results = Compiled(), False
        return tuner.run(3)

    monkeypatch.setattr("triton.runtime.driver._active", SimpleNamespace(get_benchmarker=lambda: benchmarker))
    assert tune() == 2
    assert "does not compile and is left out: PassManager::run failed" in caplog.text
    problem = "CUDA error: out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        tune()


def test_references_are_told_what_the_host_knows() -> None:
    """Then they read nothing on the host, and compute the same."""
    first, second, index = torch.randn(3, 4), torch.randn(2, 4), torch.tensor([4, 0, 2, 3])
    kept, kept_second = first.clone(), second.clone()
    assert torch.equal(pack_experts([first], index, behind=[second]), torch.cat([first, second])[index])
    told = pack_experts([first], index, behind=[second], in_first=2)
    assert torch.equal(told, torch.cat([first, second])[index])
    for ascends, below in (([0, 2, 3, 4], 2), ([1, 2], 2), ([3, 4], 0), ([], 0)):
        index = torch.tensor(ascends, dtype=torch.int64)
        joined = pack_experts([first], index, behind=[second], in_first=below)
        assert torch.equal(joined, torch.cat([first, second])[index])
        joined.add_(1)
        assert torch.equal(first, kept) and torch.equal(second, kept_second), "what is packed is a copy"
    parts, starts, order = torch.randn(4, 4), torch.tensor([0, 3, 3, 4]), torch.tensor([0, 2, 3, 1])
    totals = [first.clone(), first.clone()]
    sum_replicas(totals[0], parts, starts, order)
    sum_replicas(totals[1], parts, starts, order, [2, 1, 1])
    assert torch.equal(*totals) and rounds_of(np.array([3, 0, 1])) == (2, 1, 1) and rounds_of(np.array([0])) == ()


def test_everything_works_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from hecate.runtime.kernels import launch
from hecate.runtime.kernels.gather_rows import gather_rows
assert launch.triton is None and not launch.runs_on(torch.device("cuda"))
print(gather_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([1])).tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[[2.0]]", done.stderr[-2000:]


def test_a_kernel_without_configurations_is_launched_as_it_is() -> None:
    """Kernels of attention have all constants from their caller."""
    launched: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **options: launched.append((grid({}), args, options))

    for _ in range(2):
        launch.launch(Kernel(), lambda numbers: 6, ROWS, BLOCK=2)
    assert launched == [((6,), (ROWS,), {"BLOCK": 2})] * 2


def test_a_case_is_tuned_once_and_then_launched_as_it_was() -> None:
    """A case has its own values of the key and dtypes; what the tuner chose is kept, however often it is launched."""
    asked: list[Any] = []
    launched: list[Any] = []

    class Launcher:
        def __init__(self, found: list[Any]) -> None:
            self.found = found

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **options: self.found.append((grid, args[1:], options))

    class Tuner(Launcher):
        configs, arg_names, keys = (1, 2), ("x", "width", "count"), ["width"]
        fn = Launcher(launched)
        best_config = SimpleNamespace(all_kwargs=lambda: {"BLOCK": 4, "num_warps": 2})

    tuner = Tuner(asked)
    for dtype, width, count in (
        (torch.float32, 8, 1),
        (torch.float32, 8, 2),
        (torch.float16, 8, 3),
        (torch.float32, 9, 4),
    ):
        launch.launch(tuner, lambda numbers: 10 * numbers["BLOCK"], torch.zeros(1, dtype=dtype), width, count, N=7)
    assert [args for _, args, _ in asked] == [(8, 1), (8, 3), (9, 4)]
    assert launched == [((40,), (8, 2), {"N": 7, "BLOCK": 4, "num_warps": 2})]
    (grid, _, options), *_ = asked
    assert grid({"BLOCK": 3}) == (30,) and options == {"N": 7}
