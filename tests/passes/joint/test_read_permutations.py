"""Gradients that are added by a permutation: read by its inverse, and what is none is left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from hecate.passes import PassContext
from hecate.passes.joint.read_permutations import read_permutations

T, K, H = 6, 2, 5
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def rewritten(function: Function, *, dynamic: bool = False, dtype: torch.dtype = torch.float64) -> int:
    """How many additions of ``function(tokens [T, H], weights [T, K], experts [T, K])`` and of its backward are read.

    Its results and gradients must be the same with them and without.
    """
    torch.manual_seed(0)
    tokens, weights = torch.randn(T, H, dtype=dtype), torch.randn(T, K, dtype=dtype)
    experts, found = torch.randint(0, 4, (T, K)), []

    def partition(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
        found.append(read_permutations(joint, PassContext(world_size=1)).rewritten)
        joint.graph.lint()
        joint.recompile()
        return min_cut_rematerialization_partition(joint, inputs, **options)

    backend = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition)
    results = []
    for run in (function, torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)):
        given = [tokens.clone().requires_grad_(), weights.clone().requires_grad_()]
        out = run(*given, experts)
        results.append([out, *torch.autograd.grad((out * out).sum(), given, materialize_grads=True)])
    torch.testing.assert_close(results[1], results[0])
    return sum(found)


def as_transformers(tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    order = torch.sort(experts.reshape(-1))[1]
    rows = tokens[order // K] * weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0))
    return rows[inverse].view(-1, K, H).sum(1)


def inverse_in_zeros(tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """The inverse is written over zeros, and not added to them: it stays what it is."""
    order = experts.flatten().argsort()
    inverse = torch.zeros_like(order)
    inverse[order] = torch.arange(order.size(0))
    return tokens.repeat_interleave(K, 0)[inverse] * weights.flatten()[order][inverse].unsqueeze(-1)


def with_argsort(tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    order = experts.flatten().argsort(stable=True)
    rows = tokens.repeat_interleave(K, 0)[order] * weights.flatten()[order].unsqueeze(-1)
    return rows[order.argsort()].view(-1, K, H).sum(1)


def added_up(tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    order = experts.flatten().argsort()
    rows = tokens.repeat_interleave(K, 0) * weights.flatten().unsqueeze(-1)
    return torch.zeros_like(rows).index_add(0, order, rows)


def descending(tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Orders, and what looks like their inverses."""
    order = experts.flatten().argsort(descending=True)
    rows = tokens.repeat_interleave(K, 0)[order] * weights.flatten()[order].unsqueeze(-1)
    return rows[order.argsort(descending=True)]


def inverted_late(tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """An inverse that is there when the sum is over."""
    order = experts.flatten().argsort()
    rows = tokens.repeat_interleave(K, 0)
    return torch.zeros_like(rows).index_add(0, order, rows) * order.argsort().unsqueeze(-1)


def chained(tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """An addition of what another one has added."""
    order = experts.flatten().argsort()
    return tokens.repeat_interleave(K, 0).sin()[order][order.argsort()][weights.flatten().argsort()]


def ranked(tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """An inverse in numbers that are no index."""
    order = experts.flatten().argsort()
    place = torch.empty(T * K, dtype=tokens.dtype)
    place[order] = torch.arange(T * K, dtype=tokens.dtype)
    rows = tokens.repeat_interleave(K, 0)
    return rows[order] * place.unsqueeze(-1) + rows[place.argsort()]


def as_bytes(tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """An inverse in numbers that would be a mask."""
    order = experts.flatten().argsort()
    place = torch.empty(T * K, dtype=torch.uint8)
    place[order] = torch.arange(T * K, dtype=torch.uint8)
    return tokens.repeat_interleave(K, 0).sin()[order].cos() * (place.unsqueeze(-1) + 1)


@pytest.mark.parametrize(
    ("function", "count"),
    # Of as_transformers the weights and the results; an index_add's backward reads anyway.
    [
        (as_transformers, 2),
        (inverse_in_zeros, 3),
        (with_argsort, 3),
        (added_up, 1),
        (descending, 3),
        (inverted_late, 1),
        (chained, 3),
        (ranked, 2),
        (as_bytes, 1),
    ],
)
def test_additions_by_a_permutation_are_read(function: Function, count: int) -> None:
    assert rewritten(function) == count


def test_sizes_may_change_and_numbers_be_short() -> None:
    assert rewritten(as_transformers, dynamic=True) == 2
    assert rewritten(as_transformers, dtype=torch.bfloat16) == 2


def of_numbers(tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Numbers that may come twice."""
    return tokens[experts.flatten()] + tokens[experts.flatten().argsort() // K]


def of_a_part(tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """An order of fewer rows than there are."""
    return tokens[experts.flatten()[: T - 1].argsort()]


def counted_down(tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """What looks like an inverse, and counts from the end."""
    order = torch.sort(experts.reshape(-1))[1]
    place = torch.empty_like(order)
    place[order] = torch.arange(order.size(0) - 1, -1, -1)
    return weights.flatten()[place]


def onto_ones(tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    order = experts.flatten().argsort()
    with torch.no_grad():
        more = torch.ones(T * K, H, dtype=tokens.dtype).index_add(0, order, tokens.repeat_interleave(K, 0))
    return tokens.repeat_interleave(K, 0) * more


def into_columns(tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    return (tokens @ tokens.T)[:, experts.flatten()[:T].argsort()]


@pytest.mark.parametrize("function", [of_numbers, of_a_part, counted_down, onto_ones, into_columns])
def test_what_may_be_no_permutation_is_left_alone(function: Function) -> None:
    assert rewritten(function) == 0
