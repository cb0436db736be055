"""SparseAllGather and SparseReduceScatter as one-sided writes on one node (paper, section 2).

This is ``sparse_collectives`` for ``Config(transport="symmetric")``. Who sends which expert to whom is in
``ExpertTables`` on the device, and kernels read it there: launches are the same for all placements for which tables
have room. Sums are made in the order of ``sparse_collectives``: gradients are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hecate.runtime.kernels.pack_experts import pack_experts, widths_of
from hecate.runtime.kernels.sum_replicas import sum_replicas
from hecate.runtime.one_sided.device_tables import ExpertTables
from hecate.runtime.one_sided.exchanges import Exchanges
from hecate.runtime.ops.sparse_collectives import by_dtype, room_like, sum_dtype


def gather(exchanges: Exchanges, tables: ExpertTables, shards: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Pack experts that leave, and return a function that sends them: ``[E_r, ...] -> [K, ...]`` of each tensor."""
    groups = by_dtype([shard.dtype for shard in shards])
    widths, shapes = widths_of(shards), [shard.shape[1:] for shard in shards]
    # Experts that leave are copied: an optimizer may step before they have left.
    packed = [pack_experts([shards[place] for place in group], tables.leave) for group in groups]
    replicas = [shard.new_empty((tables.replicas, *shard.shape[1:])) for shard in shards]

    def run() -> list[Tensor]:
        for group, leaving in zip(groups, packed, strict=True):
            came = leaving[:0]
            if tables.travels:
                came = exchanges.carry(leaving, tables.sends, tables.receives, room=tables.replicas, most=tables.most)
            for place, part in zip(group, came.split([widths[place] for place in group], dim=1), strict=True):
                replicas[place].copy_(part.view(len(part), *shapes[place]))
        return replicas

    return run


def reduce(
    exchanges: Exchanges, tables: ExpertTables, own: Sequence[Tensor], replicas: Sequence[Tensor]
) -> Callable[[], list[Tensor]]:
    """Pack gradients, and return a function that brings the mean over ranks of the slots' gradients to the owners.

    ``[E_r, ...], [K, ...] -> [E_r, ...]``.
    """
    world_size = exchanges.world.size
    groups, widths = by_dtype([grad.dtype for grad in own]), widths_of(own)
    packed = [
        torch.cat([replicas[place].reshape(len(replicas[place]), widths[place]) for place in group], dim=1)
        for group in groups
    ]
    means = [torch.div(grad, world_size, out=room_like(grad)) for grad in own]
    sums = [pack_experts([grad], tables.summed, dtype=sum_dtype(grad.dtype)) for grad in own]

    def run() -> list[Tensor]:
        if not tables.travels:
            return means
        for group, leaving in zip(groups, packed, strict=True):
            came = exchanges.carry(leaving, tables.receives, tables.sends, room=len(tables.order), most=tables.most)
            for place, part in zip(group, came.split([widths[place] for place in group], dim=1), strict=True):
                sum_replicas(sums[place], part, tables.begins, tables.order, tables.rounds)
        for mean, total in zip(means, sums, strict=True):
            mean.index_copy_(0, tables.summed, (total / world_size).to(mean.dtype).view(len(total), *mean.shape[1:]))
        return means

    return run
