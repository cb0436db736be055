"""Eighteen drawn cases and two lives, many more with HECATE_TESTS=all; ``python -m tests.fuzz`` draws others."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import fuzz, live
from tests.fuzz.draw import ACTIONS, FAULTS, draw_case, draw_model
from tests.fuzz.life import Life, draw_life
from tests.fuzz.pair import GROUPS
from tests.fuzz.run import CLIPS
from tests.fuzz.turns import TURNS
from tests.support.extent import ALL

# Of models with what they do, and of lives. What they draw has everything in it, as is tested below.
_SEED, _LIVES_SEED = 31, 3
_MODELS, _CASES = 5 if ALL else 3, 40 if ALL else 6


@pytest.mark.distributed
@pytest.mark.parametrize("model", range(_MODELS))
def test_no_problem(model: int) -> None:
    problems = fuzz(_SEED, range(model, model + 1), list(range(_CASES)))
    assert not problems, "\n\n".join(problems)


@pytest.mark.distributed
def test_lives() -> None:
    problems = live(_LIVES_SEED, range(20 if ALL else 2))
    assert not problems, "\n\n".join(problems)


def test_what_is_drawn_has_everything_in_it() -> None:
    cases = [draw_case(_SEED, model, index) for model in range(_MODELS) for index in range(_CASES)]
    assert {action for case in cases for action in case.actions} == {*ACTIONS, *FAULTS}
    assert len({draw_model(_SEED, model).family for model in range(_MODELS)}) == _MODELS
    assert any(draw_model(_SEED, model).attention is not None for model in range(_MODELS))
    assert draw_case(_SEED, 1, 2) == draw_case(_SEED, 1, 2)


def test_every_turn_and_every_way_to_live_is_drawn() -> None:
    lives = [draw_life(_LIVES_SEED, number) for number in range(60)]
    assert {turn for life in lives for turn in life.turns} == {*TURNS}
    assert all(callable(getattr(Life, turn.replace(" ", "_"))) for turn in TURNS)
    assert {life.clip for life in lives} == {None, *CLIPS} and {life.groups for life in lives} == {*GROUPS}
    assert {life.dress.adapters for life in lives} == {None, "attention", "experts", "both"}
    assert any(life.counts for life in lives) and any(life.dress.balanced for life in lives)
