"""All that a GPU must show about the kernels, in one command on one GPU.

    python -m benchmarks.gpu_check                       all of it
    python -m benchmarks.gpu_check --no-tests            parity and times only
    python -m benchmarks.gpu_check --only grouped_mm     one kernel, in this process

For each kernel in float32, bfloat16 and float16: does it equal its reference, and how long do it, the reference and
what torch itself has for this take. Then ``pytest -m gpu``. Each kernel has a process of its own, so one that reads
where it must not does not spoil the others.

Candidates alternate; a sample is the mean of a few calls between two CUDA events. A ratio is that of medians, and
quartiles are those of samples. Reading offsets on the host is part of what a reference takes. Results are written to
``gpu_check.json`` and ``gpu_check.txt`` in build/benchmarks (or where ``HECATE_RESULTS`` says).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.results_folder import results_folder
from hecate.runtime.kernels import (
    combine_rows,
    expand_segments,
    gather_rows,
    grouped_mm,
    launch,
    pack_experts,
    scatter_rows,
    split_rows,
    sum_replicas,
    weight_grads,
)
from hecate.runtime.ops.ticket import join_segments, on_device

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WARM_UP, ROUNDS, CALLS = 5, 30, 5
# What a kernel and its reference may differ by, relative to the largest value. Rows that only move must be equal.
EQUAL: dict[torch.dtype, float] = dict.fromkeys(DTYPES, 0.0)
SUMS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# One kernel's share of the ten minutes that a command may take on some machines.
TIMEOUT = 240


@dataclass(frozen=True)
class Sizes:
    """Of one layer on one rank; by default about those of Qwen3-30B-A3B on eight ranks."""

    tokens: int = 8192
    choices: int = 8
    hidden: int = 2048
    inner: int = 768
    owned: int = 16
    replicas: int = 4
    ranks: int = 64


SMALL = Sizes(tokens=24, choices=3, hidden=40, inner=24, owned=3, replicas=2, ranks=6)


@dataclass(frozen=True)
class Case:
    """One kernel on one dtype.

    Attributes:
        ours, reference: each computes the result anew.
        torch: what torch itself has for it, if that is something else.
        limits: see :data:`SUMS`.
    """

    dtype: torch.dtype
    ours: Callable[[], Any]
    reference: Callable[[], Any]
    torch: Callable[[], Any] | None
    limits: dict[torch.dtype, float]


# --- the cases ---


class Maker:
    """Makes operands on a device, the same in every run."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self._generator = torch.Generator().manual_seed(0)

    @property
    def rows(self) -> int:
        return self.sizes.tokens * self.sizes.choices

    def numbers(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.device, dtype)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator).to(self.device)

    def offsets(self) -> Tensor:
        """Ends of slots: some have many rows, one has none, and a few rows are behind the last."""
        slots = self.sizes.owned + self.sizes.replicas
        shares = torch.rand(slots, generator=self._generator) ** 2
        shares[1] = 0
        sizes = (shares / shares.sum() * (self.rows - self.sizes.choices)).to(torch.int64)
        return sizes.cumsum(0).to(torch.int32).to(self.device)


def _gather(make: Maker, dtype: torch.dtype) -> Case:
    rows, index = make.numbers(make.rows, make.sizes.hidden, dtype=dtype), make.order(make.rows)
    wire = torch.bfloat16 if dtype is torch.float32 else dtype
    return Case(
        dtype,
        lambda: gather_rows.gather_rows(rows, index, wire),
        lambda: gather_rows.gather_rows_reference(rows, index, wire),
        None,
        EQUAL,
    )


def _scatter(make: Maker, dtype: torch.dtype) -> Case:
    wire = torch.bfloat16 if dtype is torch.float32 else dtype
    index, count = make.order(make.rows)[: make.rows * 3 // 4], make.rows
    rows = make.numbers(len(index), make.sizes.hidden, dtype=wire)
    return Case(
        dtype,
        lambda: scatter_rows.scatter_rows(rows, index, count, dtype),
        lambda: scatter_rows.scatter_rows_reference(rows, index, count, dtype),
        None,
        EQUAL,
    )


def _combine(make: Maker, dtype: torch.dtype) -> Case:
    tokens, choices = make.sizes.tokens, make.sizes.choices
    rows, weights = (
        make.numbers(make.rows, make.sizes.hidden, dtype=dtype),
        make.numbers(tokens, choices, dtype=dtype),
    )
    positions = make.order(make.rows).view(tokens, choices)

    def by_torch() -> Tensor:
        picked = rows.index_select(0, positions.view(-1)).view(tokens, choices, -1)
        return torch.bmm(weights.unsqueeze(1), picked).squeeze(1)

    return Case(
        dtype,
        lambda: combine_rows.combine_rows(rows, positions, weights),
        lambda: combine_rows.combine_rows_reference(rows, positions, weights),
        by_torch,
        SUMS,
    )


def _experts(make: Maker, count: int, dtype: torch.dtype) -> list[Tensor]:
    hidden, inner = make.sizes.hidden, make.sizes.inner
    return [make.numbers(count, 2 * inner, hidden, dtype=dtype), make.numbers(count, hidden, inner, dtype=dtype)]


def _pack(make: Maker, dtype: torch.dtype) -> Case:
    tensors, behind = _experts(make, make.sizes.owned, dtype), _experts(make, make.sizes.replicas, dtype)
    index = make.order(make.sizes.owned + make.sizes.replicas)
    return Case(
        dtype,
        lambda: pack_experts.pack_experts(tensors, index, behind=behind),
        lambda: pack_experts.pack_experts_reference(tensors, index, behind, dtype),
        None,
        EQUAL,
    )


def _unpack(make: Maker, dtype: torch.dtype) -> Case:
    tensors = _experts(make, make.sizes.replicas, dtype)
    index = make.order(make.sizes.replicas)
    packed = make.numbers(len(index), sum(pack_experts.widths_of(tensors)), dtype=dtype)

    def into(unpack: Callable[..., None]) -> Callable[[], list[Tensor]]:
        return lambda: (unpack(packed, tensors, index), [tensor.clone() for tensor in tensors])[1]

    # Both are timed with the same copy, which shows the result.
    return Case(dtype, into(pack_experts.unpack_experts), into(pack_experts.unpack_experts_reference), None, EQUAL)


def _sum(make: Maker, dtype: torch.dtype) -> Case:
    slots, width = make.sizes.owned, make.sizes.hidden * make.sizes.inner
    parts = make.numbers(2 * slots, width, dtype=dtype)
    # Slot s has parts s, s + slots.
    order = torch.arange(2 * slots, device=make.device).view(2, slots).t().reshape(-1)
    starts = torch.arange(0, 2 * slots + 1, 2, device=make.device)
    where = torch.arange(slots, device=make.device).repeat(2)
    totals = make.numbers(slots, width, dtype=torch.float32)

    def of(add: Callable[[Tensor], object]) -> Callable[[], Tensor]:
        def call() -> Tensor:
            result = totals.clone()
            add(result)
            return result

        return call

    # All are timed with the same copy, since they add in place.
    return Case(
        dtype,
        of(lambda total: sum_replicas.sum_replicas(total, parts, starts, order)),
        of(lambda total: sum_replicas.sum_replicas_reference(total, parts, starts, order)),
        of(lambda total: total.index_add_(0, where, parts.float())),
        EQUAL,
    )


def _expand(make: Maker, dtype: torch.dtype) -> Case:
    """Indices have one dtype; beside it what the host would do, with its copy to the device."""
    lengths = torch.diff(make.offsets().long().cpu(), prepend=torch.zeros(1, dtype=torch.int64)).repeat(8)
    starts = torch.arange(len(lengths)) * 1000
    first, ends, total = starts.to(make.device), lengths.cumsum(0).to(make.device), int(lengths.sum())
    return Case(
        torch.int64,
        lambda: expand_segments.expand_segments(first, ends, total),
        lambda: expand_segments.expand_segments_reference(first, ends, total),
        lambda: on_device(join_segments(starts.numpy(), lengths.numpy()), make.device),
        {torch.int64: 0.0},
    )


def _split(make: Maker, dtype: torch.dtype) -> Case:
    """Nodes of two ranks, and two holders of each expert on two nodes."""
    ranks, experts = make.sizes.ranks, 8 * make.sizes.owned
    counts = (make.numbers(ranks, experts, dtype=torch.float32).exp() * make.sizes.choices).long()
    total, expert = counts.sum(0), torch.arange(experts, device=make.device)
    wanted = torch.zeros(experts, ranks, dtype=torch.int64, device=make.device)
    wanted[expert, expert % ranks] = total // 2
    wanted[expert, (expert + 2) % ranks] += total - total // 2
    order = torch.arange(ranks, device=make.device)
    operands = counts, wanted, order, order // 2, ranks - 1
    return Case(
        torch.int64,
        lambda: split_rows.split_rows(*operands),
        lambda: split_rows.split_rows_reference(*operands),
        None,
        {torch.int64: 0.0},
    )


def _products(make: Maker, dtype: torch.dtype) -> Case:
    hidden, inner, offs = make.sizes.hidden, make.sizes.inner, make.offsets()
    x = make.numbers(make.rows, hidden, dtype=dtype)
    # As models keep them: the matrix is transposed when it is used.
    own, more = (
        make.numbers(count, 2 * inner, hidden, dtype=dtype).transpose(1, 2)
        for count in (make.sizes.owned, make.sizes.replicas)
    )
    native = dtype is torch.bfloat16 and make.device.type == "cuda"
    return Case(
        dtype,
        lambda: grouped_mm.grouped_mm(x, own, more, offs),
        lambda: grouped_mm.grouped_mm_reference(x, [own, more], offs),
        (lambda: torch._grouped_mm(x, torch.cat([own, more]), offs=offs)) if native else None,
        SUMS,
    )


def _weight_grads(make: Maker, dtype: torch.dtype) -> Case:
    hidden, inner, offs = make.sizes.hidden, make.sizes.inner, make.offsets()
    left = make.numbers(make.rows, 2 * inner, dtype=dtype)
    right = make.numbers(make.rows, hidden, dtype=dtype)
    outs = [
        torch.empty(count, 2 * inner, hidden, dtype=dtype, device=make.device)
        for count in (make.sizes.owned, make.sizes.replicas)
    ]
    native = dtype is torch.bfloat16 and make.device.type == "cuda"

    def by_kernel() -> list[Tensor]:
        weight_grads.weight_grads(left, right, offs, *outs)
        return outs

    def by_loop() -> list[Tensor]:
        found = [torch.empty_like(out) for out in outs]
        weight_grads.weight_grads_reference(left, right, offs, found)
        return found

    return Case(
        dtype,
        by_kernel,
        by_loop,
        (lambda: torch._grouped_mm(left.t(), right, offs=offs)) if native else None,
        SUMS,
    )


KERNELS: dict[str, tuple[Callable[[Maker, torch.dtype], Case], Sequence[torch.dtype]]] = {
    "gather_rows": (_gather, DTYPES),
    "scatter_rows": (_scatter, DTYPES),
    "combine_rows": (_combine, DTYPES),
    "pack_experts": (_pack, DTYPES),
    "unpack_experts": (_unpack, DTYPES),
    "sum_replicas": (_sum, DTYPES),
    "expand_segments": (_expand, (torch.int64,)),
    "split_rows": (_split, (torch.int64,)),
    "grouped_mm": (_products, DTYPES),
    "weight_grads": (_weight_grads, DTYPES),
}


def cases_of(name: str, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """One case after the other, made when it is its turn."""
    make, dtypes = KERNELS[name]
    for dtype in dtypes:
        yield make(Maker(sizes, device), dtype)


# --- parity and times ---


def difference(case: Case) -> float:
    """The largest difference between kernel and reference, relative to the largest value."""
    worst = 0.0
    for one, other in zip(_tensors(case.ours()), _tensors(case.reference()), strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return float("inf")
        if one.numel() == 0:
            continue
        wide = torch.promote_types(one.dtype, torch.float64)
        apart = (one.to(wide) - other.to(wide)).abs().max().item() / max(other.to(wide).abs().max().item(), 1e-30)
        # NaN compares as no larger than anything.
        worst = apart if not apart <= worst else worst
    return worst


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def times(candidates: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Milliseconds of a call of each candidate, one sample a round."""
    for call in candidates.values():
        for _ in range(WARM_UP):
            call()
    torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) / CALLS)
    return samples


def measure(case: Case) -> dict[str, Any]:
    """Parity and times of one case."""
    found: dict[str, Any] = {"dtype": str(case.dtype).removeprefix("torch.")}
    try:
        found["difference"], found["limit"] = difference(case), case.limits[case.dtype]
        found["equal"] = found["difference"] <= found["limit"]
        candidates = {"kernel": case.ours, "reference": case.reference}
        found["samples"] = times(candidates | ({"torch": case.torch} if case.torch is not None else {}))
    except Exception:
        found["error"] = traceback.format_exc()[-3000:]
    return found


def measure_kernel(name: str, to: Path | None = None) -> list[dict[str, Any]]:
    """All cases of one kernel on the GPU; ``to`` has what is measured already, should a later case never end."""
    found = []
    for case in cases_of(name, Sizes(), torch.device("cuda")):
        found.append({"kernel": name, **measure(case)})
        if to is not None:
            to.write_text(json.dumps(found))
    return found


# --- the report ---


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    return {
        "gpu": torch.cuda.get_device_name(0), "capability": list(torch.cuda.get_device_capability(0)),
        "torch": torch.__version__, "cuda": torch.version.cuda, "triton": launch.triton.__version__,
        "float32": grouped_mm.precision(),
    }  # fmt: skip


def table(found: Sequence[dict[str, Any]]) -> str:
    """One line for each case; times are medians in milliseconds with quartiles."""
    lines = [f"{'kernel':<16} {'dtype':<9} {'equal':<22} {'ms':<24} {'reference / kernel':<19} torch / kernel"]
    for one in found:
        if "samples" not in one:
            lines.append(
                f"{one['kernel']:<16} {one.get('dtype', ''):<9} FAILED {one['error'].strip().splitlines()[-1]}"
            )
            continue
        medians = {name: statistics.median(samples) for name, samples in one["samples"].items()}
        low, middle, high = statistics.quantiles(one["samples"]["kernel"], n=4)
        equal = f"{'yes' if one['equal'] else 'NO'} ({one['difference']:.1e} of {one['limit']:.0e})"
        ratios = [
            f"{medians[name] / medians['kernel']:.2f}" if name in medians else "" for name in ("reference", "torch")
        ]
        lines.append(
            f"{one['kernel']:<16} {one['dtype']:<9} {equal:<22} {f'{middle:.3f} ({low:.3f}..{high:.3f})':<24} "
            f"{ratios[0]:<19} {ratios[1]}".rstrip()
        )
    return "\n".join(lines)


def in_a_process(name: str, folder: Path) -> list[dict[str, Any]]:
    """:func:`measure_kernel`, which may end its process."""
    path = folder / f"gpu_check.{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--only", name, "--to", str(path)]
    try:
        # 1 says that something is not equal, which its results say too.
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        problem = "" if done.returncode in (0, 1) and path.exists() else done.stderr[-2000:] or str(done.returncode)
    except subprocess.TimeoutExpired:
        problem = f"no end after {TIMEOUT} s"
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    path.unlink(missing_ok=True)
    return [*found, {"kernel": name, "error": problem}] if problem else found


def run_tests() -> dict[str, Any]:
    """``pytest -m gpu``."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    return {"code": done.returncode, "output": done.stdout[-20_000:] + done.stderr[-5000:]}


def why_not() -> str | None:
    """Why nothing can be measured here, if so."""
    if not torch.cuda.is_available():
        return "NO GPU HERE: torch.cuda.is_available() is False. Nothing was run, and nothing was written."
    if not launch.runs_on(torch.device("cuda")):
        return "NO KERNELS HERE: Triton is missing, or HECATE_KERNELS=0. Nothing was run, and nothing was written."
    if launch.INTERPRETED:
        return "TRITON_INTERPRET is set: times would be those of the interpreter. Nothing was run."
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every kernel equals its reference and every test passes."""
    parser = argparse.ArgumentParser(description="Kernels on one GPU: parity, times, and the tests that need a GPU.")
    parser.add_argument("--only", choices=KERNELS, help="one kernel, in this process")
    parser.add_argument("--to", type=Path, help="with --only: where its results are written")
    parser.add_argument("--no-tests", action="store_true", help="leave out pytest -m gpu")
    given = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        print(reason)
        return 2
    if given.only:
        found = measure_kernel(given.only, given.to)
        print(table(found))
        return 0 if all(one.get("equal") and "error" not in one for one in found) else 1

    folder = results_folder()
    found = []
    for name in KERNELS:
        found += in_a_process(name, folder)
        print(f"{name} done", file=sys.stderr, flush=True)
    tests = None if given.no_tests else run_tests()
    report = {"machine": machine(), "environment": _environment(), "kernels": found, "tests": tests}
    (folder / "gpu_check.json").write_text(json.dumps(report, indent=1))
    text = "\n".join(f"{key}: {value}" for key, value in report["machine"].items()) + "\n\n" + table(found)
    if tests is not None:
        passed = "passed" if tests["code"] == 0 else f"FAILED with {tests['code']}"
        text += f"\n\npytest -m gpu: {passed}\n{tests['output'].strip().splitlines()[-1] if tests['output'] else ''}"
    (folder / "gpu_check.txt").write_text(text + "\n")
    print(text)
    right = all(one.get("equal") and "error" not in one for one in found)
    return 0 if right and (tests is None or tests["code"] == 0) else 1


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("HECATE_", "TRITON_", "CUDA_"))}


if __name__ == "__main__":
    sys.exit(main())
