"""hecate bisect: the search by itself, and faults planted into passes of a real step."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from typer.testing import CliRunner, Result

from hecate.cli import app
from hecate.commands import bisect_worker
from hecate.commands.bisect import NAMES, _notes, _search, _Trials, first_wrong
from hecate.commands.bisect_worker import (
    Difference,
    RankResult,
    Trial,
    batch_of_rank,
    compare,
    config_of,
    facts_of,
)
from hecate.config import Config
from hecate.passes import FINAL_PASSES, JOINT_PASSES, PASSES, REQUIRED
from hecate.runtime.attention.options import S2Attention
from tests.support.extent import ALL
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[3]


def facts(**given: Any) -> dict[str, Any]:
    return {"dtype": "float32", "rounding": 1e-7, "options": [], "random": False, "batches": "x"} | given


def result(loss: float, gradient: float | None, **given: Any) -> RankResult:
    gradients = {} if gradient is None else {"0.a.w": np.array([0.5, gradient], np.float32)}
    return RankResult(np.array([loss]), gradients, facts(batches=str(gradient), **given))


# --- the search ---


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_the_first_wrong_is_found_by_halves(count: int) -> None:
    for first in range(1, count + 1):
        asked: list[int] = []

        def wrong(k: int, first: int = first, asked: list[int] = asked) -> bool:
            asked.append(k)
            return k >= first

        assert first_wrong(count, wrong) == first
        assert len(asked) <= math.ceil(math.log2(count)) if count > 1 else not asked
        assert 0 not in asked and count not in asked, "both are known"


def test_differences() -> None:
    assert not compare([result(1, 2)], [result(1, 2)]).beyond(0)
    assert compare([result(1.01, 2)], [result(1, 2)]).loss == pytest.approx(0.01)
    found = compare([result(1, 2.02)], [result(1, 2)])
    assert found.gradient == pytest.approx(0.01, rel=1e-3) and str(found).endswith("(a.w, step 0)")
    # The largest of a gradient is that of all ranks: a rank with almost nothing is not more exact than the others.
    ranks = [result(1, 1e-9), result(1, 2)]
    assert compare([result(1, 2e-9), result(1, 2)], ranks).gradient < 1e-8
    for wrong in (result(math.nan, 2), result(1, math.nan), result(1, math.inf), result(1, None)):
        assert compare([wrong], [result(1, 2)]).beyond(1e9)
    assert not compare([result(1, 5)], [result(1, 2)], gradients=False).beyond(0)
    assert Difference(error="it crashed").beyond(1e9)
    assert compare([result(1, math.inf)], [result(1, math.inf)]).beyond(1e9), "nobody knows"


def test_a_result_in_a_file(tmp_path: Path) -> None:
    result(1, 2).write(tmp_path / "good.npz")
    assert compare([RankResult.read(tmp_path / "good.npz")], [result(1, 2)]) == Difference()
    (tmp_path / "x.npz").write_bytes(b"PK")
    for name in ("x.npz", "none.npz"):
        with pytest.raises(ValueError, match="cannot be read"):
            RankResult.read(tmp_path / name)


def test_names_are_all_passes_once_in_order() -> None:
    every = [function.__name__ for function in (*PASSES, *JOINT_PASSES, *FINAL_PASSES)]
    assert list(NAMES) == [name for name in every if name not in REQUIRED]


class Pretended(_Trials):
    """Trials that run nothing: results are off where a pass of ``faults`` is on."""

    faults: tuple[str, ...] = ()
    plain_loss: float | str = 1.0
    given: ClassVar[dict[str, Any]] = {}
    runs = 0

    def run(self, disabled: Sequence[str], kind: str) -> tuple[list[RankResult] | str, str]:
        self.runs += 1
        log = "line 1\nline 2"
        if kind == "plain":
            return self.plain_loss if isinstance(self.plain_loss, str) else [result(self.plain_loss, 3)], log
        if "crash" in self.faults and "schedule" not in disabled:
            return "RuntimeError: no", log
        bad = [name for name in self.faults if name not in disabled]
        # What attention= computes is something else; so is "bare", which has none.
        loss = 1.1 if self.given and kind == "compiled" else 1.0
        return [result(loss, 2.0 + 0.1 * len(bad), **self.given)], log


def pretended(*faults: str) -> tuple[Pretended, io.StringIO]:
    said = io.StringIO()
    trials = Pretended(
        script="x", folder=Path(), ranks=1, steps=1, timeout=1, console=Console(file=said, width=200, markup=False)
    )
    trials.faults = faults
    return trials, said


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_in_any_pass_is_named(name: str) -> None:
    trials, said = pretended(name)
    assert _search(trials, 1e-4) == 1
    assert f"\n{name} changes the result" in said.getvalue()
    assert f'disable_passes=("{name}",)' in said.getvalue()
    assert trials.runs <= 4 + math.ceil(math.log2(len(NAMES)))


def test_of_two_faults_the_first_is_named() -> None:
    trials, said = pretended(NAMES[3], NAMES[7])
    assert _search(trials, 1e-4) == 1
    assert f"\n{NAMES[3]} changes the result" in said.getvalue() and "not the only one" in said.getvalue()


def test_a_crash_is_a_difference() -> None:
    trials, said = pretended("crash")
    assert _search(trials, 1e-4) == 1
    assert "\nschedule changes the result" in said.getvalue() and "RuntimeError: no" in said.getvalue()


def test_a_trial_is_announced_and_a_failed_one_shown() -> None:
    trials, said = pretended("crash")
    _search(trials, None)
    assert "with all passes: no result: RuntimeError: no\n    line 1\n    line 2\n" in said.getvalue()
    assert "hecate dump x --ranks 1 --out graphs" in said.getvalue()


def test_options_that_change_the_model_are_compared_without() -> None:
    trials, said = pretended("exchange_rows")
    trials.given = {"options": ["attention", "wire_dtype"]}
    assert _search(trials, None) == 1
    text = said.getvalue()
    assert "\nexchange_rows changes the result" in text and "shard_context stays on" in text
    assert "without any pass, and without attention=: loss 1\n" in text and "Config(wire_dtype=) is left out" in text
    trials, said = pretended()
    trials.given = {"options": ["attention"]}
    assert _search(trials, None) == 0 and trials.runs == 4, "the loss is that of the plain model"


def test_a_plain_run_that_fails_is_said() -> None:
    trials, said = pretended()
    trials.plain_loss = "ValueError: odd"
    assert _search(trials, None) == 0
    assert "the model without Hecate: no result: ValueError: odd" in said.getvalue()
    assert "is right itself is not known" in said.getvalue()


def test_what_the_user_is_told_about_the_comparison() -> None:
    def notes(*ranks: dict[str, Any]) -> str:
        return "\n".join(_notes(ranks, 1e-4))

    assert notes(facts(batches="a"), facts(batches="b")) == notes(facts()) == ""
    assert "all ranks have the same batch" in notes(facts(), facts())
    assert "bfloat16" in notes(facts(dtype="bfloat16", rounding=0.01)) and "dropout" in notes(facts(random=True))


def test_facts_of_a_script() -> None:
    def of(model: nn.Module, config: Config) -> dict[str, Any]:
        return facts_of(model, config, [{"x": torch.ones(2, dtype=torch.bfloat16)}])

    model = nn.Linear(2, 2)
    found = of(model, Config(wire_dtype=torch.bfloat16))
    assert found["dtype"] == "float32" and found["options"] == ["wire_dtype"]
    assert found["batches"] != facts_of(model, Config(), [{"x": torch.zeros(2)}])["batches"]
    mixed = of(model, Config(mixed_precision=MixedPrecisionPolicy(param_dtype=torch.float16)))
    assert mixed["dtype"] == "float16" and mixed["options"] == ["mixed_precision"]
    assert of(model.to(torch.bfloat16), Config())["rounding"] > 1e-3


def test_what_a_trial_compiles_with() -> None:
    config = Config(attention=S2Attention(), wire_dtype=torch.float16, disable_passes=("schedule",))
    trial = Trial("x", "x", NAMES, "compiled", steps=1)
    made = config_of(trial, config)
    assert set(made.disable_passes) == {*NAMES} - {"shard_context"} and made.attention == config.attention
    assert made.wire_dtype is None
    made = config_of(replace(trial, kind="bare"), config)
    assert set(made.disable_passes) == {*NAMES} and made.attention is None


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_every_rank_has_a_batch_of_its_own(rows: int, ranks: int) -> None:
    ids = torch.arange(rows * 16, device="cpu").view(rows, 16)
    places = torch.arange(16, device="cpu")[None]
    given = {"input_ids": ids, "labels": ids + 1000, "position_ids": places, "weight": ids.float(), "use": True}
    made = [batch_of_rank(given, rank, ranks) for rank in range(ranks)]
    if ranks == 1:
        assert made == [given]
    for batch in made:
        assert batch.keys() == given.keys() and torch.equal(batch["position_ids"], places)
        assert all(batch[key].shape == ids.shape for key in ("input_ids", "labels", "weight"))
        assert torch.equal(batch["labels"], batch["input_ids"] + 1000), "labels stay with their tokens"
        assert {*batch["input_ids"].flatten().tolist()} <= {*ids.flatten().tolist()}
    # Where there are fewer rows than ranks some have the same, but not all.
    different = {str(batch["input_ids"].tolist()) for batch in made}
    assert len(different) == (ranks if rows == 1 else min(ranks, rows))
    seen = {tuple(row) for batch in made for row in batch["input_ids"].tolist()}
    assert rows == 1 or len(seen) == rows, "no row is lost"


def test_no_fault_and_a_fault_elsewhere() -> None:
    trials, said = pretended()
    assert _search(trials, 1e-4) == 0 and trials.runs == 3
    assert "no pass changes loss or gradients" in said.getvalue()
    trials, said = pretended()
    trials.plain_loss = 1.5
    assert _search(trials, 1e-4) == 1
    assert "the loss differs from the model without Hecate" in said.getvalue()


def test_of_one_sequence_only_tokens_are_shuffled() -> None:
    ids, grid = torch.arange(16, device="cpu")[None], torch.tensor([[1, 2, 3]], device="cpu")
    for name in ("input_ids", "tokens"):
        given = {"image_grid_thw": grid, name: ids, "labels": ids + 1000}
        for rank in range(1, 4):
            made = batch_of_rank(given, rank, 4)
            assert torch.equal(made["image_grid_thw"], grid) and not torch.equal(made[name], ids)
            assert torch.equal(made["labels"], made[name] + 1000)
    # Of two lengths with as many tensors the ids have the say.
    made = batch_of_rank({"sizes": grid, "input_ids": ids}, 1, 2)
    assert torch.equal(made["sizes"], grid) and not torch.equal(made["input_ids"], ids)


# --- bad input ---


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["bisect", f"{tmp_path}/none.py"])
    assert ran.exit_code == 2 and "there is no file" in ran.output, ran.output


# --- real steps ---

# Each launch imports torch anew in every rank; the search itself is tested above, for every pass.
_ONLY_ALL = pytest.mark.skipif(not ALL, reason="a minute or more of launches: with HECATE_TESTS=all")

SCRIPT = """
from benchmarks.bisect_faults import forget_a_mean, plant, scale_outputs
from tests.support.models import batch, build as make

def build():
    ids = batch(0, rows=4)
    return make("plain", layers=1), {{"input_ids": ids, "labels": ids}}

def no_tuple():
    return make("plain", layers=1)

def no_loss():
    model, inputs = build()
    return model, {{"input_ids": inputs["input_ids"]}}

def draws():
    import torch
    model, inputs = build()
    dropped = torch.nn.Dropout(0.1)
    model.norms[0].register_forward_hook(lambda module, given, out: dropped(out))
    return model, inputs

def sparse():
    import hecate
    ids = batch(0, rows=2, length=64)
    attention = hecate.S2Attention(block=16, local=1, dense_layers=())
    config = hecate.Config(backend="aot_eager", attention=attention)
    return make("qwen3_moe", layers=1), {{"input_ids": ids, "labels": ids}}, config

{plant}
"""


def run(tmp_path: Path, plant: str, *arguments: str, function: str = "build") -> Result:
    """The command, in this process; its workers are launched."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(plant=plant))
    # The folder that is worked in is on a worker's path, and tests.support with it.
    with contextlib.chdir(ROOT):
        return CliRunner().invoke(app, ["bisect", f"{script}:{function}", *arguments])


def plain_beside_a_gpu(script: str, folder: str) -> str:
    """The model as it is, on the CPU of a machine that has a GPU."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torch._C, "_get_accelerator", lambda *given: torch.device("cuda"))
    trial = Trial(script, folder, (), "plain", steps=1)
    patch.setattr(sys, "argv", ["bisect_worker", json.dumps(asdict(trial))])
    # Whoever runs this ends the group.
    patch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    bisect_worker.main()
    patch.undo()
    return torch.distributed.get_backend_config()


@pytest.mark.distributed
def test_a_plain_model_runs_beside_a_gpu(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(plant=""))
    found = run_ranks(f"{__name__}:plain_beside_a_gpu", 2, script=f"{script}:build", folder=str(tmp_path))
    assert all("cpu:gloo" in one.split(",") for one in found)
    assert len(RankResult.read(tmp_path / "rank1.npz").loss) == 1


@_ONLY_ALL
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        # Missing communication: on each rank by itself everything is right.
        ("bucket_gradients", "forget_a_mean"),
        ("group_expert_loops", "scale_outputs"),
        ("rematerialize", "scale_outputs"),
        ("split_collectives", "scale_outputs"),
    ],
)
def test_a_planted_fault_is_found(name: str, fault: str, tmp_path: Path) -> None:
    done = run(tmp_path, f"plant({name!r}, {fault})", "--ranks", "2", "--steps", "1")
    assert done.exit_code == 1, done.output
    assert f"\n{name} changes the result" in done.stdout and "no result" not in done.stdout
    assert "same batch" not in done.stdout


@_ONLY_ALL
@pytest.mark.distributed
@pytest.mark.slow
def test_no_fault_is_found_where_there_is_none(tmp_path: Path) -> None:
    done = run(tmp_path, "", "--ranks", "2")
    assert done.exit_code == 0, done.output
    assert "no pass changes loss or gradients" in done.stdout


@_ONLY_ALL
@pytest.mark.distributed
@pytest.mark.slow
def test_sparse_attention_stays_on(tmp_path: Path) -> None:
    done = run(tmp_path, "", "--ranks", "2", "--steps", "1", function="sparse")
    assert done.exit_code == 0, done.output
    assert "no pass changes loss or gradients" in done.stdout and "shard_context stays on" in done.stdout
    assert done.stdout.count(": loss ") == 4, "with it, without it, without Hecate, and with all passes"


@pytest.mark.slow
def test_a_script_that_cannot_be_used(tmp_path: Path) -> None:
    """What else is wrong with a script, explain says too, with the same words."""
    done = run(tmp_path, "", "--ranks", "1", function="no_tuple")
    text = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2 and "must return a model and a batch" in text, done.output


@pytest.mark.slow
def test_a_step_that_does_not_run(tmp_path: Path) -> None:
    done = run(tmp_path, "", "--ranks", "1", function="no_loss")
    assert done.exit_code == 1 and "no result: TypeError: the model of" in done.output, done.output


@pytest.mark.slow
def test_a_step_that_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One trial that a launched worker runs, and what is told of it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(plant=""))
    monkeypatch.chdir(ROOT)
    trials = _Trials(
        script=f"{script}:draws", folder=tmp_path, ranks=1, steps=1, timeout=300, console=Console(file=io.StringIO())
    )
    ran = trials.result(NAMES, "without any pass")
    assert not isinstance(ran, str), ran
    assert "the forward draws random numbers" in "\n".join(_notes([one.facts for one in ran], 1e-4))
