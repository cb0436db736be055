"""Mode in which the forward that runs right now was called."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepMode:
    """The purpose of a forward. The same on all ranks."""

    # Gradients are recorded, so its routing tells about the next steps.
    training: bool
    # The first with or without gradients, in training or not: all ranks compile, and compare graphs. Later one rank
    # may compile alone.
    first: bool
    # What its routers choose is recorded, or comes from outside: see :func:`hecate.replay_routing`.
    holds_choices: bool = False


@dataclass
class CurrentStep:
    """State of the running step, shared by everything that belongs to one model."""

    # Of the compiled forward that runs now; None between forwards, backwards included.
    mode: StepMode | None = None

    @property
    def running(self) -> bool:
        return self.mode is not None

    @property
    def is_first(self) -> bool:
        """True while a forward runs in which ranks compare what they do."""
        return self.mode is not None and self.mode.first
