"""Drawn lives: what a user does with one model over thirty turns, beside one process that does the same.

Weights are compared after every turn, so a problem names the turn that made it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from random import Random

from tests.fuzz.draw import Drawn, draw_model
from tests.fuzz.dressed import Dress
from tests.fuzz.other_turns import OtherTurns
from tests.fuzz.pair import GROUPS, OPTIMIZERS
from tests.fuzz.run import CLIPS, TOLERANCE
from tests.fuzz.turns import TURNS


@dataclass(frozen=True)
class DrawnLife:
    """One life.

    Attributes:
        optimizer: the first one, a key of ``OPTIMIZERS``.
        groups: how its parameters are grouped, a key of ``GROUPS``.
        counts: graphs are compared with those of a plain torch.compile, too.
    """

    model: Drawn
    dress: Dress
    optimizer: str
    clip: str | None
    groups: str
    counts: bool
    turns: tuple[str, ...]


def draw_life(seed: int, number: int, turns: int = 30) -> DrawnLife:
    random = Random(f"life {seed} {number}")
    drawn = random.choices([*TURNS], [*TURNS.values()], k=turns)
    model = draw_model(seed, 10_000 + number)
    dress = Dress(
        balanced=random.random() < 0.15,
        statistics=random.random() < 0.4,
        adapters=random.choice((None, None, None, "attention", "experts", "both")),
    )
    whole = model.options["policy"] == "replicate" and "attention" in model.options
    if dress.adapters is not None and (model.family == "DictMoE" or whole):
        # Experts that a loop leaves out where they have no rows are refused, if PEFT's code is in them; and where
        # experts are none of Hecate's, PEFT's code for them is in no graph, which sparse attention needs.
        dress = replace(dress, adapters="attention")
    if dress.balanced:
        options = {name: value for name, value in model.options.items() if name != "attention"}
        model = replace(model, family="BalancedMoE", options=options)
    return DrawnLife(
        model=model,
        dress=dress,
        optimizer=random.choice([*OPTIMIZERS]),
        clip=random.choice((None, *CLIPS)),
        groups=random.choice([*GROUPS]),
        counts=random.random() < 0.3,
        turns=("step", *drawn, "step"),
    )


def run_lives(seed: int, numbers: list[int], turns: int) -> list[str]:
    """Problems, one text each; a life ends with its first."""
    warnings.simplefilter("ignore")
    problems = []
    for number in numbers:
        life = draw_life(seed, number, turns)
        where = f"life {number} of seed {seed}: {life}"
        try:
            problem = Life(life, seed=f"{seed} {number}").live()
        except Exception as failure:
            # The other rank may not be where this one is: nothing after this would mean anything.
            raise RuntimeError(where) from failure
        if problem:
            problems.append(f"{where}: {problem}")
    return problems


class Life(OtherTurns):
    """One life, on this rank and in one process."""

    def __init__(self, life: DrawnLife, *, seed: str) -> None:
        self.life = life
        super().__init__(life.model, life.dress, life.clip, seed=seed)
        self.optimize(life.optimizer, life.groups)
        if life.counts:
            self.count_graphs()

    def live(self) -> str:
        """Return what went wrong, or nothing."""
        for number, turn in enumerate(self.life.turns):
            where = f"turn {number}, {turn}"
            try:
                getattr(self, turn.replace(" ", "_"))()
            except Exception as error:
                raise RuntimeError(where) from error
            if off := self.off():
                return f"{where}: of {len(off)} tensors {', '.join(off[:5])}"
            if not self.differ <= TOLERANCE:
                return f"{where}: averages differ by {self.differ:.1e}"
            if problem := self.graphs_too_many():
                return f"{where}: {problem}"
        return ""
