"""All that a GPU must show about the kernels, in one command on one GPU.

    PYTHONPATH=typings:. python -m benchmarks.gpu_check

In a checkout nothing need be installed: ``typings/hecate`` is a link to the package. ``--no-tests`` measures only,
``--only grouped_mm`` is one kernel in this process, and ``--budget 300`` ends in so many seconds.

First the tests that need a GPU, then for each kernel in bfloat16, float32 and float16: does it equal its reference,
and how long do it, the reference and what torch itself has for this take. What decides most comes first. Each kernel
has a process of its own, so one that reads where it must not does not spoil the others.

Candidates alternate; a sample is the mean of a few calls between two CUDA events. A ratio is that of medians, and
quartiles are those of samples. Reading offsets on the host is part of what a reference takes. Beside them runs what
the GPU itself can do: ``copy_`` of as many bytes as a kernel has to read and write, or one dense product, or torch's
own attention; ``of copy`` and ``of mm`` say which part of that rate a kernel reaches.

Results are written to ``gpu_check.json`` and ``gpu_check.txt`` in build/benchmarks (or where ``HECATE_RESULTS``
says), anew after each kernel; those of a running kernel are in ``gpu_check.NAME.json``, anew after each case.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.results_folder import results_folder
from hecate.runtime.attention.pattern import Pattern
from hecate.runtime.comm.collectives import on_device
from hecate.runtime.kernels import (
    clear_rows,
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
from hecate.runtime.ops import s2_attention, s2_blocks
from hecate.runtime.ops.ticket import join_segments

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
WARM_UP, ROUNDS, CALLS = 5, 30, 5
# What a kernel and its reference may differ by, relative to the largest value. Rows that only move must be equal.
EQUAL: dict[torch.dtype, float] = dict.fromkeys(DTYPES, 0.0)
SUMS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Seconds: a command may take ten minutes on some machines, and of these the tests and one kernel at most so many.
BUDGET, FOR_TESTS, FOR_A_KERNEL = 540.0, 200.0, 150.0
TESTS = ("tests/runtime/kernels", "tests/hecate_compile/test_parity.py", "tests/hecate_compile/test_one_gpu.py")
ROOT = Path(__file__).parents[1]


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
    heads: int = 32
    head_width: int = 128
    context: int = 4096
    block: int = 64


SMALL = Sizes(
    tokens=24, choices=3, hidden=40, inner=24, owned=3, replicas=2, ranks=6, heads=4, head_width=16, context=50,
    block=8,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One kernel on one dtype.

    Attributes:
        ours, reference: each computes the result anew.
        torch: what torch itself has for it, if that is something else.
        limits: see :data:`SUMS`.
        note: which case of this dtype it is, if there are several.
        timed: what is timed of kernel and reference, if that is less than computing the result anew.
        bytes: what any such kernel must read and write.
        flops: two for each multiply-add.
        bound: what the GPU can do at best in the same time, if not a copy of so many bytes.
    """

    dtype: torch.dtype
    ours: Callable[[], Any]
    reference: Callable[[], Any]
    torch: Callable[[], Any] | None
    limits: dict[torch.dtype, float]
    note: str = ""
    timed: tuple[Callable[[], Any], Callable[[], Any]] | None = None
    bytes: int = 0
    flops: int = 0
    bound: Callable[[], Any] | None = None


# --- the cases ---


class Maker:
    """Makes operands on a device, the same in every run."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self._generator = torch.Generator(device).manual_seed(0)

    @property
    def rows(self) -> int:
        return self.sizes.tokens * self.sizes.choices

    def numbers(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device).to(dtype)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self.device)

    def offsets(self) -> Tensor:
        """Ends of slots: some have many rows, one has none, and a few rows are behind the last."""
        slots = self.sizes.owned + self.sizes.replicas
        shares = torch.rand(slots, generator=self._generator, device=self.device) ** 2
        shares[1] = 0
        sizes = (shares / shares.sum() * (self.rows - self.sizes.choices)).to(torch.int64)
        return sizes.cumsum(0).to(torch.int32)


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _gather(make: Maker, dtype: torch.dtype) -> Case:
    rows, index = make.numbers(make.rows, make.sizes.hidden, dtype=dtype), make.order(make.rows)
    wire = torch.bfloat16 if dtype is torch.float32 else dtype
    return Case(
        dtype,
        lambda: gather_rows.gather_rows(rows, index, wire),
        lambda: gather_rows.gather_rows_reference(rows, index, wire),
        None,
        EQUAL,
        bytes=bytes_of(rows, index) + rows.numel() * wire.itemsize,
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
        bytes=bytes_of(rows, index) + count * make.sizes.hidden * dtype.itemsize,
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
        bytes=bytes_of(rows, positions, weights) + tokens * make.sizes.hidden * dtype.itemsize,
    )


def _experts(make: Maker, count: int, dtype: torch.dtype) -> list[Tensor]:
    hidden, inner = make.sizes.hidden, make.sizes.inner
    return [make.numbers(count, 2 * inner, hidden, dtype=dtype), make.numbers(count, hidden, inner, dtype=dtype)]


def _clear(make: Maker, dtype: torch.dtype) -> Iterator[Case]:
    """What follows a product of torch, where there are few rows behind the last slot, and one slot without any."""
    offs, inner = make.offsets(), make.sizes.inner
    rows = make.numbers(make.rows, inner, dtype=dtype)
    matrices = make.numbers(len(offs), inner, make.sizes.hidden, dtype=dtype)
    behind = torch.arange(make.rows, device=make.device) >= offs[-1]
    empty = torch.diff(offs, prepend=offs.new_zeros(1)) == 0
    for note, given, clear, mask in (
        ("rows", rows, clear_rows.clear_rows_behind, behind[:, None]),
        ("slots", matrices, clear_rows.clear_empty_slots, empty[:, None, None]),
    ):
        timed = given.clone()

        def call(to: Tensor, clear: Callable[[Tensor, Tensor], None] = clear) -> Tensor:
            clear(to, offs)
            return to

        yield Case(
            dtype,
            lambda given=given, call=call: call(given.clone()),  # type: ignore[misc]
            lambda given=given, mask=mask: given.masked_fill(mask, 0),  # type: ignore[misc]
            None,
            EQUAL,
            note=note,
            timed=(
                lambda timed=timed, call=call: call(timed),  # type: ignore[misc]
                lambda timed=timed, mask=mask: timed.masked_fill_(mask, 0),  # type: ignore[misc]
            ),
            bytes=2 * int(mask.sum()) * given[0].numel() * dtype.itemsize,
        )


def _pack(make: Maker, dtype: torch.dtype) -> Case:
    tensors, behind = _experts(make, make.sizes.owned, dtype), _experts(make, make.sizes.replicas, dtype)
    index = make.order(make.sizes.owned + make.sizes.replicas)
    return Case(
        dtype,
        lambda: pack_experts.pack_experts(tensors, index, behind=behind),
        lambda: pack_experts.pack_experts_reference(tensors, index, behind, dtype),
        None,
        EQUAL,
        bytes=2 * bytes_of(*tensors, *behind),
    )


def _unpack(make: Maker, dtype: torch.dtype) -> Case:
    tensors = _experts(make, make.sizes.replicas, dtype)
    index = make.order(make.sizes.replicas)
    packed = make.numbers(len(index), sum(pack_experts.widths_of(tensors)), dtype=dtype)

    unpacks = (pack_experts.unpack_experts, pack_experts.unpack_experts_reference)

    def into(unpack: Callable[..., None]) -> Callable[[], list[Tensor]]:
        return lambda: (unpack(packed, tensors, index), [tensor.clone() for tensor in tensors])[1]

    def in_place(unpack: Callable[..., None]) -> Callable[[], None]:
        return lambda: unpack(packed, tensors, index)

    ours, reference = (into(unpack) for unpack in unpacks)
    timed = in_place(unpacks[0]), in_place(unpacks[1])
    return Case(dtype, ours, reference, None, EQUAL, timed=timed, bytes=2 * bytes_of(packed))


def _sum(make: Maker, dtype: torch.dtype) -> Case:
    slots, width = make.sizes.owned, make.sizes.hidden * make.sizes.inner
    parts = make.numbers(2 * slots, width, dtype=dtype)
    # Slot s has parts s, s + slots.
    order = torch.arange(2 * slots, device=make.device).view(2, slots).t().reshape(-1)
    starts = torch.arange(0, 2 * slots + 1, 2, device=make.device)
    where = torch.arange(slots, device=make.device).repeat(2)
    totals = make.numbers(slots, width, dtype=torch.float32)
    running, rounds = totals.clone(), (slots, slots)

    def ours(total: Tensor) -> Tensor:
        sum_replicas.sum_replicas(total, parts, starts, order, rounds)
        return total

    def reference(total: Tensor) -> Tensor:
        sum_replicas.sum_replicas_reference(total, parts, starts, order, rounds)
        return total

    return Case(
        dtype,
        lambda: ours(totals.clone()),
        lambda: reference(totals.clone()),
        lambda: running.index_add_(0, where, parts.float()),
        EQUAL,
        timed=(lambda: ours(running), lambda: reference(running)),
        bytes=2 * bytes_of(totals) + bytes_of(parts),
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
        bytes=8 * total,
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
        bytes=2 * bytes_of(counts, wanted),
    )


def _products(make: Maker, dtype: torch.dtype) -> Iterator[Case]:
    hidden, inner, offs = make.sizes.hidden, make.sizes.inner, make.offsets()
    x, used = make.numbers(make.rows, hidden, dtype=dtype), int(offs[-1])
    # As models keep them: the matrix is transposed when it is used.
    own, more = (
        make.numbers(count, 2 * inner, hidden, dtype=dtype).transpose(1, 2)
        for count in (make.sizes.owned, make.sizes.replicas)
    )
    # Joined here, since only one who has two operands must join them.
    joined = torch.cat([own.transpose(1, 2), more.transpose(1, 2)]).transpose(1, 2)
    native = dtype is torch.bfloat16 and make.device.type == "cuda"
    for note, first, second in (("own, replicas", own, more), ("one operand", joined, joined[:0])):
        yield Case(
            dtype,
            lambda first=first, second=second: grouped_mm.grouped_mm(x, first, second, offs),  # type: ignore[misc]
            lambda: grouped_mm.grouped_mm_reference(x, [joined], offs),
            (lambda: torch._grouped_mm(x, joined, offs=offs)) if native else None,
            SUMS,
            note=note,
            flops=2 * used * hidden * 2 * inner,
            bound=lambda: x[:used] @ joined[0],
        )


def _weight_grads(make: Maker, dtype: torch.dtype) -> Case:
    hidden, inner, offs = make.sizes.hidden, make.sizes.inner, make.offsets()
    left = make.numbers(make.rows, 2 * inner, dtype=dtype)
    right, used = make.numbers(make.rows, hidden, dtype=dtype), int(offs[-1])
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
        flops=2 * used * hidden * 2 * inner,
        # As many multiply-adds as the rows of all slots take.
        bound=lambda: left[:used].t() @ right[:used],
    )


@dataclass(frozen=True)
class _Attention:
    """Operands of S2-Attention, and what computes it on their device."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    pattern: Pattern
    scale: float

    @classmethod
    def of(cls, make: Maker, dtype: torch.dtype) -> _Attention:
        sizes = make.sizes
        q, grad = (make.numbers(1, sizes.heads, sizes.context, sizes.head_width, dtype=dtype) for _ in range(2))
        k, v = (make.numbers(1, sizes.heads // 2, sizes.context, sizes.head_width, dtype=dtype) for _ in range(2))
        pattern = Pattern(block=sizes.block, local=4, stride=4, offset=0, patterns=2)
        return cls(q, k, v, grad, pattern, sizes.head_width**-0.5)

    def forward(self) -> tuple[Tensor, Tensor]:
        if self.q.is_cuda:
            from hecate.runtime.kernels.s2_forward import forward

            return forward(self.q, self.k, self.v, self.pattern, self.scale)
        return s2_blocks.forward(self.q, self.k, self.v, self.pattern, self.scale)

    def backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = (self.grad, self.q, self.k, self.v, out, lse, self.pattern, self.scale)
        if self.q.is_cuda:
            from hecate.runtime.kernels.s2_backward import backward

            return backward(*given)
        return s2_blocks.backward(*given)

    def whole(self) -> Tensor:
        """Causal attention of all tokens by torch."""
        found: Tensor = F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True, enable_gqa=True)
        return found


def _s2_forward(make: Maker, dtype: torch.dtype) -> Case:
    given = _Attention.of(make, dtype)
    return Case(
        dtype,
        lambda: given.forward()[0],
        lambda: s2_attention._dense(given.q, given.k, given.v, given.pattern, given.scale)[0].to(dtype),
        given.whole,
        SUMS,
        flops=s2_attention._flops(given.q.shape, given.k.shape, given.v.shape, None, given.pattern.numbers),
        bound=given.whole,
    )


def _s2_backward(make: Maker, dtype: torch.dtype) -> Case:
    given = _Attention.of(make, dtype)
    out, lse = given.forward()
    wide = [x.detach().requires_grad_() for x in (given.q, given.k, given.v)]
    with torch.enable_grad():
        whole = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)

    def by_torch() -> Sequence[Tensor]:
        return torch.autograd.grad(whole, wide, given.grad, retain_graph=True)

    return Case(
        dtype,
        lambda: given.backward(out, lse),
        lambda: s2_attention._dense_backward(
            given.grad, given.q, given.k, given.v, out, lse, given.pattern, given.scale
        ),
        by_torch,
        SUMS,
        flops=s2_attention._backward_flops(
            given.grad.shape, given.q.shape, given.k.shape, given.v.shape, None, None, given.pattern.numbers
        ),
        bound=by_torch,
    )


# What decides most comes first.
KERNELS: dict[str, tuple[Callable[[Maker, torch.dtype], Case | Iterator[Case]], Sequence[torch.dtype]]] = {
    "grouped_mm": (_products, DTYPES),
    "weight_grads": (_weight_grads, DTYPES),
    "gather_rows": (_gather, DTYPES),
    "scatter_rows": (_scatter, DTYPES),
    "sum_replicas": (_sum, DTYPES),
    "combine_rows": (_combine, DTYPES),
    "clear_rows": (_clear, DTYPES[:1]),
    "pack_experts": (_pack, DTYPES),
    "unpack_experts": (_unpack, DTYPES),
    # float32 has smaller blocks.
    "s2_forward": (_s2_forward, (torch.bfloat16, torch.float16)),
    "s2_backward": (_s2_backward, (torch.bfloat16, torch.float16)),
    "expand_segments": (_expand, (torch.int64,)),
    "split_rows": (_split, (torch.int64,)),
}


def cases_of(name: str, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """One case after the other, made when it is its turn."""
    make, dtypes = KERNELS[name]
    for dtype in dtypes:
        made = make(Maker(sizes, device), dtype)
        yield from [made] if isinstance(made, Case) else made


# --- parity and times ---


# Numbers that are compared in float64 at once.
_PIECE = 2**25


def difference(case: Case) -> float:
    """The largest difference between kernel and reference, relative to the largest value."""
    worst = 0.0
    for one, other in zip(_tensors(case.ours()), _tensors(case.reference()), strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return float("inf")
        if one.numel() == 0:
            continue
        largest = max(_largest(other), 1e-30)
        for a, b in zip(one.reshape(-1).split(_PIECE), other.reshape(-1).split(_PIECE), strict=True):
            apart = _largest(a.double() - b.double()) / largest
            # NaN compares as no larger than anything.
            worst = apart if not apart <= worst else worst
    return worst


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


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


def _bound_of(case: Case, device: torch.device) -> Callable[[], Any]:
    """What the GPU can do at best in the same time."""
    if case.bound is not None:
        return case.bound
    source, target = (torch.empty(case.bytes // 2, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def measure(case: Case) -> dict[str, Any]:
    """Parity and times of one case."""
    found: dict[str, Any] = {
        "dtype": str(case.dtype).removeprefix("torch."), "note": case.note, "bytes": case.bytes, "flops": case.flops,
    }  # fmt: skip
    try:
        found["difference"], found["limit"] = difference(case), case.limits[case.dtype]
        found["equal"] = found["difference"] <= found["limit"]
        kernel, reference = case.timed or (case.ours, case.reference)
        candidates = {"kernel": kernel, "reference": reference, "bound": _bound_of(case, torch.device("cuda"))}
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
            _write(to, json.dumps(found))
    return found


def _write(path: Path, text: str) -> None:
    """In one piece: whoever is ended meanwhile leaves what was there."""
    beside = path.with_suffix(path.suffix + ".new")
    beside.write_text(text)
    beside.replace(path)


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
    lines = [
        f"{'kernel':<16} {'dtype':<9} {'case':<14} {'equal':<22} {'ms':<24} {'rate':<14} {'of the GPU':<12} "
        f"{'reference / kernel':<19} torch / kernel"
    ]
    for one in found:
        start = f"{one['kernel']:<16} {one.get('dtype', ''):<9} {one.get('note', ''):<14}"
        if "samples" not in one:
            lines.append(f"{start} FAILED {one['error'].strip().splitlines()[-1]}")
            continue
        medians = {name: statistics.median(samples) for name, samples in one["samples"].items()}
        low, middle, high = statistics.quantiles(one["samples"]["kernel"], n=4)
        equal = f"{'yes' if one['equal'] else 'NO'} ({one['difference']:.1e} of {one['limit']:.0e})"
        ratios = {name: f"{median / medians['kernel']:.2f}" for name, median in medians.items()}
        lines.append(
            f"{start} {equal:<22} {f'{middle:.3f} ({low:.3f}..{high:.3f})':<24} {_rate(one, middle):<14} "
            f"{_share(one, medians):<12} {ratios['reference']:<19} {ratios.get('torch', '')}".rstrip()
        )
    return "\n".join(lines)


def _rate(one: dict[str, Any], milliseconds: float) -> str:
    if one.get("flops"):
        return f"{one['flops'] / milliseconds / 1e9:.1f} TFLOP/s"
    return f"{one['bytes'] / milliseconds / 1e6:.0f} GB/s" if one.get("bytes") else ""


def _share(one: dict[str, Any], medians: dict[str, float]) -> str:
    """Of attention torch's computes another number of scores, so there is no part of its rate to tell."""
    if "bound" not in medians or one["kernel"].startswith("s2_"):
        return ""
    return f"{medians['bound'] / medians['kernel']:.0%} of {'mm' if one.get('flops') else 'copy'}"


def run(command: Sequence[str], seconds: float, environment: dict[str, str] | None = None) -> tuple[int | None, str]:
    """The exit code of a command, None after so many seconds, and what it printed."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True,
        env=os.environ | (environment or {}),
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        # Tests end the processes that they started, if they are asked to.
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def in_a_process(name: str, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """:func:`measure_kernel`, which may end its process."""
    path = folder / f"gpu_check.{name}.json"
    path.unlink(missing_ok=True)
    code, output = run([sys.executable, "-m", "benchmarks.gpu_check", "--only", name, "--to", str(path)], seconds)
    # 1 says that something is not equal, which its results say too.
    problem = "" if code in (0, 1) and path.exists() else output[-2000:] or str(code)
    if code is None:
        problem = f"no end after {seconds:.0f} s"
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    path.unlink(missing_ok=True)
    return [*found, {"kernel": name, "error": problem}] if problem else found


def run_tests(seconds: float) -> dict[str, Any]:
    """``pytest -m gpu`` of the files that have such tests: others may need what is not installed there."""
    options = ["-m", "gpu", "-q", "--continue-on-collection-errors"]
    # Cases have many widths, and each would be tuned for. What is tuned is compared with its reference below.
    code, output = run([sys.executable, "-m", "pytest", *options, *TESTS], seconds, {"HECATE_AUTOTUNE": "0"})
    return {"code": code, "output": output[-20_000:]}


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
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds after which nothing more begins")
    given = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        print(reason)
        return 2
    if given.only:
        found = measure_kernel(given.only, given.to)
        print(table(found))
        return 0 if all(one.get("equal") and "error" not in one for one in found) else 1
    return check_all(given.budget, tests=not given.no_tests)


def check_all(budget: float, *, tests: bool) -> int:
    """The tests and all kernels, each in a process of its own, as long as there is time."""
    folder, end = results_folder(), time.monotonic() + budget
    report: dict[str, Any] = {"machine": machine(), "environment": _environment(), "tests": None, "kernels": []}

    def save() -> str:
        text = text_of(report)
        _write(folder / "gpu_check.json", json.dumps(report, indent=1))
        _write(folder / "gpu_check.txt", text + "\n")
        return text

    if tests:
        report["tests"] = run_tests(min(FOR_TESTS, budget))
        save()
    for name in KERNELS:
        left = end - time.monotonic()
        report["kernels"] += (
            in_a_process(name, folder, min(FOR_A_KERNEL, left)) if left > 0
            else [{"kernel": name, "error": "not begun: no time was left"}]
        )  # fmt: skip
        save()
        print(f"{name} done", file=sys.stderr, flush=True)
    print(save())
    right = all(one.get("equal") and "error" not in one for one in report["kernels"])
    return 0 if right and (report["tests"] is None or report["tests"]["code"] == 0) else 1


def text_of(report: dict[str, Any]) -> str:
    """The report as it is printed."""
    text = (
        "\n".join(f"{key}: {value}" for key, value in report["machine"].items()) + "\n\n" + table(report["kernels"])
    )
    if (tests := report["tests"]) is not None:
        ended = {0: "passed", None: "NO END in time"}.get(tests["code"], f"FAILED with {tests['code']}")
        text += f"\n\npytest -m gpu: {ended}\n{tests['output'].strip().splitlines()[-1] if tests['output'] else ''}"
    return text


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("HECATE_", "TRITON_", "CUDA_"))}


if __name__ == "__main__":
    sys.exit(main())
