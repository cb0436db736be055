"""Config(attention=...) on whole models: they compute what the unmodified model computes that is given the mask."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import hecate
from hecate.checkpoints.run_state import function_options
from hecate.graph import traces
from hecate.runtime.attention.s2_masks import visible
from tests.support.adversaries import Anything
from tests.support.extent import ALL
from tests.support.models import batch, build
from tests.support.parity import Difference, clear_gradients, compare, rank_and_size, run_step
from tests.support.ranks import RanksFailed, run_ranks

_HERE = "tests.hecate_compile.test_sparse_attention"
# Blocks of 16 in sequences of 40 to 100 tokens.
OPTIONS: dict[str, Any] = {"block": 16, "local": 1, "dense_layers": (0,)}
LENGTHS = (64, 50, 81)
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "llama")


def model_of(family: str, **changes: Any) -> Any:
    """Two layers, of which the second is sparse."""
    changes = {"use_cache": False, "max_position_embeddings": 256, "attention_dropout": 0.0} | changes
    if family not in ("llama", "qwen3"):
        return build(family, **changes)
    import transformers

    torch.manual_seed(0)
    name = {"llama": "Llama", "qwen3": "Qwen3"}[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **changes,
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
    return model


def give_masks(model: Any, options: hecate.S2Attention) -> None:
    """Let the sparse layers of an unmodified model take their mask instead of the one that all layers get."""
    config = model.config
    pattern = options.pattern(config.num_attention_heads, config.num_key_value_heads)

    def replace(module: Any, args: Any, kwargs: Any) -> Any:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        length = hidden.shape[1]
        mask = visible(config.num_attention_heads, length, length, pattern, hidden.device)
        # Attention takes its mask by name, in transformers.
        return args, {**kwargs, "attention_mask": mask[None].expand(hidden.shape[0], -1, -1, -1)}

    for number, layer in enumerate(model.model.layers):
        if not options.is_dense(number):
            layer.self_attn.register_forward_pre_hook(replace, with_kwargs=True)


def step_and_compare(model: Any, reference: Any, ids: torch.Tensor) -> Difference:
    clear_gradients(model, reference)
    loss = run_step(model, ids)
    expected = reference(input_ids=ids, labels=ids)["loss"]
    expected.backward()
    return compare(model, loss, reference, expected.detach())


def measure(family: str, options: dict[str, Any], **config: Any) -> dict[str, Any]:
    """On one rank: the worst errors over some lengths, and how much was compiled."""
    torch._dynamo.utils.counters.clear()
    if config.get("policy") == "anything":
        config["policy"] = Anything()
    changes = config.pop("changes", {})
    checkpointed = config.pop("checkpointed", False)
    reference, model = (model_of(family, **changes) for _ in range(2))
    attention = hecate.S2Attention(**options)
    give_masks(reference, attention)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    hecate.compile(model, hecate.Config(**({"backend": "aot_eager", "attention": attention} | config)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        errors = [step_and_compare(model, reference, batch(n, rows=4, length=k)) for n, k in enumerate(LENGTHS)]
    explanation = hecate.explain(model)
    worst = max(errors, key=lambda e: e.gradient)
    # That the pattern makes a difference, or there would be nothing to compare.
    with torch.no_grad():
        ids = batch(0, rows=4, length=LENGTHS[0])
        plain = model_of(family, **changes)(input_ids=ids, labels=ids)["loss"]
        sparse = reference(input_ids=ids, labels=ids)["loss"]
    return {
        "loss": max(e.loss for e in errors),
        "gradient": worst.gradient,
        "worst": worst.worst,
        "graphs": len(explanation.graphs),
        "breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "rewritten": {record.name: record.rewritten for record in explanation.graphs[0].passes},
        "text": str(explanation),
        "changed": abs(float(plain - sparse)),
    }


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", OPTIONS, {"policy": "anything"}),
    "llama": ("llama", OPTIONS, {}),
    "rematerialize": ("qwen3_moe", OPTIONS, {"policy": "anything", "rematerialize": True}),
    "sharded": ("deepseek_v3", OPTIONS, {"policy": "anything", "dense": "shard"}),
    "checkpointed": ("mixtral", OPTIONS, {"policy": "anything", "checkpointed": True}),
    "masked": ("llama", OPTIONS, {"disable_passes": ["skip_blocks"]}),
}
# What the number of ranks changes nothing in, and what it does; of the rest the one that takes less time.
ALONE, TOGETHER = ("qwen3_moe", "masked"), ("checkpointed",)
if ALL:
    CASES |= {f"{family}, plain": (family, OPTIONS, {}) for family in FAMILIES if family != "llama"}
    CASES |= {f"{family}, sharded": (family, OPTIONS, {"dense": "shard"}) for family in FAMILIES}
    CASES |= {f"{family}, checkpointed": (family, OPTIONS, {"checkpointed": True}) for family in FAMILIES}
    CASES |= {
        f"{family}, masked": (family, OPTIONS, {"disable_passes": ["skip_blocks"]})
        for family in FAMILIES
        if family != "llama"
    }
    CASES |= {
        "per query head": ("mixtral", OPTIONS | {"per": "q", "stride": 4}, {}),
        "every layer": ("mixtral", OPTIONS | {"dense_layers": ()}, {}),
        "offset": ("mixtral", OPTIONS | {"offset": 1}, {}),
        "with a cache": ("mixtral", OPTIONS, {"changes": {"use_cache": True}}),
    }
    CASES |= {f"{family}, inductor": (family, OPTIONS, {"backend": "inductor"}) for family in FAMILIES}
    ALONE = TOGETHER = tuple(CASES)


def check(found: dict[str, Any], case: str) -> None:
    family, options, config = CASES[case]
    assert found["loss"] < 1e-5 and found["gradient"] < 1e-5, found["worst"]
    assert found["changed"] > 1e-4, "the pattern makes a difference"
    # One for the first length, and one for every other.
    assert (found["graphs"], found["breaks"]) == (2, 0)
    sparse = 2 if options["dense_layers"] == () else 1
    assert found["rewritten"]["shard_context"] == sparse
    assert found["rewritten"]["skip_blocks"] == (0 if "disable_passes" in config else sparse)
    assert "model.layers.1.self_attn: sparse," in found["text"]
    if family != "llama":
        assert found["rewritten"]["exchange_rows"] == 2
    else:
        assert "no experts are sharded" in found["text"]


@pytest.mark.parametrize("case", ALONE)
def test_one_process(case: str) -> None:
    family, options, config = CASES[case]
    check(measure(family, options, **dict(config)), case)


def measure_all() -> dict[str, Any]:
    given = {case: CASES[case] for case in TOGETHER}
    return {case: measure(family, options, **dict(config)) for case, (family, options, config) in given.items()}


@cache
def results() -> list[dict[str, Any]] | RanksFailed:
    """A failure is remembered too, so that it is waited for once."""
    try:
        return run_ranks(f"{_HERE}:measure_all", 2, timeout=3000 if ALL else 900)
    except RanksFailed as failure:
        return failure


@pytest.mark.distributed
@pytest.mark.timeout(3100 if ALL else 1000)
@pytest.mark.parametrize("case", TOGETHER)
def test_two_ranks(case: str) -> None:
    found = results()
    if isinstance(found, RanksFailed):
        pytest.fail(str(found))
    for rank in found:
        check(rank[case], case)


def different_lengths() -> tuple[float, str]:
    """Ranks may have sequences of different lengths, as without the option. How far the rank's own loss is off."""
    rank, _ = rank_and_size()
    attention = hecate.S2Attention(**OPTIONS | {"dense_layers": ()})
    reference, model = (model_of("qwen3_moe", layers=1) for _ in range(2))
    give_masks(reference, attention)
    hecate.compile(model, hecate.Config(backend="aot_eager", attention=attention))
    ids = batch(rank, rows=2, length=50 + 20 * rank)
    loss, expected = (one(input_ids=ids, labels=ids)["loss"] for one in (model, reference))
    loss.backward()
    dist.barrier()
    return abs(float(loss - expected)) / float(expected), str(hecate.explain(model))


@pytest.mark.distributed
def test_ranks_may_have_other_lengths() -> None:
    for off, text in run_ranks(f"{_HERE}:different_lengths", 2):
        assert off < 1e-5
        assert "model.layers.0.self_attn: sparse," in text


# --- what is refused ---


def compiled(family: str, options: dict[str, Any] = OPTIONS, **changes: Any) -> Any:
    attention = hecate.S2Attention(**options)
    return hecate.compile(model_of(family, **changes), hecate.Config(backend="aot_eager", attention=attention))


def message_of(model: Any, **given: Any) -> str:
    ids = batch(0, rows=2, length=50)
    with pytest.raises(hecate.UnsupportedAttentionError) as caught:
        model(input_ids=ids, labels=ids, **given)
    return str(caught.value)


def test_refused_in_compile() -> None:
    with pytest.raises(hecate.UnsupportedAttentionError, match="GPT-OSS, whose attention has sinks"):
        compiled("gpt_oss")
    with pytest.raises(ValueError, match=r"dense_layers=\(0, 1\) are all 2 layers"):
        compiled("llama", OPTIONS | {"dense_layers": (0, 1)})
    with pytest.raises(ValueError, match=r"dense_layers=\(0, 7\) names layer 7, and the model has 2"):
        compiled("llama", OPTIONS | {"dense_layers": (0, 7)})
    with pytest.raises(ValueError, match="see only 50% of the context"):
        compiled("llama", OPTIONS | {"stride": 4})
    with pytest.warns(UserWarning, match="attention stays dense"):
        compiled("llama", OPTIONS | {"local": 16})
    with pytest.raises(hecate.NoExpertsError):
        hecate.compile(model_of("llama"), hecate.Config(backend="aot_eager"))


def test_refused_in_the_first_forward() -> None:
    padded = torch.ones(2, 50, dtype=torch.long)
    text = message_of(compiled("llama"), attention_mask=padded)
    assert "model.layers.1.self_attn cannot have S2-Attention: the mask depends on attention_mask" in text
    assert "has a window or another pattern" in message_of(compiled("mixtral", sliding_window=20))
    assert "dropout" in message_of(compiled("llama", attention_dropout=0.1).train())


class NoAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        return out


def test_what_may_be_experts_is_not_taken_for_none() -> None:
    model = model_of("llama")
    model.model.extra = torch.nn.Conv1d(4, 4, 3)
    config = hecate.Config(backend="aot_eager", attention=hecate.S2Attention(**OPTIONS))
    with pytest.raises(hecate.NoExpertsError, match=r'Passed over model\.extra: (?s:.*)policy="replicate"'):
        hecate.compile(model, config)
    model = model_of("llama")
    model.config.num_experts = 8
    with pytest.raises(hecate.NoExpertsError, match='policy="replicate"'):
        hecate.compile(model, config)


def test_a_model_in_which_nothing_became_sparse_is_refused() -> None:
    attention = hecate.S2Attention(**OPTIONS)
    model = hecate.compile(NoAttention(), hecate.Config(backend="aot_eager", attention=attention))
    for _ in range(2):
        with pytest.raises(hecate.UnsupportedAttentionError, match="has made no layer sparse"):
            model(torch.ones(2, 4))


# --- attention that would be dense, and nobody would notice ---


@pytest.mark.skipif(not traces._OWN_COUNT, reason="in torch 2.11 all models of a process have one limit together")
def test_more_graphs_than_a_model_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "LIMIT", 1)
    model = compiled("llama", OPTIONS)
    with torch._dynamo.config.patch(recompile_limit=1):
        model(input_ids=batch(0, rows=2, length=50))
        with pytest.raises(hecate.UnsupportedAttentionError, match=r"raise torch\._dynamo\.config\.recompile_limit"):
            model(input_ids=batch(0, rows=2, length=64))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_layer_that_torch_does_not_trace(family: str) -> None:
    model = model_of(family)
    attention = model.model.layers[1].self_attn
    attention.forward = torch.compiler.disable(attention.forward)
    hecate.compile(model, hecate.Config(backend="aot_eager", attention=hecate.S2Attention(**OPTIONS)))
    assert "the whole model must be one graph" in message_of(model)


def test_another_attention_after_the_first_step() -> None:
    model = compiled("llama")
    ids = batch(0, rows=2, length=50)
    model(input_ids=ids, labels=ids)["loss"].backward()
    model.set_attn_implementation("eager")
    assert "model.layers.1.self_attn cannot have S2-Attention" in message_of(model)


class SomeAttention(torch.nn.Module):
    """One attention that is sparse, and one that nobody recognises, in a model without a config."""

    def __init__(self) -> None:
        super().__init__()
        self.second = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        if self.second:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)
        weights = (x @ x.transpose(-1, -2)).tril().exp().tril()
        return weights @ x / weights.sum(-1, keepdim=True)


def test_a_graph_with_fewer_sparse_layers_than_the_first() -> None:
    options = hecate.S2Attention(**OPTIONS | {"dense_layers": ()})
    model = hecate.compile(SomeAttention(), hecate.Config(backend="aot_eager", attention=options))
    model(torch.randn(2, 2, 50, 8))
    model.second = False
    with pytest.raises(hecate.UnsupportedAttentionError, match="made only 1 of 2 layers sparse"):
        model(torch.randn(2, 2, 50, 8))


def test_a_model_that_is_not_compiled_at_all() -> None:
    model = compiled("llama")
    with torch.compiler.set_stance("force_eager"):
        assert "torch.compile compiled nothing" in message_of(model)


def test_checkpoints_know_the_option(tmp_path: Path) -> None:
    model = compiled("mixtral")
    hecate.save(tmp_path / "run", model, step=1)
    other = compiled("mixtral", OPTIONS | {"local": 2})
    with pytest.raises(hecate.MismatchError, match=r"hecate\.attention\.local was 1 and is 2"):
        hecate.load(tmp_path / "run", other)
    plain = hecate.compile(model_of("mixtral"), hecate.Config(backend="aot_eager"))
    with pytest.raises(hecate.MismatchError, match=r"hecate\.attention was .* and is None"):
        hecate.load(tmp_path / "run", plain)
    # The same function, in other words.
    for same in ({"dense_layers": [0, 0]}, {"stride": 2, "offset": 2}):
        hecate.load(tmp_path / "run", compiled("mixtral", OPTIONS | same))


def test_checkpoints_from_before_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = hecate.compile(model_of("mixtral"), hecate.Config(backend="aot_eager"))
    options = function_options(plain)
    del options["hecate.attention"]
    with monkeypatch.context() as patched:
        # The package has a function of this name.
        patched.setattr(import_module("hecate.checkpoints.save"), "function_options", lambda model: options)
        hecate.save(tmp_path / "run", plain, step=1)
    hecate.load(tmp_path / "run", plain)
    sparse = compiled("mixtral")
    with pytest.raises(hecate.MismatchError, match=r"hecate\.attention was None and is .*same_options=False"):
        hecate.load(tmp_path / "run", sparse)
    hecate.load(tmp_path / "run", sparse, same_options=False)
