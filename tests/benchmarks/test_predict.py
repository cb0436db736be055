"""Simulated beside measured steps: how far they are apart, and what planning takes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import cells, predict, shapes, store
from hecate.runtime.placement.policy import Static
from hecate.simulator.step import PredictedSpan

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def measured(**seconds: list[float]) -> dict[str, Any]:
    samples = {name: [{"seconds": s, "moves": 9.0} for s in times] for name, times in seconds.items()}
    return {"cell": {"cell": {"shape": "modern"}, "launches": [{"samples": {"zipf": samples}}]}}


def test_errors_are_relative_and_order_counts_where_quartiles_are_apart() -> None:
    found = measured(slow=[2.0, 2.0, 2.0], fast=[1.0, 1.0, 1.0], also=[0.9, 1.0, 1.1])
    right = {"cell": {"zipf": {"slow": 1.8, "fast": 1.1, "also": 1.0}}}
    assert predict.errors(found, right) == {"median": pytest.approx(0.1), "worst": pytest.approx(0.1), "order": 1.0}
    wrong = {"cell": {"zipf": {"slow": 1.05, "fast": 1.1, "also": 1.0}}}
    # Of two pairs that can be told apart, slow after fast is wrong and slow after also is right.
    assert predict.errors(found, wrong)["order"] == 0.5


def test_launches_are_predicted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (measured(slow=[t], fast=[t / 2])["cell"]["launches"][0] for t in (1.0, 2.0, 4.0))
    cell = {"cell": {"shape": "modern", "systems": ["slow"]}, "launches": [first, second, third]}
    monkeypatch.setattr(
        predict, "predict_launch",
        lambda shape, names, launch: {"zipf": {"slow": 3 * launch["samples"]["zipf"]["slow"][0]["seconds"]}},
    )  # fmt: skip
    assert predict.predict(cell) == {"zipf": {"slow": 6.0}}
    assert predict.measured_seconds(cell, "zipf", "slow") == (1.0, 2.0, 4.0, 3)
    # Launches of slow and fast overlap, so nothing is said about their order.
    assert predict.errors({"cell": cell}, {"cell": {"zipf": {"slow": 2.0, "fast": 5.0}}})["order"] == 1.0


def test_cells_that_the_simulator_was_not_tuned_on_are_named() -> None:
    found = {"modern.a": measured(one=[1.0])["cell"], "gpt-moe-s.a": measured(one=[1.0])["cell"]}
    found["gpt-moe-s.a"]["cell"] = {"shape": "gpt-moe-s"}
    said = predict.said_of(found, {"modern.a": {"zipf": {"one": 1.5}}, "gpt-moe-s.a": {"zipf": {"one": 1.0}}})
    assert said[1].startswith("- Tuned on (gpt-moe-s.a; 1 lines): median error 0.0%")
    assert said[2].startswith("- Not tuned on (modern.a; 1 lines): median error 50.0%, worst 50.0%")


def test_the_table_of_errors_is_made_from_samples() -> None:
    measured_cells = store.load(RESULTS)
    predicted = json.loads((RESULTS / "simulated.json").read_text())
    again = "measured again since: run python -m benchmarks.compare.predict benchmarks/results"
    assert set(predicted) == set(measured_cells), again
    assert (RESULTS / "simulated.md").read_text() == predict.markdown(measured_cells, predicted), again


@pytest.mark.skipif(cells.ENGINE_CHANGED, reason="the committed steps were measured with an earlier engine")
def test_the_simulator_still_says_what_the_table_says() -> None:
    """Static EP's planning takes next to nothing, so its prediction is the same on every machine."""
    cell = store.load(RESULTS)["bert-moe.a"]
    cell["cell"]["systems"] = ["static EP"]
    for launch in cell["launches"]:
        launch["samples"] = {"zipf": {"static EP": launch["samples"]["zipf"]["static EP"]}}
    table = json.loads((RESULTS / "simulated.json").read_text())["bert-moe.a"]["zipf"]["static EP"]
    again = "the simulator was changed: run python -m benchmarks.compare.predict benchmarks/results"
    assert predict.predict(cell)["zipf"]["static EP"] == pytest.approx(table, rel=0.02), again


def test_a_folder_without_samples_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["predict", str(tmp_path)])
    with pytest.raises(SystemExit, match="no compare"):
        predict.main()
    assert not list(tmp_path.iterdir())


def test_planning_is_what_one_rank_plans_and_what_does_not_hide() -> None:
    class Slow(Static):
        def place(self, layer: Any) -> Any:
            return self._busy(0.01 if layer == "late" else 0.0)

        def calibrate(self, layer: Any, placement: Any, counts: Any) -> Any:
            return self._busy(0.004 if layer == 1 else 0.008)

        def assign(self, layer: Any, placement: Any, counts: Any, rank: int) -> Any:
            return self._busy(0.006 if rank == 0 else 0.003)

        def _busy(self, seconds: float) -> None:
            begun = time.thread_time()
            while time.thread_time() - begun < seconds:
                pass

    clocked = predict.Clocked(Slow(), layers=2)
    policy: Any = clocked.policy
    for step in range(5):
        for _layer in range(2):
            # Step 1 plans step 2, which takes long.
            policy.place("late" if step == 2 else "soon")
            if step in (1, 4):
                policy.calibrate(step, None, None)
                for rank in range(8):
                    policy.assign(None, None, None, rank)
    hidden = PredictedSpan(part="forward", operator="exchange_back", begun=0.0, ended=1.0)
    shown = PredictedSpan(part="forward", operator="exchange_back", begun=0.0, ended=0.0)
    other = PredictedSpan(part="backward", operator="exchange_back", begun=0.0, ended=5.0)
    first, second = (2 * (0.006 + calibrated) / shapes.CORES for calibrated in (0.004, 0.008))
    longer = 0.01 / shapes.CORES
    assert clocked.exposed(0, 1, [hidden, hidden, other]) == pytest.approx(first, rel=0.15)
    assert clocked.exposed(0, 1, [hidden, shown, other]) == pytest.approx(first + longer, rel=0.15)
    # The last step plans none.
    assert clocked.exposed(1, 4, [shown, shown]) == pytest.approx(second, rel=0.15)
