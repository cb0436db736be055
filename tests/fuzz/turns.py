"""The turns of a life: what a user does with a model, each in a method of its name, beside one process."""

from __future__ import annotations

from tests.fuzz.other_turns import OtherTurns

# How often each is drawn. Those that make another graph cost seconds.
TURNS = {
    "step": 12,
    "accumulate": 3,
    "evaluate": 2,
    "infer": 1,
    "evaluate in bfloat16": 1,
    "without adapters": 1,
    "other lengths": 3,
    "one row": 1,
    "generate": 2,
    "freeze": 2,
    "thaw": 2,
    "hook on a module": 1,
    "hook on a parameter": 1,
    "take hooks off": 1,
    "change a buffer": 4,
    "checkpoint layers": 1,
    "begin an average": 1,
    "begin an average by name": 1,
    "look at the average": 1,
    "save": 2,
    "load": 2,
    "save and load": 1,
    "another optimizer": 2,
    "another rate": 1,
    "another model": 1,
    "a frozen copy": 1,
    "forget the copy": 1,
    "made anew": 1,
    "a trainer": 1,
    "two forwards": 1,
    "schedule": 1,
    "refused": 3,
    "not a number": 1,
    "no backward": 1,
    "bad token": 1,
}


class Turns(OtherTurns):
    """A model and its reference, on this rank, with a method for every turn."""
