"""The files of a run: what was written comes back, what is cut off is left out, what was changed is an error."""

from __future__ import annotations

import io
import json
import struct
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from hecate.reports import run_files
from hecate.reports.run_data import load_run
from hecate.reports.run_files import (
    RunError,
    RunHead,
    append_chunk,
    next_step,
    rank_path,
    read_rank,
    start_folder,
    start_numbers,
    starts_in,
)
from tests.hecate_compile.reports.made_run import make_run

HEAD = RunHead(model="x", policy="x", device="cpu", layers=(), experts=(), nodes=(0,), started=0.0)


def written(path: Path, count: int) -> Path:
    with path.open("ab") as file:
        for number in range(count):
            steps = np.arange(3 * number, 3 * number + 3)
            append_chunk(file, {"step": steps, "log.loss": steps / 2} if number else {"step": steps})
    return path


def test_chunks_come_back_in_order(tmp_path: Path) -> None:
    read = read_rank(written(tmp_path / "x.steps", 3), HEAD)
    assert read.steps == 9 and read.problem == ""
    assert read.arrays["step"].tolist() == list(range(9))
    # What was not logged in the first chunk is NaN there.
    assert np.isnan(read.arrays["log.loss"][:3]).all()
    assert read.arrays["log.loss"][3:].tolist() == [1.5, 2, 2.5, 3, 3.5, 4]


def test_columns_of_other_releases(tmp_path: Path) -> None:
    with (tmp_path / "x.steps").open("ab") as file:
        append_chunk(file, {"step": np.arange(2), "of_a_later_release": np.zeros(7)})
    read = read_rank(tmp_path / "x.steps", HEAD)
    assert "of_a_later_release" not in read.arrays
    assert read.arrays["memory"].tolist() == [0, 0] and np.isnan(read.arrays["travel"]).all(), "of an earlier one"


@pytest.mark.parametrize("left", [1, 5, 11, 130, 200])
def test_a_last_chunk_that_is_cut_off_is_left_out(left: int, tmp_path: Path) -> None:
    path = written(tmp_path / "x.steps", 2)
    whole = path.stat().st_size
    written(path, 1)
    path.write_bytes(path.read_bytes()[: whole + left])
    read = read_rank(path, HEAD)
    assert read.steps == 6 and f"cut off at byte {whole}" in read.problem


@pytest.mark.parametrize("place", [3, 60, 190, 250])
def test_what_stands_before_a_changed_byte_is_read(place: int, tmp_path: Path) -> None:
    path = written(tmp_path / "x.steps", 1)
    first = path.stat().st_size
    written(path, 2)
    data = bytearray(path.read_bytes())
    data[first + place] ^= 0x55
    path.write_bytes(data)
    read = read_rank(path, HEAD)
    assert read.steps == 3 and read.problem.startswith(f"its file is damaged or cut off at byte {first} (")
    path.write_bytes(data[first:])
    with pytest.raises(RunError, match=r"x\.steps is damaged or cut off at byte 0"):
        read_rank(path, HEAD)


def hostile() -> dict[str, bytes]:
    """Files that no monitor wrote."""
    chunk, kind, count = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(chunk, np.array([{}], dtype=object), allow_pickle=True)
    append_chunk(kind, {"step": np.array(["a"])})
    append_chunk(count, {"step": np.arange(3), "memory": np.arange(2)})
    huge = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118)
    huge += b"{'descr': '|u1', 'fortran_order': False, 'shape': (999999999999999,), }".ljust(117) + b"\n"
    return {
        "text": b"not a run at all, but long enough",
        "pickled": chunk.getvalue(),
        "a word for a number": kind.getvalue(),
        "of two lengths": count.getvalue(),
        "huge": huge,
        "no chunk": (lambda file: (np.save(file, np.zeros(3)), file.getvalue())[1])(io.BytesIO()),
    }


@pytest.mark.parametrize("name", list(hostile()))
def test_what_no_monitor_wrote_is_an_error_that_names_the_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.steps").write_bytes(hostile()[name])
    with pytest.raises(RunError, match=r"x\.steps is damaged"):
        read_rank(tmp_path / "x.steps", HEAD)
    with pytest.raises(RunError, match=r"none\.steps"):
        read_rank(tmp_path / "none.steps", HEAD)


def test_a_damaged_rank_or_start_is_noted_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=5, ranks=2)
    rank_path(folder, 1).write_bytes(b"x" * 100)
    (make_run(tmp_path, steps=5, start=1) / "run.json").write_text("{")
    run = load_run(tmp_path)
    assert run.steps == 5 and np.isnan(run.rows[..., 1]).all() and not np.isnan(run.rows[..., 0]).any()
    assert any("start001 is left out" in note for note in run.notes)
    assert any("rank 1" in note and "cut off at byte 0" in note for note in run.notes)
    rank_path(folder, 0).write_bytes(b"x" * 100)
    with pytest.raises(RunError, match=r"run\.json"):
        load_run(tmp_path)


def test_a_head_of_something_else_is_an_error(tmp_path: Path) -> None:
    make_run(tmp_path / "x", steps=1)
    good = json.loads((tmp_path / "x/start000/run.json").read_text())
    wrong = [{"model": 0}, {"layers": 3}, {"layers": [1, 2]}, {"nodes": []}, {"experts": [8, True]}]
    wrong += [{"started": None}, {"experts": [8]}]
    texts = ["", "[]", "{}", '{"model": 1}', "{", *(json.dumps(good | one) for one in wrong)]
    for text in texts:
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(RunError, match=r"run\.json is not what hecate\.monitor writes"):
            RunHead.read(tmp_path)
    for given in ({"started": 1}, {"of_a_later_release": 1}):
        (tmp_path / "run.json").write_text(json.dumps(good | given))
        assert RunHead.read(tmp_path).layers == tuple(good["layers"])


@pytest.mark.parametrize("other", [1, 99])
def test_another_format_is_named(other: int, tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=3)
    head = RunHead.read(folder)
    (folder / "run.json").write_text(json.dumps(asdict(head) | {"format": other}))
    with pytest.raises(RunError, match=rf"run\.json: a run in format {other}, .*it reads format 2"):
        load_run(tmp_path)
    assert next_step(tmp_path, head) == 0, "a new start in the same folder"
    make_run(tmp_path, steps=3, start=1)
    run = load_run(tmp_path)
    assert run.steps == 3 and f"start000 is left out: {folder}" in run.notes[0]


def test_a_head_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = RunHead.read(make_run(tmp_path / "x", steps=1))

    def stop(part: Path, whole: Path) -> None:
        raise OSError("killed here")

    monkeypatch.setattr(run_files.os, "replace", stop)
    with pytest.raises(OSError, match="killed here"):
        head.write(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["run.json.part3"]


def test_starts_are_folders_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("start000", "start999", "start1000", "start5", "started", "start002.old"):
        (tmp_path / name).mkdir()
    for name in ("start000.tar.gz", "start003"):
        (tmp_path / name).write_text("")
    assert start_numbers(tmp_path) == [0, 999, 1000]
    assert [path.name for path in starts_in(tmp_path)] == ["start000", "start999", "start1000"]
    make_run(tmp_path, steps=1, start=2000)
    head = RunHead.read(start_folder(tmp_path, 2000))
    make_run(tmp_path, steps=3, start=10_000)
    assert next_step(tmp_path, head) == 3


def test_a_run_put_together(tmp_path: Path) -> None:
    make_run(tmp_path, steps=25, ranks=2)
    run = load_run(tmp_path)
    assert run.steps == 25 and run.notes == ()
    assert run.rows.shape == (25, 2, 2) and (run.rows == 400).all()
    assert np.array_equal(run.owner_rows, run.rows)
    assert (run.before == 1).all() and (run.after == 1).all()
    assert (run.replicas == 1).all()
    assert run.hidden == pytest.approx(0.8)
    assert run.layer_hidden.shape == (25, 2)
    assert [line.rank for line in run.timelines] == [0, 1]
    assert run.logged["loss"][:2].tolist() == [3, 1.5]


def test_a_restart_replaces_the_steps_that_ran_again(tmp_path: Path) -> None:
    make_run(tmp_path, steps=25, loss_of=lambda number: number * 0 + 1.0)
    make_run(tmp_path, steps=10, start=1, first_step=20, loss_of=lambda number: number * 0 + 2.0)
    run = load_run(tmp_path)
    assert run.step.tolist() == list(range(30))
    assert run.logged["loss"].tolist() == [1.0] * 20 + [2.0] * 10
    assert run.notes == (
        "start000: 5 of its 25 steps, from step 20 on, ran again in a later start, and count as they ran the last "
        "time",
    )


def test_a_restart_goes_on_behind_the_last_step(tmp_path: Path) -> None:
    make_run(tmp_path, steps=25)
    folder = make_run(tmp_path, steps=1, start=1, first_step=25, missing=(0, 1))
    head = RunHead.read(folder)
    assert next_step(tmp_path, head) == 25, "the newest start with steps decides"
    assert next_step(tmp_path, replace(head, experts=(4, 4))) == 0, "of another model"
    assert next_step(tmp_path / "none", head) == 0
    rank_path(start_folder(tmp_path, 0), 0).write_bytes(b"x" * 100)
    assert next_step(tmp_path, head) == 0


def test_another_number_of_ranks_is_left_out_and_said(tmp_path: Path) -> None:
    make_run(tmp_path, steps=5, ranks=4)
    make_run(tmp_path, steps=5, ranks=2, start=1)
    run = load_run(tmp_path)
    assert run.steps == 5 and "start000" in run.notes[0]


def test_a_start_without_steps_says_nothing_about_the_run(tmp_path: Path) -> None:
    make_run(tmp_path, steps=5, ranks=2)
    make_run(tmp_path, steps=5, ranks=4, start=1, missing=(0, 1, 2, 3))
    run = load_run(tmp_path)
    assert run.steps == 5 and run.head.world_size == 2
    assert run.notes == ("start001: rank 0 wrote no step, so it is left out",)


def test_the_timeline_is_of_the_last_start_that_has_one(tmp_path: Path) -> None:
    make_run(tmp_path, steps=5)
    make_run(tmp_path, steps=5, start=1, first_step=5)
    make_run(tmp_path, steps=5, start=2, first_step=10, spans=False)
    assert [line.step for line in load_run(tmp_path).timelines] == [5, 5]


def test_ranks_that_wrote_less(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=40, ranks=3, missing=(2,))
    path = rank_path(folder, 1)
    path.write_bytes(path.read_bytes()[:-7])
    run = load_run(tmp_path)
    assert run.steps == 40, "those of rank 0"
    assert any("rank 1" in note and "cut off" in note for note in run.notes)
    assert any("rank 1 wrote 20 of 40 steps" in note for note in run.notes)
    assert (run.rows[:20, :, 1] == 300).all() and np.isnan(run.rows[20:, :, 1]).all()
    assert np.isfinite(run.logged["loss"]).all(), "rank 0 knows it"
    assert any("[2]" in note for note in run.notes)
    assert np.isnan(run.rows[..., 2]).all() and np.isnan(run.after).all()
    assert (run.before > 0).all(), "rank 0 knows the load of all"
    make_run(tmp_path / "x", steps=40, ranks=2)
    first = rank_path(tmp_path / "x/start000", 0)
    first.write_bytes(first.read_bytes()[:-7])
    assert load_run(tmp_path / "x").rows.shape == (20, 2, 2), "and what others wrote behind them is left out"


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such folder"):
        load_run(tmp_path / "none")
    with pytest.raises(RunError, match="no start000"):
        load_run(tmp_path)
    make_run(tmp_path, steps=5, ranks=2, missing=(0, 1))
    with pytest.raises(RunError, match="no steps yet"):
        load_run(tmp_path)
