"""Pieces as Inductor compiles them, in one process: what an interpreter of them would not show."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hecate.graph.lowering import _inductor, _InPieces
from hecate.graph.steps import Pieces
from tests.hecate_compile.graph.test_pieces import operators

pytestmark = pytest.mark.slow
__all__ = ["operators"]


def send(rows: Tensor, layer: int = 0) -> Tensor:
    found: Tensor = torch.ops.hecate.test_send(rows, layer)
    return found


@pytest.fixture
def sizes_from_data() -> Iterator[None]:
    # As hecate.compile has them while a model is traced.
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def in_pieces(function: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Pieces]]:
    found: dict[str, Pieces] = {}

    def backend(gm: Any, inputs: Any) -> Any:
        return _inductor(gm, inputs, _InPieces(lambda gm, part: None, found), {}, dumping=True)

    return torch.compile(function, backend=backend, fullgraph=True), found


class Averaging(nn.Module):
    """A buffer that is read through a view in one piece, and written in another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(2, 8))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        row = self.average[0]
        sent = send(x * 2 + row)
        out = sent @ weight + row
        with torch.no_grad():
            self.average.copy_(self.average * 0.5 + sent.mean())
        return out


def test_views_of_a_buffer_are_read_before_it_is_written() -> None:
    torch.manual_seed(0)
    plain = Averaging()
    model = copy.deepcopy(plain)
    compiled, pieces = in_pieces(model)
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x, weight), plain(x, weight))
            torch.testing.assert_close(model.average, plain.average)
    assert pieces["forward"].all == 2


def test_what_a_piece_draws_is_drawn_once(sizes_from_data: None) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        mask = torch.rand_like(x) > 0.5
        chosen = x[mask]
        return mask, send(chosen) * 2 + 1, send(chosen.sum(0, keepdim=True)) * 0 + chosen.shape[0]

    compiled, _ = in_pieces(function)
    x = torch.arange(1.0, 1001.0)
    with torch.no_grad():
        for _ in range(3):
            mask, rows, count = compiled(x)
            torch.testing.assert_close(rows, x[mask] * 2 + 1)
            assert float(count) == int(mask.sum())


def test_a_promise_is_that_of_its_own_layer(sizes_from_data: None) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        many = send(x).abs().sum().int().item()
        torch._check(many * many < 50)
        first = send(x.new_zeros(many) + 1)
        more = send(send(y) + 0 * first.sum()).abs().sum().int().item()
        return first, send(y.new_zeros(more) + 1)

    compiled, _ = in_pieces(function)
    x, y = torch.full((2, 2), 1.0), torch.full((2, 2), 5.0)
    with torch.no_grad():
        for found, expected in zip(compiled(x, y), function(x, y), strict=True):
            torch.testing.assert_close(found, expected)
        with pytest.raises(RuntimeError):
            compiled(torch.full((2, 2), 3.0), y)


def test_gradients_of_layers_that_draw_random_numbers() -> None:
    def function(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        outs = [x]
        for layer, weight in enumerate(weights):
            outs.append(torch.dropout(send(outs[-1] @ weight.t(), layer), 0.5, True))
        return tuple(outs[1:])

    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    compiled, pieces = in_pieces(function)
    for rows in (4, 6):
        x = torch.randn(rows, 8)
        outs = compiled(x, *weights)
        found = torch.autograd.grad(outs[-1].square().sum(), weights)
        expected = x
        for layer, (weight, out) in enumerate(zip(weights, outs, strict=True)):
            expected = send(expected @ weight.t(), layer) * 2 * (out != 0)
            torch.testing.assert_close(out, expected)
            assert 0 < int((out != 0).sum()) < out.numel()
        assert not torch.equal(outs[0] != 0, outs[1] != 0)
        for one, other in zip(found, torch.autograd.grad(expected.square().sum(), weights), strict=True):
            torch.testing.assert_close(one, other)
    assert pieces["forward"].different < pieces["forward"].all
