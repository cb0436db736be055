"""Generation with hecate.S2Cache: the tokens of the model that is given its mask, with a part of the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hecate
from tests.hecate_compile.test_sparse_attention import OPTIONS, give_masks, model_of
from tests.support.extent import ALL
from tests.support.models import batch
from tests.support.ranks import run_ranks

_HERE = "tests.hecate_compile.integrations.test_s2_cache"
# Blocks leave the window, and heads get strided blocks at different times.
LONG = 200 if ALL else 48
only_with_all = pytest.mark.skipif(not ALL, reason="ten seconds or more of generation: with HECATE_TESTS=all")


def pair(family: str, options: dict[str, Any] = OPTIONS, **changes: Any) -> tuple[Any, Any]:
    """A compiled model, and the plain one with masks."""
    attention = hecate.S2Attention(**options)
    reference, model = (model_of(family, use_cache=True, **changes).eval() for _ in range(2))
    give_masks(reference, attention)
    return hecate.compile(model, hecate.Config(backend="aot_eager", attention=attention)), reference


def tokens(model: Any, prompt: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
    # Without a mask, generate takes the tokens of the text that are the padding token for padding.
    given: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0} | options
    out: torch.Tensor = model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, **given)
    return out


def generate(family: str, length: int = 37, count: int = LONG, **options: Any) -> dict[str, Any]:
    """On one rank."""
    model, reference = pair(family, OPTIONS | options)
    prompt = batch(0, rows=2, length=length)
    wanted = tokens(reference, prompt, count, use_cache=False)
    cache = hecate.S2Cache(model)
    sparse = tokens(model, prompt, count, past_key_values=cache)
    graphs = len(hecate.explain(model).graphs)
    whole = tokens(model, prompt, count)
    config = model.config
    pattern = hecate.S2Attention(**OPTIONS | options).pattern(config.num_attention_heads, config.num_key_value_heads)
    seen = length + count - 1
    dense = tokens(model_of(family, use_cache=True).eval(), prompt, count)
    kept = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    per_token = 2 * config.num_key_value_heads * kept[0].shape[3] * kept[0].element_size()
    return {
        "differs": not torch.equal(dense, wanted),
        "bytes": [x.untyped_storage().nbytes() // per_token for x in kept],
        "sparse": torch.equal(sparse, wanted),
        "whole": torch.equal(whole, wanted),
        "graphs": graphs,
        "kept": [layer.keys.shape[2] for layer in cache.layers],
        "expected": [seen, pattern.stored(seen)],
        "values": [layer.values.shape[2] for layer in cache.layers],
    }


def check(found: dict[str, Any]) -> None:
    assert found["sparse"] and found["whole"]
    assert found["differs"], "the pattern makes a difference"
    assert found["kept"] == found["values"] == found["expected"]
    # What memory holds, and not what a view shows of it.
    assert found["bytes"] == [count for count in found["expected"] for _ in range(2)]
    assert found["kept"][1] < found["kept"][0]
    # Prompt, first token, and one for every later length; of a short text torch first takes all to be kept.
    assert found["graphs"] <= 4


@pytest.mark.parametrize("family", ["qwen3_moe", *(["mixtral", "llama"] if ALL else [])])
def test_tokens_and_memory(family: str) -> None:
    check(generate(family))


@only_with_all
def test_a_prompt_of_whole_blocks_and_a_short_one() -> None:
    check(generate("llama", length=48))
    check(generate("llama", length=3))


@only_with_all
def test_other_patterns() -> None:
    check(generate("llama", local=2, offset=1))
    check(generate("llama", homogeneous=True, stride=3, allow_holes=True))


@only_with_all
@pytest.mark.distributed
def test_on_two_ranks() -> None:
    for found in run_ranks(f"{_HERE}:generate", 2, family="qwen3_moe"):
        check(found)


@only_with_all
def test_beams_and_another_text() -> None:
    model, reference = pair("llama")
    prompt = batch(0, rows=2, length=21)
    cache = hecate.S2Cache(model)
    beams = tokens(model, prompt, 40, num_beams=3, past_key_values=cache)
    assert torch.equal(beams, tokens(reference, prompt, 40, num_beams=3, use_cache=False))
    cache.reset()
    other = batch(1, rows=2, length=30)
    assert torch.equal(tokens(model, other, 20, past_key_values=cache), tokens(reference, other, 20, use_cache=False))


@only_with_all
def test_compressed_keys_are_for_all_heads() -> None:
    """Those of DeepSeek; with the default cache its sparse layers look at what they would see."""
    model, reference = pair("deepseek_v3")
    with pytest.raises(hecate.UnsupportedAttentionError, match=r"one compressed key for all heads \(MLA\)"):
        hecate.S2Cache(model)
    prompt = batch(0, rows=2, length=37)
    assert torch.equal(tokens(model, prompt, 40), tokens(reference, prompt, 40, use_cache=False))


def test_a_dense_layer_with_a_window() -> None:
    """It has a mask of its own, which the one column of the others must not become."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20, "use_sliding_window": True}
    model, reference = pair("qwen3", **kinds)
    prompt = batch(0, rows=2, length=27)
    cache = hecate.S2Cache(model)
    wanted = tokens(reference, prompt, 24, use_cache=False)
    assert torch.equal(tokens(model, prompt, 24, past_key_values=cache), wanted)
    # That the window makes a difference.
    assert not torch.equal(tokens(pair("qwen3")[1], prompt, 24, use_cache=False), wanted)


def test_padding_is_refused() -> None:
    model, _ = pair("llama")
    mask = torch.ones(2, 37, dtype=torch.long)
    mask[0, :4] = 0
    for given in ({}, {"past_key_values": hecate.S2Cache(model)}):
        with pytest.raises(hecate.UnsupportedAttentionError, match="not the causal one"):
            tokens(model, batch(0, rows=2, length=37), 4, attention_mask=mask, **given)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hecate\.S2Cache: this LlamaForCausalLM was not compiled"):
        hecate.S2Cache(model_of("llama"))
    dense = hecate.compile(model_of("mixtral"), hecate.Config(backend="aot_eager"))
    with pytest.raises(ValueError, match=r"compiled without Config\(attention=...\)"):
        hecate.S2Cache(dense)
    model, plain = pair("llama", OPTIONS | {"per": "q", "stride": 4})
    with pytest.raises(hecate.UnsupportedAttentionError, match="2 heads of queries look at the same keys"):
        hecate.S2Cache(model)
    model, _ = pair("llama")
    cache = hecate.S2Cache(model)
    with pytest.raises(hecate.UnsupportedAttentionError, match="only the forward of the compiled model"):
        plain(batch(0, rows=2), past_key_values=cache)
    cache = hecate.S2Cache(model)
    with torch.no_grad():
        model(batch(0, rows=2, length=20), past_key_values=cache)
        with pytest.raises(hecate.UnsupportedAttentionError, match="several tokens came at once"):
            model(batch(0, rows=2, length=5), past_key_values=cache)
    with pytest.raises(hecate.UnsupportedAttentionError, match="tokens are to be taken back"):
        cache.layers[1].crop(-1)
    cache.layers[1].crop(0)
