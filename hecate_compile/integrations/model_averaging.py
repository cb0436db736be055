"""Refuse torch's averages of shards over ranks (``PostLocalSGDOptimizer`` and its kin), which would mix experts.

Ranks keep different parts of a sharded parameter, and parameters that are whole on all ranks are equal already.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.algorithms.model_averaging import utils

from hecate.wrap.shard import shard_of

_average_parameters = utils.average_parameters


def refuse_shards() -> None:
    """Make the averaging of shards raise. Further calls change nothing."""
    utils.average_parameters = _average_whole


@functools.wraps(_average_parameters)
def _average_whole(params: Iterator[nn.Parameter], process_group: Any) -> None:
    """Average parameters that every rank has whole, by torch's function."""
    given = list(params)
    for parameter in given:
        shard = shard_of(parameter)
        if shard is not None and shard.world.group is not None:
            raise RuntimeError(
                f"hecate: {shard.name} would be averaged over ranks, each of which has other {shard.part} of it. "
                "Leave PostLocalSGDOptimizer or the averager out: gradients are averaged already, and each expert is "
                "updated by its owner."
            )
    _average_parameters(iter(given), process_group)
