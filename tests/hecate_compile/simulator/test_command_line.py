"""``hecate simulate`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hecate.cli import app

ROOT = Path(__file__).parents[3]
MODEL = """
import torch
from tests.support.models import build

def small():
    ids = torch.zeros(2, 16, dtype=torch.int64)
    return build("qwen3_moe", layers=1), {"input_ids": ids, "labels": ids}

def dense():
    return torch.nn.Linear(2, 2), {"input": torch.zeros(1, 2)}

def wrong():
    return build("qwen3_moe")
"""
CLUSTER = "nodes = 2\ngpus = 2\nflops = 1e9\nmemory_bytes = 1e9\nrank_bytes = 1e8\nnode_bytes = 1e7\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "two.toml").write_text(CLUSTER)
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hecate.cli", "simulate", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_it_predicts_every_policy(folder: Path) -> None:
    out = folder / "out.json"
    done = run(
        f"{folder}/model.py:small", "--cluster", f"{folder}/two.toml",
        "--policy", "static", "--policy", "hecate", "--policy", f"{ROOT}/benchmarks/policies/faster_moe.py:FasterMoE",
        "--workload", "zipf", "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {result["policy"]: result for result in json.loads(out.read_text())}
    assert list(found) == ["static", "hecate", f"{ROOT}/benchmarks/policies/faster_moe.py:FasterMoE"]
    assert all(result["seconds"] > 0 and result["states"] > 0 for result in found.values())
    assert found["static"]["replicas"] == 0 and found["static"]["imbalance"] > 1
    assert "hecate" in done.stdout and "times as fast" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{}/none.py:small", "--cluster", "{}/two.toml"], "there is no file"),
        (["{}/model.py:none", "--cluster", "{}/two.toml"], "has no none"),
        (["{}/model.py:wrong", "--cluster", "{}/two.toml"], "a model and a batch"),
        (["{}/model.py:small", "--cluster", "{}/none.toml"], "none.toml"),
        (["{}/model.py:small", "--cluster", "{}/two.toml", "--policy", "magic"], "no policy 'magic'"),
        (["{}/model.py:small", "--cluster", "{}/two.toml", "--policy", "os:getcwd"], "no hecate.Policy"),
        (["{}/model.py:small", "--cluster", "{}/two.toml", "--policy", "none.py:Mine"], "expected file.py:Class"),
        (["{}/model.py:small", "--cluster", "{}/two.toml", "--policy", "no_such:Mine"], "No module named"),
        (["{}/model.py:small", "--cluster", "{}/two.toml", "--workload", "mild"], "no workload 'mild'"),
        (["{}/model.py:small", "--cluster", "{}/two.toml", "--trace", "{}/two.toml"], "not a trace"),
        (["{}/model.py:dense", "--cluster", "{}/two.toml"], "no experts"),
        (["{}/two.toml:small", "--cluster", "{}/two.toml"], "is not a Python file"),
        (["{}/model.py:small", "--cluster", "{}/two.toml", "--json", "{}/none/out.json"], "there is no folder"),
        (["{}/model.py:small", "--cluster", "{}/two.toml", "--json", "{}"], "cannot be written"),
    ],
)
def test_bad_input_is_explained(arguments: list[str], said: str, folder: Path) -> None:
    done = CliRunner().invoke(app, ["simulate", *(argument.format(folder) for argument in arguments)])
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit), "explained, not raised"
    # The message comes in a box, which breaks its lines.
    text = "".join(done.stderr.replace("│", " ").split())
    assert said.replace(" ", "") in text, text
