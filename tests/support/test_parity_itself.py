"""The comparison that all parity tests rest on finds what is planted."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support.parity import compare, error_of, state_error


def _pair() -> tuple[nn.Linear, nn.Linear]:
    models = (nn.Linear(3, 2), nn.Linear(3, 2))
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    return models


def _plant_nan(model: nn.Linear) -> None:
    model.weight.grad[0, 0] = math.nan


def _plant_missing(model: nn.Linear) -> None:
    model.bias.grad = None


def _plant_shape(model: nn.Linear) -> None:
    model.weight.grad = None
    model.weight.data = model.weight.data[:1]
    model.weight.grad = torch.ones(1, 3)


def _plant_error(model: nn.Linear) -> None:
    model.weight.grad[1, 2] += 0.5


@pytest.mark.parametrize(
    ("plant", "error"),
    [(_plant_nan, math.inf), (_plant_missing, math.inf), (_plant_shape, math.inf), (_plant_error, 0.5)],
)
def test_planted_errors_are_found(plant: Callable[[nn.Linear], None], error: float) -> None:
    model, reference = _pair()
    one = torch.tensor(1.0)
    assert compare(model, one, reference, one).gradient == 0.0
    plant(model)
    assert compare(model, one, reference, one).gradient == error
    assert compare(reference, torch.tensor(math.nan), reference, one).loss == math.inf


def test_what_is_not_finite_is_an_infinite_error_wherever_it_stands() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert error_of(good, good) == 0.0 and error_of(2 * good, good, relative=True) == 1.0
    for names in (("a", "b"), ("b", "a")):
        ours = {names[0]: good, names[1]: bad}
        assert state_error(ours, dict.fromkeys(names, good)) == math.inf
