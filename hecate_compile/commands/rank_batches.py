"""A batch of its own for every rank, made of one.

Where all ranks compute the same, nobody sees that communication is missing: a mean of equal numbers is each of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

import torch

from hecate.commands.built import Batch


def batch_of_rank(batch: Batch, rank: int, ranks: int) -> Batch:
    """This rank's part of the rows, repeated to as many rows as there were; of one row, its tokens in another order.

    Shapes stay what they were. A tensor with another number of rows than most have is left as it is.
    """
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim}
    if ranks == 1 or not tensors:
        return batch
    rows = Counter(value.shape[0] for value in tensors.values()).most_common(1)[0][0]
    if rows == 1:
        return dict(batch) | _shuffled(tensors, rank)
    parts = torch.arange(rows, device="cpu").tensor_split(min(rows, ranks))
    part = parts[rank % len(parts)]
    chosen = part.repeat(-(-rows // len(part)))[:rows]
    return dict(batch) | {
        key: value[chosen.to(value.device)] for key, value in tensors.items() if value.shape[0] == rows
    }


def _shuffled(tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Tokens of one sequence in an order that is this rank's; labels and masks of as many follow them."""
    # Positions say where, not what.
    found = {
        key: value
        for key, value in tensors.items()
        if value.ndim > 1 and not value.is_floating_point() and "position" not in key
    }
    if rank == 0 or not found:
        return {}
    # What is as long is about tokens; sizes of images, for instance, are not.
    known = found.get("input_ids")
    counted = Counter(value.shape[1] for value in found.values())
    length = known.shape[1] if known is not None else counted.most_common(1)[0][0]
    order = torch.randperm(length, generator=torch.Generator().manual_seed(rank), device="cpu")
    return {key: value[:, order.to(value.device)] for key, value in found.items() if value.shape[1] == length}


def fingerprint_of(batch: Batch) -> str:
    """Equal for equal tensors."""
    digest = hashlib.sha256()
    for key, value in sorted(batch.items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{key} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
