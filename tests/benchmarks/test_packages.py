"""Layers of three packages; `python -m benchmarks.packages` takes all of them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.families import lines
from benchmarks.packages import __main__ as command
from benchmarks.packages.models import MODELS
from tests.support.ranks import run_ranks

# Each is small, and needs nothing that is not installed for the tests: a list of experts, each with its slots of a
# batch; slices of sorted rows; einsum behind graph breaks in the gate.
CHOSEN = ("soft-moe-pytorch", "latent-moe", "mixture-of-experts")


@pytest.mark.distributed
@pytest.mark.parametrize("name", CHOSEN)
def test_package(name: str) -> None:
    options = {"models": "benchmarks.packages.models", "evaluates": True}
    for result in run_ranks("benchmarks.families.case:run", 2, name=name, **options):
        assert result["loss_error"] < 1e-5 and result["gradient_error"] < 1e-5, result
        assert result["logits_error"] < 1e-5 and result["rewritten"] == result["layers"] == 2, result


def test_wrong_results_fail_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: Any) -> None:
    right = {"layers": 2, "experts": 8, "rewritten": 2, "reasons": [], "graphs": 1, "seconds": 4.2}
    right |= {"loss_error": 0.0, "gradient_error": 3e-7, "worst": "", "logits_error": 0.0}
    cases = {"litgpt": right, "mh-moe": right | {"logits_error": float("nan")}}
    monkeypatch.setenv("HECATE_RESULTS", str(tmp_path))
    monkeypatch.setattr(lines, "_run", lambda name, **options: cases[name])
    monkeypatch.setattr(command, "_install", lambda names, folder: None)
    for names, ends in ((["litgpt"], "0 failed."), (list(cases), "1 failed: mh-moe.")):
        monkeypatch.setattr("sys.argv", ["packages", *names])
        if ends[0] == "0":
            command.main()
        else:
            with pytest.raises(SystemExit, match="1"):
                command.main()
        said = capsys.readouterr().out
        assert f"{len(names)} exchange rows in every MoE layer" in said and ends in said


def test_every_model_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert all(model.requirements and all("==" in need for need in model.requirements) for model in MODELS.values())
    monkeypatch.setattr("sys.argv", ["packages", "litgpd"])
    with pytest.raises(SystemExit):
        command.main()
    assert "no model litgpd; there are torchtitan" in capsys.readouterr().err
