"""Operators that bring a token's row to each node once, and the sum of its results back.

| operator | shapes | backward |
|---|---|---|
| ``route_nodes`` | ``[R], [W,E], [E,W], [2,W], [n], [R'] -> [4,W], [u], [m], [R']``, a ticket by nodes | none |
| ``exchange_nodes`` | ``[R,...] -> [R',...]`` | ``exchange_nodes_back`` with the same ticket |
| ``exchange_nodes_back`` | ``[R',...] -> [R,...]`` | ``exchange_nodes`` with the same ticket |

They are right where rows of one token are equal on the way there, and only the sum over a token's rows is used on the
way back: the sum of the rows that come from one node stands in one of them, the others are zero
(``hecate.passes.analysis.node_rows`` proves both). Each is the transpose of the other.
``choices`` is for the planner: how many rows each token has, 0 if that is not known.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hecate.runtime.comm.queue import Job
from hecate.runtime.ops.exchange import differentiate_exchange
from hecate.runtime.ops.registration import define_collective
from hecate.runtime.state.layer import Relaying, get_layer


def _route_nodes(
    tokens: Tensor,
    counts: Tensor,
    placement: Tensor,
    splits: Tensor,
    send_index: Tensor,
    receive_index: Tensor,
    choices: int,
    layer: int,
) -> Job:
    record = get_layer(layer)
    if choices and record.sizes.together != choices:
        # Plans of this layer count tokens from now on, on all ranks.
        record.placer.sizes = replace(record.sizes, together=choices)
    assert isinstance(record.carrier, Relaying), "passes ask for tickets by nodes only of carriers that relay"
    used = record.placer.find(placement)
    return record.carrier.route_nodes(record, tokens, counts, used, (splits, send_index, receive_index))


def _route_nodes_fake(
    tokens: Tensor,
    counts: Tensor,
    placement: Tensor,
    splits: Tensor,
    send_index: Tensor,
    receive_index: Tensor,
    choices: int,
    layer: int,
) -> list[Tensor]:
    ctx = torch.library.get_ctx()
    return [
        torch.empty((4, get_layer(layer).world.size), dtype=torch.int64, device="cpu"),
        send_index.new_empty((ctx.new_dynamic_size(),)),
        send_index.new_empty((ctx.new_dynamic_size(),)),
        torch.empty_like(receive_index),
    ]


def _exchange_nodes(
    rows: Tensor, splits: Tensor, send_index: Tensor, middle_index: Tensor, receive_index: Tensor, layer: int
) -> Job:
    record = get_layer(layer)
    return record.carrier.dispatch(record, rows, (splits, send_index, middle_index, receive_index))


def _exchange_nodes_fake(
    rows: Tensor, splits: Tensor, send_index: Tensor, middle_index: Tensor, receive_index: Tensor, layer: int
) -> Tensor:
    return rows.new_empty((receive_index.shape[0], *rows.shape[1:]))


def _exchange_nodes_back(
    rows: Tensor,
    splits: Tensor,
    send_index: Tensor,
    middle_index: Tensor,
    receive_index: Tensor,
    num_rows: int,
    layer: int,
) -> Job:
    record = get_layer(layer)
    return record.carrier.combine(record, rows, (splits, send_index, middle_index, receive_index), num_rows)


def _exchange_nodes_back_fake(
    rows: Tensor,
    splits: Tensor,
    send_index: Tensor,
    middle_index: Tensor,
    receive_index: Tensor,
    num_rows: int,
    layer: int,
) -> Tensor:
    return rows.new_empty((num_rows, *rows.shape[1:]))


define_collective(
    "route_nodes(Tensor tokens, Tensor counts, Tensor placement, Tensor splits, Tensor send_index, "
    "Tensor receive_index, int choices, int layer) -> Tensor[]",
    _route_nodes,
    _route_nodes_fake,
    role="exchange",
    carries="tickets",
    saved_in_checkpoints="always",
    results="node_splits, node_send_index, node_middle_index, node_receive_index[R']",
    whole="node_ticket",
)
define_collective(
    "exchange_nodes(Tensor rows, Tensor splits, Tensor send_index, Tensor middle_index, Tensor receive_index, "
    "int layer) -> Tensor",
    _exchange_nodes,
    _exchange_nodes_fake,
    role="exchange",
    carries="rows",
    hops=2,
    saved_in_checkpoints="always",
    results="rows",
)
define_collective(
    "exchange_nodes_back(Tensor rows, Tensor splits, Tensor send_index, Tensor middle_index, Tensor receive_index, "
    "SymInt num_rows, int layer) -> Tensor",
    _exchange_nodes_back,
    _exchange_nodes_back_fake,
    role="exchange",
    carries="rows",
    homeward=True,
    hops=2,
    saved_in_checkpoints="always",
    results="results",
)


differentiate_exchange("exchange_nodes", "exchange_nodes_back")
