"""Simulated beside measured steps: how far they are apart, and what planning takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.compare import machine, predict, shapes, store
from hecate.simulator import ClusterSpec
from hecate.simulator.step import PredictedSpan, Prediction

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def measured(**seconds: list[float]) -> dict[str, Any]:
    samples = {name: [{"seconds": s, "moves": 9.0} for s in times] for name, times in seconds.items()}
    return {"cell": {"cell": {"shape": "modern"}, "launches": [{"samples": {"zipf": samples}}]}}


def test_errors_are_relative_and_order_counts_where_quartiles_are_apart() -> None:
    found = measured(**{"static EP": [2.0, 2.0, 2.0], "fast": [1.0, 1.0, 1.0], "also": [0.9, 1.0, 1.1]})
    right = {"cell": {"zipf": {"static EP": [1.8], "fast": [1.1], "also": [1.0]}}}
    errors = predict.errors(found, right)
    assert (errors["median"], errors["worst"], errors["order"]) == (pytest.approx(0.1), pytest.approx(0.1), 1.0)
    # Half of static EP's time, and simulated 1.1 / 1.8 and 1.0 / 1.8 of it.
    assert errors["relative_worst"] == pytest.approx(2.2 / 1.8 - 1)
    assert errors["relative"] == pytest.approx((2.2 / 1.8 + 2.0 / 1.8) / 2 - 1)
    wrong = {"cell": {"zipf": {"static EP": [1.05], "fast": [1.1], "also": [1.0]}}}
    # Of two pairs that can be told apart, static EP after fast is wrong and static EP after also is right.
    assert predict.errors(found, wrong)["order"] == 0.5


def test_launches_are_predicted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = [measured(**{"static EP": [t], "fast": [t / 2]})["cell"]["launches"][0] for t in (1.0, 2.0, 4.0)]
    cell = {"cell": {"shape": "modern", "systems": ["static EP", "fast"]}, "launches": launches}
    # A machine that was slower while rates were measured, in the last launch twice as slow as in the others.
    slower = iter([3.0, 3.0, 6.0])

    def predict_launch(shape: Any, names: Any, launch: Any) -> dict[str, dict[str, float]]:
        times, samples = next(slower), launch["samples"]["zipf"]
        return {"zipf": {name: times * samples[name][0]["seconds"] for name in ("static EP", "fast")}}

    monkeypatch.setattr(predict, "predict_launch", predict_launch)
    found = predict.predict(cell)
    assert found == {"zipf": {"static EP": [3.0, 6.0, 24.0], "fast": [1.5, 3.0, 12.0]}}
    assert predict.measured_seconds(cell, "zipf", "static EP") == (1.0, 2.0, 4.0, 3)
    errors = predict.errors({"cell": cell}, {"cell": found})
    # Seconds are three times as long; over static EP's in the same launch nothing is off.
    assert (errors["median"], errors["relative_worst"]) == (2.0, 0.0)
    # Launches of the two overlap, so nothing is said about their order.
    assert predict.errors({"cell": cell}, {"cell": {"zipf": {"static EP": [2.0], "fast": [5.0]}}})["order"] == 1.0


def test_cells_that_the_simulator_was_not_tuned_on_are_named() -> None:
    found = {"modern.a": measured(one=[1.0])["cell"], "gpt-moe-s.a": measured(one=[1.0])["cell"]}
    found["gpt-moe-s.a"]["cell"] = {"shape": "gpt-moe-s"}
    said = predict.said_of(found, {"modern.a": {"zipf": {"one": [1.5]}}, "gpt-moe-s.a": {"zipf": {"one": [1.0]}}})
    assert said[1].startswith("- Tuned on (gpt-moe-s.a; 1 lines): median error 0.0%")
    assert said[2].startswith("- Not tuned on (modern.a; 1 lines): median error 50.0%, worst 50.0%")


def test_the_table_of_errors_is_made_from_samples() -> None:
    measured_cells = store.load(RESULTS)
    predicted = json.loads((RESULTS / "simulated.json").read_text())
    again = "measured again since: run python -m benchmarks.compare.predict benchmarks/results"
    assert set(predicted) == set(measured_cells), again
    assert (RESULTS / "simulated.md").read_text() == predict.markdown(measured_cells, predicted), again


def test_the_simulator_still_says_what_the_table_says() -> None:
    """Of static EP, in seconds, in one launch. Graphs of another torch may be a little different."""
    cell = store.load(RESULTS)["bert-moe.a"]
    cell["cell"]["systems"] = ["static EP"]
    (launch, *_) = cell["launches"]
    launch["samples"] = {"zipf": {"static EP": launch["samples"]["zipf"]["static EP"]}}
    cell["launches"] = [launch]
    (expected, *_) = json.loads((RESULTS / "simulated.json").read_text())["bert-moe.a"]["zipf"]["static EP"]
    again = "the simulator was changed: run python -m benchmarks.compare.predict benchmarks/results"
    assert predict.predict(cell)["zipf"]["static EP"] == [pytest.approx(expected, rel=0.02)], again


def test_what_overlaps_counts_once() -> None:
    assert predict.covered([]) == 0.0
    # Two that overlap, one inside another, and one apart.
    assert predict.covered([(1.0, 3.0), (2.0, 4.0), (2.5, 2.7), (5.0, 5.5)]) == pytest.approx(3.5)


def test_what_is_held_against_each_other_is_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(machine.dist, "barrier", lambda: ran.append("together"))
    monkeypatch.setattr(machine, "_mean", lambda seconds: seconds + 100.0)

    def work(name: str) -> float:
        ran.append(name)
        # The machine slows down.
        return float(len(ran))

    found = machine.measure_in_turns({name: lambda name=name: work(name) for name in ("one", "other")})
    assert ran == ["together", "one", "together", "other"] * machine.TURNS
    assert found["other"] - found["one"] == 2.0, "they differ by one turn, and not by all"
    assert found["one"] == 100.0 + 2 + 4 * (machine.TURNS // 2), "the median of a rank, then the mean of all"


def test_a_step_is_predicted_at_the_pace_that_the_machine_had_around_it() -> None:
    launch: dict[str, Any] = {"alone": {"step": 0.5, "plain": 0.4}}
    launch["samples"] = {"zipf": {"static EP": [{"turn": 0}, {"turn": 2}], "hecate": [{"turn": 1}]}}
    launch["pace"] = {"zipf": [[0.4, 0.6], [0.6, 0.8], [0.8, 1.0], [1.0, 1.2]]}
    assert predict.paces(launch, "zipf", "static EP") == pytest.approx([0.6 / 0.4, 1.0 / 0.4]), "before and after"
    assert predict.paces(launch, "zipf", "hecate") == pytest.approx([0.8 / 0.4])


def test_older_launches_have_one_pace_for_a_workload_or_none() -> None:
    launch: dict[str, Any] = {"alone": {"step": 0.5}}
    launch["samples"] = {name: {"static EP": [{}, {}, {}]} for name in ("zipf", "natural")}
    launch["pace"] = {"zipf": [[0.6, 0.5], [0.9, 0.7], [0.5, 0.9]], "natural": []}
    assert predict.paces(launch, "zipf", "static EP") == pytest.approx([1.3] * 3), "medians of ranks, and their mean"
    assert predict.paces(launch, "natural", "static EP") == [1.0] * 3
    del launch["pace"]
    assert predict.paces(launch, "zipf", "static EP") == [1.0] * 3


def test_compute_is_slower_for_the_part_of_a_step_in_which_rows_travel() -> None:
    class Half:
        """A second of compute at full speed, and a collective for half of the step."""

        def __init__(self, cluster: ClusterSpec) -> None:
            self.cluster = cluster

        def step(self, layers: Any, *, update: float) -> Any:
            seconds = 1e9 / self.cluster.flops
            none = np.zeros(1)
            return Prediction(seconds=seconds, compute=none, waited=none, sent=none, spans=(half, experts))

    half = PredictedSpan(part="forward", operator="exchange", begun=0.25, ended=0.75)
    experts = PredictedSpan(part="forward", operator="sparse_all_gather", begun=0.0, ended=0.9)
    cluster = ClusterSpec(
        name="one", nodes=1, gpus=1, flops=1e9, memory_bytes=1e9, rank_bytes=1e9, node_bytes=1e9, start=1.0
    )
    made: Any = Half(cluster)
    assert predict.beside(made, [], 0.0, 1.0).seconds == pytest.approx(1.0)
    assert predict.beside(made, [], 0.0, 1.4).seconds == pytest.approx(1.2)
    # What was given stays as it is, for the next step.
    assert made.cluster is cluster


def test_a_folder_without_samples_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["predict", str(tmp_path)])
    with pytest.raises(SystemExit, match="no compare"):
        predict.main()
    assert not list(tmp_path.iterdir())


def test_planning_counts_where_it_does_not_hide() -> None:
    # Milliseconds of CPU, of the median of three ranks: 2 in each layer before the gate, 3 after it in all.
    planning = {"before": [0.004, 0.001, 0.009], "after": [0.003, 0.002, 0.1]}
    long = PredictedSpan(part="forward", operator="exchange", begun=0.0, ended=1.0)
    none = PredictedSpan(part="forward", operator="exchange", begun=0.0, ended=0.0)
    half = PredictedSpan(part="forward", operator="exchange_nodes", begun=1.0, ended=1.0 + 0.001 / shapes.CORES)
    other = PredictedSpan(part="backward", operator="exchange", begun=0.0, ended=5.0)
    after = 0.003 / shapes.CORES

    def seconds(*spans: PredictedSpan) -> float:
        return predict.planned(planning, spans, layers=2)

    assert seconds(long, long, other) == pytest.approx(after)
    assert seconds(long, none, other) == pytest.approx(after + 0.002 / shapes.CORES)
    assert seconds(half, none) == pytest.approx(after + (0.001 + 0.002) / shapes.CORES)
    # Rows in two chunks: planning runs beside the first of a layer.
    assert seconds(long, none, long, none) == pytest.approx(after)
    assert seconds(none, long, none, long) == pytest.approx(after + 0.004 / shapes.CORES)
