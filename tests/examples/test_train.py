"""The training example, by the command a user runs, on a small model."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import hecate
from tests.support.extent import ALL
from tests.support.ranks import run_ranks, torchrun

_HERE = "tests.examples.test_train"
ROOT = Path(__file__).parents[2]


_OPTIONS = (
    "--steps 40 --layers 1 --hidden 32 --experts 4 --length 64 --generate 4 --backend aot_eager "
    "--auxiliary-loss 0.01 --save-every 8"
)
_SMALL = _OPTIONS.split()


def run_example(example: str, arguments: list[str], changes: dict[str, int] | None = None) -> str:
    """On one rank: what an example prints, run as a command.

    Args:
        changes: of its model's config.
    """
    import transformers

    sys.argv, config_of = [example, *arguments], transformers.Qwen3MoeConfig

    def config(**given: Any) -> Any:
        return config_of(**(given | (changes or {})))

    patched: Any = mock.patch.object(transformers, "Qwen3MoeConfig", config) if changes else contextlib.nullcontext()
    with patched, contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    return said.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run that nobody disturbs: what it said, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = [*_SMALL, "--dump", str(folder / "dump"), "--checkpoints", str(folder / "steps")]
    said, _ = run_ranks(f"{_HERE}:run_example", 2, example="train.py", arguments=arguments)
    return said, folder


@pytest.mark.distributed
def test_two_ranks_learn_and_report(whole: tuple[str, Path]) -> None:
    said, folder = whole
    first, last = map(float, re.findall(r"first loss ([\d.]+), last loss ([\d.]+)", said)[0])
    unigram = float(re.findall(r"byte unigram model ([\d.]+)", said)[0])
    assert last < first - 1
    assert 2.5 < unigram < 4.5
    assert "generated: 'def " in said
    assert len(list((folder / "dump").glob("rank0/graph*/*_exchange_rows.diff"))) == 1, "one graph"
    steps = sorted(path.name for path in (folder / "steps").glob("step-*"))
    assert steps == ["step-00000024", "step-00000032", "step-00000040"]


@pytest.mark.distributed
def test_killed_training_goes_on_with_the_same_losses(whole: tuple[str, Path], tmp_path: Path) -> None:
    """A rank is killed in the middle; torchrun starts all again, and nothing is different at the end."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    undisturbed, killed = whole[1] / "steps", tmp_path / "steps"
    # What is measured at the start of a run, and plans depend on, is the same from here on.
    shutil.copytree(undisturbed / "step-00000024", killed / "step-00000024")
    restarts = ["--max-restarts", "1", "--monitor-interval", "0.1"]
    options = ["--dump", str(tmp_path / "dump"), "--checkpoints", str(killed), "--resume"]
    command = [*torchrun(2), *restarts, str(ROOT / "examples" / "train.py"), *_SMALL, *options]
    with (tmp_path / "output").open("w") as output:
        agent = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_for(killed / "step-00000032", agent)
            workers = _children(agent.pid)
            os.kill(workers[-1], signal.SIGKILL)
            code = agent.wait(200)
        finally:
            agent.kill()
    assert len(workers) == 2 and code == 0, (tmp_path / "output").read_text()[-4000:]
    assert (tmp_path / "output").read_text().count("going on from step") == 2
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    found = []
    for folder in (undisturbed, killed):
        model = Qwen3MoeForCausalLM(config)
        loaded = hecate.load(folder, model, same_options=False)
        found.append((loaded.step, loaded.extra["losses"], model.state_dict()))
    (step, losses, weights), (again, same_losses, same_weights) = found
    assert step == again == 40 and losses == same_losses
    assert all(torch.equal(value, same_weights[key]) for key, value in weights.items())


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 150
    while not path.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    assert path.exists(), path


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not ALL, reason="test_peft trains such adapters: with HECATE_TESTS=all")
@pytest.mark.distributed
def test_adapters_learn_and_are_saved(tmp_path: Path) -> None:
    from safetensors import safe_open

    said, _ = run_ranks(f"{_HERE}:run_example", 2, example="finetune_lora.py", arguments=[str(tmp_path)])
    losses = list(map(float, re.findall(r"ast.py: .* mean loss ([\d.]+)", said)))
    assert len(losses) == 3 and losses[-1] < losses[0]
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
    assert sum("experts" in name for name in names) == 8 and sum("q_proj" in name for name in names) == 4


def test_wrong_folder_and_too_little_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("short")
    for folder, said in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "at least 100,000 are needed")):
        monkeypatch.setattr("sys.argv", ["train.py", "--text", str(folder)])
        with pytest.raises(SystemExit, match=said):
            runpy.run_path(str(ROOT / "examples" / "train.py"), run_name="__main__")


class Moved(Exception):
    """Where a model was to go."""


@pytest.mark.distributed
def test_reinforcement_learning_is_that_of_one_process() -> None:
    """Rewards of three rollouts, and how far training is off them: by rounding, in the first update of each."""
    found = []
    for ranks in (1, 2):
        said, *_ = run_ranks(f"{_HERE}:run_example", ranks, example="grpo_replay.py", arguments=["--steps", "3"])
        found.append(re.findall(r"step \d: reward ([\d.]+), log-probabilities at most (\S+), (\S+) apart", said))
    one, two = ([tuple(map(float, line)) for line in lines] for lines in found)
    assert len(one) == 3
    for (reward, rounding, moved), (same, rounding_too, moved_too) in zip(one, two, strict=True):
        assert reward == same and max(rounding, rounding_too) < 1e-5
        assert moved == pytest.approx(moved_too, rel=0.2) and moved > 1e-2


@pytest.mark.distributed
def test_biases_balance_loads() -> None:
    """After 60 steps the busiest experts have fewer rows than with biases that stand still."""
    found = []
    for rate in ("0.01", "0"):
        arguments = ["--steps", "61", "--rate", rate]
        said, _ = run_ranks(f"{_HERE}:run_example", 2, example="aux_free.py", arguments=arguments)
        found.append([float(one) for one in re.findall(r"step 60: .* layers ([\d.]+) ([\d.]+)", said)[0]])
    moved, still = found
    assert sum(moved) < 0.7 * sum(still)


@pytest.mark.parametrize("example", ["train.py", "trainer.py", "finetune_lora.py", "grpo_replay.py", "aux_free.py"])
def test_ranks_share_gpus_if_there_are_too_few(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before hecate.compile, which takes the device from the model."""

    def move(model: torch.nn.Module, device: str) -> None:
        raise Moved(device)

    def compile(*given: object) -> None:
        raise AssertionError("not moved before")

    # Libraries that look for a GPU when they are imported are not to find this one.
    for library in ("transformers.trainer", "peft.tuners.lora"):
        importlib.import_module(library)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(sys, "argv", [example, *(_SMALL if example == "train.py" else [])])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.nn.Module, "to", move)
    monkeypatch.setattr(hecate, "compile", compile)
    with pytest.raises(Moved, match=r"^cuda:1$"):
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
