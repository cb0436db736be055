"""Kernels that move experts and add up their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu_check.case import EQUAL, Case, Maker, bytes_of
from hecate.runtime.kernels import pack_experts, sum_replicas


def pack(make: Maker, dtype: torch.dtype) -> Case:
    tensors, behind = _experts(make, make.sizes.owned, dtype), _experts(make, make.sizes.replicas, dtype)
    index = make.order(make.sizes.owned + make.sizes.replicas)
    return Case(
        dtype,
        lambda: pack_experts.pack_experts(tensors, index, behind=behind, in_first=make.sizes.owned),
        lambda: pack_experts.pack_experts_reference(tensors, index, behind, dtype, make.sizes.owned),
        None,
        EQUAL,
        bytes=2 * bytes_of(*tensors, *behind),
    )


def unpack(make: Maker, dtype: torch.dtype) -> Case:
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


def sum_gradients(make: Maker, dtype: torch.dtype) -> Case:
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


def _experts(make: Maker, count: int, dtype: torch.dtype) -> list[Tensor]:
    hidden, inner = make.sizes.hidden, make.sizes.inner
    return [make.numbers(count, 2 * inner, hidden, dtype=dtype), make.numbers(count, hidden, inner, dtype=dtype)]
