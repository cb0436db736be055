"""The buffers of a plain model as every rank under ``DistributedDataParallel`` would have them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RankBuffers:
    """Has one process be one rank after another, each with buffers of its own.

    Before a forward all take rank 0's, if that is due: in a model's first, and if the last forward with gradients
    averaged them.
    """

    def __init__(self, model: nn.Module, size: int, rank: int) -> None:
        self._kept = [
            (module, key)
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and key not in module._non_persistent_buffers_set
        ]
        self.rank, self.size, self._now, self._due = rank, size, rank, True
        self._of = [[buffer.clone() for buffer in self._here()] for _ in range(size)]

    def _here(self) -> list[Tensor]:
        return [buffer for module, key in self._kept if (buffer := module._buffers[key]) is not None]

    def turn_to(self, rank: int) -> None:
        self._of[self._now] = self._here()
        # Put in place, not written into: a backward may still need what is there.
        for (module, key), buffer in zip(self._kept, self._of[rank], strict=True):
            module._buffers[key] = buffer
        self._now = rank

    def of_a_new_model(self) -> None:
        """Begin with a model that has not been called yet."""
        self._due = True

    def before_forward(self, *, training: bool, averages: bool = True) -> None:
        due, self._due = self._due, training and averages
        if due:
            self.all_take_first()

    def all_take_first(self) -> None:
        self.turn_to(0)
        with torch.no_grad():
            self._of = [[buffer.clone() for buffer in self._here()] for _ in range(self.size)]
        self._now = 0
        self.turn_to(self.rank)
