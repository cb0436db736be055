"""S2-Attention against dense attention with its mask in float64; its cache; its masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hecate.runtime.attention import s2_attention, s2_blocks
from hecate.runtime.attention.options import UnsupportedAttentionError
from hecate.runtime.attention.pattern import Pattern
from tests.support import reference
from tests.support.extent import ALL

ops = torch.ops.hecate


def pattern(local: int, stride: int, patterns: int, *, offset: int = 0, block: int = 16) -> Pattern:
    return Pattern(block, local, stride, offset, patterns)


# Query heads, key heads, length, widths of keys and of values, pattern.
Case = tuple[int, int, int, int, int, Pattern]
CASES: dict[str, Case] = {
    "whole blocks": (4, 4, 160, 8, 8, pattern(2, 4, 4)),
    "no multiple of the block": (4, 4, 150, 8, 8, pattern(2, 4, 4)),
    "one token": (2, 2, 1, 8, 8, pattern(1, 2, 2)),
    "one token in the last block": (2, 2, 97, 8, 8, pattern(1, 2, 2)),
    "shorter than a block": (2, 2, 7, 8, 8, pattern(1, 2, 2)),
    "only local blocks": (2, 2, 64, 8, 8, pattern(4, 2, 2)),
    "one block behind the local ones": (2, 2, 80, 8, 8, pattern(4, 2, 2)),
    "shared keys": (6, 3, 130, 8, 8, pattern(1, 3, 3)),
    "a pattern for each query head": (6, 2, 130, 8, 8, pattern(1, 6, 6)),
    "one pattern": (4, 2, 130, 8, 8, pattern(2, 4, 1)),
    "an offset": (4, 4, 130, 8, 8, pattern(1, 4, 4, offset=3)),
    "more strides than patterns": (2, 2, 200, 8, 8, pattern(1, 6, 2)),
    "more strides than blocks": (2, 2, 130, 8, 8, pattern(1, 50, 2)),
    "nothing but local": (2, 2, 130, 8, 8, pattern(2, 10**6, 2, offset=1)),
    "nothing but local and the first block": (2, 2, 130, 8, 8, pattern(2, 10**6, 2)),
    "all blocks": (2, 2, 130, 8, 8, pattern(1, 1, 2)),
    "narrow values": (2, 2, 130, 12, 8, pattern(1, 2, 2)),
    "wide values": (2, 2, 130, 8, 12, pattern(1, 2, 2)),
    "larger blocks": (2, 2, 300, 8, 8, pattern(2, 2, 2, block=32)),
    "blocks of several tiles": (2, 1, 150, 64, 64, pattern(1, 2, 2, block=32)),
}


@st.composite
def cases(draw: Any, *, widths: tuple[int, ...], longest: int) -> Case:
    shared, key_heads = draw(st.sampled_from([1, 4, 8])), draw(st.integers(1, 2))
    heads = shared * key_heads
    patterns = draw(st.sampled_from([1, key_heads, heads]))
    block, offset = draw(st.sampled_from([16, 32])), draw(st.integers(0, 3))
    p = pattern(draw(st.integers(1, 4)), draw(st.integers(1, 6)), patterns, block=block, offset=offset)
    width = draw(st.sampled_from(widths))
    return heads, key_heads, draw(st.integers(1, longest)), width, draw(st.sampled_from([width, widths[0]])), p


def inputs(name: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor, Pattern]:
    return inputs_of(CASES[name], dtype)


def inputs_of(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Pattern]:
    """q, k, v as models have them, views of token-major memory; a gradient; the pattern."""
    heads, key_heads, length, width, width_out, p = case
    generator = torch.Generator().manual_seed(0)

    def make(count: int, size: int) -> Tensor:
        return torch.randn(2, length, count, size, generator=generator).transpose(1, 2).to(dtype)

    return [make(heads, width), make(key_heads, width), make(key_heads, width_out)], make(heads, width_out), p


def expected(qkv: list[Tensor], grad: Tensor, p: Pattern) -> list[Tensor]:
    leaves = [x.detach().double().requires_grad_() for x in qkv]
    out = reference.s2_attention(*leaves, p, 0.3)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    assert all(a.shape == b.shape for a, b in zip(found, wanted, strict=True))
    # A gradient that is zero, as of a single key, is compared with what gradients are otherwise.
    return [float((a - b).abs().max() / b.abs().max().clamp_min(0.5)) for a, b in zip(found, wanted, strict=True)]


def through_operator(qkv: list[Tensor], grad: Tensor, p: Pattern) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in qkv]
    out, _ = ops.s2_attention(*leaves, None, p.numbers, 0.3)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def with_a_mask(qkv: list[Tensor], grad: Tensor, p: Pattern) -> list[Tensor]:
    """What runs where there is neither a CPU nor Triton."""
    out, lse = s2_attention._dense(*qkv, p, 0.3)
    return [out, *s2_attention._dense_backward(grad, *qkv, out, lse, p, 0.3)]


@pytest.mark.parametrize("name", CASES)
def test_equals_dense_attention_with_the_mask(name: str) -> None:
    qkv, grad, p = inputs(name)
    wanted = expected(qkv, grad, p)
    for way in (through_operator, with_a_mask):
        assert max(errors(way(qkv, grad, p), wanted)) < 3e-6, way
    q, k, _ = qkv
    whole = reference.s2_mask(q.shape[1], q.shape[2], p)
    assert torch.equal(ops.s2_mask(q, k, None, p.numbers), whole[None])
    # The last queries alone.
    assert torch.equal(ops.s2_mask(q[:, :, -1:], k, None, p.numbers), whole[None, :, -1:])


@settings(max_examples=300 if ALL else 30, deadline=None, derandomize=True)
@given(cases(widths=(8, 16, 24), longest=150))
def test_drawn_cases(case: Case) -> None:
    qkv, grad, p = inputs_of(case, torch.float32)
    assert max(errors(through_operator(qkv, grad, p), expected(qkv, grad, p))) < 3e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    bar = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-12}[dtype]
    for name in ("no multiple of the block", "shared keys", "narrow values"):
        qkv, grad, p = inputs(name, dtype)
        found = through_operator(qkv, grad, p)
        assert all(x.dtype == dtype for x in found)
        assert max(errors(found, expected(qkv, grad, p))) < bar


@pytest.mark.parametrize(("rows", "length"), [(0, 40), (2, 0)])
def test_nothing_in_nothing_out(rows: int, length: int) -> None:
    p = pattern(1, 2, 2)
    q, k, v, grad = (torch.randn(rows, heads, length, width) for heads, width in ((4, 8), (2, 8), (2, 6), (4, 6)))
    found = through_operator([q, k, v], grad, p)
    assert [x.shape for x in found] == [grad.shape, q.shape, k.shape, v.shape]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("length", [48, 50])
def test_results_have_the_strides_that_were_promised(rows: int, length: int) -> None:
    p = pattern(1, 2, 2)
    for heads in (2, 1):
        q = torch.randn(rows, heads, length, 8)
        numbers = (p if heads == 2 else pattern(1, 2, 1)).numbers
        for mine, promised in zip(
            ops.s2_attention(q, q, q, None, numbers, 0.3),
            s2_attention._attention_fake(q, q, q, None, numbers, 0.3),
            strict=True,
        ):
            assert mine.stride() == promised.stride() and mine.dtype == promised.dtype


def test_gradients_are_equal_each_time_and_of_windows_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, grad, p = inputs("no multiple of the block")
    whole, again = (through_operator(qkv, grad, p) for _ in range(2))
    monkeypatch.setattr(s2_blocks, "_PIECE", 1)
    for a, b, c in zip(through_operator(qkv, grad, p), whole, again, strict=True):
        assert torch.equal(a, b) and torch.equal(b, c)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 3), st.integers(1, 700))
def test_what_the_kernels_compute_is_the_formula(local: int, stride: int, offset: int, length: int) -> None:
    """But for queries behind the end, which fill the steps of the stairs."""
    p, heads = pattern(local, stride, 6, offset=offset), 6
    cells: dict[str, int] = {"forward": 0, "backward": 0}

    def count(part: str, q: Tensor, k: Tensor, causal: bool) -> None:
        queries, keys = q.shape[2] // p.block, k.shape[2] // p.block
        # Of causal attention the kernel skips what is behind the diagonal.
        blocks = keys * (keys + 1) // 2 if causal else queries * keys
        cells[part] += q.shape[0] * q.shape[1] * blocks

    def flash(*operands: Any, **given: Any) -> Any:
        q, k, _, _, causal = operands
        count("forward", q, k, causal)
        return _FLASH(*operands, **given)

    def flash_backward(*operands: Any, **given: Any) -> Any:
        _, q, k, _, _, _, _, causal = operands
        count("backward", q, k, causal)
        return _FLASH_BACKWARD(*operands, **given)

    q, k, v, grad = (torch.randn(1, heads, length, 8) for _ in range(4))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(s2_blocks, "_flash", flash)
        patched.setattr(s2_blocks, "_flash_backward", flash_backward)
        through_operator([q, k, v], grad, p)
    n = p.blocks_of(length)
    stairs = -(-max(0, n - local) // stride)
    assert p.blocks(length) <= cells["forward"] <= p.blocks(length) + heads * stairs * (stride - 1)
    assert cells["backward"] == cells["forward"]


_FLASH, _FLASH_BACKWARD = s2_blocks._flash, s2_blocks._flash_backward


def test_flops_are_those_of_the_blocks() -> None:
    heads, width = 4, 8
    for length in (160, 16 * 7, 32, 640):
        p = pattern(2, 4, 4)
        q = torch.randn(1, heads, length, width, requires_grad=True)
        counter = FlopCounterMode(display=False)
        with counter:
            out, _ = ops.s2_attention(q, q, q, None, p.numbers, 1.0)
        backward = FlopCounterMode(display=False)
        with backward:
            out.sum().backward()
        cells = p.blocks(length) * 16 * 16
        assert counter.get_total_flops() == 2 * cells * 2 * width
        assert backward.get_total_flops() == 2 * cells * 5 * width


# --- masks that are known when they are there ---


def test_a_cache_of_any_length_is_one_graph() -> None:
    p, graphs = pattern(2, 2, 2), []

    def backend(gm: torch.fx.GraphModule, given: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    store = torch.compile(
        lambda old, new, seen: ops.s2_store(old, new, seen, p.numbers), backend=backend, dynamic=True, fullgraph=True
    )
    for seen in (40, 41, 48, 65, 130):
        text, token = torch.randn(1, 2, seen, 8), torch.randn(1, 2, 1, 8)
        found = store(ops.s2_store(None, text, 0, p.numbers), token, seen)
        assert torch.equal(found, ops.s2_store(None, torch.cat([text, token], 2), 0, p.numbers))
    assert len(graphs) == 1


def test_check_of_masks() -> None:
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    for good in (causal, causal.expand(3, 1, 6, 6), torch.ones(2, 1, 1, 9, dtype=torch.bool)):
        assert ops.s2_check("layer", good).shape == (1,)
    padded = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    padded[1, :, :, 0] = False
    window = causal & ~torch.ones(6, 6, dtype=torch.bool).tril(-3)
    for bad in (padded, window, ~causal, torch.ones(6, 6, dtype=torch.bool)):
        with pytest.raises(UnsupportedAttentionError, match=r"layers\.3 got a mask that is not the causal one"):
            ops.s2_check("model.layers.3", bad)


# --- the cache ---


@pytest.mark.parametrize(
    "p", [pattern(2, 3, 3), pattern(1, 3, 3, offset=2), pattern(2, 2, 1), pattern(3, 1, 3)], ids=str
)
@pytest.mark.parametrize("prompt", [1, 16, 40, 48, 200])
def test_cache_keeps_what_will_be_seen(p: Pattern, prompt: int) -> None:
    heads, tokens = 3, prompt + 130
    x = torch.randn(2, heads, tokens, 4)
    stored = ops.s2_store(None, x[:, :, :prompt], 0, p.numbers)
    for seen in range(prompt, tokens):
        assert stored.shape == (2, heads, p.stored(seen), 4)
        if seen % 7 == 0 or seen == tokens - 1:
            visible_ = ops.s2_stored_mask(x[:, :, :1], stored, seen, None, p.numbers)[0, :, 0]
            for head in range(heads):
                assert torch.equal(stored[:, head, visible_[head]], reference.s2_stored(x[:, :, :seen], head, p))
        stored = ops.s2_store(stored, x[:, :, seen : seen + 1], seen, p.numbers)


@pytest.mark.parametrize("p", [pattern(2, 3, 3), pattern(1, 2, 1), pattern(2, 1, 3)], ids=str)
def test_decoding_is_the_last_row_of_attention(p: Pattern) -> None:
    for tokens in (1, 17, 33, 49, 96, 97, 150):
        q, k, v = torch.randn(2, 6, tokens, 8), torch.randn(2, 3, tokens, 8), torch.randn(2, 3, tokens, 8)
        kept = [ops.s2_store(None, x, 0, p.numbers) for x in (k, v)]
        found = ops.s2_decode(q[:, :, -1:], *kept, tokens, None, p.numbers, 0.3)
        wanted = reference.s2_attention(q, k, v, p, 0.3)[:, :, -1:]
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
