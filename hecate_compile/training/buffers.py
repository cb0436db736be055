"""Buffers, such as running statistics, as ``DistributedDataParallel`` has them: every rank takes rank 0's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hecate.private import buffers_of, foreach_copy_, is_persistent, keep_versions
from hecate.runtime.comm import collectives
from hecate.runtime.comm.queue import Job, run
from hecate.runtime.comm.warn import warn_alone
from hecate.runtime.comm.watch import RankEndedError
from hecate.runtime.ops.gradients import GradientSync
from hecate.runtime.state.step_mode import StepMode


class Buffers:
    """The buffers of one model, sent in one broadcast."""

    def __init__(self, model: nn.Module, sync: GradientSync, *, enabled: bool) -> None:
        # Weak: the model holds this.
        self._model, self._sync, self.enabled = weakref.ref(model), sync, enabled
        # As DistributedDataParallel has it, a broadcast is due in the first forward, of any kind, after one whose
        # backward averages gradients. So between two steps a rank sends or receives once, and ranks may evaluate
        # other numbers of batches.
        self._due = True
        # The module's dictionary of buffers, which does not hold the module; the key; and for a buffer that is in no
        # state dict the tensor: where such ones depend on the batch, ranks replace them by others of other shapes.
        self._kept: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
        self._came = False
        self.find()

    def find(self) -> None:
        """Look for buffers that came, and for modules that went; the same on all ranks."""
        model = self._model()
        modules = [] if model is None else list(model.modules())
        here = {id(buffers_of(module)) for module in modules}
        self._kept = [kept for kept in self._kept if id(kept[0]) in here]
        known = {(id(buffers), key) for buffers, key, _ in self._kept}
        seen = {id(buffer) for buffer in self._now()}
        for module in modules:
            own = buffers_of(module)
            for key, buffer in own.items():
                if buffer is None or not buffer.numel() or id(buffer) in seen or (id(own), key) in known:
                    continue
                seen.add(id(buffer))
                passing = not is_persistent(module, key)
                self._kept.append((own, key, buffer if passing else None))
                self._came = True

    def before_forward(self, mode: StepMode) -> None:
        """Take rank 0's buffers, if that is due. A collective then, and the first of a forward."""
        due, self._due = self._due, mode.training and self._sync.switches.enabled
        if not due:
            return
        try:
            self._send()
        except RankEndedError as error:
            if mode.training or self._sync.in_graph:
                raise
            # Where the others have ended, each rank's own buffers are right.
            warn_alone(f"{error}. This rank evaluates with its own buffers.", stacklevel=6)

    def after_additions(self) -> None:
        """Take rank 0's buffers, if some came that no rank has sent yet. A collective then."""
        if self._came:
            self._send()

    def _send(self) -> None:
        world, self._came = self._sync.world, False
        if not self.enabled or not world.connected:
            return
        # Widest first, so that each begins where its dtype may.
        buffers = sorted((buffer.detach() for buffer in self._now()), key=lambda buffer: -buffer.element_size())
        if not buffers:
            return
        with torch.no_grad():
            # Sent as bytes, in one broadcast for all dtypes.
            flat = torch.cat([buffer.contiguous().view(-1).view(torch.uint8) for buffer in buffers])

            def send() -> Tensor:
                collectives.broadcast(flat, world)
                return flat

            received = run(Job(world.queue, send, label="broadcast of buffers"))
            if world.rank == 0:
                return
            parts = received.split([buffer.numel() * buffer.element_size() for buffer in buffers])
            # A buffer that an earlier forward has saved for its backward gets another value here. Autograd would
            # refuse that, but DistributedDataParallel lets it pass, and several forwards before one backward are
            # common.
            with keep_versions(tuple(buffers)):
                foreach_copy_(
                    buffers,
                    [part.view(b.dtype).view(b.shape) for b, part in zip(buffers, parts, strict=True)],
                )

    def _now(self) -> Iterator[Tensor]:
        for buffers, key, followed in self._kept:
            buffer = buffers.get(key) if followed is None else followed
            if buffer is not None:
                yield buffer
