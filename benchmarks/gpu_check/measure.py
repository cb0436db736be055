"""Parity and times of one kernel."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.case import Case, Sizes
from benchmarks.gpu_check.cases import cases_of
from benchmarks.gpu_check.report import write

WARM_UP, ROUNDS, CALLS = 5, 30, 5

# Numbers that are compared in float64 at once.
_PIECE = 2**25


def measure_kernel(name: str, to: Path | None = None) -> list[dict[str, Any]]:
    """All cases of one kernel on the GPU; ``to`` has what is measured already, should a later case never end."""
    found: list[dict[str, Any]] = []

    def add(one: dict[str, Any]) -> None:
        found.append({"kernel": name, **one})
        if to is not None:
            write(to, json.dumps(found))

    try:
        for case in cases_of(name, Sizes(), torch.device("cuda")):
            add(measure(case))
    except Exception:
        # Operands could not be made, so there are no more cases.
        add({"error": traceback.format_exc()[-3000:]})
    return found


def measure(case: Case) -> dict[str, Any]:
    """Parity and times of one case."""
    found: dict[str, Any] = {
        "dtype": str(case.dtype).removeprefix("torch."), "note": case.note, "bytes": case.bytes, "flops": case.flops,
        "most_ms": case.most_ms,
    }  # fmt: skip
    try:
        found["difference"], found["limit"] = difference(case), case.limits[case.dtype]
        found["equal"] = found["difference"] <= found["limit"]
        kernel, reference = case.timed or (case.ours, case.reference)
        candidates = {
            "kernel": kernel, "reference": reference, "bound": _bound_of(case, torch.device("cuda")),
            "torch": case.torch,
        }  # fmt: skip
        found["samples"] = times({name: call for name, call in candidates.items() if call is not None})
    except Exception:
        found["error"] = traceback.format_exc()[-3000:]
    return found


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


def _bound_of(case: Case, device: torch.device) -> Callable[[], Any] | None:
    """What the GPU can do at best in the same time, if that is known."""
    if case.bound is not None or not case.bytes:
        return case.bound
    source, target = (torch.empty(case.bytes // 2, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)
