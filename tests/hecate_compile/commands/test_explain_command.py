"""hecate explain and hecate dump, as a user runs them; and the help of every command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hecate.cli import app
from tests.support.models import transformers_config

ROOT = Path(__file__).parents[3]
MODEL = """
import torch
from tests.support.models import PlainLanguageModel, PlainMoE, build

def small():
    ids = torch.zeros(2, 16, dtype=torch.int64)
    return build("qwen3_moe"), {"input_ids": ids, "labels": ids}

def dense():
    return torch.nn.Linear(2, 2), {"input": torch.zeros(1, 2)}

def wrong():
    return build("qwen3_moe")

class StrangeMoE(PlainMoE):
    def forward(self, hidden):
        tokens = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(self.choices, dim=-1)
        out = torch.zeros_like(tokens)
        for expert in range(self.w_in.shape[0]):
            token, choice = torch.where(chosen == expert)
            h = tokens[token] @ self.w_in[expert]
            h = (h - h.sum(0, keepdim=True)) @ self.w_out[expert]
            out.index_add_(0, token, h * weights[token, choice, None])
        return out.view_as(hidden)

def strange():
    ids = torch.zeros(2, 16, dtype=torch.int64)
    return PlainLanguageModel(StrangeMoE, layers=1), {"input_ids": ids, "labels": ids}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    transformers_config("qwen3_moe", num_hidden_layers=5).save_pretrained(tmp_path / "config")
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hecate.cli", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300,
        check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_a_function_is_explained_for_many_ranks(folder: Path) -> None:
    done = run("explain", f"{folder}/model.py:small", "--ranks", "4", "--nodes", "2")
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 4" in done.stdout and "on 2 node(s)" in done.stdout
    assert "model.layers.1.mlp.experts" in done.stdout and "exchange_rows" in done.stdout
    assert "schedule of the backward" in done.stdout and "speeds that are made up" in done.stdout


@pytest.mark.slow
def test_a_config_needs_no_weights(folder: Path) -> None:
    done = run("explain", f"{folder}/config", "--ranks", "2", "--length", "16")
    assert done.returncode == 0, done.stderr
    assert "2 of 5 layers" in done.stdout and "model.layers.1.mlp.experts" in done.stdout
    assert "nothing initialized" not in done.stderr


@pytest.mark.slow
def test_a_region_that_is_left_alone_is_explained_by_its_line(folder: Path) -> None:
    done = run("explain", f"{folder}/model.py:strange", "--ranks", "2", "--strict")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "left alone" in done.stdout and "sum" in done.stdout


@pytest.mark.slow
def test_graphs_are_dumped(folder: Path) -> None:
    done = run("dump", f"{folder}/model.py:small", "--out", f"{folder}/graphs", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert (folder / "graphs" / "rank0").is_dir() and "files" in done.stdout


@pytest.mark.slow
def test_a_model_without_experts_ends_with_1(folder: Path) -> None:
    done = run("explain", f"{folder}/model.py:dense")
    assert done.returncode == 1 and "cannot compile this model" in done.stderr and "no experts" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "{}/none.py:small"], "expected file.py:function"),
        (["explain", "{}/model.py"], "model.py:function"),
        (["explain", "{}/model.py:wrong"], "a model and a batch"),
        (["explain", "{}/model.py:none"], "has no none"),
        (["explain", "{}/model.py:small", "--cluster", "{}/none.toml"], "none.toml"),
        (["explain", "{}/model.py:small", "--ranks", "3", "--nodes", "2"], "does not divide"),
        (["explain", "{}/model.py:small", "--policy", "magic"], "no policy 'magic'"),
        (["explain", "{}"], "no folder with a config.json"),
        (["explain", "no_such_model_type"], "no type that transformers knows"),
        (["dump", "{}/model.py:small", "--out", "{}/model.py"], "is a file"),
    ],
)
def test_bad_input_is_explained(
    arguments: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = CliRunner().invoke(app, [argument.format(folder) for argument in arguments])
    assert isinstance(done.exception, SystemExit), "explained, not raised"
    text = "".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2 and said.replace(" ", "") in text, done.output


@pytest.mark.parametrize("command", ["explain", "dump", "bisect", "report", "doctor", "simulate", "replay"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0 and f"Example: hecate {command}" in " ".join(done.output.replace("│", " ").split())
