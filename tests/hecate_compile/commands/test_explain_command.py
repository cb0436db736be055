"""hecate explain and hecate dump, as a user runs them; and the help of every command."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn
from torch._dynamo.exc import Unsupported
from typer.testing import CliRunner, Result

import hecate
from hecate.cli import app
from hecate.commands import built, dump, explain
from hecate.commands import given_model as given_model_module
from hecate.commands.console import compiling
from hecate.commands.given_model import given_model
from hecate.passes.invariants import InvalidGraphError
from hecate.wrap.find_experts import NoExpertsError
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

def raises():
    return small()[1]["missing"]

def gathered():
    import hecate
    model, batch = small()
    return model, [batch, batch], hecate.Config(policy="gather")

class CountedMoE(PlainMoE):
    def forward(self, hidden):
        tokens = hidden.reshape(-1, hidden.shape[-1])
        counts = torch.bincount(self.router(tokens).argmax(-1), None, self.w_in.shape[0])
        parts = tokens.split(counts.tolist())
        return torch.cat([p @ self.w_in[e] @ self.w_out[e] for e, p in enumerate(parts)]).view_as(hidden)

class ChosenMoE(PlainMoE):
    def forward(self, hidden):
        chosen = self.router(hidden).argmax(-1).flatten().tolist()
        return sum(hidden @ self.w_in[e] @ self.w_out[e] for e in sorted(set(chosen)))

def counted():
    ids = torch.zeros(2, 16, dtype=torch.int64)
    return PlainLanguageModel(CountedMoE, layers=1), {"input_ids": ids, "labels": ids}

def chosen():
    ids = torch.zeros(2, 16, dtype=torch.int64)
    return PlainLanguageModel(ChosenMoE, layers=1), {"input_ids": ids, "labels": ids}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "syntax.py").write_text("import torch\ndef (:\n")
    (tmp_path / "fails.py").write_text("import torch\nimport no_such_package\n")
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(3)\n")
    transformers_config("qwen3_moe", num_hidden_layers=5).save_pretrained(tmp_path / "config")
    return tmp_path


def run(*arguments: str) -> Result:
    """The command, in this process."""
    done = CliRunner().invoke(app, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.mark.slow
def test_a_function_is_explained_for_many_ranks(folder: Path) -> None:
    """In a process of its own, as users run it."""
    done = subprocess.run(
        [sys.executable, "-m", "hecate.cli", "explain", f"{folder}/model.py:small", "--ranks", "4", "--nodes", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 4" in done.stdout and "on 2 node(s)" in done.stdout
    assert "model.layers.1.mlp.experts" in done.stdout and "exchange_rows" in done.stdout
    assert "schedule, as predicted" in done.stdout and "speeds that are made up" in done.stdout


@pytest.mark.slow
def test_a_config_needs_no_weights(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    done = run("explain", f"{folder}/config", "--ranks", "2", "--length", "16")
    assert done.exit_code == 0, done.output
    assert "2 of 5 layers" in done.stdout and "model.layers.1.mlp.experts" in done.stdout
    assert not any("nothing initialized" in str(warning.message) for warning in recwarn)


@pytest.mark.slow
def test_a_region_that_is_left_alone_is_explained_by_its_line(folder: Path) -> None:
    done = run("explain", f"{folder}/model.py:strange", "--ranks", "2", "--strict")
    assert done.exit_code == 3, done.output
    assert "left alone" in done.stdout and "sum" in done.stdout


@pytest.mark.slow
def test_layers_that_no_graph_can_have_are_named(folder: Path) -> None:
    """What data choose is seen only where something runs, so what is not shown is said to be."""
    done = run("explain", f"{folder}/model.py:counted", "--ranks", "2", "--strict")
    assert done.exit_code == 3, done.output
    assert "runs as Python, with all experts gathered: blocks.0: " in done.stdout
    assert "parts = tokens.split(counts.tolist())" in done.stdout
    done = run("explain", f"{folder}/model.py:chosen", "--ranks", "2", "--strict")
    assert done.exit_code == 3 and "in no graph yet: blocks.0" in done.stdout, done.output


@pytest.mark.slow
def test_graphs_are_dumped(folder: Path) -> None:
    done = run("dump", f"{folder}/model.py:small", "--out", f"{folder}/graphs", "--ranks", "2")
    assert done.exit_code == 0, done.output
    assert (folder / "graphs" / "rank0").is_dir() and "files" in done.stdout


def test_a_model_without_experts_ends_with_1(folder: Path) -> None:
    done = run("explain", f"{folder}/model.py:dense")
    assert done.exit_code == 1 and "cannot compile this model" in done.stderr and "no experts" in done.stderr


@pytest.mark.slow
def test_the_function_may_bring_its_own_config(folder: Path) -> None:
    done = run("explain", f"{folder}/model.py:gathered", "--ranks", "2", "--layers", "3", "--strict")
    assert done.exit_code == 3, "gathered because the user wants it so, which is gathered too"
    assert "exchange_rows is switched off" in done.stdout
    assert "--layers not used" in done.stdout


def test_the_users_own_line_is_named_for_a_relative_name_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "deeper.py").write_text("import json\n\ndef make():\n    return json.loads('{')\n")
    monkeypatch.chdir(folder)
    for name in ("deeper.py:make", f"{folder}/deeper.py:make", "./deeper.py:make"):
        with pytest.raises(typer.BadParameter, match=r"deeper\.py:4: JSONDecodeError"):
            built.build(name)


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (NoExpertsError("no experts"), typer.Exit),
        (RuntimeError("hecate.compile: compiled already"), typer.Exit),
        (Unsupported("a branch on data", gb_type="x", skip_frame=False), typer.Exit),
        (ValueError("hecate.Config: no such pass"), typer.BadParameter),
        (InvalidGraphError("hecate: rows never come back"), InvalidGraphError),
        (TypeError("bad operand"), TypeError),
        (ValueError("of the model's own code"), ValueError),
        (typer.Exit(7), typer.Exit),
    ],
)
def test_faults_keep_their_traceback(
    error: Exception, ends: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ends) as raised, compiling():
        raise error
    said = ends is typer.Exit and not isinstance(error, typer.Exit)
    assert (raised.value is error) == (
        ends is type(error) and not said and not str(error).startswith("hecate.Config")
    )
    assert ("cannot compile this model" in capsys.readouterr().err) == said
    if isinstance(raised.value, typer.Exit):
        assert raised.value.exit_code == (1 if said else 7)


def test_a_dump_that_broke_off_ends_with_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(name: str, *, dump: Path, whole: bool, **options: Any) -> explain.CompiledGiven:
        (dump / "rank0").mkdir(parents=True)
        (dump / "rank0" / "index.html").write_text("")
        explanation: Any = None
        return explain.CompiledGiven(explanation=explanation, notes=["a note"], dumped_all=whole)

    for whole in (True, False):
        monkeypatch.setattr(dump, "compile_given", partial(compiled, whole=whole))
        done = CliRunner().invoke(app, ["dump", "x", "--out", f"{folder}/{whole}"])
        assert done.exit_code == int(not whole) and "1 files" in done.output and "note: a note" in done.output
        assert ("the dump is not whole" in done.output) != whole


def test_only_experts_are_shared_when_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts = 4
            self.up = nn.Parameter(torch.empty(4, 100, 100, device="meta"))

    # 160,000 bytes of experts, and twice as much that is three-dimensional too.
    model = nn.ModuleDict({"experts": Experts(), "conv": nn.Conv1d(100, 200, 4, bias=False, device="meta")})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    needed = 320_000 + 160_000 / 4 + 2 * 320_000
    for free in (needed + 1, needed - 1):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 10**12))
        if free < needed:
            with pytest.raises(typer.BadParameter, match="more --ranks or fewer --layers"):
                given_model_module._check_memory(model, 4)
        else:
            given_model_module._check_memory(model, 4)
    # Without a GPU the machine's own memory counts.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(given_model_module, "free_memory", lambda: 1000)
    with pytest.raises(typer.BadParameter, match="more --ranks"):
        given_model_module._check_memory(model, 4)


@pytest.mark.parametrize(
    ("changes", "layers", "kept"),
    [
        (dict(mlp_only_layers=[0, 1, 2]), None, 4),
        (dict(decoder_sparse_step=3), None, 3),
        (dict(), None, 2),
        (dict(mlp_only_layers=[0, 1, 2]), 1, 1),
        (dict(), 9, 5),
    ],
)
def test_dense_layers_in_front_are_taken_too(
    changes: dict[str, Any], layers: int | None, kept: int, tmp_path: Path
) -> None:
    transformers_config("qwen3_moe", num_hidden_layers=5, **changes).save_pretrained(tmp_path)
    made, note = given_model(str(tmp_path), layers=layers, ranks=2)
    assert made.model.config.num_hidden_layers == kept
    assert note == (f"{kept} of 5 layers; --layers takes more" if kept < 5 else "")


@pytest.mark.parametrize("name", ["switch_transformers"])
def test_a_model_of_another_kind_is_made(name: str, tmp_path: Path) -> None:
    import transformers

    transformers.SwitchTransformersConfig(
        d_model=16,
        d_ff=16,
        d_kv=8,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        num_experts=4,
        vocab_size=32,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ).save_pretrained(tmp_path)
    assert type(given_model(str(tmp_path), ranks=2)[0].model).__name__ == "SwitchTransformersForConditionalGeneration"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "{}/none.py:small"], "there is no file"),
        (["explain", "{}/syntax.py:small"], "syntax.py:2: SyntaxError"),
        (["explain", "{}/fails.py:small"], "fails.py:2: ModuleNotFoundError: No module named 'no_such_package'"),
        (["explain", "{}/ends.py:small"], "ends.py:2: SystemExit: 3"),
        (["explain", "{}/model.py:raises"], "model.py:32: KeyError: 'missing'"),
        (["explain", "{}/model.py:small", "--disable-pass", "no_such_pass"], "no_such_pass"),
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


def test_version_and_where_torch_is_missing(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0 and done.output.strip() == f"hecate {hecate.__version__}"
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so: no such file', name='torch')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, ROOT / "hecate_command.py", "doctor"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1 and "torch cannot be imported" in ran.stderr and "pip install torch" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("command", ["explain", "dump", "bisect", "report", "doctor", "simulate", "replay"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0 and f"Example: hecate {command}" in " ".join(done.output.replace("│", " ").split())


def test_the_list_of_passes() -> None:
    out = CliRunner().invoke(app, ["passes"])
    assert out.exit_code == 0, out.output
    names = ("make_loops_traceable", "install_reads", "exchange_rows", "schedule")
    places = [out.output.index(name) for name in names]
    assert places == sorted(places)
    assert "always on: without it a checkpointed" in out.output and "captured/exchange_rows.py" in out.output
