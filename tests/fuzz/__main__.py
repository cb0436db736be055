"""Drawn models, options, loops and faults on two ranks, against one process.

    python -m tests.fuzz                                  200 cases, about 3 minutes on two cores
    python -m tests.fuzz --cases 2000 --seed 7            more, and others
    python -m tests.fuzz --seed 7 --model 31 --case 2     one of them again
    python -m tests.fuzz --lives 100                      lives of thirty turns, with a model of its own each
    python -m tests.fuzz --life 31                        one of them again

Every twenty cases share a model, which is compiled once. A problem is printed with what it takes to see it again.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tests.fuzz.draw import draw_case, draw_model
from tests.support.ranks import RanksFailed, run_ranks

_CASES_PER_MODEL = 20
# Models of one launch.
_TOGETHER = 2


def fuzz(seed: int, models: range, cases: list[int], *, log: bool = False) -> list[str]:
    """Problems of drawn cases, one text each."""
    return _problems("tests.fuzz.run:run_models", "models", models, log=log, seed=seed, cases=cases)


def live(seed: int, lives: range, turns: int = 30, *, log: bool = False) -> list[str]:
    """Problems of drawn lives, one text each."""
    return _problems("tests.fuzz.life:run_lives", "lives", lives, log=log, seed=seed, turns=turns)


def _problems(function: str, what: str, numbers: range, *, log: bool, seed: int, **drawn: Any) -> list[str]:
    problems: list[str] = []
    for start in range(numbers.start, numbers.stop, _TOGETHER):
        some = list(range(start, min(start + _TOGETHER, numbers.stop)))
        try:
            found = run_ranks(function, 2, timeout=400, seed=seed, numbers=some, **drawn)
            new = [f"rank {rank}: {problem}" for rank, mine in enumerate(found) for problem in mine]
        except RanksFailed as error:
            new = [f"seed {seed}, {what} {some}: {error}"]
        problems += new
        if log:
            print("\n\n".join([*new, f"{what} {some[0]} to {some[-1]}: {len(problems)} problems so far"]), flush=True)
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=int, help="only this one")
    parser.add_argument("--case", type=int, help="only this one of the model's")
    parser.add_argument("--lives", type=int, help="so many lives instead")
    parser.add_argument("--life", type=int, help="only this life")
    parser.add_argument("--turns", type=int, default=30, help="of each life")
    options = parser.parse_args()
    if options.lives is not None or options.life is not None:
        numbers = range(options.lives or 0) if options.life is None else range(options.life, options.life + 1)
        problems = live(options.seed, numbers, options.turns, log=True)
        print(f"{len(numbers)} lives, {len(problems) or 'no'} problems")
        sys.exit(bool(problems))
    models, cases = range(-(-options.cases // _CASES_PER_MODEL)), list(range(_CASES_PER_MODEL))
    if options.case is not None:
        cases = [options.case]
    if options.model is not None:
        models = range(options.model, options.model + 1)
        print(draw_model(options.seed, options.model))
        for index in cases:
            print(index, draw_case(options.seed, options.model, index))
    problems = fuzz(options.seed, models, cases, log=True)
    print(f"{len(models) * len(cases)} cases, {len(problems) or 'no'} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
