"""The files of a run: what was written comes back, what is cut off is left out, what was changed is an error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hecate.reports.run_data import load_run
from hecate.reports.run_files import (
    RunError,
    RunHead,
    append_chunk,
    next_step,
    rank_path,
    read_rank,
    start_folder,
)
from tests.hecate_compile.reports.made_run import make_run


def written(path: Path, count: int) -> Path:
    with path.open("ab") as file:
        for number in range(count):
            steps = np.arange(3 * number, 3 * number + 3)
            append_chunk(file, {"step": steps, "log.loss": steps / 2} if number else {"step": steps})
    return path


def test_chunks_come_back_in_order(tmp_path: Path) -> None:
    read = read_rank(written(tmp_path / "x.steps", 3))
    assert read.steps == 9 and read.problem == ""
    assert read.arrays["step"].tolist() == list(range(9))
    # What was not logged in the first chunk is NaN there.
    assert np.isnan(read.arrays["log.loss"][:3]).all() and read.arrays["log.loss"][3:].tolist() == [
        1.5,
        2,
        2.5,
        3,
        3.5,
        4,
    ]


@pytest.mark.parametrize("left", [1, 5, 11, 12, 40])
def test_a_last_chunk_that_is_cut_off_is_left_out(left: int, tmp_path: Path) -> None:
    path = written(tmp_path / "x.steps", 2)
    whole = path.stat().st_size
    written(path, 1)
    path.write_bytes(path.read_bytes()[: whole + left])
    read = read_rank(path)
    assert read.steps == 6 and "cut off" in read.problem


def test_a_changed_byte_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path / "x.steps", 2)
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunError, match="damaged at byte 0"):
        read_rank(path)
    path.write_bytes(b"not a run at all, but long enough")
    with pytest.raises(RunError, match="damaged"):
        read_rank(path)
    with pytest.raises(RunError, match=r"none\.steps"):
        read_rank(tmp_path / "none.steps")


def test_what_stands_before_a_changed_byte_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "x.steps", 1)
    first = path.stat().st_size
    written(path, 2)
    data = bytearray(path.read_bytes())
    data[first + 30] ^= 1
    path.write_bytes(data)
    read = read_rank(path)
    assert read.steps == 3 and read.problem == f"its file is damaged at byte {first}; what follows is left out"


def test_a_damaged_rank_or_start_is_noted_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=5, ranks=2)
    rank_path(folder, 1).write_bytes(b"x" * 100)
    (make_run(tmp_path, steps=5, start=1) / "run.json").write_text("{")
    run = load_run(tmp_path)
    assert run.steps == 5 and np.isnan(run.rows[..., 1]).all() and not np.isnan(run.rows[..., 0]).any()
    assert any("start001 is left out" in note for note in run.notes)
    assert any("rank 1" in note and "damaged at byte 0" in note for note in run.notes)
    rank_path(folder, 0).write_bytes(b"x" * 100)
    with pytest.raises(RunError, match=r"run\.json"):
        load_run(tmp_path)


def test_a_head_of_something_else_is_an_error(tmp_path: Path) -> None:
    make_run(tmp_path / "x", steps=1)
    good = json.loads((tmp_path / "x/start000/run.json").read_text())
    wrong = [
        {"first_step": "0"}, {"layers": 3}, {"layers": [1, 2]}, {"nodes": []}, {"experts": [8, True]},
        {"started": None}, {"format": 99}, {"more": 1}, {"experts": [8]},
    ]  # fmt: skip
    texts = ["", "[]", "{}", '{"model": 1}', "{", *(json.dumps(good | one) for one in wrong)]
    for text in texts:
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(RunError, match=r"run\.json"):
            RunHead.read(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(good | {"started": 1}))
    assert RunHead.read(tmp_path).layers == tuple(good["layers"])


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


def test_ranks_that_wrote_less(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=40, ranks=3, missing=(2,))
    path = rank_path(folder, 1)
    path.write_bytes(path.read_bytes()[:-7])
    run = load_run(tmp_path)
    assert run.steps == 20, "what all that wrote have in common"
    assert any("rank 1" in note and "cut off" in note for note in run.notes)
    assert any("[2]" in note for note in run.notes)
    assert np.isnan(run.rows[..., 2]).all() and np.isnan(run.after).all()
    assert (run.before > 0).all(), "rank 0 knows the load of all"


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such folder"):
        load_run(tmp_path / "none")
    with pytest.raises(RunError, match="no start000"):
        load_run(tmp_path)
    make_run(tmp_path, steps=5, ranks=2, missing=(0, 1))
    with pytest.raises(RunError, match="no steps yet"):
        load_run(tmp_path)
