"""Mode in which the forward that runs right now was called."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepMode:
    """The purpose of a forward. The same on all ranks.

    Attributes:
        training: gradients are recorded, so its routing tells about the next steps.
        first: the first forward in its grad mode, in which all ranks compile; graphs are compared then. A later
            recompile may happen on one rank alone.
    """

    training: bool
    first: bool


@dataclass
class CurrentStep:
    """State of the running step, shared by everything that belongs to one model.

    Attributes:
        mode: of the compiled forward that runs now; None between forwards, backwards included.
    """

    mode: StepMode | None = None

    @property
    def running(self) -> bool:
        return self.mode is not None
