"""What ``hecate.load_pretrained`` takes from a folder, and refuses before anything changes; in one process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hecate
from tests.hecate_compile.checkpoints.model_kinds import State, model_of, on_meta, same
from tests.support.ranks import message_of


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    hecate.export(model_of("plain"), tmp_path / "plain")
    return tmp_path / "plain"


def refused(folder: Path, model: nn.Module | None = None, **options: Any) -> str:
    """What loading says; the model must be as it was."""
    model = model_of("plain", seed=1) if model is None else model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    said = message_of(lambda: hecate.load_pretrained(model, folder, **options))
    assert same(model.state_dict(), before), "something was changed"
    return said


def assert_loads(folder: Path, kind: str = "plain") -> None:
    """All that another model of this kind was exported with."""
    model = model_of(kind, seed=1)
    hecate.load_pretrained(model, folder)
    assert same(model.state_dict(), model_of(kind).state_dict())


def changed(folder: Path, change: Callable[[State], object]) -> Path:
    """The folder with other tensors in its file."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    return folder


def test_what_does_not_fit_is_named_and_nothing_is_changed(plain: Path) -> None:
    changed(plain, lambda state: state.pop("blocks.0.w_in"))
    assert refused(plain).startswith("MismatchError") and "blocks.0.w_in is not in the files" in refused(plain)
    changed(plain, lambda state: state.update({"blocks.0.w_in.more": torch.zeros(2)}))
    assert "blocks.0.w_in.more is not in the model" in refused(plain)
    shape = "blocks.0.w_out has the shape [8, 16, 31] in the files and [8, 16, 32] in the model"
    changed(plain, lambda state: state.update({"blocks.0.w_out": torch.zeros(8, 16, 31)}))
    assert shape in refused(plain) and shape in refused(plain, strict=False)
    changed(plain, lambda state: state.update({"blocks.0.w_out": torch.zeros(8, 16, 32).to(torch.float8_e4m3fn)}))
    assert "float8_e4m3fn in the files" in refused(plain, strict=False)


def test_what_is_in_both_is_loaded_if_that_is_asked_for(plain: Path) -> None:
    changed(plain, lambda state: state.pop("blocks.0.w_in"))
    changed(plain, lambda state: state.update({"more": torch.zeros(2)}))
    model, before = model_of("plain", seed=1), model_of("plain", seed=1).state_dict()
    left = hecate.load_pretrained(model, plain, strict=False)
    assert left == (["blocks.0.w_in"], ["more"])
    expected = model_of("plain").state_dict() | {"blocks.0.w_in": before["blocks.0.w_in"]}
    assert same(model.state_dict(), expected)


def test_one_name_of_a_tied_parameter_is_enough(plain: Path) -> None:
    assert_loads(changed(plain, lambda state: state.pop("embedding.weight")))


def test_floats_take_the_dtype_of_the_model(plain: Path) -> None:
    model = model_of("plain", seed=1).bfloat16()
    hecate.load_pretrained(model, plain)
    assert same(model.state_dict(), model_of("plain").bfloat16().state_dict())


def test_experts_with_a_gap_are_refused(tmp_path: Path) -> None:
    hecate.export(model_of("qwen3_moe"), tmp_path / "model")
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"

    def shift(state: State) -> None:
        state[name.format(8)] = state.pop(name.format(3))

    assert "not numbered without a gap" in refused(changed(tmp_path / "model", shift), model_of("qwen3_moe"))
    changed(tmp_path / "model", lambda state: state.pop(name.format(8)))
    assert "not numbered" in refused(tmp_path / "model", model_of("qwen3_moe"), strict=False)


def test_tensors_that_transformers_leaves_out_are_left_out(tmp_path: Path) -> None:
    hecate.export(model_of("deepseek_v3"), tmp_path / "model")
    extra = {"model.layers.61.eh_proj.weight": torch.zeros(2), "model.rotary_emb.inv_freq": torch.zeros(2)}
    assert_loads(changed(tmp_path / "model", lambda state: state.update(extra)), "deepseek_v3")


def test_a_model_without_its_head_and_names_of_the_base_model_load(tmp_path: Path) -> None:
    whole: Any = model_of("mixtral")
    whole.model.save_pretrained(tmp_path / "base")
    model = model_of("mixtral", seed=1)
    head = model.state_dict()["lm_head.weight"]
    assert "lm_head.weight is not in the files" in refused(tmp_path / "base", model)
    assert hecate.load_pretrained(model, tmp_path / "base", strict=False) == (["lm_head.weight"], [])
    assert same(model.state_dict(), whole.state_dict() | {"lm_head.weight": head})


def test_a_folder_that_has_no_safe_files_is_refused(tmp_path: Path) -> None:
    assert "is no folder; huggingface_hub.snapshot_download" in refused(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "has no model.safetensors and no model.safetensors.index.json" in refused(tmp_path / "empty")
    torch.save({}, tmp_path / "empty" / "pytorch_model.bin")
    said = refused(tmp_path / "empty")
    assert "pytorch_model.bin, a pickle" in said and "save_pretrained" in said
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    assert "adapters of PEFT" in refused(tmp_path / "empty")


def test_files_that_are_damaged_are_refused(plain: Path) -> None:
    file = plain / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:-7], content[:100], b"", b"\xff" * 64):
        file.write_bytes(damaged)
        assert "model.safetensors cannot be read" in refused(plain)
    file.unlink()
    os.mkfifo(file)
    assert "not a plain file" in refused(plain)


def test_quantized_weights_are_refused(plain: Path) -> None:
    (plain / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    assert "are quantized" in refused(plain, strict=False)
    (plain / "config.json").write_text("[" * 100_000)
    assert "config.json cannot be read" in refused(plain)


@pytest.mark.parametrize(
    "index, says",
    [
        ({"a": "../other.safetensors"}, "outside of the folder"),
        ({"a": "/etc/passwd"}, "outside of the folder"),
        ({"a": ".."}, "outside of the folder"),
        ({"a": "part\0"}, "outside of the folder"),
        ({"a": "link.safetensors"}, "is a link out of the folder"),
        ({"a": "missing.safetensors"}, "missing.safetensors is missing"),
        ({"a": "part.safetensors"}, "says that a is in part.safetensors, and it is not"),
        ({"b": "part.safetensors", "a": "again.safetensors"}, "b is in part.safetensors, and in again.safetensors"),
        ({"a": 3}, "cannot be read"),
        ([], "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_an_index_leads_nowhere_else(tmp_path: Path, index: Any, says: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    save_file({"b": torch.zeros(1)}, folder / "part.safetensors")
    save_file({"b": torch.zeros(1), "a": torch.zeros(1)}, folder / "again.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "other.safetensors")
    text = index if isinstance(index, str) else json.dumps({"weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    assert says in refused(folder)


def test_a_snapshot_of_the_hub_is_links_to_its_blobs(plain: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (plain / "model.safetensors").rename(blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert_loads(snapshot)


def test_a_model_without_storage_must_be_compiled_first(tmp_path: Path) -> None:
    assert "is on the meta device; compile the model first" in message_of(
        lambda: hecate.load_pretrained(on_meta("olmoe"), tmp_path)
    )
