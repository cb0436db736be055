"""Exports of one process: what is refused, and how the folder comes to be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import hecate
from hecate.checkpoints.hub import export as exporting
from hecate.checkpoints.hub.layouts import PretrainedLayout
from tests.hecate_compile.checkpoints.model_kinds import State, model_of, same
from tests.hecate_compile.checkpoints.test_export import read
from tests.support.ranks import message_of

_LIMIT = 10_000


def test_dtype_is_that_of_parameters(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = model_of("deepseek_v3")
    hecate.export(model, tmp_path / "half", dtype=torch.bfloat16)
    state = read(tmp_path / "half")
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    # What transformers keeps in float32 itself: the bias, from 5.24 on the gate's weight, too.
    kept = {name for name, value in loaded.state_dict().items() if value.dtype == torch.float32}
    assert bias in kept and len(kept) < 3
    assert {name for name, value in state.items() if value.dtype != torch.bfloat16} == kept
    assert loaded.dtype == torch.bfloat16 and model.config.dtype != torch.bfloat16
    expected = model.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name].to(value.dtype)), name


@pytest.mark.parametrize("sees", ["less", "an error"])
def test_a_conversion_of_the_whole_model_goes_by_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees: str
) -> None:
    convert = PretrainedLayout.convert

    def whole_alone(layout: Any, tensors: State) -> State:
        if len(tensors) > 3:
            return convert(layout, tensors)
        if sees == "less":
            return {}
        raise KeyError("a tensor that is not there")

    monkeypatch.setattr(PretrainedLayout, "convert", whole_alone)
    steps: list[int] = []
    take = exporting._Writer.take

    def counted(writer: Any, whole: State) -> None:
        steps.append(len(whole))
        take(writer, whole)

    monkeypatch.setattr(exporting._Writer, "take", counted)
    model: Any = model_of("qwen3_moe")
    hecate.export(model, tmp_path / "model", max_shard_size=_LIMIT)
    assert steps == [len(model.state_dict())]
    model.save_pretrained(tmp_path / "expected")
    assert same(read(tmp_path / "model"), read(tmp_path / "expected"))


@pytest.mark.parametrize(
    "kind, policy, dense",
    [
        ("qwen3_moe", "hecate", "shard"),
        ("list", "hecate", "replicate"),
        ("plain", "replicate", "replicate"),
    ],
)
def test_a_compiled_model_of_one_process(kind: str, policy: Any, dense: Any, tmp_path: Path) -> None:
    config = hecate.Config(backend="aot_eager", policy=policy, dense=dense)
    hecate.export(hecate.compile(model_of(kind), config), tmp_path / "model")
    other = hecate.compile(model_of(kind, seed=1), config)
    hecate.load_pretrained(other, tmp_path / "model")
    assert same(other.state_dict(), model_of(kind).state_dict())


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    model = model_of("plain")
    for size in ("5", "5 bytes", 0, -1, True, "0GB", None):
        options: Any = {"max_shard_size": size}
        assert message_of(lambda options=options: hecate.export(model, tmp_path / "x", **options)).startswith(
            f"ValueError: hecate.export: max_shard_size={size!r}"
        )
    assert exporting._bytes_of("1.5 mb") == 1_500_000
    said = message_of(lambda: hecate.export(model, tmp_path / "x", dtype=torch.int8))
    assert "dtype=torch.int8" in said
    assert not list(tmp_path.iterdir())


def test_adapters_and_extra_state_are_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    lora: Any = LoraConfig(target_modules=["q_proj"])
    model: Any = get_peft_model(model_of("olmoe"), lora)
    assert "model.save_pretrained(directory)" in message_of(lambda: hecate.export(model, tmp_path / "x"))
    assert "before the adapters are added" in message_of(lambda: hecate.load_pretrained(model, tmp_path))

    class Counting(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

    other = nn.Sequential(Counting(2, 2))
    assert "0 has extra state" in message_of(lambda: hecate.export(other, tmp_path / "x"))
    assert not list(tmp_path.iterdir())


# --- the folder ---


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    for _ in range(2):
        said = message_of(lambda: hecate.export(model_of("plain", seed=1), tmp_path / "model"))
    assert said.startswith("CheckpointError") and "is not empty" in said
    assert same(read(tmp_path / "model"), model_of("plain", seed=1).state_dict())
    (tmp_path / "file").write_text("")
    assert "is a file" in message_of(lambda: hecate.export(model_of("plain"), tmp_path / "file"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    hecate.export(model_of("plain"), tmp_path / "link")
    assert same(read(tmp_path / "empty"), model_of("plain").state_dict())
    hecate.export(model_of("plain"), tmp_path / "new" / "model")
    assert same(read(tmp_path / "new" / "model"), model_of("plain").state_dict())


def test_what_comes_into_the_folder_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = exporting._finish

    def meanwhile(*arguments: Any) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "theirs").write_text("theirs")
        finish(*arguments)

    monkeypatch.setattr(exporting, "_finish", meanwhile)
    said = message_of(lambda: hecate.export(model_of("plain"), tmp_path / "model"))
    assert said.startswith("CheckpointError") and "not empty" in said
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "theirs"]


@pytest.mark.parametrize("renamed", [False, True])
def test_a_kill_leaves_nothing_half(tmp_path: Path, renamed: bool) -> None:
    """Killed before the rename, or after it; then the next one has its way."""
    child = os.fork()
    if child == 0:
        rename, path_class = Path.rename, cast(Any, Path)

        def killed(path: Path, target: Path) -> None:
            if renamed:
                rename(path, target)
            os._exit(9)

        path_class.rename = killed
        hecate.export(model_of("plain"), tmp_path / "model")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert (tmp_path / "model").exists() is renamed
    if not renamed:
        hecate.export(model_of("plain"), tmp_path / "model")
    assert same(read(tmp_path / "model"), model_of("plain").state_dict())
