"""Compare ranks: now and then the parameters that each has whole, and once the first batches.

Averaged gradients keep parameters equal to the last bit, unless the user's code computes with numbers that only its
rank knows, such as a norm over the gradients of its own experts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hecate.private import is_traceable_wrapper_subclass, tree_leaves
from hecate.runtime.comm import collectives
from hecate.runtime.comm.agreement import DisagreementError, gather_json
from hecate.runtime.comm.history import doing
from hecate.runtime.comm.warn import warn_together
from hecate.runtime.comm.world import World
from hecate.runtime.ops.gradients import ReplicatedParameter
from hecate.runtime.state.step_mode import StepMode
from hecate.training.digest import digest, has_digest

# Training forwards after which ranks compare for the first times: errors by design show soon.
_EARLY = (1, 10, 50)
# Most parameters that a message names with their difference.
_SHOWN = 3
# Ranks of different hardware may differ by so many units of the largest element's last place.
_ROUNDINGS = 32


_CAUSES = (
    "Their gradients are averaged, so something updates them in another way on each rank. Likely are: a norm over "
    "gradients taken by hand, which is that of this rank's experts (torch.nn.utils.get_total_norm and "
    "clip_grad_norm_ take that of the whole model); an optimizer of your own that takes norms or estimates of all "
    "its parameters, or random numbers; code that changes weights on some ranks only."
)


@dataclass(frozen=True)
class Drift:
    """A difference between ranks: the parameters, and by how much."""

    text: str
    # No more than other hardware on some ranks would explain.
    rounding: bool


class DriftCheck:
    """Compares the parameters that all ranks of a world have alike, every so many training forwards; 0 for never.

    If ranks do not make the same forwards (``in_forwards``), they compare when they save. Once the program has
    ``stepped_apart``, on gradients that it left local, nothing is compared.
    """

    def __init__(
        self,
        records: Callable[[], Sequence[ReplicatedParameter]],
        world: World,
        stepped_apart: Callable[[], bool],
        *,
        every: int,
        in_forwards: bool,
    ) -> None:
        self._records, self._stepped_apart, self._every, self._in_forwards = (
            records,
            stepped_apart,
            every,
            in_forwards,
        )
        self._world = world
        self._forwards = 0
        self._stepped = self._apart = self._warned = False

    def before_forward(self, mode: StepMode) -> None:
        """Compare if it is time, a collective then; raise on all ranks if parameters differ by more than rounding."""
        if self._world.group is None or not self._every or not self._in_forwards or not mode.training:
            return
        done, self._forwards = self._forwards, self._forwards + 1
        self._stepped = self._stepped or self._stepped_apart()
        if not done or (done not in _EARLY and done % self._every):
            return
        drift = self._of_anybody(None if self._apart else self._compare(stepped=self._stepped))
        if drift is None:
            return
        if not drift.rounding:
            raise DisagreementError(
                f"hecate: after {done} training forwards {drift.text}\n{_CAUSES} To go on as it is: "
                "hecate.Config(compare_every=0)."
            )
        self._warn(
            f"hecate: after {done} training forwards {drift.text}\nSo little comes of ranks with other hardware"
        )

    def _of_anybody(self, drift: Drift | None) -> Drift | None:
        """Return the drift of other ranks of the model where these have none: all raise. A collective of groups."""
        everyone = self._world.everyone
        if everyone is self._world:
            return drift
        mine = drift is not None and not drift.rounding
        found = torch.tensor(mine, dtype=torch.uint8, device="cpu").to(everyone.control_device)
        everyone.queue.drain()
        collectives.all_reduce(found, everyone, dist.ReduceOp.MAX)
        if found and not mine:
            return Drift("other ranks differ in parameters that their groups share: their errors name them.", False)
        return drift

    def before_save(self) -> None:
        """Warn of differences, since a checkpoint has one rank's values. A collective."""
        if self._world.group is not None and self._every and (drift := self._compare()) is not None:
            self._warn(f"hecate.save: {drift.text}\nOne rank's values are saved. {_CAUSES}", again=not drift.rounding)

    def _warn(self, text: str, *, again: bool = False) -> None:
        warned, self._warned = self._warned, True
        if again or not warned:
            warn_together(text, self._world.rank, stacklevel=2)

    def _compare(self, *, stepped: bool = False) -> Drift | None:
        """Return the difference, the same on all ranks; None if there is none. A collective.

        Steps on a rank's own gradients, and averages after them, are the program's business: where a rank has
        ``stepped`` so, nothing is compared from then on.
        """
        world = self._world
        found = {
            record.name: collectives.part_of(record.parameter.detach()) for record in self._records() if record.exists
        }
        parameters = {name: p for name, p in found.items() if not is_traceable_wrapper_subclass(p)}
        bits = [_bits(p) for p in parameters.values()]
        digests = torch.stack(bits) if bits else torch.zeros(0, dtype=torch.int64, device=world.device)
        # Odd factors, so that no bit is lost, and equal differences do not cancel out.
        factors = 2 * torch.arange(len(bits), device=digests.device) + 1
        # This collective must not run at the same time as those that graphs have started.
        world.queue.drain()
        with doing("the comparison of parameters"):
            mixed = (digests * factors).sum().view(1).to(world.control_device)
            mine = torch.cat([mixed, torch.tensor([stepped], dtype=mixed.dtype, device=mixed.device)])
            mixes, steps = collectives.all_gather_even(mine, world).t().tolist()
            self._apart = self._apart or any(steps)
            if any(steps) or len({*mixes}) == 1:
                return None
            told = gather_json([[*parameters], digests.tolist()], world)
            names, values = zip(*told, strict=True)
            if any(other != names[0] for other in names):
                return Drift("ranks have different parameters: some were added or removed on some ranks only", False)
            differing = [
                name for name, found in zip(names[0], zip(*values, strict=True), strict=True) if len({*found}) > 1
            ]
            return self._measured({name: parameters[name] for name in differing}, len(parameters))

    def _measured(self, differing: dict[str, torch.Tensor], total: int) -> Drift:
        """Measure how far parameters are off rank 0's, the worst first."""
        offs = []
        for name, parameter in differing.items():
            first = parameter.clone(memory_format=torch.contiguous_format)
            collectives.broadcast(first, self._world)
            off = (parameter.float() - first.float()).abs().max()
            every = collectives.all_gather_even(off.view(1).to(self._world.control_device), self._world).flatten()
            eps = torch.finfo(first.dtype).eps if first.is_floating_point() else 0.0
            # NaN on one rank only is no rounding.
            rounding = float(every.max()) <= _ROUNDINGS * eps * float(first.abs().max())
            offs.append((rounding, -float(every.max()), name, int(every.argmax())))
        offs.sort()
        numbers = self._world.numbers or range(self._world.size)
        lines = [
            f"  {name} of rank {numbers[rank]} is off rank {numbers[0]}'s by {-off:.1e}"
            for _, off, name, rank in offs[:_SHOWN]
        ]
        alike = "each has whole" if self._world is self._world.everyone else "they share"
        what = f"ranks have other values of {len(offs)} of the {total} parameters that {alike}:"
        return Drift("\n".join([what, *lines]), all(rounding for rounding, *_ in offs))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number that changes with any bit of ``tensor``: the sum of its bytes, eight at a time."""
    raw = tensor.reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = len(raw) // 8 * 8
    return raw[:whole].view(torch.int64).sum() + raw[whole:].sum(dtype=torch.int64)


# Training forwards whose inputs are compared: one batch may be the same by chance, or be made up to warm up.
_FORWARDS = 3
# Multiplies the digest of earlier inputs; odd, so that no bit of them is lost.
_FACTOR = 6364136223846793005


class SameBatches:
    """Compares the inputs of the first training forwards between ranks, once and in one collective.

    Warns if all are the same. Raises on all ranks if those differ between which tensors are split.
    """

    def __init__(self, world: World, *, enabled: bool, copies: Sequence[int] = ()) -> None:
        self._world, self._first = world, min(copies, default=world.rank)
        self._forwards = 0 if enabled and world.group is not None else _FORWARDS + 1
        self._digest: Tensor | None = None

    def before_forward(self, mode: StepMode, args: Any, kwargs: Any) -> None:
        if not mode.training or self._forwards > _FORWARDS:
            return
        if self._forwards == _FORWARDS:
            self._compare()
        else:
            with torch.no_grad():
                for tensor in filter(has_digest, tree_leaves((args, kwargs))):
                    # Kept on the model's device, where nobody waits for it.
                    found = digest(tensor).to(self._world.device) + tensor.numel()
                    self._digest = found if self._digest is None else self._digest * _FACTOR + found
        self._forwards += 1

    def _compare(self) -> None:
        """Compare digests, and warn. A collective, to which a rank without inputs comes, too."""
        world, mine = self._world, self._digest
        self._digest = None
        inputs = torch.zeros((), dtype=torch.int64, device=world.device) if mine is None else mine
        told = torch.stack([inputs, *(torch.full_like(inputs, own) for own in (mine is not None, self._first))])
        # This collective must not run at the same time as those that graphs have started.
        world.queue.drain()
        with doing("the comparison of batches"):
            every = collectives.all_gather_even(told.to(world.control_device), world).tolist()
        firsts = [every[first] for *_, first in every]
        apart = next((rank for rank, line in enumerate(every) if line[:2] != firsts[rank][:2]), None)
        if apart is not None:
            raise DisagreementError(
                f"hecate: ranks {every[apart][2]} and {apart} share split tensors (tensor parallelism), so they "
                "compute the same of one batch, but had others in the first forwards. Give them the same: "
                'DistributedSampler(data, num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank())'
            )
        # One rank of each line, and of several.
        every = [line for rank, line in enumerate(every) if line[2] == rank]
        if world.rank == 0 and len(every) > 1 and all(line[:2] == every[0][:2] for line in every) and every[0][1]:
            warnings.warn(
                f"hecate: in the first {_FORWARDS} training forwards all {world.size} ranks had the same batches, so "
                f"{world.size} ranks do the work of one. A loader must know of ranks to give each its own part of "
                "the data: DataLoader(data, sampler=torch.utils.data.DistributedSampler(data, num_replicas=ranks, "
                "rank=rank)); for a stream datasets.distributed.split_dataset_by_node; for batches that are drawn at "
                "random, another seed on each rank.",
                stacklevel=2,
            )
