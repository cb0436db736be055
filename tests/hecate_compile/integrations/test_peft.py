"""LoRA by PEFT: on attention, on fused experts, on experts in a list."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

import hecate
from tests.hecate_compile.wrap.test_stack_experts import small
from tests.support.adversaries import Restless
from tests.support.extent import ALL
from tests.support.models import batch, build
from tests.support.parity import state_error
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.integrations.test_peft"

FUSED = dict(target_modules=["q_proj", "v_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])


def adapted(kind: str, **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    if kind == "list":
        model, targets = small(layers=1), dict(target_modules=["w1", "w2"])
    else:
        model, targets = build(kind, layers=1), FUSED
    torch.manual_seed(1)
    found = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **targets, **options))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                # They start as zeros, and then lora_A has no gradient.
                parameter.normal_(std=0.1)
    return found


def train(kind: str) -> dict[str, Any]:
    """Three steps with momentum on one rank, against one process."""
    rank, size = dist_rank()
    reference = adapted(kind)
    model = hecate.compile(adapted(kind), hecate.Config(backend="aot_eager", policy=Restless(reshard_every=2)))
    models = (model, reference)
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1, momentum=0.9) for m in models
    ]
    losses = []
    for step in range(3):
        ids = batch(step, rows=4)
        mine = ids.chunk(size)[rank]
        loss = model(input_ids=mine, labels=mine)["loss"]
        expected = reference(input_ids=ids, labels=ids)["loss"]
        for one, value, optimizer in zip(models, (loss, expected), optimizers, strict=True):
            value.backward()
            optimizer.step()
            one.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(abs(float(mean) / size - float(expected.detach())))
    state, wanted = model.state_dict(), reference.state_dict()
    explanation = hecate.explain(model)
    found = {
        "losses": losses,
        "counts": [m.get_nb_trainable_parameters() for m in models],
        "same names": set(state) == set(wanted),
        "error": state_error(state, wanted),
        "moved": state_error(wanted, adapted(kind).state_dict()),
        "exchanged": len(hecate.stats(model).layers),
        "skipped": [skip.reason for skip in explanation.skipped],
        "graphs": len(explanation.graphs),
        "merged": [message_of(model.merge_adapter), message_of(model.merge_and_unload)],
    }
    # Saved by all ranks, read by a plain model; and back.
    from peft import PeftModel, set_peft_model_state_dict

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model.save_pretrained(folder[0])
    dist.barrier()
    ids = batch(7, rows=2)
    if kind != "list":
        again = PeftModel.from_pretrained(build(kind, layers=1), folder[0])
        with torch.no_grad():
            found["saved"] = float((again(input_ids=ids).logits - reference(input_ids=ids).logits).abs().max())
            with reference.disable_adapter(), model.disable_adapter():
                off = model(input_ids=ids).logits - reference(input_ids=ids).logits
            found["off"] = float(off.abs().max())
    fresh = adapted(kind).state_dict()
    adapters = {k.replace(".default.weight", ".weight"): v for k, v in fresh.items() if "lora_" in k}
    set_peft_model_state_dict(model, adapters)
    loaded = model.state_dict()
    found["loaded"] = all(torch.equal(loaded[k], v) for k, v in fresh.items() if "lora_" in k)
    found["files"] = sorted(path.name for path in Path(folder[0]).iterdir())
    found["bases"] = load_over_bases(model, kind)
    return found


def load_over_bases(model: nn.Module, kind: str) -> list[str]:
    """What is said of a checkpoint of all ranks that is loaded over its own base, and over one other of each kind."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    hecate.save(folder[0], model, step=1)
    said = []
    for word in ("", "embed", "experts"):
        again = adapted(kind)
        with torch.no_grad():
            for name, parameter in again.named_parameters():
                if word and word in name and "lora_" not in name:
                    # The last number of the last expert, by the least that there is.
                    last = parameter.view(-1)[-1:]
                    last.copy_(torch.nextafter(last, last + 1))
        hecate.compile(again, hecate.Config(backend="aot_eager"))
        said.append(message_of(lambda again=again: hecate.load(folder[0], again)))
    return said


def checkpoint_layers() -> list[dict[str, Any]]:
    """Checkpointing of a frozen model, on before it is compiled or behind a step, and off before the last step."""
    rank, size = dist_rank()
    found = []
    for early in (True, False):
        reference, model = adapted("qwen3_moe"), adapted("qwen3_moe")
        if early:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        hecate.compile(model, hecate.Config(backend="aot_eager", policy="static"))
        models = (model, reference)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        errors, graphs = [], []
        for step in range(3):
            if step == 1 and not early:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            if step == 2:
                model.gradient_checkpointing_disable()
            ids = batch(step, rows=4)
            for one, part, optimizer in zip(models, (ids.chunk(size)[rank], ids), optimizers, strict=True):
                one(input_ids=part, labels=part)["loss"].backward()
                optimizer.step()
                one.zero_grad()
            errors.append(state_error(model.state_dict(), reference.state_dict()))
            graphs.append(len(hecate.explain(model).graphs))
        moved = state_error(reference.state_dict(), adapted("qwen3_moe").state_dict())
        found.append({"errors": errors, "graphs": graphs, "moved": moved})
    return found


@pytest.mark.distributed
def test_layers_of_a_frozen_model_are_checkpointed_in_one_graph() -> None:
    for early, late in run_ranks(f"{_HERE}:checkpoint_layers", 2):
        assert max(early["errors"] + late["errors"]) < 1e-5, (early, late)
        assert min(early["moved"], late["moved"]) > 1e-2
        assert early["graphs"] == [1, 1, 2] and late["graphs"][:2] == [1, 2]


def generate() -> dict[str, Any]:
    """Between two steps: what PEFT's models generate, which call the model inside them, as in one process."""
    found: dict[str, Any] = {"texts": [], "losses": [], "graphs": []}
    # What has no task is asked for texts by the same way with less around it.
    for task in (None, "CAUSAL_LM") if ALL else ("CAUSAL_LM",):
        reference: Any = adapted("qwen3_moe", task_type=task)
        model: Any = hecate.compile(adapted("qwen3_moe", task_type=task), hecate.Config(backend="aot_eager"))
        rank, size = dist_rank()
        prompt = batch(5 + rank, rows=2)[:, :6]
        options: dict[str, Any] = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
        # On rank 1 texts end earlier.
        whole = reference.generate(input_ids=prompt, eos_token_id=None, **options)
        options |= dict(eos_token_id=whole[:, 8].tolist() if rank else None, pad_token_id=0)

        def same_texts(models: Any = (model, reference), prompt: Any = prompt, options: Any = options) -> bool:
            return torch.equal(*(one.generate(input_ids=prompt, **options) for one in models))

        for step in range(2):
            ids = batch(step, rows=4)
            mine = ids.chunk(size)[rank]
            loss = model(input_ids=mine, labels=mine).loss
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            found["losses"].append(
                abs(float(mean) / size - float(reference(input_ids=ids, labels=ids).loss.detach()))
            )
            for one in (model, reference):
                one.zero_grad()
            found["texts"].append(same_texts())
            if task is not None:
                with model.disable_adapter(), reference.disable_adapter():
                    found["texts"].append(same_texts())
            found["graphs"].append(len(hecate.explain(model).graphs))
    return found


def dist_rank() -> tuple[int, int]:
    import os

    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@cache
def results(kind: str) -> list[dict[str, Any]]:
    return run_ranks(f"{_HERE}:train", 2, kind=kind)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "list"] if ALL else ["gpt_oss", "list"])
def test_adapters_on_experts_train_as_in_one_process(kind: str) -> None:
    for found in results(kind):
        assert max(found["losses"]) < 1e-5 and found["error"] < 1e-5 and found["moved"] > 1e-3
        assert all("after hecate.compile: the adapter of" in said for said in found["merged"]), found["merged"]
        assert found["same names"] and found["loaded"]
        assert found["counts"][0] == found["counts"][1]
        same, *others = found["bases"]
        assert same == "no error" and all("the base here is another one" in said for said in others), found["bases"]
        assert (found["exchanged"], found["skipped"], found["graphs"]) == (1, [], 1), found["skipped"]
        # The list has no config that a plain model could be built from again.
        assert kind == "list" or (found["saved"] < 1e-5 and found["off"] < 1e-5)
        assert "adapter_model.safetensors" in found["files"]


@pytest.mark.distributed
def test_models_with_adapters_generate() -> None:
    for found in run_ranks(f"{_HERE}:generate", 2, timeout=240):
        assert all(found["texts"]) and max(found["losses"]) < 1e-5
        # Behind the first step nothing is compiled again.
        assert found["graphs"][::2] == found["graphs"][1::2], found["graphs"]


def test_one_process() -> None:
    model, reference = adapted("qwen3_moe"), adapted("qwen3_moe")
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    ids = batch(0, rows=2)
    loss, expected = (m(input_ids=ids, labels=ids).loss for m in (model, reference))
    assert torch.allclose(loss, expected)
    assert set(model.state_dict()) == set(reference.state_dict())


def test_adapters_of_experts_freeze_and_thaw_where_they_were() -> None:
    model: Any = adapted("qwen3_moe")
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    layer = next(m for name, m in model.named_modules() if name.endswith("mlp.experts") and hasattr(m, "lora_A"))
    own = {name: p for name, p in model.named_parameters() if "experts" in name and "lora_" in name}
    for part, wanted in ((layer.lora_A["default"], ["lora_A"]), (layer.lora_B, ["lora_A", "lora_B"])):
        assert part.requires_grad_(False) is part
        frozen = {name.rpartition("_proj_")[2] for name, p in own.items() if not p.requires_grad}
        assert sorted(frozen) == wanted
    layer.lora_A.requires_grad_(True)
    layer.lora_B["default"].requires_grad_()
    assert all(p.requires_grad for p in own.values())
    layer.get_base_layer().requires_grad_(True)
    layer.base_layer.requires_grad_(False)
    kept = {
        name.rpartition("experts.")[2]: p.requires_grad for name, p in model.named_parameters() if "experts" in name
    }
    assert sorted(name for name, trained in kept.items() if trained) == [
        f"base_layer.base_layer.{layer.parameter_name}_lora_{half}" for half in "AB"
    ]


def test_switching_adapters_off_and_on_thaws_those_of_experts_as_peft_does() -> None:
    model: Any = adapted("qwen3_moe")
    reference: Any = adapted("qwen3_moe")
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    layer = next(m for name, m in model.named_modules() if name.endswith("mlp.experts") and hasattr(m, "lora_A"))
    assert [name for name, _ in layer.lora_A.named_parameters()] == ["default.weight"]
    assert len({id(p) for p in model.parameters()}) == len([*model.parameters()])
    for act in (lambda one: one.requires_grad_(False), lambda one: one.base_model.disable_adapter_layers()):
        for one in (model, reference):
            act(one)
        assert not any(p.requires_grad for one in (model, reference) for p in one.parameters())
    for one in (model, reference):
        one.base_model.enable_adapter_layers()
        assert {"lora_" in name for name, p in one.named_parameters() if p.requires_grad} == {True}
        assert all(p.requires_grad for name, p in one.named_parameters() if "lora_" in name)


def test_a_hook_on_an_adapter_of_experts_is_refused() -> None:
    model: Any = adapted("qwen3_moe")
    layer = next(m for name, m in model.named_modules() if name.endswith("mlp.experts") and hasattr(m, "lora_A"))
    layer.lora_A["default"].weight.register_hook(torch.abs)
    with pytest.raises(ValueError, match=r"experts\.lora_A\.default\.weight has a gradient hook"):
        hecate.compile(model)


def test_adapters_on_attention_are_merged() -> None:
    from peft import LoraConfig, get_peft_model

    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(1)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        models.append(get_peft_model(build("qwen3_moe", layers=1), config))
    model, reference = models
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    ids = batch(0, rows=2)
    for act in (lambda one: one, lambda one: one.merge_adapter(), lambda one: one.unmerge_adapter()):
        for one in models:
            act(one)
        loss, expected = (one(input_ids=ids, labels=ids).loss for one in models)
        assert torch.allclose(loss, expected)
        # A merged adapter is not read.
        assert loss.requires_grad == expected.requires_grad
        for one, value in zip(models, (loss, expected), strict=True):
            one.zero_grad()
            if value.requires_grad:
                value.backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None and theirs.grad is not None:
                assert torch.allclose(ours.grad, theirs.grad, atol=1e-6), name


def test_two_adapters_on_experts_are_refused() -> None:
    from peft import LoraConfig

    model: Any = adapted("qwen3_moe")
    model.add_adapter("second", LoraConfig(r=4, lora_alpha=8, **FUSED))
    with pytest.raises(ValueError, match=r"experts' .* \(default, second\).*one adapter that is not merged"):
        hecate.compile(model)
    # Nothing was changed.
    assert torch.isfinite(model(input_ids=batch(0, rows=2)).logits).all()


def test_adapters_are_not_loaded_over_another_base(tmp_path: Path) -> None:
    model: Any = adapted("qwen3_moe")
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    hecate.save(tmp_path, model, step=1)
    hecate.load(tmp_path, model)
    name, router = next((n, p) for n, p in model.named_parameters() if n.endswith("gate.weight"))
    with torch.no_grad():
        router[0, 0] += 1
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(hecate.CheckpointError, match=rf"1 of its \d+ parameters have other values, {name} the first"):
        hecate.load(tmp_path, model)
    assert state_error(model.state_dict(), before) == 0.0
    hecate.load(tmp_path, model, same_options=False)
    router.data = router.data.double()
    with pytest.raises(hecate.CheckpointError, match="was float32 when they were saved, and is float64; cast=True"):
        hecate.load(tmp_path, model)
    hecate.load(tmp_path, model, cast=True)


def test_a_part_of_the_base_that_was_trained_and_frozen_again_is_saved(tmp_path: Path) -> None:
    """What was frozen all along is left out, also by a run that went on from the checkpoint."""

    def compiled() -> Any:
        return hecate.compile(adapted("qwen3_moe"), hecate.Config(backend="aot_eager"))

    def base(checkpoint: Path) -> set[str]:
        names = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        return {name.rpartition("model.")[2] for name in names if "lora_" not in name}

    model = compiled()
    norm = next(module for name, module in model.named_modules() if name.endswith("model.norm"))
    for trains in (True, False):
        norm.requires_grad_(trains)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        loss = model(input_ids=batch(0, rows=2), labels=batch(0, rows=2)).loss
        loss.backward()
        optimizer.step()
        model.zero_grad()
    assert state_error(compiled().state_dict(), model.state_dict()) > 1e-3
    for folder in (tmp_path / "first", tmp_path / "second"):
        assert base(hecate.save(folder, model, step=2)) == {"norm.weight"}
        model, before = compiled(), model
        hecate.load(folder, model)
        assert state_error(model.state_dict(), before.state_dict()) == 0.0
