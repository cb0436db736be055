"""Masks as people write them, found causal or not by drop_causal_masks and the cone that it evaluates."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hecate
from hecate.graph.lowering import NotRun, capturing
from hecate.passes import PASSES
from hecate.passes.attention import mask_cone
from hecate.passes.attention.attention_calls import Scope, change_operands
from hecate.passes.attention.drop_causal_masks import drop_causal_masks
from hecate.passes.attention.mask_cone import MaskCone
from hecate.passes.base import Outcome, PassContext, Refused
from hecate.passes.fingerprint import fingerprint
from hecate.passes.invariants import verify
from hecate.passes.runner import run_passes
from tests.support.extent import OLD_TORCH
from tests.support.models import batch, build
from tests.support.parity import compare

S = 16
Mask = Callable[[Tensor, Tensor], Tensor]


class Rewritten:
    """A torch.compile backend that runs the pass on what Dynamo captured, and nothing else."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.graphs: list[GraphModule] = []

    def __call__(self, gm: GraphModule, inputs: list[Any]) -> Any:
        (record,) = run_passes(gm, PassContext(world_size=1), passes=[drop_causal_masks], check=verify)
        self.outcomes.append(Outcome(rewritten=record.rewritten, skipped=record.skipped))
        self.graphs.append(gm)
        return gm.forward

    @property
    def rewritten(self) -> int:
        return self.outcomes[-1].rewritten

    @property
    def reasons(self) -> list[str]:
        assert not any(skip.fallback for outcome in self.outcomes for skip in outcome.skipped)
        return [skip.reason for skip in self.outcomes[-1].skipped]

    def attention(self) -> list[dict[str, Any]]:
        """The keyword arguments of all calls of attention."""
        return [
            dict(node.kwargs)
            for module in self.graphs[-1].modules()
            if isinstance(module, GraphModule)
            for node in module.graph.nodes
            if node.target is F.scaled_dot_product_attention
        ]


def qkv(length: int = S, *, batch: int = 3, keys: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, 2, n, 4, generator=generator) for n in (length, keys or length, keys or length)]


def compiled(function: Callable[..., Tensor], inputs: list[Tensor], *, dynamic: bool = False) -> Rewritten:
    """Compile ``function``, and check that it still computes the same."""
    backend = Rewritten()
    model = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    # One test compiles a table of functions that share their code, and torch counts graphs by code.
    with torch._dynamo.config.patch(recompile_limit=64):
        torch.testing.assert_close(model(*inputs), function(*inputs), equal_nan=True)
    return backend


def attend(masks: Mapping[str, Mask], *, dynamic: bool = False, **options: Any) -> Rewritten:
    """Attention with each of the masks, made from queries' and keys' positions, ``[S, 1]`` and ``[1, S]``."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(q.shape[-2])
        made = [mask(positions[:, None], positions[None, :]) for mask in masks.values()]
        return torch.stack([F.scaled_dot_product_attention(q, k, v, attn_mask=each, **options) for each in made])

    return compiled(function, qkv(), dynamic=dynamic)


def causal(q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def square(length: int = S) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def _eighths(q: Tensor) -> Tensor:
    """``positions // 8``, without a division."""
    return q.expand(-1, 8).reshape(-1)[: q.shape[0]]


CAUSAL: dict[str, Mask] = {
    "le": causal,
    "not gt": lambda q, k: ~(k > q),
    "tril": lambda q, k: torch.ones(q.shape[0], q.shape[0], dtype=torch.bool).tril(),
    "triu of floats": lambda q, k: torch.full((q.shape[0], q.shape[0]), 1.0).triu(1) == 0,
    "numbers to bool": lambda q, k: torch.where(k <= q, 1.0, 0.0).to(torch.bool),
    "shape of a tensor": lambda q, k: torch.ones_like(q + k).tril().bool(),
    "batches, cloned": lambda q, k: (k <= q)[None, None].expand(3, 1, -1, -1).clone(),
    "or": lambda q, k: (k < q) | (k == q),
    # As transformers makes it where sequences may be packed: a count of jumps of the positions.
    "packed": lambda q, k: (
        (k <= q)
        & (
            (torch.diff(q[:, 0], prepend=q[:1, 0] - 1) != 1).cumsum(-1)[:, None]
            == (torch.diff(q[:, 0], prepend=q[:1, 0] - 1) != 1).cumsum(-1)[None, :]
        )
    ),
    "a window of the length": lambda q, k: (k <= q) & (q - k < q.shape[0]),
}
OTHERS: dict[str, Mask] = {
    "strict": lambda q, k: k < q,
    "all": lambda q, k: (k >= 0) & (q >= 0),
    "one cell more": lambda q, k: (k <= q) | ((q == 1) & (k == 3)),
    "one cell less": lambda q, k: (k <= q) & ~((q == 9) & (k == 2)),
    "the last cell less": lambda q, k: (k <= q) & ((q < q.shape[0] - 1) | (k > 0)),
    "offset": lambda q, k: k <= q + 1,
    "window": lambda q, k: (k <= q) & (q - k < 6),
    "chunks": lambda q, k: (k <= q) & (k // 8 == q // 8),
    "transposed": lambda q, k: q <= k,
    "another one in a batch": lambda q, k: (k <= q) & ((torch.arange(3)[:, None, None, None] != 1) | (k > 0)),
    "half the length": lambda q, k: (k <= q) & (q - k < q.shape[0] // 2),
}
# What is causal at a length of 16, and not at one that the graph allows as well.
CAUSAL_AT_FIRST: dict[str, Mask] = {
    "window": lambda q, k: (k <= q) & (q - k < 100),
    "window of the first length": lambda q, k: (k <= q) & (q - k < 16),
    "window of blocks": lambda q, k: (k <= q) & (q // 8 - k // 8 < 8),
    "chunks": lambda q, k: (k <= q) & (k // 64 == q // 64),
    "a cell far out": lambda q, k: (k <= q) | ((q == 300) & (k == 305)),
    "added up": lambda q, k: (k <= q) & (q - k < (q - q + 60) + (q - q + 60)),
    "window of blocks, by a reshape": lambda q, k: (k <= q) & (_eighths(q)[:, None] - _eighths(q)[None] < 8),
    "window of blocks, by bits": lambda q, k: (k <= q) & ((q & -8) - (k & -8) < 64),
    "a product": lambda q, k: (k <= q) & (q - k < torch.add(q - q, torch.full_like(q, 5), alpha=20)),
    "a product of sizes": lambda q, k: (k <= q) & (q - k < torch.ones(30, dtype=torch.bool).expand(30, 30).sum()),
    "counted": lambda q, k: (k <= q) & (q - k < (q[:1] >= 0).expand(100, 1).cumsum(0)[-1:]),
    "rounded positions": lambda q, k: k.bfloat16() <= q.bfloat16(),
    "small integers": lambda q, k: k.to(torch.int8) <= q.to(torch.int8),
    "strides": lambda q, k: (k <= q) & ((q - k) % 50 < 49),
}


def rewrites(masks: Mapping[str, Mask], *, dynamic: bool) -> None:
    found = attend(masks, dynamic=dynamic)
    left = [name for name, call in zip(masks, found.attention(), strict=True) if call["attn_mask"] is not None]
    assert (found.rewritten, found.reasons, left) == (len(masks), [], [])
    assert all(call["is_causal"] for call in found.attention())


def refuses(masks: Mapping[str, Mask], *, dynamic: bool) -> None:
    found = attend(masks, dynamic=dynamic)
    dropped = [name for name, call in zip(masks, found.attention(), strict=True) if call["attn_mask"] is None]
    assert (found.rewritten, dropped) == (0, [])
    assert all("not causal" in reason or (dynamic and "lengths never tried" in reason) for reason in found.reasons)


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "open"])
def test_rewrites_what_is_causal_and_leaves_other_patterns_alone(dynamic: bool) -> None:
    rewrites(CAUSAL, dynamic=dynamic)
    refuses(OTHERS, dynamic=dynamic)


def test_looks_beyond_the_first_length() -> None:
    rewrites(CAUSAL_AT_FIRST, dynamic=False)
    refuses(CAUSAL_AT_FIRST, dynamic=True)


def test_a_length_that_stays_below_the_window() -> None:
    """The same mask may be causal where the graph has a largest length."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(q.shape[-2])
        queries, keys = positions[:, None], positions[None, :]
        return F.scaled_dot_product_attention(q, k, v, (keys <= queries) & (queries - keys < 100))

    for largest, rewritten in ((100, 1), (101, 0)):
        inputs = qkv()
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 2, min=2, max=largest)
        backend = Rewritten()
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
        assert backend.rewritten == rewritten, backend.reasons


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "open"])
def test_large_masks_are_looked_at_in_blocks(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some rows of a mask, at the lengths that are tried for an open one too.
    monkeypatch.setattr(mask_cone, "PIECE", 1000 if dynamic else 3 * S)
    by_rows = ("le", "not gt", "batches, cloned", "or", "packed", "a window of the length")
    rewrites({name: CAUSAL[name] for name in by_rows}, dynamic=dynamic)
    cells = ("one cell more", "one cell less", "the last cell less", "window", "another one in a batch")
    refuses({name: OTHERS[name] for name in cells}, dynamic=dynamic)

    monkeypatch.setattr(mask_cone, "PIECE", 3 * S)
    # Where a row of the mask is not computed from one row, it has to be small.
    whole = attend({"tril": CAUSAL["tril"], "transposed": lambda q, k: (q <= k).transpose(0, 1)})
    assert not whole.rewritten and all("too large for that" in reason for reason in whole.reasons)
    monkeypatch.setattr(mask_cone, "MOST", S * S - 1)
    assert "too many to look at" in attend({"le": causal}).reasons[0]


def test_keeps_the_other_arguments() -> None:
    found = attend({"le": causal}, scale=0.3, enable_gqa=True)
    assert found.attention() == [{"attn_mask": None, "scale": 0.3, "enable_gqa": True, "is_causal": True}]
    backend = Rewritten()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, square(), 0.25, False)

    torch.compile(function, backend=backend)(*qkv())
    (node,) = (n for n in backend.graphs[0].graph.nodes if n.target is F.scaled_dot_product_attention)
    assert node.args[3:] == (None, 0.25, True) and not node.kwargs


def test_ranks_may_answer_differently() -> None:
    """One has sequences shorter than a window, another one longer ones; what they compare stays equal."""
    found = attend({"window": OTHERS["window"]})
    assert found.rewritten == 0
    (node,) = (n for n in found.graphs[0].graph.nodes if n.target is F.scaled_dot_product_attention)
    before = fingerprint(found.graphs[0])
    change_operands(node, {"attn_mask": None, "is_causal": True})
    assert found.attention()[0]["is_causal"] and fingerprint(found.graphs[0]) == before


@pytest.mark.parametrize("device", ["meta", torch.device("meta")], ids=["named", "object"])
def test_masks_of_other_devices_are_computed_on_the_cpu(device: Any) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(S, device=device)
        mask = (positions[None] <= positions[:, None]).to(device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.device))

    found = Rewritten()
    torch.compile(function, backend=found)(*(tensor.to("meta") for tensor in qkv()))
    assert (found.rewritten, found.reasons) == (1, [])


def masked_by(make: Callable[[Tensor], Tensor], data: Tensor, inputs: list[Tensor]) -> Rewritten:
    """Attention with a mask that is made from ``data``."""

    def function(q: Tensor, k: Tensor, v: Tensor, data: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make(data))

    return compiled(function, [*inputs, data])


def test_leaves_data_and_other_shapes_and_numbers_alone() -> None:
    data = torch.ones(S, S, dtype=torch.bool)

    def reason(make: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> str:
        found = masked_by(make, data, inputs)
        assert found.rewritten == 0
        return found.reasons[0]

    changing = "the mask depends on data, which may be another one in every step"
    assert reason(lambda data: square() & data, qkv()) == changing
    assert "depends on data" in reason(lambda data: square() & data.clone()[:1].expand(S, -1), qkv())
    assert "random" in reason(lambda data: square() & (torch.rand(S) >= 0), qkv())
    assert "empty" in reason(lambda data: square() & ((torch.empty(S) == 0) | True), qkv())
    assert "numbers" in reason(lambda data: torch.zeros(S, S).masked_fill(~square(), float("-inf")), qkv())
    assert "not square" in reason(lambda data: square()[-4:], qkv(4, keys=S))
    assert "not square" in reason(lambda data: square()[:, :8], qkv(S, keys=8))
    # One row for all queries.
    assert "not square" in reason(lambda data: square()[-1:], qkv())
    of_its_shape = masked_by(
        lambda data: torch.ones_like(data).tril() & data.new_ones(data.shape).tril(), data, qkv()
    )
    assert (of_its_shape.rewritten, of_its_shape.reasons) == (1, [])


def test_leaves_alone_a_mask_that_repeats_the_queries() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=square().expand(3, 1, S, S))

    found = Rewritten()
    # Its shape is inferred, but the kernel refuses it.
    with pytest.raises(RuntimeError, match="broadcast shape"):
        torch.compile(function, backend=found)(*qkv(batch=1))
    assert found.rewritten == 0 and "enlarges" in found.reasons[0]


def test_leaves_alone_what_is_changed_in_place() -> None:
    def before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = square()
        mask[0, 3] = True
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def of_a_part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(S)
        keys = positions[None]
        positions[2:].add_(0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keys <= torch.arange(S)[:, None])

    def between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = square()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mask.logical_not_()
        return F.scaled_dot_product_attention(out, k, v, attn_mask=mask)

    for function, rewritten in ((before, 0), (of_a_part, 0), (between, 1)):
        found = compiled(function, qkv())
        assert found.rewritten == rewritten, function
        assert "in-place" in found.reasons[0]


def test_attention_in_checkpointed_layers() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(3, 1, -1, -1))

    def inner(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, q, k, v, mask, use_reentrant=False)
        return out + q

    def function(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
        positions = torch.arange(q.shape[-2])
        mask = positions[None] <= positions[:, None]
        if padding is not None:
            mask = mask & padding
        for body in (layer, inner):
            q = checkpoint(body, q, k, v, mask, use_reentrant=False)
        return q

    for dynamic in (False, True):
        inputs = qkv()
        found = compiled(function, inputs, dynamic=dynamic)
        assert (found.rewritten, found.reasons) == (2, [])
        found = compiled(function, [*inputs, torch.ones(S, dtype=torch.bool)], dynamic=dynamic)
        assert (found.rewritten, len(found.reasons)) == (0, 1)
        assert "padding" in found.reasons[0]


def test_a_cone_says_what_its_mask_is() -> None:
    def window(q: Tensor) -> Tensor:
        positions = torch.arange(q.shape[1])
        near = positions[None] > positions[:, None] - 3
        return (near & (positions[None] <= positions[:, None])).expand(q.shape[0], 1, -1, -1).clone()

    def evaluate(cone: MaskCone, batch: int, queries: int, keys: int) -> torch.Tensor:
        return torch.cat([rows for _, rows in reversed(list(cone.rows(batch, queries, keys)))], dim=-2)

    cones: list[MaskCone] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        (output,) = (node for node in gm.graph.nodes if node.op == "output")
        cones.append(MaskCone(output.args[0][0], Scope(gm)))
        return gm.forward

    for dynamic in (True, False):
        torch.compile(window, backend=backend, dynamic=dynamic)(torch.zeros(2, 8))
    opened, fixed = cones
    assert not opened.is_fixed and fixed.is_fixed
    for sizes in ((2, 8), (3, 5), (1, 1)):
        assert torch.equal(evaluate(opened, *sizes, sizes[1]), window(torch.zeros(sizes)))
    assert torch.equal(evaluate(fixed, 2, 8, 8), window(torch.zeros(2, 8)))
    with pytest.raises(Refused, match="size of 5 where the graph has 8"):
        evaluate(fixed, 2, 5, 5)
    with pytest.raises(Refused, match="size of 6"):
        evaluate(opened, 2, 5, 6)


# --- whole models ---


def compare_with_itself(model: Any, reference: Any, *, length: int, **given: Tensor) -> None:
    """Loss and every gradient of both."""
    ids = batch(length, rows=2, length=length)
    for each in (model, reference):
        each.zero_grad()
    losses = []
    for each in (model, reference):
        loss = each(input_ids=ids, labels=ids, **given).loss
        loss.backward()
        losses.append(loss.detach())
    error = compare(model, losses[0], reference, losses[1])
    assert error.loss < 1e-6 and error.gradient < 1e-5, error


def test_a_model_computes_the_same_and_padding_is_respected_and_explained() -> None:
    reference, model = (build("qwen3_moe", layers=1, use_cache=False) for _ in range(2))
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    # The second length makes it an open one.
    for length in (12, 17):
        compare_with_itself(model, reference, length=length)
    explanation = hecate.explain(model)
    assert [graph.passes[0].rewritten for graph in explanation.graphs] == [1, 1]
    assert explanation.skipped == ()
    padding = torch.ones(2, 12, dtype=torch.long)
    padding[0, :5] = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="hecate")
        compare_with_itself(model, reference, length=12, attention_mask=padding)
    explanation = hecate.explain(model)
    assert [graph.passes[0].rewritten for graph in explanation.graphs] == [1, 1, 0]
    (skip,) = explanation.skipped
    assert (skip.where, skip.fallback) == ("model.layers.0.self_attn", False)
    assert skip.reason == "the mask depends on attention_mask: pass none where nothing is padded"
    assert "left alone: model.layers.0.self_attn: the mask depends on attention_mask" in str(explanation)


def test_a_dense_model_with_checkpointed_layers() -> None:
    reference, model = (build("llama", use_cache=False) for _ in range(2))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = Rewritten()

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        found(gm, inputs)
        return aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop)(gm, inputs)

    model.compile(backend=backend)
    compare_with_itself(model, reference, length=12)
    assert (found.rewritten, found.reasons) == (2, [])
    if OLD_TORCH:
        # It leaves functions in which a graph broke to Python from then on, those around the masks too.
        return
    with torch.no_grad():
        model(input_ids=batch(0, rows=2, length=12), position_ids=torch.arange(12)[None])
    assert found.reasons == ["the mask depends on position_ids: pass none where no sequences are packed"]
    assert found.outcomes[-1].skipped[0].where == "model.layers.0.self_attn and 1 more"


def test_a_model_with_a_window_is_left_alone() -> None:
    found = Rewritten()
    reference, model = (build("mixtral", layers=1, use_cache=False, sliding_window=6) for _ in range(2))
    model.compile(backend=found)
    with torch.no_grad():
        ids = batch(0, rows=2)
        torch.testing.assert_close(model(input_ids=ids).logits, reference(input_ids=ids).logits)
    assert "not causal at a length of 16" in found.reasons[0]


@pytest.mark.parametrize("off", [False, True])
def test_no_mask_is_computed_unless_it_is_switched_off(off: bool) -> None:
    length = 22
    model = build("qwen3_moe", layers=1, use_cache=False)
    name = PASSES[0].__name__
    assert name == "drop_causal_masks"
    hecate.compile(model, hecate.Config(backend="aot_eager", disable_passes=(name,) if off else ()))
    ids = batch(0, rows=2, length=length)
    with capturing() as graphs, suppress(NotRun):
        model(input_ids=ids, labels=ids)
    forward = graphs[0].graph
    square = [
        node.name
        for node in forward.graph.nodes
        if isinstance(node.meta.get("val"), Tensor) and tuple(node.meta["val"].shape[-2:]) == (length, length)
    ]
    assert bool(square) is off, square
