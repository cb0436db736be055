"""Thirty-six drawn cases and two lives, many more with HECATE_TESTS=all; ``python -m tests.fuzz`` draws others."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import fuzz, live
from tests.fuzz.draw import ACTIONS, FAULTS, draw_case, draw_model
from tests.support.extent import ALL

_SEED, _MODELS, _CASES = 3, 5 if ALL else 3, 40 if ALL else 12


@pytest.mark.distributed
@pytest.mark.parametrize("model", range(_MODELS))
def test_no_problem(model: int) -> None:
    problems = fuzz(_SEED, range(model, model + 1), list(range(_CASES)))
    assert not problems, "\n\n".join(problems)


@pytest.mark.distributed
def test_lives() -> None:
    problems = live(_SEED, range(20 if ALL else 2))
    assert not problems, "\n\n".join(problems)


def test_what_is_drawn_has_everything_in_it() -> None:
    cases = [draw_case(_SEED, model, index) for model in range(_MODELS) for index in range(_CASES)]
    assert {action for case in cases for action in case.actions} == {*ACTIONS, *FAULTS}
    assert len({draw_model(_SEED, model).family for model in range(_MODELS)}) == _MODELS
    assert any(draw_model(_SEED, model).attention is not None for model in range(_MODELS))
    assert draw_case(_SEED, 1, 2) == draw_case(_SEED, 1, 2)
