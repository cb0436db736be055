"""Three families; HECATE_TESTS=all and `python -m benchmarks.families` take all of them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.families import __main__ as command
from benchmarks.families import lines
from benchmarks.families.models import not_covered
from benchmarks.families.table import FAMILIES
from tests.support.extent import ALL, OLD_TRANSFORMERS
from tests.support.ranks import run_ranks

# Grouped matmuls without and with biases are in test_parity (Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3, GPT-OSS), other
# ways of writing MoE in the blocks of docs/models.md, parameters that are read without gradients in test_user_code.
CHOSEN = {
    "llama4_text": "bmm over all tokens",
    "qwen3_next": "linear attention: a backward whose strides were not traced",
    "dbrx": "experts in matrices one under the other",
    "doge": "refused, and trained with policy='replicate'",
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", FAMILIES if ALL else CHOSEN)
def test_family(name: str) -> None:
    policy = "replicate" if name in ("doge", "longcat_flash") else "hecate"
    for result in run_ranks("benchmarks.families.case:run", 2, name=name, policy=policy):
        assert result["loss_error"] < 1e-5 and result["gradient_error"] < 1e-4, result
        assert result["rewritten"] == result["layers"], result
        assert result["layers"] > 0 or policy == "replicate"
        if name not in ("switch_transformers", "longcat_flash"):
            assert result["graphs"] == 1


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="families are those of transformers 5.24")
def test_no_family_is_forgotten() -> None:
    assert not_covered() == []


def result(**changes: Any) -> dict[str, Any]:
    right = {"layers": 2, "experts": 8, "rewritten": 2, "reasons": [], "graphs": 1, "seconds": 4.2}
    return right | {"loss_error": 0.0, "gradient_error": 3e-7, "worst": ""} | changes


def test_wrong_results_fail_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: Any) -> None:
    cases = {
        "mixtral": result(),
        "olmoe": result(gradient_error=float("inf"), worst="head"),
        "qwen3_moe": result(rewritten=1, reasons=["in-place mul_"]),
    }
    monkeypatch.setenv("HECATE_RESULTS", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["families", *cases])

    def run(name: str, **options: Any) -> dict[str, Any]:
        refused = options["policy"] != "replicate" and name == "doge"
        return {"error": "NoExpertsError: none"} if refused else cases[name]

    monkeypatch.setattr(lines, "_run", run)
    monkeypatch.setattr(command, "not_covered", list)
    with pytest.raises(SystemExit, match="1"):
        command.main()
    said = capsys.readouterr().out
    assert "2 exchange rows in every MoE layer, 1 gather experts in some" in said and "1 failed: olmoe" in said
    assert "in-place mul_" in said
    cases |= {"olmoe": result(), "doge": result(layers=0, rewritten=0)}
    monkeypatch.setattr("sys.argv", ["families", *cases])
    command.main()
    said = capsys.readouterr().out
    assert "2 exchange rows in every MoE layer, 1 gather experts in some, 1 are refused" in said
    assert '`policy="replicate"`: none' in said


def test_unknown_families_are_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["families", "mixtrall"])
    with pytest.raises(SystemExit):
        command.main()
    assert "no family mixtrall; there are afmoe" in capsys.readouterr().err
