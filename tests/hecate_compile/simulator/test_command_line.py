"""``hecate simulate`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from hecate.cli import app
from hecate.commands.simulate import _routing
from hecate.simulator import ClusterSpec

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
MODEL_AND_CLUSTER = ("{}/model.py:small", "--cluster", "{}/two.toml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "two.toml").write_text(CLUSTER)
    for name, experts, rows, owner in (("other", 3, 1, 0), ("empty", 8, 0, 0), ("owners", 8, 1, 4)):
        counts = np.full((2, 1, 4, experts), rows)
        np.savez(tmp_path / f"{name}.npz", counts=counts, owners=np.full((1, experts), owner))
    return tmp_path


def simulate(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *(argument.format(folder) for argument in arguments)])


def test_it_predicts_every_policy(folder: Path) -> None:
    out = folder / "out.json"
    policies = ["static", "hecate", f"{ROOT}/benchmarks/policies/faster_moe.py:FasterMoE"]
    options = [part for policy in policies for part in ("--policy", policy)]
    done = simulate(folder, *MODEL_AND_CLUSTER, *options, "--workload", "zipf", "--json", str(out))
    assert done.exit_code == 0, done.stderr
    found = {result["policy"]: result for result in json.loads(out.read_text())}
    assert list(found) == policies
    assert all(result["seconds"] > 0 and result["states"] > 0 for result in found.values())
    assert found["static"]["replicas"] == 0 and found["static"]["imbalance"] > 1
    assert "hecate" in done.stdout and "times as fast" in done.stdout


def test_groups_of_ranks(folder: Path) -> None:
    out = folder / "out.json"
    done = simulate(folder, *MODEL_AND_CLUSTER, "--expert-group", "2", "--policy", "static", "--json", str(out))
    assert done.exit_code == 0, done.stderr
    flat = simulate(folder, *MODEL_AND_CLUSTER, "--policy", "static", "--json", str(folder / "flat.json"))
    assert flat.exit_code == 0, flat.stderr
    (grouped,), (whole,) = (json.loads(path.read_text()) for path in (out, folder / "flat.json"))
    assert grouped["states"] > whole["states"], "a rank owns twice as many experts"
    assert grouped["seconds"] != whole["seconds"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{}/none.py:small", "--cluster", "{}/two.toml"], "there is no file"),
        (["{}/model.py:none", "--cluster", "{}/two.toml"], "has no none"),
        (["{}/model.py:wrong", "--cluster", "{}/two.toml"], "a model and a batch"),
        (["{}/model.py:small", "--cluster", "{}/none.toml"], "none.toml"),
        ([*MODEL_AND_CLUSTER, "--policy", "magic"], "no policy 'magic'"),
        ([*MODEL_AND_CLUSTER, "--policy", "os:getcwd"], "no hecate.Policy"),
        ([*MODEL_AND_CLUSTER, "--policy", "none.py:Mine"], "expected file.py:Class"),
        ([*MODEL_AND_CLUSTER, "--policy", "no_such:Mine"], "No module named"),
        ([*MODEL_AND_CLUSTER, "--expert-group", "many"], "expected a number of ranks, or auto"),
        ([*MODEL_AND_CLUSTER, "--expert-group", "3"], "its 4 ranks do not make whole groups of 3"),
        ([*MODEL_AND_CLUSTER, "--workload", "mild"], "no workload 'mild'"),
        ([*MODEL_AND_CLUSTER, "--trace", "{}/two.toml"], "not a trace"),
        ([*MODEL_AND_CLUSTER, "--trace", "{}/owners.npz"], "owners are not"),
        (["{}/two.toml:small", "--cluster", "{}/two.toml"], "is not a Python file"),
        ([*MODEL_AND_CLUSTER, "--json", "{}/none/out.json"], "there is no folder"),
        ([*MODEL_AND_CLUSTER, "--json", "{}"], "cannot be written"),
    ],
)
def test_bad_input_is_explained(arguments: list[str], said: str, folder: Path) -> None:
    done = simulate(folder, *arguments)
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit), "explained, not raised"
    # The message comes in a box, which breaks its lines.
    text = "".join(done.stderr.replace("│", " ").split())
    assert said.replace(" ", "") in text, text


def test_a_model_that_cannot_be_compiled_ends_with_1(folder: Path) -> None:
    done = simulate(folder, "{}/model.py:dense", "--cluster", "{}/two.toml")
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert "hecate cannot compile this model" in done.stderr and "no experts" in done.stderr


@pytest.mark.parametrize(("name", "said"), [("other", "3 experts, the model has 8"), ("empty", "without rows")])
def test_a_trace_that_does_not_fit(name: str, said: str, folder: Path) -> None:
    routing = _routing(folder / f"{name}.npz", "zipf", 1.5)
    captured: Any = SimpleNamespace(layers=[SimpleNamespace(num_experts=8)], rows=4)
    with pytest.raises(typer.BadParameter, match=said):
        routing(ClusterSpec.load(folder / "two.toml"), captured)


def test_a_bug_is_no_bad_option(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise ValueError("a bug in the simulator")

    monkeypatch.setattr("hecate.commands.simulate.study", fail)
    done = simulate(folder, *MODEL_AND_CLUSTER)
    assert isinstance(done.exception, ValueError), "raised, with its traceback"
