"""Parity and times of kernels."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.case import Case
from benchmarks.gpu_check.cases import cases_of
from benchmarks.gpu_check.place import SPOILED, Place
from benchmarks.gpu_check.results import NO_TIME, Results

WARM_UP, ROUNDS, CALLS = 5, 30, 5

# Numbers that are compared in float64 at once.
_PIECE = 2**25


def measure_kernels(
    names: Sequence[str],
    results: Results,
    until: float,
    place: Place,
    *,
    timed: bool = True,
    limited: Callable[[float], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """All cases of these kernels, one after the other, as long as there is time and none spoils the process.

    Args:
        until: when no other begins, of ``time.monotonic()``.
        timed: whether it is also said how long they take.
        limited: what ends one that takes longer than so many seconds.
    """
    for name in names:
        if (left := until - time.monotonic()) <= 0:
            results.add({"kernel": name, "error": NO_TIME})
            continue
        results.begin(running := {"kernel": name})
        with limited(left if name == names[-1] else left / 2):
            _measure_kernel(name, results, place, timed=timed)
        results.drop(running)
        if place.is_spoiled():
            sys.exit(SPOILED)


def _measure_kernel(name: str, results: Results, place: Place, *, timed: bool) -> None:
    try:
        for case in cases_of(name, place.sizes, place.device):
            found = measure(case, place, timed=timed)
            results.add({"kernel": name, **found})
            if "error" in found and place.is_spoiled():
                return
    except Exception:
        # Operands could not be made, so there are no more cases.
        results.add({"kernel": name, "error": traceback.format_exc()[-3000:]})


def measure(case: Case, place: Place, *, timed: bool) -> dict[str, Any]:
    """Parity and times of one case."""
    found: dict[str, Any] = {
        "dtype": str(case.dtype).removeprefix("torch."),
        "note": case.note,
        "bytes": case.bytes,
        "flops": case.flops,
        "most_ms": case.most_ms,
        "limit": case.limits[case.dtype],
    }
    try:
        compare(case, found)
        if timed:
            kernel, reference = case.timed or (case.ours, case.reference)
            candidates = {
                "kernel": kernel,
                "reference": reference,
                "bound": _bound_of(case, place.device),
                "torch": case.torch,
            }
            found["samples"] = times({name: call for name, call in candidates.items() if call is not None}, place)
    except Exception:
        found["error"] = traceback.format_exc()[-3000:]
    return found


def compare(case: Case, found: dict[str, Any]) -> None:
    """Kernel, and torch's own way where it computes the same, with the reference."""
    ours, expected = _tensors(case.ours()), _tensors(case.reference())
    found["difference"] = difference(ours, expected)
    differences = [found["difference"]]
    if case.torch is not None and case.same:
        found["torch difference"] = difference(_tensors(case.torch()), expected)
        differences.append(found["torch difference"])
    found["equal"] = all(one <= found["limit"] for one in differences)


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest value that is expected."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
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


def times(candidates: dict[str, Callable[[], Any]], place: Place, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Milliseconds of a call of each candidate, one sample a round."""
    for call in candidates.values():
        for _ in range(WARM_UP):
            call()
    place.wait()
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            samples[name].append(place.milliseconds(lambda call=call: [call() for _ in range(CALLS)]) / CALLS)
    return samples


def _bound_of(case: Case, device: torch.device) -> Callable[[], Any] | None:
    """What the GPU can do at best in the same time, if that is known."""
    if case.bound is not None or not case.bytes:
        return case.bound
    source, target = (torch.empty(case.bytes // 2, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)
