"""S2-Attention, where a head sees the last blocks of keys and every n-th block before (arXiv 2407.17678).

| operator | shapes | backward |
|---|---|---|
| ``s2_attention`` | ``[b,Hq,S,D], [b,Hk,S,D], [b,Hk,S,Dv], [1]? -> [b,Hq,S,Dv], [b,Hq,S]`` | below |
| ``s2_attention_backward`` | its gradient and values ``-> [b,Hq,S,D], [b,Hk,S,D], [b,Hk,S,Dv]`` | none |

Hk divides Hq: neighbouring query heads share a key head. The second result is the logarithm of each row's sum, in
float32 or float64; it has no gradient. ``pattern`` is :attr:`Pattern.numbers`, ``checked`` as in ``s2_masks``.

CPUs use torch's flash kernels (``s2_blocks``), GPUs Triton's; all else is dense attention with a mask.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hecate.runtime.attention import s2_blocks
from hecate.runtime.attention.pattern import Pattern
from hecate.runtime.attention.s2_masks import visible
from hecate.runtime.kernels.launch import runs_on
from hecate.runtime.kernels.operands import FLOATS
from hecate.runtime.ops.registration import define, differentiate

# Longer rows do not fit into the memory of a GPU's multiprocessor.
_WIDEST = 256


def _fits_kernel(q: Tensor, v: Tensor) -> bool:
    return q.is_cuda and not _why_dense(q, v)


def _why_dense(q: Tensor, v: Tensor) -> str:
    """Say why the kernels do not take tensors on a GPU; "" if they do."""
    if not runs_on(q.device):
        return "Triton is missing, or HECATE_KERNELS=0"
    if q.dtype not in FLOATS:
        return f"there are no kernels for {q.dtype}"
    if max(q.shape[3], v.shape[3]) > _WIDEST:
        return f"heads wider than {_WIDEST} do not fit into them"
    return ""


def _warn_of_dense(q: Tensor, v: Tensor) -> None:
    if q.is_cuda:
        warnings.warn(
            "hecate: sparse attention runs without its GPU kernels, as dense attention with a mask: "
            f"{_why_dense(q, v)}. The numbers are right, and nothing is saved",
            stacklevel=2,
        )


def _attention(
    q: Tensor, k: Tensor, v: Tensor, checked: Tensor | None, numbers: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    if not q.shape[0] or not q.shape[2]:
        return _attention_fake(q, k, v, checked, numbers, scale)
    pattern = Pattern(*numbers)
    if q.device.type == "cpu" and q.dtype in s2_blocks.DTYPES:
        found, lse = s2_blocks.forward(q, k, v, pattern, scale)
    elif _fits_kernel(q, v):
        from hecate.runtime.attention.s2_forward import forward

        found, lse = forward(q, k, v, pattern, scale)
    else:
        _warn_of_dense(q, v)
        found, lse = _dense(q, k, v, pattern, scale)
    return _without_gaps(found.to(q.dtype).transpose(1, 2)).transpose(1, 2), _without_gaps(lse)


def _without_gaps(x: Tensor) -> Tensor:
    """Return ``x`` in the strides that the fake has, also of sizes that are one; mostly without a copy."""
    steps = [1, *itertools.accumulate(reversed(x.shape[1:]), operator.mul)]
    return x.contiguous().as_strided(x.shape, steps[::-1])


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, checked: Tensor | None, numbers: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    b, heads, length, _ = q.shape
    # It lies token by token, as torch's own attention lays it out: the model then joins the heads.
    out = q.new_empty((b, length, heads, v.shape[3])).transpose(1, 2)
    return out, q.new_empty((b, heads, length), dtype=s2_blocks.sum_dtype(q))


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, numbers: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if not q.shape[0] or not q.shape[2]:
        return _backward_fake(grad, q, k, v, out, lse, numbers, scale)
    pattern = Pattern(*numbers)
    if q.device.type == "cpu" and q.dtype in s2_blocks.DTYPES:
        return s2_blocks.backward(grad, q, k, v, out, lse, pattern, scale)
    if _fits_kernel(q, v):
        from hecate.runtime.attention.s2_backward import backward

        return backward(grad, q, k, v, out, lse, pattern, scale)
    return _dense_backward(grad, q, k, v, out, lse, pattern, scale)


def _backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, numbers: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# --- with a mask ---


def _repeated(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).repeat_interleave(heads // x.shape[1], 1)


def _scores(q: Tensor, k: Tensor, pattern: Pattern, scale: float) -> Tensor:
    mask = visible(q.shape[1], q.shape[2], k.shape[2], pattern, q.device)
    return (q @ k.transpose(-1, -2) * scale).masked_fill_(~mask, float("-inf"))


def _dense(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float) -> tuple[Tensor, Tensor]:
    heads, dtype = q.shape[1], s2_blocks.sum_dtype(q)
    wide_q, wide_k, wide_v = (_repeated(x, heads, dtype) for x in (q, k, v))
    scores = _scores(wide_q, wide_k, pattern, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp_() @ wide_v, lse


def _dense_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pattern: Pattern, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    heads, dtype = q.shape[1], lse.dtype
    wide_grad, wide_q, wide_k, wide_v, wide_out = (_repeated(x, heads, dtype) for x in (grad, q, k, v, out))
    weights = (_scores(wide_q, wide_k, pattern, scale) - lse[..., None]).exp_()
    of_scores = wide_grad @ wide_v.transpose(-1, -2) - (wide_grad * wide_out).sum(-1, keepdim=True)
    of_scores.mul_(weights).mul_(scale)
    dq, dk = of_scores @ wide_k, of_scores.transpose(-1, -2) @ wide_q
    dv = weights.transpose(-1, -2) @ wide_grad
    dk, dv = (x.reshape(x.shape[0], like.shape[1], -1, *x.shape[2:]).sum(2) for x, like in ((dk, k), (dv, v)))
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()


define(
    "s2_attention(Tensor q, Tensor k, Tensor v, Tensor? checked, int[] pattern, float scale) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
)
define(
    "s2_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int[] pattern, "
    "float scale) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, _, ctx.pattern, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output)


def _differentiated(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    dq, dk, dv = torch.ops.hecate.s2_attention_backward(grad, *ctx.saved_tensors, ctx.pattern, ctx.scale)
    return dq, dk, dv, None, None, None


differentiate("s2_attention", _differentiated, _setup)


def _cells(shape: Any, pattern: Pattern) -> Any:
    """Count the scores computed for queries ``[b, heads, length, D]``; the length may be symbolic."""
    b, heads, length, _ = shape
    n = (length + pattern.block - 1) // pattern.block
    near = torch.sym_min(n, pattern.local)
    far = n - near
    # For strided blocks the mean over all residues, exact where heads have all of them equally often.
    blocks = heads * (near * n - near * (near - 1) // 2) + heads * far * (far + 1) // (2 * pattern.stride)
    return b * blocks * pattern.block**2


@register_flop_formula(torch.ops.hecate.s2_attention)
def _flops(q_shape: Any, k_shape: Any, v_shape: Any, checked: Any, numbers: Any, *args: Any, **kwargs: Any) -> Any:
    """Count operations of scores and their product with values, two per multiply-add, in the computed blocks."""
    return 2 * _cells(q_shape, Pattern(*numbers)) * (q_shape[3] + v_shape[3])


@register_flop_formula(torch.ops.hecate.s2_attention_backward)
def _backward_flops(grad_shape: Any, q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Count operations of the scores, again, and of the gradients of weights, q, k and v."""
    _, _, numbers, *_ = args
    return 2 * _cells(q_shape, Pattern(*numbers)) * (3 * q_shape[3] + 2 * v_shape[3])
