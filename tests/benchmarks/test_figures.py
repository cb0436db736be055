"""From made-up samples with known answers to figures and tables."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.compare import cells, figures, report

# The cell of most tests: one of Hecate beside static EP.
ZIPF = "zipf"


def sample(seconds: float, **more: Any) -> dict[str, Any]:
    return {"seconds": seconds, "moves": 0.0, "sent": [4, 2], "cpu": [0.1, 0.2], "process": [0.1, 0.2], **more}


def launch(samples: dict[str, list[dict[str, Any]]], workload: str = ZIPF, **more: Any) -> dict[str, Any]:
    return {"samples": {workload: samples}, "bytes": dict.fromkeys(samples, 100), **more}


def cell(*launches: dict[str, Any]) -> dict[str, Any]:
    return {"cell": {"shape": "gpt-moe-s"}, "launches": list(launches)}


def steps(*seconds: float) -> list[dict[str, Any]]:
    return [sample(value) for value in seconds]


def test_a_line_is_the_median_over_launches_with_their_range() -> None:
    found = cell(
        # A slow step counts as what it takes: 12 / 6, where most rounds say 4.
        launch({"static EP": steps(4, 4, 4), "hecate": steps(1, 1, 4)}),
        launch({"static EP": steps(4, 4, 4), "hecate": steps(1, 1, 1)}),
        launch({"static EP": steps(3, 3, 3), "hecate": steps(1, 1, 1)}),
    )
    line = figures.line_of(found, ZIPF, "hecate")
    assert line["speed-up"] == (2, 3, 4, 3) and str(line["speed-up"]) == "3.00 (2.00 - 4.00)"
    assert line["seconds"] == (1, 1, 2, 3)
    single = figures.line_of(cell(found["launches"][0]), ZIPF, "hecate")
    assert str(single["speed-up"]) == "2.00", "one launch has no range"


def test_moves_are_in_the_seconds() -> None:
    moving = [sample(1.0, moves=0.5), sample(1.25, moves=0.5), sample(0.75, moves=0.5)]
    line = figures.line_of(cell(launch({"static EP": steps(3, 3, 3), "SmartMoE": moving})), ZIPF, "SmartMoE")
    assert line["seconds"].middle == 1.5 and line["moves"] == 0.5 and line["speed-up"].middle == 2.0


def test_the_summary_compares_the_same_steps() -> None:
    samples = {"static EP": steps(2, 6, 2), "hecate": steps(1, 2, 2), "LAER": steps(2, 2, 1.5)}
    samples |= {"hecate (auto)": steps(0.25, 0.5, 0.5), "bound: free links": steps(0.1, 0.1, 0.1)}
    again = {"static EP": steps(3), "hecate": steps(1), "LAER": steps(2), "hecate (auto)": steps(0.75)}
    (line,) = report.summary({"one": cell(launch(samples), launch(again))}).splitlines()[2:]
    assert line == ("| one | zipf | 2.50 (2.00 - 3.00) | - | LAER: 1.55 (1.10 - 2.00) | 0.50 (0.25 - 0.75) | - |")


def test_balance_and_memory_of_a_line() -> None:
    uneven = [sample(2.0, rows=[[30], [10]], held=[[0, 0], [0, 0]]) for _ in range(2)]
    even = [sample(1.0, rows=[[20], [20]], held=[[0, 0], [30, 10]]) for _ in range(2)]
    best, base = figures.lines_of(cell(launch({"static EP": uneven, "hecate": even})), ZIPF)
    assert best["system"] == "hecate" and best["imbalance"] == 1.0 and base["imbalance"] == 1.5
    # Slots of all layers, and the gradients of those of the largest.
    assert best["bytes"] == 170 and base["bytes"] == 100 and best["sent"] == 4


def test_cpu_time_is_of_the_rank_with_most() -> None:
    found = [sample(1.0, cpu=[0.1, 0.2], process=[0.5, 0.3]), sample(1.0, cpu=[0.1, 0.4], process=[0.5, 0.5])]
    line = figures.line_of(cell(launch({"static EP": found})), ZIPF, "static EP")
    assert line["cpu"] == pytest.approx(0.3) and line["beside"] == pytest.approx(0.4)


def test_what_bounds_a_step() -> None:
    waits = {"rows": [0.4, 0.2], "counts": [0.2, 0.2], "experts": [0.0, 0.0], "dense gradients": [0.0, 0.2]}
    ours = [sample(2.0, moves=0.5, rows=[[1], [1]], waits=waits)]
    free = [sample(0.5)]
    found = cell(launch({"static EP": steps(5), "hecate": ours, "bound: free links": free}))
    line = figures.line_of(found, ZIPF, "hecate")
    assert line["bound"] == 0.2
    assert line["waits"] == pytest.approx({"rows": 0.15, "counts": 0.1, "experts": 0.0, "dense gradients": 0.05})
    assert "| one | zipf | 0.20 | 15 / 10 / 0 / 5 | 70 |" in report.bounds_table({"one": found})
    assert figures.waits_of(found, ZIPF, "static EP") is None, "as a system that is not on the engine"


def test_means_are_geometric_and_apart_for_even_routing() -> None:
    def one(workload: str, other: float, large: float | None = None) -> dict[str, Any]:
        samples = {"static EP": steps(other), "LAER": steps(other), "hecate": steps(1)}
        if large is not None:
            samples["hecate (LAER's memory)"] = steps(large)
        made = launch(samples, workload)
        made["bytes"]["LAER"] = 200
        return cell(made)

    measured = {"a": one("zipf", 2), "b": one("drift", 8, large=4), "c": one("balanced", 3)}
    found = {(mean.other, mean.ours): mean for mean in figures.means(measured)}
    laer = found["LAER", "hecate"]
    assert laer.skewed == pytest.approx(4) and laer.even == pytest.approx(3) and laer.lines == (2, 1)
    assert laer.memory == pytest.approx(2)
    large = found["LAER", "hecate (LAER's memory)"]
    assert large.skewed == pytest.approx(2) and large.even is None
    assert not any(other in figures.OWN for other, _ in found)
    assert "| LAER | hecate | 4.00 (2 lines) | 3.00 (1 line) | 2.00 |" in report.means_table(measured)


def test_every_system_has_a_note_on_overlap() -> None:
    assert set(cells.OVERLAPS) == {*cells.EXTERNAL, cells.IN_NODES}
