"""shard_context and skip_blocks: attention as people call it, beside attention with the mask written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hecate.passes import PassContext, Remark, Skip
from hecate.passes.attention.drop_causal_masks import drop_causal_masks
from hecate.passes.attention.shard_context import shard_context
from hecate.passes.attention.skip_blocks import skip_blocks
from hecate.passes.fingerprint import fingerprint
from hecate.passes.invariants import verify
from hecate.passes.runner import run_passes
from hecate.runtime.attention.options import S2Attention
from tests.support import reference
from tests.support.extent import ALL
from tests.support.graphs import GraphUnderTest

B, H, G, S, D = 2, 2, 2, 70, 8
SMALL = S2Attention(block=16, local=1, dense_layers=())
Function = Callable[..., Tensor]


class Sharded:
    """A torch.compile backend that runs the passes on what Dynamo captured, and nothing else."""

    def __init__(
        self, options: S2Attention = SMALL, *, key_heads: int | None = None, off: tuple[str, ...] = ()
    ) -> None:
        self.context = PassContext(world_size=1, attention=options, key_heads=key_heads)
        self.off = off
        self.graphs: list[GraphModule] = []
        self.counts: list[tuple[int, int]] = []
        self.skipped: list[Skip] = []
        self.remarks: list[Remark] = []

    def __call__(self, gm: GraphModule, inputs: list[Any]) -> Any:
        passes = [drop_causal_masks, shard_context, skip_blocks]
        _, context, blocks = run_passes(gm, self.context, passes=passes, disabled=self.off, check=verify)
        self.graphs.append(gm)
        self.counts.append((context.rewritten, blocks.rewritten))
        self.skipped += blocks.skipped
        self.remarks += context.remarks
        return gm.forward

    def calls(self) -> list[str]:
        """What attention became, in the last graph."""
        targets = [
            str(getattr(node.target, "__name__", node.target))
            for module in self.graphs[-1].modules()
            if isinstance(module, GraphModule)
            for node in module.graph.nodes
            if node.op == "call_function"
        ]
        return [name.removesuffix(".default") for name in targets if "s2_" in name or "dot_product" in name]


def qkv(length: int = S, *, key_heads: int = H, grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H * G, length, D), (B, key_heads, length, D), (B, key_heads, length, D)]
    return [torch.randn(shape, generator=generator).requires_grad_(grad) for shape in shapes]


def repeat_kv(x: Tensor, count: int = G) -> Tensor:
    """As transformers writes it."""
    b, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(b, heads, count, length, width).reshape(b, heads * count, length, width)


def causal(q: Tensor) -> Tensor:
    positions = torch.arange(q.shape[2])
    return positions[None] <= positions[:, None]


WAYS: dict[str, Function] = {
    "is_causal": lambda q, k, v: F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), is_causal=True),
    "a mask": lambda q, k, v: F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=causal(q)),
    "a mask for each row": lambda q, k, v: F.scaled_dot_product_attention(
        q, repeat_kv(k), repeat_kv(v), causal(q).expand(q.shape[0], 1, -1, -1)
    ),
    "enable_gqa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    "a scale": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True, scale=D**-0.5
    ),
    "repeat_interleave": lambda q, k, v: F.scaled_dot_product_attention(
        q, k.repeat_interleave(G, dim=1), v.repeat_interleave(G, 1), is_causal=True
    ),
    "torch.repeat_interleave": lambda q, k, v: F.scaled_dot_product_attention(
        q, torch.repeat_interleave(k, G, dim=1), torch.repeat_interleave(v, repeats=G, dim=1), is_causal=True
    ),
    "unsqueeze and flatten": lambda q, k, v: F.scaled_dot_product_attention(
        q,
        k.unsqueeze(2).expand(-1, -1, G, -1, -1).flatten(1, 2),
        v.unsqueeze(2).expand(-1, -1, G, -1, -1).flatten(1, 2),
        is_causal=True,
    ),
}


def errors(found: Sharded, function: Function, lengths: tuple[int, ...], options: S2Attention = SMALL) -> float:
    """The worst error of the output and all gradients, against the reference with its mask."""

    def attention(x: Tensor) -> Tensor:
        # One tensor, as a projection makes it: queries and keys are as many whatever their number is.
        return function(*x.split([H * G, H, H], 1))

    model = torch.compile(attention, backend=found, fullgraph=True)
    worst = 0.0
    for length in lengths:
        inputs = qkv(length)
        out = model(torch.cat(inputs, 1))
        expected = reference.s2_attention(*inputs, options.pattern(H * G, H), D**-0.5)
        weights = torch.linspace(0, 1, out.numel()).view(out.shape)
        mine = [out.detach(), *torch.autograd.grad(out, inputs, weights)]
        theirs = [expected.detach(), *torch.autograd.grad(expected, inputs, weights.double())]
        worst = max(worst, *(float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, theirs, strict=True)))
    return worst


OFF: list[tuple[str, ...]] = [(), ("drop_causal_masks", "skip_blocks"), ("skip_blocks",), ("drop_causal_masks",)]


@pytest.mark.parametrize(
    ("name", "off"), [(name, off) for name in WAYS for off in OFF if ALL or not off or name == "a mask"]
)
def test_attention_is_sparse(name: str, off: tuple[str, ...]) -> None:
    found = Sharded(key_heads=H, off=off)
    # The second length makes it an open one.
    assert errors(found, WAYS[name], (S, 100, 33)) < 1e-5
    assert found.counts == [(1, int("skip_blocks" not in off))] * 2
    wanted = ["s2_mask", "scaled_dot_product_attention"] if "skip_blocks" in off else ["s2_attention"]
    assert found.calls() == wanted


@pytest.mark.parametrize(
    "options",
    [
        S2Attention(block=16, local=2, stride=2, dense_layers=()),
        S2Attention(block=16, local=1, stride=4, per="q", dense_layers=()),
        S2Attention(block=16, local=1, offset=1, dense_layers=()),
        S2Attention(block=16, local=1, stride=3, homogeneous=True, allow_holes=True, dense_layers=()),
        S2Attention(block=32, local=1, stride=6, allow_holes=True, dense_layers=()),
    ],
    ids=["local", "per query head", "offset", "homogeneous", "holes"],
)
def test_options(options: S2Attention) -> None:
    assert errors(Sharded(options), WAYS["a mask"], (S, 130), options) < 1e-5


def test_keys_that_are_changed_in_place_are_not_read_through() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = k * 1
        wide = repeat_kv(first)
        first.mul_(0)
        return F.scaled_dot_product_attention(q, wide, repeat_kv(v), is_causal=True)

    with pytest.raises(Exception, match="keys of 4 heads where the model's config says 2"):
        torch.compile(function, backend=Sharded(key_heads=H))(*qkv())
    # A pattern for each query head does not ask.
    options = S2Attention(block=16, local=1, per="q", dense_layers=())
    assert errors(Sharded(options, key_heads=H), function, (S,), options) < 1e-5


def refused(
    function: Function, options: S2Attention = SMALL, inputs: list[Tensor] | None = None, **known: Any
) -> str:
    with pytest.raises(Exception) as caught:
        torch.compile(function, backend=Sharded(options, **known))(*(inputs or qkv()))
    assert "UnsupportedAttentionError" in str(caught.value), caught.value
    return str(caught.value)


def test_refuses_what_would_be_another_model() -> None:
    def attend(**changes: Any) -> Function:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **changes)

    def masked(make: Callable[[Tensor], Tensor]) -> Function:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=make(q), enable_gqa=True)

    assert "it is not causal" in refused(attend())
    assert "dropout" in refused(attend(is_causal=True, dropout_p=0.1))
    near = masked(lambda q: causal(q) & (torch.arange(q.shape[2])[None] > torch.arange(q.shape[2])[:, None] - 20))
    assert "it has a window or another pattern" in refused(near)
    numbers = masked(lambda q: torch.zeros(q.shape[2], q.shape[2]).masked_fill(~causal(q), float("-inf")))
    assert "numbers that are added" in refused(numbers)
    crossed = [qkv(20)[0], *qkv(S)[1:]]
    assert "not causal, or has other queries than keys" in refused(attend(is_causal=True), inputs=crossed)
    text = refused(attend(is_causal=True), key_heads=1)
    assert "keys of 2 heads where the model's config says 1" in text and "dense_layers" in text
    holes = S2Attention(block=16, local=1, stride=4, dense_layers=())
    assert "see only 50% of the context" in refused(attend(is_causal=True), holes)


def test_refuses_padding_and_names_the_input() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor) -> Tensor:
        mask = causal(q) & attention_mask[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    mask = torch.ones(B, S, dtype=torch.bool)
    text = refused(function, inputs=[*qkv(), mask])
    assert "the mask depends on attention_mask: pass none where nothing is padded" in text

    # Without gradients it is looked at when it is there.
    found = Sharded()
    with torch.no_grad():
        model = torch.compile(function, backend=found)
        inputs = qkv()
        expected = reference.s2_attention(*inputs, SMALL.pattern(H * G, H), D**-0.5)
        torch.testing.assert_close(model(*inputs, mask).double(), expected, rtol=1e-5, atol=1e-5)
        assert found.calls() == ["s2_check", "s2_attention"]
        mask[1, 0] = False
        with pytest.raises(ValueError, match="got a mask that is not the causal one"):
            model(*inputs, mask)


def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, repeat_kv(k).transpose(-1, -2)) * D**-0.5
    scores = scores.masked_fill(~causal(q), float("-inf"))
    sinks = torch.zeros(1, 1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return weights @ repeat_kv(v)


def with_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, repeat_kv(k), repeat_kv(v)))
    scores = torch.bmm(q, k.mT).masked_fill(~causal(q[None]), float("-inf"))
    return torch.bmm(F.softmax(scores, -1), v)


def with_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhgid,bhjd->bhgij", q.unflatten(1, (H, G)), k)
    weights = torch.softmax(scores.masked_fill(~causal(q), float("-inf")), -1)
    return torch.einsum("bhgij,bhjd->bhgid", weights, v).flatten(1, 2)


def by_flash_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = repeat_kv(k), repeat_kv(v)
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True)[0]
    return out


@pytest.mark.parametrize("function", [with_sinks, with_bmm, with_groups, by_flash_kernel])
def test_refuses_attention_by_hand(function: Function) -> None:
    assert "computes its weights by hand or by another function" in refused(function)


def test_refuses_multihead_attention() -> None:
    attention = nn.MultiheadAttention(D, 2, batch_first=True)
    hidden = nn.Transformer.generate_square_subsequent_mask(S)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = q[:, 0]
        out: Tensor = attention(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0]
        return out

    assert "nn.MultiheadAttention" in refused(function)


def test_a_router_behind_attention_is_none() -> None:
    gate, weight = nn.Linear(D, 4), torch.randn(D, 4)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = torch.bmm(x[:, 0], x[:, 1].mT) @ x[:, 0]
        return gate(x).softmax(-1) + torch.softmax(x @ weight, -1)

    found = Sharded()
    torch.compile(function, backend=found)(*qkv())
    assert found.counts == [(1, 1)]


class Block(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Layers(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for layer in self.layers:
            q = checkpoint(layer, q, k, v, use_reentrant=False) if self.checkpointed else layer(q, k, v)
        return q


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("dense", [(0, 2), (), "every 2nd"])
def test_dense_layers(dense: Any, checkpointed: bool) -> None:
    options = S2Attention(block=16, local=1, dense_layers=dense)
    found = Sharded(options)
    inputs = qkv()
    out = torch.compile(Layers(checkpointed), backend=found, fullgraph=True)(*inputs)
    expected = inputs[0].double()
    full = S2Attention(block=16, local=100, dense_layers=())
    for layer in range(3):
        p = (full if options.is_dense(layer) else options).pattern(H * G, H)
        expected = expected + reference.s2_attention(expected, *inputs[1:], p, D**-0.5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    sparse = sum(not options.is_dense(layer) for layer in range(3))
    assert found.counts == [(sparse, sparse)]
    assert len(found.remarks) == (3 if dense else sparse)
    dense_ones = [remark.where for remark in found.remarks if remark.text.startswith("dense")]
    assert len(dense_ones) == 3 - sparse
    numbers = [int(remark.where.removeprefix("layers.")) for remark in found.remarks]
    assert numbers == ([0, 1, 2] if dense else [layer for layer in range(3) if not options.is_dense(layer)])
    sparse_ones = [remark.text for remark in found.remarks if remark.text.startswith("sparse, 2 patterns, stride 2")]
    assert len(sparse_ones) == sparse


def test_masks_of_checkpointed_layers_come_from_outside() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=mask)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, q, k, v, causal(q), use_reentrant=False)
        return out

    found = Sharded(key_heads=H)
    assert errors(found, function, (S, 100)) < 1e-5
    assert found.counts == [(1, 1)] * 2


def test_a_layer_without_a_number_is_refused() -> None:
    text = refused(WAYS["a mask"], S2Attention(block=16, local=1))
    assert "its number is not known" in text and text.count("dense_layers=") == 1, text


@pytest.mark.parametrize("off", [(), ("skip_blocks",)])
def test_one_query_looks_at_what_it_would_see(off: tuple[str, ...]) -> None:
    """As in generation with a cache of all keys."""

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q[:, :, -1:], repeat_kv(k), repeat_kv(v), attn_mask=mask)

    found = Sharded(key_heads=H, off=off)
    model = torch.compile(function, backend=found)
    with torch.no_grad():
        for length in (40, 41, 64, 65, 130):
            inputs = qkv(length)
            expected = reference.s2_attention(*inputs, SMALL.pattern(H * G, H), D**-0.5)[:, :, -1:]
            torch.testing.assert_close(model(*inputs).double(), expected, rtol=1e-5, atol=1e-5)
            given = torch.ones(B, 1, 1, length, dtype=torch.bool)
            torch.testing.assert_close(model(*inputs, given).double(), expected, rtol=1e-5, atol=1e-5)
        if not off:
            assert found.calls() == ["s2_check", "s2_store", "s2_store", "s2_decode"]
        given[0, 0, 0, 0] = False
        with pytest.raises(ValueError, match="not the causal one"):
            model(*inputs, given)


def test_what_ranks_compare_does_not_have_the_length() -> None:
    lines = []
    for length in (70, 100):
        found = Sharded()
        torch.compile(WAYS["a mask"], backend=found, dynamic=False)(*qkv(length))
        lines.append(fingerprint(found.graphs[0]))
    assert lines[0] == lines[1]
    found = Sharded(S2Attention(block=16, local=2, dense_layers=()))
    torch.compile(WAYS["a mask"], backend=found, dynamic=False)(*qkv())
    assert fingerprint(found.graphs[0]) != lines[0]


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_casts_operands(inside: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), is_causal=True)

    results = []
    for off in ((), ("skip_blocks",)):
        found, inputs = Sharded(off=off), qkv()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
            # As whoever runs a compiled graph: what was cast is in it.
            model = torch.compile(function if inside else WAYS["enable_gqa"], backend=found)
            out = model(*inputs)
        assert out.dtype == torch.bfloat16 and found.counts == [(1, int(not off))] and not found.skipped
        gradients = torch.autograd.grad(out.float().square().sum(), inputs)
        results.append([out, *gradients])
        assert {x.dtype for x in gradients} == {torch.float32}
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)


def test_nothing_happens_without_the_option() -> None:
    found = Sharded()
    found.context = PassContext(world_size=1)
    torch.compile(WAYS["is_causal"], backend=found)(*qkv())
    assert found.counts == [(0, 0)] and found.calls() == ["scaled_dot_product_attention"]


def test_who_refuses_leaves_the_graph_as_it_was(g: GraphUnderTest) -> None:
    q, k, v = (g.input(torch.randn(1, heads, 1, D)) for heads in (6, 2, 2))
    with g.graph.inserting_after(v):
        mask = g.graph.call_function(torch.ops.hecate.s2_mask.default, (q, k, None, [16, 1, 3, 0, 3]))
    mask.meta["example_value"] = torch.ones(6, 1, 1, dtype=torch.bool)
    out = g.graph.call_function(F.scaled_dot_product_attention, (q, k, v, mask), {"enable_gqa": True})
    # As under autocast, so that operands would be cast.
    out.meta["example_value"] = torch.zeros(1, 6, 1, D, dtype=torch.bfloat16)
    gm = g.finish(out)
    before = [node.name for node in gm.graph.nodes]
    with torch.no_grad():
        outcome = skip_blocks(gm, PassContext(world_size=1))
    assert outcome.rewritten == 0 and "2 heads of keys have 3 patterns" in outcome.skipped[0].reason
    assert [node.name for node in gm.graph.nodes] == before
