"""Every operator passes torch's own checks, and its halves are the whole."""

from __future__ import annotations

import pytest
import torch

from hecate.runtime.comm.collective import collective_named, collectives
from hecate.runtime.comm.world import SINGLE
from hecate.runtime.one_sided.carrier import OneSided
from hecate.runtime.one_sided.exchanges import Exchanges
from hecate.runtime.one_sided.transport import Transport
from hecate.runtime.one_sided.windows import local_windows
from hecate.runtime.placement.owners import Owners
from tests.runtime.attention import test_s2_attention
from tests.support.layers import add_layer

OWNED = torch.full((4, 1), 2, dtype=torch.int8)
# At one rank there are no replicas.
NONE = torch.arange(0)
OPCHECKS: dict[str, tuple[object, ...]] = {
    "gather_experts": (torch.randn(4, 2, 3, requires_grad=True), 4),
    "reduce_scatter_experts": (torch.randn(4, 2, 3), 4),
    "place": (torch.zeros(1),),
    "sparse_all_gather": ([torch.randn(4, 2, 3), torch.randn(4, 2)], OWNED, NONE),
    "sparse_reduce_scatter": (
        [torch.randn(4, 2, 3), torch.randn(4, 2)],
        [torch.randn(0, 2, 3), torch.randn(0, 2)],
        OWNED,
        4,
    ),
    "gather_counts": (torch.tensor([1, 1, 4, 6], dtype=torch.int32), OWNED),
    "calibrate": (torch.tensor([[1, 0, 3, 2]]), OWNED),
    "top_up": ([torch.randn(4, 2, 3)], [torch.randn(0, 2, 3)], OWNED, OWNED, NONE),
    "route": (torch.tensor([[1, 0, 3, 2]]), OWNED, torch.tensor([1, 1, 4, 6], dtype=torch.int32), 4, 0, 2),
    "count_rows": (torch.tensor([1, 1, 4, 6], dtype=torch.int32),),
    "exchange": (
        torch.randn(6, 3, requires_grad=True),
        torch.tensor([[6], [6]]),
        torch.randperm(6),
        torch.randperm(6),
    ),
    "exchange_back": (
        torch.randn(6, 3, requires_grad=True),
        torch.tensor([[6], [6]]),
        torch.randperm(6),
        torch.randperm(6),
        6,
    ),
    "route_nodes": (
        torch.tensor([0, 1, 0, 2, 2, 1]),
        torch.tensor([[1, 0, 3, 2]]),
        OWNED,
        torch.tensor([[6], [6]]),
        torch.arange(6),
        torch.arange(6),
        2,
    ),
    "exchange_nodes": (
        torch.randn(6, 3, requires_grad=True),
        torch.tensor([[3], [3], [6], [6]]),
        torch.tensor([0, 1, 3]),
        torch.tensor([0, 1, 0, 2, 2, 1]),
        torch.randperm(6),
    ),
    "exchange_nodes_back": (
        torch.randn(6, 3, requires_grad=True),
        torch.tensor([[3], [3], [6], [6]]),
        torch.tensor([0, 1, 3]),
        torch.tensor([0, 1, 0, 2, 2, 1]),
        torch.randperm(6),
        6,
    ),
    "grouped_mm": (
        torch.randn(6, 3, requires_grad=True),
        torch.randn(2, 3, 5, requires_grad=True),
        torch.tensor([2, 6]),
    ),
    "grouped_mm_weight_grad": (torch.randn(6, 3), torch.randn(6, 5), torch.tensor([2, 6]), True),
    "grouped_mm_pair": (
        torch.randn(6, 3, requires_grad=True),
        torch.randn(2, 3, 5, requires_grad=True),
        torch.randn(1, 3, 5, requires_grad=True),
        torch.tensor([2, 5, 6]),
    ),
    "grouped_mm_pair_weight_grad": (torch.randn(6, 3), torch.randn(6, 5), torch.tensor([2, 5, 6]), 2, 1, True),
    "row_slots": (torch.tensor([2, 6]), 6),
    "sizes_to_offsets": ([2, 4], torch.zeros(1)),
}
_WITHOUT_LAYER = (
    "grouped_mm",
    "grouped_mm_weight_grad",
    "grouped_mm_pair",
    "grouped_mm_pair_weight_grad",
    "row_slots",
    "sizes_to_offsets",
)


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name: str) -> None:
    layer = add_layer(name="test", owners=Owners.contiguous(4, 1), world=SINGLE)
    arguments = OPCHECKS[name] if name in _WITHOUT_LAYER else (*OPCHECKS[name], layer.id)
    torch.library.opcheck(getattr(torch.ops.hecate, name).default, arguments)


def test_opcheck_of_a_route_with_bounded_room() -> None:
    exchanges = Exchanges(SINGLE, Transport(local_windows(1, 128, SINGLE.device)[0], seconds=1.0))
    layer = add_layer(name="test", owners=Owners.contiguous(4, 1), world=SINGLE, carrier=OneSided(exchanges, 150))
    counts, offsets = torch.tensor([[1, 0, 3, 2]]), torch.tensor([1, 1, 4, 6], dtype=torch.int32)
    torch.library.opcheck(torch.ops.hecate.route.default, (counts, OWNED, offsets, 4, 7, 1, layer.id))


def test_every_operator_is_checked() -> None:
    defined = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "hecate::" in name
    }
    halves = {half.name().split("::")[1] for one in collectives() for half in (one.start, one.wait)}
    # Those of other modules are checked beside their own tests.
    elsewhere = {"average_gradients", "gather_dense", "reduce_scatter_dense", *test_s2_attention.OPCHECKS}
    assert defined - halves == {*OPCHECKS, *elsewhere}


@pytest.mark.parametrize("name", [collective.name for collective in collectives() if collective.name in OPCHECKS])
def test_a_start_and_its_wait_are_the_collective(name: str) -> None:
    layer = add_layer(name="test", owners=Owners.contiguous(4, 1), world=SINGLE)
    collective = getattr(torch.ops.hecate, name).default
    arguments = (*OPCHECKS[name], layer.id)
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
