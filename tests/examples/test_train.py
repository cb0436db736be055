"""The training example, by the command a user runs, on a small model."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(*arguments: str, ranks: int = 1, example: str = "train.py") -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d",
                "--rdzv-endpoint", "127.0.0.1:0"] if ranks > 1 else []  # fmt: skip
    command = [sys.executable, *launcher, str(ROOT / "examples" / example), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.distributed
def test_two_ranks_learn_and_report(tmp_path: Path) -> None:
    small = "--steps 40 --layers 2 --hidden 32 --experts 4 --length 64 --generate 4 --backend aot_eager"
    run = _run(*small.split(), "--auxiliary-loss", "0.01", "--dump", str(tmp_path), ranks=2)
    assert run.returncode == 0, run.stderr[-4000:]
    first, last = map(float, re.findall(r"first loss ([\d.]+), last loss ([\d.]+)", run.stdout)[0])
    unigram = float(re.findall(r"byte unigram model ([\d.]+)", run.stdout)[0])
    assert last < first - 1
    assert 2.5 < unigram < 4.5
    assert "generated: 'def " in run.stdout
    assert len(list(tmp_path.glob("rank0/graph*.exchange_rows.3.diff"))) == 1, "one graph"


@pytest.mark.distributed
def test_adapters_learn_and_are_saved(tmp_path: Path) -> None:
    from safetensors import safe_open

    run = _run(str(tmp_path), ranks=2, example="finetune_lora.py")
    assert run.returncode == 0, run.stderr[-4000:]
    losses = list(map(float, re.findall(r"ast.py: .* mean loss ([\d.]+)", run.stdout)))
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
