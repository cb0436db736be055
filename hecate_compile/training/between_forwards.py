"""The work that lies between two forwards of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from hecate.runtime.comm.world import World
from hecate.runtime.state.layer import Carrier
from hecate.runtime.state.overlap_window import HiddenTime
from hecate.runtime.state.step_mode import StepMode
from hecate.training.additions import Additions
from hecate.training.buffers import Buffers
from hecate.training.drift import DriftCheck
from hecate.training.move_owners import OwnerMover


@dataclass(eq=False, kw_only=True)
class BetweenForwards:
    """The parts of a model that act before a forward, in the order in which they act."""

    # Weak: the model holds this.
    model: weakref.ref[nn.Module]
    world: World
    has_shards: bool
    carrier: Carrier
    buffers: Buffers
    additions: Additions
    drift: DriftCheck
    owner_mover: OwnerMover
    hidden_time: HiddenTime | None
    watcher: Callable[[], None] | None = None

    def __call__(self, mode: StepMode) -> None:
        # Without shards a rank can evaluate alone when the others are gone.
        if mode.training or self.has_shards:
            self.world.check()
        self._check_device()
        # Step 1: the host learns what the last forward has left on the device. A monitor sees the last step whole,
        # before this forward begins.
        self.carrier.settle()
        if self.watcher is not None:
            self.watcher()
        # Step 2: between two steps, parameters may have been added and buffers may have become other than rank 0's,
        # experts may change owners, and rates may become known.
        self.buffers.before_forward(mode)
        self.additions.before_forward()
        self.buffers.after_additions()
        self.drift.before_forward(mode)
        self.owner_mover.before_forward(mode)
        if self.hidden_time is not None:
            self.hidden_time.before_forward(mode)

    def _check_device(self) -> None:
        """Refuse a model that was moved, told by one parameter; a single rank sends nothing and may move it."""
        model, world = self.model(), self.world
        parameter = next(model.parameters(), None) if model is not None and world.group is not None else None
        if parameter is not None and parameter.device != world.device:
            raise RuntimeError(
                f"hecate: on rank {world.rank} the model was on {world.device} in hecate.compile and is on "
                f"{parameter.device} now, but what ranks send each other is where it was. Move it before "
                "hecate.compile, model.to(device) with this rank's device; transformers.Trainer and accelerate "
                "move it to a GPU by themselves, unless they are told to use the CPU."
            )
