"""Every operator against its plain reference, on several ranks (threads), and opcheck on each."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hecate.runtime import reference
from hecate.runtime.layer import Layer, add_layer
from hecate.runtime.owners import Owners
from hecate.runtime.world import SINGLE, World
from tests.threads import on_threads

OWNERS = {
    "contiguous": Owners((0, 0, 1, 1, 2), 3),
    "shuffled": Owners((2, 0, 1, 0, 2), 3),
    "one rank owns nothing": Owners((2, 0, 2, 0, 2), 3),
}


def routed(rank: int, *, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[R, 4]`` and offsets ``[5]``: other counts on every rank, expert 1 without rows, rank 2 empty."""
    counts = torch.tensor([[3, 0, 2, 1, 4], [1, 0, 0, 5, 2], [0, 0, 0, 0, 0]][rank])
    rows = torch.randn(int(counts.sum()) + padding, 4, generator=torch.Generator().manual_seed(rank))
    return rows, counts.cumsum(0).to(torch.int32)


@pytest.mark.parametrize("name", OWNERS)
def test_gather_and_reduce_scatter(name: str) -> None:
    owners = OWNERS[name]
    full = torch.randn(5, 2, 3)

    def check(world: World) -> None:
        layer = add_layer(name="test", owners=owners, world=world)
        shard = full[owners.owned_by(world.rank)].clone().requires_grad_()
        out = torch.ops.hecate.gather_experts(shard, 5, layer.id)
        shards = [full[owners.owned_by(rank)] for rank in range(3)]
        assert torch.equal(out, reference.gather_experts(shards, owners))
        grads = [torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
        out.backward(grads[world.rank])
        torch.testing.assert_close(shard.grad, reference.reduce_scatter_experts(grads, owners)[world.rank])

    on_threads(check)


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("name", OWNERS)
def test_exchange_and_back(name: str, padding: int) -> None:
    owners = OWNERS[name]
    everyone = [routed(rank, padding=padding) for rank in range(3)]
    rows_of, offsets_of = [rows for rows, _ in everyone], [offsets for _, offsets in everyone]
    arrived, slot_offsets = reference.exchange(rows_of, offsets_of, owners)

    def check(world: World) -> None:
        layer = add_layer(name="test", owners=owners, world=world)
        rows, offsets = rows_of[world.rank].clone().requires_grad_(), offsets_of[world.rank]
        ends, *ticket = torch.ops.hecate.route(offsets, owners.counts[world.rank], layer.id)
        assert torch.equal(ends, slot_offsets[world.rank])
        out = torch.ops.hecate.exchange(rows, *ticket, layer.id)
        assert torch.equal(out, arrived[world.rank])
        back = torch.ops.hecate.exchange_back(out * 2, *ticket, rows.shape[0], layer.id)
        expected = reference.exchange_back([a * 2 for a in arrived], offsets_of, owners, [len(r) for r in rows_of])
        assert torch.equal(back, expected[world.rank])
        # The way there and back is the identity on rows that travel, so the gradient comes back doubled.
        grad = torch.randn_like(back)
        back.backward(grad)
        sent = int(offsets[-1])
        torch.testing.assert_close(rows.grad, torch.cat([grad[:sent] * 2, torch.zeros(padding, 4)]))
        assert torch.equal(layer.counts, torch.stack([o.diff(prepend=o.new_zeros(1)) for o in offsets_of]).long())
        assert layer.bytes_sent == 2 * (_bytes(layer, "out") + _bytes(layer, "in"))

    on_threads(check)


def _bytes(layer: Layer, direction: str) -> int:
    """Bytes of float32 rows of width 4 that leave this rank on the way out, or on the way back."""
    assert layer.counts is not None
    me, total = layer.world.rank, 0
    for expert, owner in enumerate(layer.owners.ranks):
        if direction == "out" and owner != me:
            total += int(layer.counts[me, expert])
        if direction == "in" and owner == me:
            total += int(layer.counts[:, expert].sum() - layer.counts[me, expert])
    return total * 16


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm(dtype: torch.dtype, transposed: bool) -> None:
    offs = torch.tensor([2, 2, 7], dtype=torch.int32)
    x = torch.randn(9, 4).to(dtype).requires_grad_()
    stored = torch.randn(3, 5, 4) if transposed else torch.randn(3, 4, 5)
    w = stored.to(dtype).requires_grad_()
    used = w.transpose(1, 2) if transposed else w
    out = torch.ops.hecate.grouped_mm(x, used, offs)
    expected = reference.grouped_mm(x, used, offs)
    torch.testing.assert_close(out, expected)
    assert not out[7:].any(), "padding rows are zero"
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, w), grad)
    theirs = torch.autograd.grad(expected, (x, w), grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert not ours[1][1].any(), "an expert without rows gets a zero gradient"
    assert ours[1].stride() == w.stride(), "the gradient lies in memory like the weight"


def test_grouped_mm_without_rows_or_slots() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    assert torch.ops.hecate.grouped_mm(torch.zeros(0, 4), torch.zeros(0, 4, 5), none).shape == (0, 5)
    offs = torch.zeros(3, dtype=torch.int32)
    assert torch.ops.hecate.grouped_mm(torch.zeros(0, 4), torch.randn(3, 4, 5), offs).shape == (0, 5)
    grad = torch.ops.hecate.grouped_mm_weight_grad(torch.zeros(0, 4), torch.zeros(0, 5), offs, False)
    assert grad.shape == (3, 4, 5) and not grad.any()


def test_grouped_mm_gradcheck() -> None:
    offs = torch.tensor([1, 1, 4], dtype=torch.int32)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: torch.ops.hecate.grouped_mm(x, w, offs), (x, w))


def test_flops_count_all_rows() -> None:
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(2, 4, 5, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        torch.ops.hecate.grouped_mm(x, w, torch.tensor([2, 6])).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 4 * 5


def test_row_slots_and_offsets() -> None:
    offs = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    assert torch.equal(torch.ops.hecate.row_slots(offs, 7), reference.row_slots(offs, 7))
    assert torch.ops.hecate.sizes_to_offsets([0, 3, 0, 2], offs).tolist() == offs.tolist()


OPCHECKS: dict[str, tuple[object, ...]] = {
    "gather_experts": (torch.randn(4, 2, 3, requires_grad=True), 4),
    "reduce_scatter_experts": (torch.randn(4, 2, 3), 4),
    "route": (torch.tensor([1, 1, 4, 6], dtype=torch.int32), 4),
    "count_rows": (torch.tensor([1, 1, 4, 6], dtype=torch.int32),),
    "exchange": (
        torch.randn(6, 3, requires_grad=True), torch.tensor([[6], [6]]), torch.randperm(6), torch.randperm(6),
    ),
    "exchange_back": (
        torch.randn(6, 3, requires_grad=True), torch.tensor([[6], [6]]), torch.randperm(6), torch.randperm(6), 6,
    ),
    "grouped_mm": (
        torch.randn(6, 3, requires_grad=True), torch.randn(2, 3, 5, requires_grad=True), torch.tensor([2, 6]),
    ),
    "grouped_mm_weight_grad": (torch.randn(6, 3), torch.randn(6, 5), torch.tensor([2, 6]), True),
    "row_slots": (torch.tensor([2, 6]), 6),
    "sizes_to_offsets": ([2, 4], torch.zeros(1)),
}  # fmt: skip
_WITHOUT_LAYER = ("grouped_mm", "grouped_mm_weight_grad", "row_slots", "sizes_to_offsets")


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name: str) -> None:
    layer = add_layer(name="test", owners=Owners.contiguous(4, 1), world=SINGLE)
    arguments = OPCHECKS[name] if name in _WITHOUT_LAYER else (*OPCHECKS[name], layer.id)
    torch.library.opcheck(getattr(torch.ops.hecate, name).default, arguments)


def test_every_operator_is_checked() -> None:
    defined = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "hecate::" in name
    }
    assert defined == {*OPCHECKS, "average_gradients"}


def test_unknown_layer_is_named() -> None:
    with pytest.raises(LookupError, match="MoE layer 123456"):
        torch.ops.hecate.gather_experts(torch.zeros(1, 1), 1, 123456)
