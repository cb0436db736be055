"""``Config(dense="shard")``: the same training with dense parameters in equal parts on all ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.runtime.ops import registration
from hecate.runtime.ops.dense import DenseShard
from hecate.runtime.placement.planner import Rates
from hecate.wrap.shard import shard_of
from tests.hecate_compile.test_parity import REPLICAS, measure
from tests.support.adversaries import Moving
from tests.support.extent import ALL
from tests.support.models import VOCABULARY, PlainLanguageModel, batch, build, transformers_config
from tests.support.parity import clear_gradients, compare, rank_and_size, run_step, state_error, step_and_compare
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.test_dense_shard"
FREE_LINKS = Rates(flops=1e9, rank_bytes=1e12, node_bytes=1e12)


def _compiled(model: nn.Module, **options: Any) -> nn.Module:
    config = {"backend": "aot_eager", "rates": FREE_LINKS, "dense": "shard"} | options
    return hecate.compile(model, hecate.Config(**config))


@contextmanager
def _gathers() -> Iterator[list[torch.dtype]]:
    """The dtype of every all-gather of dense parameters inside the block."""
    seen: list[torch.dtype] = []
    original = registration.begin

    def begin(prepare: Any, args: Any, note: str) -> int:
        if note.split()[1] == "gather_dense":
            shards, _, dtype = args
            seen.append(dtype or shards[0].dtype)
        return original(prepare, args, note)

    registration.begin = begin
    try:
        yield seen
    finally:
        registration.begin = original


# --- parity ---


def parity(families: list[str], **options: Any) -> dict[str, Any]:
    return {family: measure(family, dense="shard", **(REPLICAS | options)) for family in families}


def _check_parity(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        for family, found in result.items():
            assert found["loss"] < 1e-5, family
            assert found["gradient"] < 1e-5, (family, found["worst"])
            assert (found["graphs"], found["breaks"], found["skipped"]) == (1, 0, [])
            assert found["rewritten"]["exchange_rows"] == 2
            assert found["rewritten"]["bucket_gradients"] == 0, "nothing dense is left whole"


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3] if ALL else [2])
def test_equals_one_process(size: int) -> None:
    """On three ranks most shards have padding."""
    families = ["qwen3_moe", "gpt_oss", "plain"] if size == 2 else ["plain"]
    ranks = run_ranks(f"{_HERE}:parity", size, families=families)
    _check_parity(ranks)
    for result in ranks:
        # Embedding; two blocks; last norm and head. The plain model has no parameters in its blocks but the router.
        assert {found["rewritten"]["bucket_gathers"] for found in result.values()} == {3}


@pytest.mark.distributed
def test_equals_one_process_without_the_pass() -> None:
    ranks = run_ranks(f"{_HERE}:parity", 2, families=["qwen3_moe"], disable_passes=["bucket_gathers"])
    _check_parity(ranks)


def gathered_again(checkpointing: bool) -> dict[str, Any]:
    reference, model = build("qwen3_moe"), build("qwen3_moe")
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    reference.train()
    _compiled(model)
    worst = max(step_and_compare(model, reference, batch(step)).gradient for step in range(2))
    ids = batch(2)
    mine = ids.chunk(rank_and_size()[1])[rank_and_size()[0]]
    with _gathers() as forward:
        loss = model(input_ids=mine, labels=mine)["loss"]
    with _gathers() as backward:
        loss.backward()
    return {"worst": worst, "graphs": len(hecate.explain(model).graphs), "gathers": [len(forward), len(backward)]}


@pytest.mark.distributed
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_backward_gathers_again(checkpointing: bool) -> None:
    for result in run_ranks(f"{_HERE}:gathered_again", 2, checkpointing=checkpointing):
        assert result["worst"] < 1e-5
        assert result["graphs"] == 1
        assert result["gathers"] == [4, 3], "embedding, two layers, head; all but the embedding again"


def mixed_precision() -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    found = {}
    for family in ("qwen3_moe", "plain"):
        reference = build(family, layers=1)
        for parameter in reference.parameters():
            parameter.data = parameter.data.bfloat16()
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        model = _compiled(build(family, layers=1), mixed_precision=policy)
        with _gathers() as gathered:
            loss = run_step(model, batch(0))
        expected = reference(input_ids=batch(0), labels=batch(0))["loss"]
        expected.backward()
        difference = compare(model, loss, reference, expected.detach().float())
        dtypes = sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None})
        found[family] = {
            "loss": difference.loss,
            "gradient": difference.gradient,
            "worst": difference.worst,
            "dtypes": dtypes,
            "travelled": sorted(set(map(str, gathered))),
        }
    return found


@pytest.mark.distributed
def test_mixed_precision() -> None:
    """The bounds are those of replicated parameters."""
    for result in run_ranks(f"{_HERE}:mixed_precision", 2):
        for family, errors in result.items():
            assert errors["loss"] < 2**-7, (family, "a unit in the last place of bf16")
            assert errors["gradient"] < 5e-2, (family, errors["worst"])
            assert errors["dtypes"] == ["torch.float32"]
            assert errors["travelled"] == ["torch.bfloat16"]


# --- training ---


def train() -> dict[str, Any]:
    """Tied embeddings, owners that change, evaluation between, accumulation, clipping, decay by dimension, AdamW."""
    options = {"tie_word_embeddings": True, "num_experts": 5, "layers": 1}
    reference = build("qwen3_moe", **options)
    model = _compiled(build("qwen3_moe", **options), policy=Moving(reshard_every=2))
    optimizers = []
    for candidate in (model, reference):
        matrices = [p for p in candidate.parameters() if p.ndim > 1]
        vectors = [p for p in candidate.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        # A large eps: second moments near zero would turn rounding into steps of full size.
        optimizers.append(torch.optim.AdamW(groups, lr=1e-2, eps=1e-3))
    rank, size = rank_and_size()
    norms, logits_error, gradient = [], 0.0, 0.0
    for step in range(6):
        clear_gradients(model, reference)
        for micro in range(2):
            ids = batch(10 * step + micro)
            hecate.set_requires_gradient_sync(model, micro == 1)
            loss = run_step(model, ids)
            expected = reference(input_ids=ids, labels=ids)["loss"]
            expected.backward()
        gradient = max(gradient, compare(model, loss, reference, expected.detach()).gradient)
        for order in (2.0, float("inf")):
            ours = hecate.clip_grad_norm_(model, 1e9, order)
            theirs = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9, order)
            norms.append(abs(float(ours) / float(theirs) - 1))
        hecate.clip_grad_norm_(model, 0.5)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            mine = ids.chunk(size)[rank]
            found, expected = model(input_ids=mine)["logits"], reference(input_ids=mine)["logits"]
            logits_error = max(logits_error, float((found - expected).abs().max() / expected.abs().max()))
    state = model.state_dict()
    weights = state_error(state, reference.state_dict(), relative=True)
    padding = max(
        float(p[shard_of(p).counts[rank] :].detach().abs().sum())
        for p in model.parameters()
        if isinstance(shard_of(p), DenseShard)
    )
    own_state = {
        value.shape == p.shape
        for p, values in optimizers[0].state.items()
        for value in values.values()
        if value.ndim and isinstance(shard_of(p), DenseShard)
    }
    return {
        "gradient": gradient,
        "norm": max(norms),
        "logits": logits_error,
        "weights": weights,
        "padding": padding,
        "own_state": list(own_state),
        "graphs": len(hecate.explain(model).graphs),
        "tied_state": state["lm_head.weight"] is state["model.embed_tokens.weight"],
        "moves": len(compiled_model_of(model, "test").owner_mover.moves),
        "parameters": len(list(model.parameters())) - len(list(reference.parameters())),
    }


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_training_equals_one_process(size: int) -> None:
    for result in run_ranks(f"{_HERE}:train", size):
        # The first step is as exact as ever; later ones carry what AdamW made of rounding.
        assert result["gradient"] < 1e-4
        assert result["norm"] < 1e-5
        assert result["logits"] < 1e-4
        assert result["weights"] < 1e-4
        assert result["padding"] == 0
        assert result["own_state"] == [True]
        assert result["graphs"] == 2, "with gradients and without"
        assert result["tied_state"]
        assert result["moves"] == 2
        assert result["parameters"] == 0, "tied parameters are one"


def partly_frozen() -> dict[str, Any]:
    """Frozen matrices beside trained ones in every block."""
    reference = build("qwen3_moe", layers=1)
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_("experts" in name or "norm" in name or "k_proj" in name)
    model = build("qwen3_moe", layers=1)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    _compiled(model)
    whole = [name for name, p in model.named_parameters() if shard_of(p) is None]
    frozen = [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in reference.parameters()]
    difference = step_and_compare(model, reference, batch(0))
    return {"worst": difference.gradient, "whole": whole, "frozen": frozen}


@pytest.mark.distributed
def test_frozen_parameters_are_sharded_too() -> None:
    for result in run_ranks(f"{_HERE}:partly_frozen", 2):
        assert result["worst"] < 1e-5
        assert result["whole"] == []
        assert result["frozen"]


# --- memory ---


def memory() -> dict[str, Any]:
    model = build("qwen3_moe", layers=1)
    _, size = rank_and_size()
    full = sum(p.numel() for name, p in model.named_parameters() if ".experts." not in name)
    row = sum(p[0].numel() for name, p in model.named_parameters() if ".experts." not in name)
    _compiled(model)
    shards = [p for p in model.parameters() if isinstance(shard_of(p), DenseShard)]
    alive = [_alive()]
    run_step(model, batch(0))
    alive.append(_alive())
    return {
        "parameters": sum(p.numel() for p in shards),
        "gradients": sum(p.grad.numel() for p in shards),
        "bound": full / size + row,
        "alive": alive,
    }


def _alive() -> int:
    """Whole embeddings and heads that something holds."""
    for _ in range(20):
        gc.collect()
        tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
        found = sum(not isinstance(t, FakeTensor) and t.shape == (VOCABULARY, 32) for t in tensors)
        if not found:
            break
        # gloo's thread may hold what it has just sent for a moment longer.
        time.sleep(0.02)
    return found


@pytest.mark.distributed
def test_a_rank_holds_its_share() -> None:
    for result in run_ranks(f"{_HERE}:memory", 3):
        assert result["parameters"] <= result["bound"]
        assert result["gradients"] == result["parameters"]
        assert result["alive"] == [0, 0]


# --- state dicts and the meta device ---


def state_dict_round_trip() -> dict[str, Any]:
    options = {"tie_word_embeddings": True, "layers": 1}
    reference = build("qwen3_moe", **options)
    model = _compiled(build("qwen3_moe", **options))
    state, expected = model.state_dict(), reference.state_dict()
    same = list(state) == list(expected) and all(torch.equal(state[k], expected[k]) for k in expected)
    ids = batch(0)
    run_step(model, ids)

    other = build("qwen3_moe", seed=1, **options)
    model.load_state_dict(other.state_dict())
    loaded = all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())
    loaded &= step_and_compare(model, other, ids).gradient < 1e-5

    model.load_state_dict(expected, assign=True)
    assigned = all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    tied = model.lm_head._parameters["weight"] is model.model.embed_tokens._parameters["weight"]
    error = step_and_compare(model, reference, ids).gradient

    one_process = build("qwen3_moe", seed=2, **options)
    one_process.load_state_dict(model.state_dict())
    outputs = torch.equal(one_process(input_ids=ids)["logits"], reference(input_ids=ids)["logits"])
    wrong = dict(expected)
    key = "model.layers.0.self_attn.q_proj.weight"
    wrong[key] = wrong[key][:11]
    before = model.state_dict()[key]
    message = message_of(lambda: model.load_state_dict(wrong))
    kept = torch.equal(model.state_dict()[key], before)
    part = list(model.lm_head.state_dict()["weight"].shape)
    return {
        "same": same,
        "loaded": loaded,
        "assigned": assigned,
        "tied": tied,
        "error": error,
        "outputs": outputs,
        "message": message,
        "kept": kept,
        "part": part,
    }


@pytest.mark.distributed
def test_state_dict_is_full_and_loads_back() -> None:
    for result in run_ranks(f"{_HERE}:state_dict_round_trip", 3):
        assert result["same"] and result["loaded"] and result["assigned"] and result["tied"] and result["outputs"]
        assert result["error"] < 1e-5
        assert "q_proj.weight: the checkpoint has [11, 32], the model [32, 32]" in result["message"]
        assert result["kept"]
        assert result["part"] == [VOCABULARY, 32]


def meta_device() -> dict[str, Any]:
    """Ranks other than 0 never allocate a whole dense parameter, and rank 0 one module's at a time."""
    from transformers import AutoModelForCausalLM

    from hecate.wrap import shard_model

    allocated: list[int] = []
    original = shard_model._unwritten

    def unwritten(like: torch.Tensor, device: torch.device) -> torch.Tensor:
        allocated.append(_alive() if isinstance(like, nn.Parameter) else 0)
        return original(like, device)

    shard_model._unwritten = unwritten
    config = transformers_config("qwen3_moe", tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    gc.collect()
    # The meta tensors themselves have these shapes too.
    before = _alive()
    _compiled(model)
    shard_model._unwritten = original
    reference = AutoModelForCausalLM.from_config(config)
    reference.load_state_dict(model.state_dict())
    worst = step_and_compare(model, reference, batch(0)).gradient
    std = float(reference.model.layers[0].self_attn.q_proj.weight.std())
    tied = model.lm_head._parameters["weight"] is model.model.embed_tokens._parameters["weight"]
    whole = sum(shard_of(p) is None for p in model.parameters())
    with torch.device("meta"):
        shared = AutoModelForCausalLM.from_config(config)
    # A module that comes before the experts has a parameter of theirs, too.
    shared.model.embed_tokens.alias = shared.model.layers[0].mlp.experts.down_proj
    _compiled(shared)
    alias = shard_of(shared.model.embed_tokens._parameters["alias"])
    return {
        "alias": alias is not None and (alias.part, list(alias.full_shape)),
        "worst": worst,
        "std": std,
        "tied": tied,
        "whole": whole,
        "before": before,
        "allocations": len(allocated),
        "most": max(allocated[1:], default=0),
    }


@pytest.mark.distributed
def test_meta_device_model() -> None:
    ranks = run_ranks(f"{_HERE}:meta_device", 2)
    for rank, result in enumerate(ranks):
        assert result["worst"] < 1e-5
        assert result["std"] == pytest.approx(0.02, rel=0.2)
        assert result["tied"]
        assert result["whole"] == 0
        assert result["alias"] == ["experts", [8, 32, 16]]
        # After the embedding, which is first, nothing of its shape is left.
        assert result["before"] == 1 and result["most"] == 0
        assert rank == 0 or result["allocations"] < ranks[0]["allocations"]


# --- what is read where ---


class WithExtras(PlainLanguageModel):
    """A scalar, a single row, a recurrent module, and a part that Dynamo leaves to Python."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(1, 32))
        self.filter = nn.Linear(32, 32)
        self.memory = nn.LSTM(32, 32)

    @torch.compiler.disable
    def untraced(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.filter(hidden)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.untraced(self.embedding(input_ids) * self.scale + self.shift)
        assert self.head.weight.shape == (VOCABULARY, 32)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            hidden = hidden + block(norm(hidden))
        logits = self.head(hidden)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def extras() -> dict[str, Any]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(WithExtras())
    model, reference = _compiled(models[0]), models[1]
    worst = max(step_and_compare(model, reference, batch(step)).gradient for step in range(2))
    whole = [name for name, p in model.named_parameters() if shard_of(p) is None]
    outside = list(model.head.weight.shape)
    used = message_of(lambda: model.norms[0].weight.square().sum().backward())
    model.norms[0].weight = nn.Parameter(torch.zeros(32))
    replaced = message_of(model.state_dict)
    return {"worst": worst, "whole": whole, "outside": outside, "used": used, "replaced": replaced}


@pytest.mark.distributed
def test_untraced_reads_and_parameters_that_stay_whole() -> None:
    for result in run_ranks(f"{_HERE}:extras", 2):
        assert result["worst"] < 1e-5
        recurrent = [f"memory.{kind}_l0" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        assert result["whole"] == ["scale", "shift", *recurrent]
        assert result["outside"] == [VOCABULARY // 2, 32]
        assert result["used"].startswith("UntracedReadError") and "norms.0.weight was not averaged" in result["used"]
        assert "norms.0.weight is no longer the shard" in result["replaced"]


def test_one_process_keeps_everything_whole() -> None:
    model = _compiled(build("plain"))
    assert all(not isinstance(shard_of(p), DenseShard) for p in model.parameters())
    reference = build("plain")
    assert step_and_compare(model, reference, batch(0)).gradient < 1e-5


def differing_options() -> str:
    dist.init_process_group("gloo")
    kind = "shard" if rank_and_size()[0] else "replicate"
    return message_of(lambda: hecate.compile(build("plain"), hecate.Config(backend="aot_eager", dense=kind)))


@pytest.mark.distributed
def test_ranks_with_different_options() -> None:
    for message in run_ranks(f"{_HERE}:differing_options", 2):
        assert message.startswith("DisagreementError") and "option dense = 'shard'" in message
