"""Every operator passes torch's own checks, and its halves are the whole."""

from __future__ import annotations

import pytest
import torch

from hecate.runtime.attention.pattern import Pattern
from hecate.runtime.comm.collective import collective_named, collectives
from hecate.runtime.comm.world import SINGLE
from hecate.runtime.one_sided.carrier import OneSided
from hecate.runtime.one_sided.exchanges import Exchanges
from hecate.runtime.one_sided.transport import Transport
from hecate.runtime.one_sided.windows import local_windows
from hecate.runtime.ops.dense import add_dense_shard
from hecate.runtime.ops.gradients import GradientSync, add_replicated
from hecate.runtime.placement.owners import Owners
from tests.support.graphs import number_of
from tests.support.layers import add_layer

OWNED = torch.full((4, 1), 2, dtype=torch.int8)
# At one rank there are no replicas.
NONE = torch.arange(0)
ROWS, OFFSETS = torch.randn(6, 3, requires_grad=True), torch.tensor([1, 1, 4, 6], dtype=torch.int32)
COUNTS, SPLITS = torch.tensor([[1, 0, 3, 2]]), torch.tensor([[6], [6]])
# Of exchanges, and of those that cross to each node once.
TICKET = (SPLITS, torch.randperm(6), torch.randperm(6))
TOKENS = torch.tensor([0, 1, 0, 2, 2, 1])
NODE_TICKET = (torch.tensor([[3], [3], [6], [6]]), torch.tensor([0, 1, 3]), TOKENS, torch.randperm(6))
EXPERTS = [torch.randn(4, 2, 3), torch.randn(4, 2)]
REPLICAS = [expert[:0] for expert in EXPERTS]
# Without the layer, which is the last argument.
OF_LAYERS: dict[str, tuple[object, ...]] = {
    "gather_experts": (torch.randn(4, 2, 3, requires_grad=True), 4),
    "reduce_scatter_experts": (torch.randn(4, 2, 3), 4),
    "place": (torch.zeros(1),),
    "sparse_all_gather": (EXPERTS, OWNED, NONE),
    "sparse_reduce_scatter": (EXPERTS, REPLICAS, OWNED, 4),
    "gather_counts": (OFFSETS, OWNED),
    "calibrate": (COUNTS, OWNED),
    "top_up": (EXPERTS, REPLICAS, OWNED, OWNED, NONE),
    "route": (COUNTS, OWNED, OFFSETS, 4, 0, 2),
    "count_rows": (OFFSETS,),
    "hold_choices": (torch.tensor([[0, 3], [1, 2]]), 0, 2, 2, True, 0),
    "average_fractions": (torch.rand(5),),
    "exchange": (ROWS, *TICKET),
    "exchange_back": (ROWS, *TICKET, 6),
    "route_nodes": (TOKENS, COUNTS, OWNED, SPLITS, torch.arange(6), torch.arange(6), 2),
    "exchange_nodes": (ROWS, *NODE_TICKET),
    "exchange_nodes_back": (ROWS, *NODE_TICKET, 6),
}
GRAD, OWN, MORE = torch.randn(6, 5), *(torch.randn(n, 3, 5, requires_grad=True) for n in (2, 1))
SYNC, P = GradientSync(SINGLE), Pattern(block=16, local=1, stride=2, offset=0, patterns=2)
DENSE = [number_of(add_dense_shard("p", torch.Size((3, 2)), SYNC)) for _ in range(2)]
MODULE = torch.nn.Linear(1, 3)
BIAS = [number_of(add_replicated(MODULE, "bias", SYNC))]
Q, K, V = (torch.randn(1, heads, 40, 8, requires_grad=True) for heads in (4, 2, 2))
STORED = torch.randn(1, 2, P.stored(40), 8)
QKV = Q.detach(), K.detach(), V.detach()
OUT, LSE = torch.ops.hecate.s2_attention(*QKV, None, P.numbers, 1.0)
OTHERS: dict[str, tuple[object, ...]] = {
    "average_gradients": ([torch.randn(3)], BIAS),
    "gather_dense": ([torch.randn(3, 2, requires_grad=True) for _ in DENSE], DENSE, torch.float64),
    "reduce_scatter_dense": ([torch.randn(3, 2) for _ in DENSE], DENSE, torch.float32),
    "s2_attention": (Q, K, V, None, P.numbers, 1.0),
    "s2_attention_backward": (torch.randn_like(OUT), *QKV, OUT, LSE, P.numbers, 1.0),
    "s2_mask": (*QKV[:2], None, P.numbers),
    "s2_stored_mask": (QKV[0][:, :, :1], STORED, 40, None, P.numbers),
    "s2_check": ("layer", torch.ones(4, 4, dtype=torch.bool).tril()),
    "s2_store": (STORED, QKV[1][:, :, :1], 40, P.numbers),
    "s2_decode": (QKV[0][:, :, :1], STORED, STORED, 40, None, P.numbers, 1.0),
    "grouped_mm": (ROWS, OWN, torch.tensor([2, 6])),
    "grouped_mm_weight_grad": (ROWS.detach(), GRAD, torch.tensor([2, 6]), True),
    "grouped_mm_pair": (ROWS, OWN, MORE, torch.tensor([2, 5, 6])),
    "grouped_mm_pair_weight_grad": (ROWS.detach(), GRAD, torch.tensor([2, 5, 6]), 2, 1, True),
    "row_slots": (torch.tensor([2, 6]), 6),
    "sizes_to_offsets": ([2, 4], torch.zeros(1)),
}


@pytest.mark.parametrize("name", OF_LAYERS | OTHERS)
def test_opcheck(name: str) -> None:
    layer = add_layer(name="test", owners=Owners.contiguous(4, 1), world=SINGLE)
    arguments = (*OF_LAYERS[name], layer.id) if name in OF_LAYERS else OTHERS[name]
    torch.library.opcheck(getattr(torch.ops.hecate, name).default, arguments)


def test_opcheck_of_a_route_with_bounded_room() -> None:
    exchanges = Exchanges(SINGLE, Transport(local_windows(1, 128, SINGLE.device)[0], seconds=1.0))
    layer = add_layer(name="test", owners=Owners.contiguous(4, 1), world=SINGLE, carrier=OneSided(exchanges, 150))
    torch.library.opcheck(torch.ops.hecate.route.default, (COUNTS, OWNED, OFFSETS, 4, 7, 1, layer.id))


def test_every_operator_is_checked() -> None:
    defined = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "hecate::" in name
    }
    halves = {half.name().split("::")[1] for one in collectives() for half in (one.start, one.wait)}
    assert defined - halves == {*OF_LAYERS, *OTHERS}


@pytest.mark.parametrize("name", [collective.name for collective in collectives() if collective.name in OF_LAYERS])
def test_a_start_and_its_wait_are_the_collective(name: str) -> None:
    layer = add_layer(name="test", owners=Owners.contiguous(4, 1), world=SINGLE)
    collective = getattr(torch.ops.hecate, name).default
    arguments = (*OF_LAYERS[name], layer.id)
    split = collective_named(name)
    with torch.no_grad():
        whole = collective(*arguments)
        token = split.start(*arguments, [], "forward name 0.5 1 64 a subject")
        halves = split.wait(token, *arguments, [])
    torch.testing.assert_close(halves, whole, rtol=0, atol=0)
    span = SINGLE.queue.spans[-1]
    assert (span.operator, span.subject, span.predicted, span.behind) == ("name", "a subject", 0.5, 1.0)
    assert span.started <= span.begun <= span.ended <= span.ready


def test_unknown_layer_is_named() -> None:
    with pytest.raises(LookupError, match="MoE layer 123456"):
        torch.ops.hecate.gather_experts(torch.zeros(1, 1), 1, 123456)
