"""How many graphs a model may have: counted for each model, and gone with it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo import symbolic_convert

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.graph import traces
from hecate.graph.numbers_in_graphs import WithoutNumbersIfNeeded
from hecate.private import LearnedByDynamo
from tests.support.models import PlainLanguageModel, batch, build
from tests.support.parity import compare, error_of, rank_and_size, step_and_compare
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.graph.test_traces"
EAGER = hecate.Config(backend="aot_eager")
# Instead of torch's limit of eight graphs of a function, which take longer.
_FEW = 4


def _pair(seed: int = 0) -> tuple[PlainLanguageModel, PlainLanguageModel]:
    """A compiled model and what it is compared with."""
    made = []
    for _ in range(2):
        torch.manual_seed(seed)
        made.append(PlainLanguageModel(hidden=8, layers=1, experts=2))
    return hecate.compile(made[0], EAGER), made[1]


def test_each_graph_says_why_it_was_made() -> None:
    model, _ = _pair()
    for length in (6, 9, 12):
        ids = torch.zeros(2, length, dtype=torch.int64)
        model(input_ids=ids, labels=ids)["loss"].backward()
    with torch.no_grad():
        model(input_ids=ids)
    explanation = hecate.explain(model)
    first, longer, without_gradients = (graph.because for graph in explanation.graphs)
    assert first == ""
    assert "size mismatch at index 1. expected 6, actual 9" in longer and "input_ids" in longer
    assert without_gradients == "GLOBAL_STATE changed: grad_mode"
    assert without_gradients in str(explanation)
    assert [graph["because"] for graph in explanation.to_dict()["graphs"]] == [first, longer, without_gradients]


def _step(model: nn.Module, reference: nn.Module, ids: torch.Tensor) -> float:
    difference = step_and_compare(model, reference, ids)
    return max(difference.loss, difference.gradient)


def _graphs(model: nn.Module) -> int:
    return len(compiled_model_of(model, "explain").backend.graphs)


def sweep() -> dict[str, Any]:
    """Five models in a row, of which the last two are kept and have several graphs each."""
    errors, kept = [], []
    for seed in range(5):
        model, reference = _pair(seed)
        ids = batch(seed)
        with torch.no_grad():
            errors.append(error_of(model(ids)["logits"], reference(ids)["logits"]))
            if seed >= 3:
                kept.append(model)
                errors.append(error_of(model(ids, ids)["loss"], reference(ids, ids)["loss"]))
    errors.append(_step(model, reference, batch(9)))
    return {"errors": errors, "graphs": [_graphs(model) for model in kept]}


def _preference_loss(policy: nn.Module, frozen: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """DPO's: what the policy has gained on the first half of the rows against the second."""

    def score(model: nn.Module) -> torch.Tensor:
        logits = model(input_ids=ids)["logits"][:, :-1].log_softmax(-1)
        return logits.gather(-1, ids[:, 1:, None]).sum((1, 2))

    with torch.no_grad():
        before = score(frozen)
    gained = score(policy) - before
    chosen, rejected = gained.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def preferences() -> dict[str, Any]:
    """DPO by hand, whose reference is a second model of the same class, then text."""
    policy, frozen = (hecate.compile(build("qwen3_moe", layers=1), EAGER) for _ in range(2))
    rank, size = rank_and_size()
    plain, plain_frozen = (build("qwen3_moe", layers=1) for _ in range(2))
    errors = []
    for step, length in enumerate((12, 16, 9)):
        ids = batch(step, rows=4 * size, length=length)
        for model in (policy, plain):
            model.zero_grad()
        ours = _preference_loss(policy, frozen, ids.chunk(size)[rank])
        theirs = torch.stack([_preference_loss(plain, plain_frozen, part) for part in ids.chunk(size)]).mean()
        ours.backward()
        theirs.backward()
        difference = compare(policy, ours.detach(), plain, theirs.detach())
        errors.append(max(difference.loss, difference.gradient))
    texts = []
    for model in (policy, plain):
        prompts, length = batch(9, rows=2, length=5), {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        padded = torch.ones_like(prompts)
        padded[0, :2] = 0
        texts.append(model.generate(prompts, attention_mask=padded, **length).tolist())
    return {"errors": errors, "texts": texts[0] == texts[1], "graphs": [_graphs(policy), _graphs(frozen)]}


def many_shapes() -> dict[str, Any]:
    """Shapes with sizes of one among them, and each way of being called."""
    model, reference = _pair()
    rank, size = rank_and_size()
    errors = [
        _step(model, reference, batch(length, rows=rows * size, length=length))
        for rows, length in [(4, 16), (3, 20), (1, 13)]
    ]
    with torch.no_grad():
        for rows, length in [(4, 16), (1, 31), (3, 1)]:
            ids = batch(length, rows=rows * size, length=length)
            for given in [{}, {"labels": ids.chunk(size)[rank]}] if length > 1 else [{}]:
                ours = model(ids.chunk(size)[rank], **given)["logits"]
                errors.append(float((ours - reference(ids)["logits"].chunk(size)[rank]).abs().max()))
    return {"errors": errors, "graphs": _graphs(model)}


def each_has_its_own() -> dict[str, dict[str, Any]]:
    """On one rank, one after the other in one process, where torch allows few graphs."""
    torch._dynamo.config.recompile_limit = _FEW
    return {"sweep": sweep(), "preferences": preferences(), "many shapes": many_shapes()}


@pytest.mark.distributed
def test_each_model_has_its_own_number_of_graphs() -> None:
    for found in run_ranks(f"{_HERE}:each_has_its_own", 2):
        for name, one in found.items():
            assert max(one["errors"]) < 1e-5, name
        assert len(found["sweep"]["errors"]) == 5 + 2 + 1
        assert sum(found["sweep"]["graphs"]) > _FEW, "more than torch allows all of them together"
        assert found["preferences"]["texts"] and found["preferences"]["graphs"][0] > _FEW
        assert found["many shapes"]["graphs"] > _FEW


def limit() -> list[str]:
    """A number of the model's is another one in each step."""
    traces.LIMIT = torch._dynamo.config.recompile_limit = 2
    model, _ = _pair()
    ids = batch(0)
    found = []
    with torch.no_grad():
        for turns in (1, 2, 3, 4):
            model.turns = turns
            found.append(message_of(lambda: model(ids)))
        # Another model of the class has its own.
        found.append(message_of(lambda: _pair(1)[0](ids)))
    return found


@pytest.mark.distributed
def test_behind_the_last_graph_the_error_says_what_changed() -> None:
    for found in run_ranks(f"{_HERE}:limit", 2):
        assert [text for text in found if text == "no error"] == ["no error"] * 3, found
        for text in found[2:4]:
            assert text.startswith("UntracedReadError") and "as many graphs of the model as it may" in text
            assert "'forward'" in text and "has 2" in text and "self.turns == 2" in text and "\nUser" not in text
            assert "torch._dynamo.config.recompile_limit" in text


def graphs_alive() -> int:
    """Return how many graphs Dynamo keeps, of whatever code."""
    codes = filter(None, (seen() for seen in traces.convert_frame.input_codes.seen))
    return sum(entry.code is not None for code in codes for entry in _debug_get_cache_entry_list(code))


def test_graphs_of_a_dead_model_are_freed() -> None:
    gc.collect()
    before = graphs_alive()
    model, reference = _pair()
    for length in (16, 20, 24):
        _step(model, reference, batch(0, length=length))
    assert graphs_alive() > before
    del model
    gc.collect()
    assert graphs_alive() == before


def test_what_torch_knows_of_a_dead_model_is_freed() -> None:
    objects = []
    for seed in range(4):
        model, reference = _pair(seed)
        _step(model, reference, batch(seed))
        del model, reference
        gc.collect()
        objects.append(len(gc.get_objects()))
    # Facts about each length in its graphs were some 8,000; what is left are notes of Dynamo's.
    assert objects[3] - objects[1] < 2 * 3000


def test_floats_that_must_be_written_out_are_a_models_own() -> None:
    """Ranks have the same graphs, whatever else one of them compiles: that may make Dynamo begin again."""
    state, seen = symbolic_convert.TensorifyState, []

    def convert(*given: Any) -> None:
        seen.append({*state.force_specializations})
        state.specialize("one of ours")

    model = nn.Linear(1, 1)
    compile_frame = WithoutNumbersIfNeeded(convert, model, LearnedByDynamo(), fullgraph=False)
    before = {*state.force_specializations}
    for _ in range(2):
        compile_frame()
        assert state.force_specializations == before
        state.clear()
        before = set()
    assert seen == [set(), {"one of ours"}]


def test_sizes_that_have_changed_are_a_models_own() -> None:
    """A model has the graphs that it would have alone, after another one of its class has seen other lengths."""
    graphs = []
    for seed in range(2):
        model, reference = _pair(seed)
        for length in (8, 12, 10):
            _step(model, reference, batch(seed, length=length))
        graphs.append(len(hecate.explain(model).graphs))
    assert graphs == [2, 2]
