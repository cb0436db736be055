"""What accelerators would add with atomics: summed in order, or written; and what cannot be is left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from hecate.passes import PassContext
from hecate.passes.base import Pass
from hecate.passes.joint import read_permutations as reading
from hecate.passes.joint import sum_slots as summing
from hecate.passes.joint import write_choices as writing
from hecate.passes.joint.read_permutations import read_permutations
from hecate.passes.joint.sum_slots import sum_slots
from hecate.passes.joint.write_choices import write_choices

T, K, E, H = 6, 2, 4, 5


@pytest.fixture(autouse=True)
def _as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reading, summing, writing):
        monkeypatch.setattr(module, "adds_in_any_order", lambda value: True)


def gradients(function: Callable[..., Tensor], count: int) -> Callable[..., list[Tensor]]:
    """Of the first ``count`` arguments, as autograd writes them."""

    def joint(*given: Tensor) -> list[Tensor]:
        wanted = [tensor.detach().requires_grad_() for tensor in given[:count]]
        out = function(*wanted, *given[count:])
        return list(torch.autograd.grad((out * out).sum(), wanted))

    return joint


def rewritten(by: Pass, function: Callable[..., list[Tensor]], inputs: Sequence[Tensor], **tolerance: float) -> int:
    """How much of a graph is rewritten; its results stay what they are."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    expected = gm(*inputs)
    found = by(gm, PassContext(world_size=1)).rewritten
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*inputs), expected, **tolerance)
    assert (found > 0) == (not _adds(gm)), "what is rewritten adds nothing any more"
    return found


def _adds(gm: GraphModule) -> bool:
    names = ("index_put", "index_add", "scatter_add")
    return any(
        name in str(node.target) and (name != "index_put" or node.args[3:] == (True,))
        for node in gm.graph.nodes
        for name in names
    )


def tokens_and_order() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(T, H, dtype=torch.float64), torch.randint(0, E, (T * K,))]


@pytest.mark.parametrize("rounding", ["//", "floor", "trunc"])
def test_rows_of_a_token_are_summed(rounding: str) -> None:
    def rows(tokens: Tensor, experts: Tensor) -> Tensor:
        order = experts.argsort()
        index = order // K if rounding == "//" else torch.div(order, K, rounding_mode=rounding)
        return tokens[index].sin()

    assert rewritten(read_permutations, gradients(rows, 1), tokens_and_order()) == 1


def test_results_of_a_token_are_summed() -> None:
    def combine(tokens: Tensor, experts: Tensor) -> list[Tensor]:
        rows = tokens.repeat_interleave(K, 0).sin()
        return [torch.zeros_like(tokens).index_add(0, experts.argsort() // K, rows)]

    assert rewritten(read_permutations, combine, tokens_and_order()) == 1


def test_sums_of_bfloat16_are_rounded_once() -> None:
    """1 + 4 * 2**-8 in bfloat16 is 1 as long as one after the other is added."""

    def combine(rows: Tensor, experts: Tensor) -> list[Tensor]:
        return [torch.zeros(2, 1, dtype=rows.dtype).index_add(0, experts.argsort(stable=True) // 5, rows)]

    rows = torch.tensor([[1.0], *[[2.0**-8]] * 4], dtype=torch.bfloat16).repeat(2, 1)
    gm = make_fx(combine, tracing_mode="fake")(rows, torch.zeros(10, dtype=torch.int64))
    assert read_permutations(gm, PassContext(world_size=1)).rewritten == 1
    gm.recompile()
    (found,) = gm(rows, torch.zeros(10, dtype=torch.int64))
    assert found.float().flatten().tolist() == [1 + 2.0**-6] * 2


@pytest.mark.parametrize("wrong", ["another number of tokens", "no order", "by a tensor"])
def test_other_sums_stay(wrong: str) -> None:
    def combine(tokens: Tensor, experts: Tensor) -> list[Tensor]:
        order = experts if wrong == "no order" else experts.argsort()
        index = order // torch.full_like(order, K) if wrong == "by a tensor" else order // K
        room = tokens.new_zeros(T + (wrong == "another number of tokens"), H)
        return [room.index_add(0, index, tokens.repeat_interleave(K, 0))]

    assert rewritten(read_permutations, combine, tokens_and_order()) == 0


def slots_and_rows(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    # A slot without rows, too.
    offsets = torch.tensor([3, 3, 7, 12], dtype=torch.int32)
    return [torch.randn(E, H, dtype=dtype), torch.randn(12, H, dtype=dtype), offsets]


def test_gradients_of_biases_are_summed_slot_by_slot() -> None:
    def biased(biases: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        return rows.sin() + biases[torch.ops.hecate.row_slots(offsets, rows.shape[0])]

    assert rewritten(sum_slots, gradients(biased, 2), slots_and_rows(), rtol=1e-5, atol=1e-5) == 1


@pytest.mark.parametrize("wrong", ["more biases", "matrices", "other numbers"])
def test_other_additions_to_experts_stay(wrong: str) -> None:
    def biased(biases: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        slots = torch.ops.hecate.row_slots(offsets, rows.shape[0])
        if wrong == "more biases":
            return rows + torch.cat([biases, biases])[slots]
        if wrong == "matrices":
            return rows[:, None] + biases[:, None][slots]
        return rows + biases[slots.flip(0)]

    assert rewritten(sum_slots, gradients(biased, 2), slots_and_rows()) == 0


@pytest.mark.parametrize(("dimension", "along", "count"), [(1, -1, 1), (-1, 1, 1), (0, 1, 0)])
def test_gradients_of_chosen_scores_are_written(dimension: int, along: int, count: int) -> None:
    def chosen(scores: Tensor) -> Tensor:
        return scores.sin().gather(dimension, scores.topk(K, dim=along).indices)

    torch.manual_seed(0)
    assert rewritten(write_choices, gradients(chosen, 1), [torch.randn(T, T, dtype=torch.float64)]) == count


def test_places_that_may_be_equal_are_added_to() -> None:
    def chosen(scores: Tensor, places: Tensor) -> Tensor:
        return scores.gather(1, places)

    inputs = [torch.randn(T, E, dtype=torch.float64), torch.zeros(T, K, dtype=torch.int64)]
    assert rewritten(write_choices, gradients(chosen, 1), inputs) == 0
