"""The comparison that all parity tests rest on finds what is planted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.parity import compare, error_of, state_error


def with_gradient(*shape: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.ones(shape)
    return parameter


def linear() -> nn.Linear:
    model = nn.Linear(3, 2)
    model.weight, model.bias = with_gradient(2, 3), with_gradient(2)
    return model


# What is done to a model, and the error that it makes.
PLANTED: dict[str, tuple[Callable[[Any], object], float]] = {
    "not a number": (lambda model: model.weight.grad[0, 0].fill_(math.nan), math.inf),
    "no gradient": (lambda model: setattr(model.bias, "grad", None), math.inf),
    "another shape": (lambda model: setattr(model, "weight", with_gradient(1, 3)), math.inf),
    "another number": (lambda model: model.weight.grad[1, 2].add_(0.5), 0.5),
}


@pytest.mark.parametrize("what", PLANTED)
def test_planted_errors_are_found(what: str) -> None:
    (plant, error), model, reference = PLANTED[what], linear(), linear()
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
