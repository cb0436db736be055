"""Torch's averages of parameters over ranks (``PostLocalSGDOptimizer`` and its kin), which would mix experts.

Ranks that keep parts of a parameter keep different ones, and what is whole on all ranks is equal already.
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
    """From now on averaging shards raises. The first call does it."""
    utils.average_parameters = _average_whole


@functools.wraps(_average_parameters)
def _average_whole(params: Iterator[nn.Parameter], process_group: Any) -> None:
    """Torch's function; of parameters that every rank has whole."""
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
