"""Scalars of a run for TensorBoard, which :func:`hecate.monitor` writes besides its own files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hecate.reports.ratios import hidden_part, max_over_mean
from hecate.reports.run_files import Array


class TensorBoardLog:
    """Scalars for TensorBoard, written by rank 0 a chunk of steps at a time; ImportError without TensorBoard."""

    def __init__(self, folder: Path, world_size: int) -> None:
        # This imports TensorBoard, which is not installed with Hecate.
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))
        self._world_size = world_size
        # Owners of the chunks so far, and the step from which on each holds.
        self._since: list[int] = []
        self._owners: list[Array] = []

    def write(self, arrays: Mapping[str, Array]) -> None:
        """Write a chunk, as ``run_files`` describes it."""
        if "owners" in arrays:
            self._since = [*self._since[-1:], *arrays["owners_step"].tolist()]
            self._owners = [*self._owners[-1:], *arrays["owners"]]
        for index, step in enumerate(arrays["step"].tolist()):
            moment = float(arrays["began"][index])
            for tag, value in self._scalars(arrays, index).items():
                if np.isfinite(value):
                    self._writer.add_scalar(tag, value, step, walltime=moment)
        self._writer.flush()

    def _scalars(self, arrays: Mapping[str, Array], index: int) -> dict[str, float]:
        found = {name[4:]: float(array[index]) for name, array in arrays.items() if name.startswith("log.")}
        travel, exposed = arrays["travel"][index].sum(), arrays["exposed"][index].sum()
        found |= {
            "hecate/step_seconds": float(arrays["seconds"][index]),
            "hecate/memory_bytes": float(arrays["memory"][index]),
            "hecate/hidden": float(hidden_part(travel, exposed)),
        }
        if "load" in arrays:
            loads, holders = arrays["load"][index], arrays["holders"][index]
            found["hecate/replicas"] = float(holders.astype(np.int64).sum() - holders.size)
            before = []
            now = max(0, bisect_right(self._since, int(arrays["step"][index])) - 1)
            for load, owner in zip(loads, self._owners[now], strict=True):
                # A layer with fewer experts than another is filled up with -1.
                here = owner >= 0
                before.append(np.bincount(owner[here], load[here], minlength=self._world_size))
            if before:
                found["hecate/imbalance_of_owners"] = float(max_over_mean(np.stack(before)).mean())
        return found

    def close(self) -> None:
        self._writer.close()
