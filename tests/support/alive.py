"""Memory that operators returned and somebody still holds."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Counts bytes of floating-point tensors while it is on, in its thread, without those of ``known``.

    Attributes:
        peak: the most behind any operator.
    """

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def bytes(self) -> int:
        """Of what is there now."""
        return sum(size for reference, size in self._found.values() if not reference.expired())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                continue
            if (storage := tensor.untyped_storage())._cdata not in self._known:
                # An address may be that of memory that is gone.
                self._found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        return out
