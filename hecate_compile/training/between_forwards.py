"""The work that lies between two forwards of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hecate.runtime.comm import collectives
from hecate.runtime.comm.agreement import agree
from hecate.runtime.comm.world import World
from hecate.runtime.ops.gradients import GradientSyncs, ReplicatedParameter
from hecate.runtime.state.layer import Carrier
from hecate.runtime.state.overlap_window import HiddenTime
from hecate.runtime.state.step_mode import CurrentStep, StepMode
from hecate.training.buffers import Buffers
from hecate.training.drift import DriftCheck
from hecate.training.move_owners import OwnerMover
from hecate.wrap.changes import Changes
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.parameter_reads import install_replicated_reads
from hecate.wrap.shard import shard_of
from hecate.wrap.stack_experts import tie_stacks


class Additions:
    """Makes parameters added after ``hecate.compile`` part of the training: whole on all ranks, averaged."""

    def __init__(
        self,
        model: nn.Module,
        replicated: Sequence[ReplicatedParameter],
        *,
        syncs: GradientSyncs,
        step: CurrentStep,
        param_dtype: torch.dtype | None,
        added: Callable[[ReplicatedParameter], None],
        changes: Changes,
        changed: Callable[[], None],
    ) -> None:
        # Weak: the model holds this.
        self._model = weakref.ref(model)
        self._syncs, self._step, self._param_dtype = syncs, step, param_dtype
        self._added, self._changed = added, changed
        self._records = list(replicated)
        self._changes, self._seen = changes, -1
        # By identity: tensors compare element by element.
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._remember(model)

    @property
    def records(self) -> tuple[ReplicatedParameter, ...]:
        """The records of all parameters that every rank has whole."""
        return tuple(self._records)

    def before_forward(self) -> None:
        """Take in new parameters; a collective then, which ranks that added nothing do not come to."""
        model = self._model()
        if self._changes.number == self._seen or model is None:
            return
        new = {
            name: parameter
            for name, parameter in model.named_parameters()
            if shard_of(parameter) is None and parameter not in self._known
        }
        if not new:
            self._changed()
            self._remember(model)
            return
        # Remembered only after ranks agree: otherwise this forward raises, and so does the next.
        world = self._syncs.whole.world
        agree(
            [f"{name} {list(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for name, p in new.items()],
            "the parameters that were added after hecate.compile",
            "Add the same ones on every rank, or add them before.",
            world,
        )
        syncs = {name: self._syncs.of(parameter, name) for name, parameter in new.items()}
        known = {id(record.parameter): record for record in self._records if record.exists}
        for name, parameter in new.items():
            record = known.get(id(parameter))
            if record is not None and record.sync is not syncs[name]:
                raise RuntimeError(
                    f"hecate: {name} was {'a whole tensor' if record.sync is self._syncs.whole else 'a DTensor'} in "
                    "hecate.compile, and something put the other into its place. Copy values into the parameter"
                )
        with torch.no_grad():
            for name, parameter in new.items():
                collectives.broadcast(collectives.part_of(parameter.detach()), syncs[name].world)
        added = install_replicated_reads(model, self._syncs, self._step, self._param_dtype)
        self._records = [record for record in self._records if record.exists]
        replaced = [record for record in self._records if any(record.parameter is p for p in new.values())]
        self._records += added
        for record in (*replaced, *added):
            self._added(record)
        self._changed()
        self._remember(model)

    def _remember(self, model: nn.Module) -> None:
        self._seen = self._changes.number
        self._changes.follow(model)
        for parameter in model.parameters():
            if shard_of(parameter) is None:
                self._known[parameter] = True


@dataclass(eq=False, kw_only=True)
class BetweenForwards:
    """The parts of a model that act before a forward, in the order in which they act."""

    # Weak: the model holds this.
    model: weakref.ref[nn.Module]
    world: World
    has_shards: bool
    experts: Sequence[ExpertsModule]
    carrier: Carrier
    buffers: Buffers
    additions: Additions
    drift: Sequence[DriftCheck]
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
        # Step 2: between two steps, parameters may have been cast, frozen or added and buffers may have become other
        # than rank 0's, experts may change owners, and rates may become known.
        tie_stacks(self.experts)
        self.buffers.before_forward(mode)
        self.additions.before_forward()
        self.buffers.after_additions()
        for check in self.drift:
            check.before_forward(mode)
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
