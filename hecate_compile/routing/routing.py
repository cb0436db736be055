"""Experts of tokens, layer by layer, as a recording has them and a file keeps them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Routing:
    """The experts that each token of a rank's own batch goes to.

    Args:
        by_layer: integers ``[batch, sequence, k]`` for each layer, by the names of the experts modules; -1 in all k
            places of a token leaves the choice to the model.
    """

    def __init__(self, by_layer: Mapping[str, Tensor]) -> None:
        self._parts = {name: [ids] for name, ids in by_layer.items()}

    def append(self, by_layer: Mapping[str, Tensor]) -> None:
        """Add what follows in the sequence."""
        for name, ids in by_layer.items():
            self._parts.setdefault(name, []).append(ids)

    @property
    def by_layer(self) -> dict[str, Tensor]:
        """Integers ``[batch, sequence, k]`` by the names of the experts modules, forwards one after the other.

        Raises:
            ValueError: forwards had batches of different sizes, so that they are no sequence.
        """
        for name, parts in self._parts.items():
            sizes = sorted({ids.shape[0] for ids in parts})
            if len(sizes) > 1:
                raise ValueError(
                    f"hecate: the routing of {name} is that of forwards with batches of {sizes[0]} and "
                    f"{sizes[-1]}. Record each in a block of its own"
                )
            self._parts[name] = [torch.cat(parts, dim=1)] if len(parts) > 1 else parts
        return {name: parts[0] for name, parts in self._parts.items()}

    @property
    def ids(self) -> Tensor:
        """Integers ``[batch, sequence, layer, k]``, as inference engines give them.

        Raises:
            ValueError: nothing was recorded, or layers have other numbers of tokens or of experts of a token.
        """
        by_layer = self.by_layer
        sizes = {tuple(ids.shape) for ids in by_layer.values()}
        if len(sizes) != 1:
            found = "; ".join(f"{name} {list(ids.shape)}" for name, ids in by_layer.items())
            raise ValueError(
                f"hecate: the routing of these layers is no one tensor, take it from by_layer: {found}"
                if by_layer
                else "hecate: no routing was recorded: no forward of the model has run inside the block"
            )
        return torch.stack([*by_layer.values()], dim=2)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a compressed numpy archive: ``layers``, their names, and ``0``, ``1``, ... with their integers.

        Raises:
            OSError: it cannot be written.
        """
        by_layer = self.by_layer
        arrays: dict[str, Any] = {str(number): _smallest(ids) for number, ids in enumerate(by_layer.values())}
        arrays["layers"] = np.asarray([*by_layer], dtype=np.str_)
        with Path(path).open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Routing:
        """Return what :meth:`save` wrote, on the CPU.

        Raises:
            OSError: it cannot be read.
            ValueError: it is something else.
        """
        with np.load(path, allow_pickle=False) as found:
            if "layers" not in found:
                raise ValueError(f"hecate.Routing.load: {os.fspath(path)} holds no routing, but {sorted(found)}")
            return cls(
                {str(name): torch.from_numpy(found[str(number)]) for number, name in enumerate(found["layers"])}
            )

    def __repr__(self) -> str:
        return f"Routing({', '.join(f'{name} {list(ids.shape)}' for name, ids in self.by_layer.items())})"


def _smallest(ids: Tensor) -> np.ndarray[Any, Any]:
    """Return integers in the smallest signed type that has them."""
    largest = int(ids.max()) if ids.numel() else 0
    dtype = next(one for one in (np.int8, np.int16, np.int32) if largest <= np.iinfo(one).max)
    return ids.cpu().numpy().astype(dtype)
