"""Launches: their order, their files, and runs that go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import benchmarks.compare.__main__ as compare
from benchmarks.compare import against, cells, store
from benchmarks.compare.__main__ import chosen, order

ONE, TWO = cells.full()[:2]


def test_launches_take_turns_among_cells() -> None:
    names = [(number, cell.name) for number, cell in order([ONE, TWO], {ONE.name: [], TWO.name: []}, 2)]
    assert names == [(0, ONE.name), (0, TWO.name), (1, ONE.name), (1, TWO.name)]
    missing = [(number, cell.name) for number, cell in order([ONE, TWO], {ONE.name: [0, 1], TWO.name: [1]}, 3)]
    assert missing == [(0, TWO.name), (2, ONE.name), (2, TWO.name)]


def test_a_launch_is_on_disk_as_soon_as_it_ends(tmp_path: Path) -> None:
    for number in range(2):
        store.add(tmp_path, ONE, {"code": "x", "timelines": {}, "seed": number}, first=number == 0)
        assert store.seeds_of(tmp_path, ONE, "x") == [*range(number + 1)]
    found = store.load(tmp_path)[ONE.name]
    assert [launch["seed"] for launch in found["launches"]] == [0, 1]
    assert ["timelines" in launch for launch in found["launches"]] == [False, True], "only the last one is drawn"
    assert found["cell"]["shape"] == ONE.shape
    # A new run replaces them with its first launch, and not before.
    store.add(tmp_path, ONE, {"code": "x", "seed": 7}, first=True)
    assert [launch["seed"] for launch in store.load(tmp_path)[ONE.name]["launches"]] == [7]
    assert [path.name for path in tmp_path.iterdir()] == [f"compare.{ONE.name}.json"]


def test_only_launches_of_the_same_cell_and_code_are_added_to(tmp_path: Path) -> None:
    assert store.seeds_of(tmp_path, ONE, "x") == []
    store.add(tmp_path, ONE, {"code": "x"}, first=True)
    with pytest.raises(SystemExit, match="other code"):
        store.seeds_of(tmp_path, ONE, "y")
    with pytest.raises(SystemExit, match="other options"):
        store.seeds_of(tmp_path, replace(ONE, rounds=99), "x")


def test_code_is_what_a_sample_depends_on(tmp_path: Path) -> None:
    for folder in ("hecate_compile/runtime", "hecate_compile/simulator", "benchmarks/compare", "benchmarks/traces"):
        (tmp_path / folder).mkdir(parents=True)
    for name in (*store._MEASURES, "report"):
        (tmp_path / "benchmarks" / "compare" / f"{name}.py").touch()
    before = store.code_digest(tmp_path)
    (tmp_path / "benchmarks" / "compare" / "report.py").write_text("changed")
    (tmp_path / "hecate_compile" / "simulator" / "step.py").write_text("changed")
    assert store.code_digest(tmp_path) == before
    (tmp_path / "hecate_compile" / "runtime" / "queue.py").write_text("changed")
    after = store.code_digest(tmp_path)
    (tmp_path / "benchmarks" / "traces" / "natural.npz").write_bytes(b"changed")
    assert len({before, after, store.code_digest(tmp_path)}) == 3


def test_cells_beyond_the_full_table_run_if_asked_for() -> None:
    assert [cell.name for cell in chosen(None, everything=False)] == ["gpt-moe-s.a"]
    assert len(chosen(None, everything=True)) == 5
    (large,) = chosen(["gpt-moe-l.a"], everything=False)
    assert large.name == "gpt-moe-l.a" and large not in cells.full()
    # The short cell keeps its systems.
    assert chosen(["gpt-moe-s.a"], everything=False) == cells.short()
    with pytest.raises(SystemExit, match="no cell nonsense"):
        chosen(["nonsense"], everything=True)


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells, three launches of each; the fourth launch fails."""
    ran: list[str] = []
    seeds: list[int] = []

    def run_cell(cell: cells.Cell, attention: float, timeout: float, *, seed: int) -> dict[str, Any]:
        ran.append(cell.name)
        seeds.append(seed)
        if len(ran) == 4:
            raise SystemExit("cut off")
        return {"cell": cell.as_json(), "attention": attention, "seed": seed, "timelines": {}}

    def main(*options: str) -> None:
        names = [option for name in ("modern.a", "modern.b") for option in ("--cell", name)]
        monkeypatch.setattr("sys.argv", ["compare", "--no-self-test", *names, *options])
        compare.main()

    monkeypatch.setenv("HECATE_RESULTS", str(tmp_path))
    monkeypatch.setattr(compare, "calibrate", lambda: 0.01)
    monkeypatch.setattr(compare, "run_cell", run_cell)
    monkeypatch.setattr(compare.report, "write", lambda folder: ran.append("report"))
    monkeypatch.setattr(store, "code_digest", lambda: "x")
    with pytest.raises(SystemExit, match="cut off"):
        main()
    assert {name: len(cell["launches"]) for name, cell in store.load(tmp_path).items()} == {
        "modern.a": 2,
        "modern.b": 1,
    }
    main("--continue")
    assert ran[4:] == ["modern.b", "modern.a", "modern.b", "report"]
    assert seeds == [0, 0, 1, 1, 1, 2, 2], "every launch draws anew, and draws the same again"
    assert [len(cell["launches"]) for cell in store.load(tmp_path).values()] == [3, 3]
    digests = iter("xxy")
    monkeypatch.setattr(store, "code_digest", lambda: next(digests))
    with pytest.raises(SystemExit, match="changed while it was measured"):
        main()
    assert [len(cell["launches"]) for cell in store.load(tmp_path).values()] == [1, 3]


def test_against_launches_any_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_cell(cell: cells.Cell, attention: float, timeout: float, **more: Any) -> dict[str, Any]:
        return {"ran": cell.as_json(), "more": more}

    monkeypatch.setattr(compare, "run_cell", run_cell)
    for steps in (None, {"zipf": [3, 5]}):
        given = ["gpt-moe-l.b", "static EP,hecate", "zipf", 2, 0.01, 9.0, steps, str(tmp_path / "out")]
        monkeypatch.setattr("sys.argv", ["-c", json.dumps(given)])
        exec(against._LAUNCH, {})
        found = json.loads((tmp_path / "out").read_text())
        ran = found["ran"]
        assert (ran["shape"], ran["link"], ran["rounds"], ran["workloads"]) == ("gpt-moe-l", "b", 2, ["zipf"])
        assert found["more"] == ({"steps": steps} if steps else {})


def test_two_versions_time_the_steps_that_the_former_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The former draws 1, 2 and 3, and has time for the first two only once."""
    given: list[tuple[bool, Any]] = []

    def launch(tree: Path, options: Any) -> dict[str, Any]:
        now = tree == against.ROOT
        given.append((now, options[-1]))
        drawn = options[-1]["zipf"] if now else [1, 2, 3] if len(given) == 1 else [1, 2]
        # Of step 3 today's would be far slower.
        samples = [{"step": step, "seconds": (1.0 if step < 3 else 9.0) if now else 2.0} for step in drawn]
        return {"samples": {"zipf": dict.fromkeys(against.SYSTEMS, samples)}}

    @contextmanager
    def checkout(commit: str) -> Iterator[Path]:
        yield tmp_path

    monkeypatch.setattr(against, "launch", launch)
    monkeypatch.setattr(against, "checkout", checkout)
    monkeypatch.setattr(against, "calibrate", lambda: 0.01)
    monkeypatch.setenv("HECATE_RESULTS", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["against", "former", "--launches", "2"])
    against.main()
    assert given == [(False, None), (True, {"zipf": [1, 2, 3]}), (True, {"zipf": [1, 2, 3]}), (False, None)]
    pairs = json.loads((tmp_path / "against.gpt-moe-s.a.json").read_text())["pairs"]
    assert [now["zipf"]["hecate"] for _, now in pairs] == [1.0, 1.0]


def test_todays_default_is_held_against_the_former_two_replicas() -> None:
    former = {"zipf": {"static EP": 4.0, "hecate": 3.0, "bound: free links": 1.0}}
    now = {"zipf": {"static EP": 4.0, "hecate": 2.0, "bound: free links": 1.0, "hecate (auto)": 1.5}}
    lines = against.lines_of([(former, now)])
    assert "| zipf | hecate | 2.000 | 1.50 (1.50 - 1.50) |  | 50% |" in lines
    assert "| zipf | hecate (auto) | 1.500 | 2.00 (2.00 - 2.00) |  | 67% |" in lines
    assert lines[-1].endswith(": 1.500"), "the mean is over hecate's lines alone"


def test_a_machine_that_was_slower_meanwhile_is_taken_out() -> None:
    """Of 3 seconds now 2 are compute, which took twice as long as it would have before."""
    samples = {
        "zipf": {name: [{"step": 1, "seconds": s}] for name, s in zip(against.SYSTEMS, (4.0, 3.0, 2.0), strict=True)}
    }
    now = against.medians({"samples": samples, "pace": {"zipf": [[1.0, 1.2], [0.9, 1.6], [5.0, 1.0]]}}, {"zipf": [1]})
    assert now["zipf"][against.PACE] == pytest.approx(1.1)
    former = {"zipf": now["zipf"] | {against.PACE: 0.55}}
    lines = against.lines_of([(former, now)])
    assert "| zipf | hecate | 3.000 | 1.00 (1.00 - 1.00) | 1.50 (1.50 - 1.50) | 67% |" in lines
    assert "| zipf | static EP | 4.000 | 1.00 (1.00 - 1.00) |  |  |" in lines
    assert lines[-1].endswith(": 1.000, at equal pace 1.500")
