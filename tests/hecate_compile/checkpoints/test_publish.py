"""Who may put a step into a folder, and what is left when that fails."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hecate
from hecate.checkpoints import publish
from hecate.checkpoints import save as saving
from hecate.checkpoints.coordination import CheckpointError
from tests.hecate_compile.checkpoints.test_damage import bits, bounded, load, trained


def save(folder: Path, step: int, **options: Any) -> str:
    """Save a step; returns what it restores."""
    model, optimizer = trained(step)
    wanted = bits(model, optimizer)
    hecate.save(folder, model, optimizer, step=step, **options)
    return wanted


def steps(folder: Path) -> list[str]:
    """All that is in the folder, but for the files of the protocol."""
    return sorted(path.name for path in folder.iterdir() if path.name not in (".lock", ".owner"))


def forked(work: Callable[[], object]) -> None:
    """Run ``work`` in a process forked from this one."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    with bounded(30):
        assert os.waitpid(process, 0)[1] == 0


def assert_taken_over(folder: Path, step: int) -> None:
    before = steps(folder)
    with pytest.raises(CheckpointError, match=f"rank 0: .*another run saves to {folder} since this one did"):
        save(folder, step)
    assert steps(folder) == before


# --- two runs ---


def test_the_last_run_to_start_owns_the_folder(tmp_path: Path) -> None:
    """A forked process is another run, though the token is made when hecate is imported, which may be before."""
    first, mine = save(tmp_path, 1), publish._run

    def other() -> None:
        assert publish._run != mine and not publish._owned
        save(tmp_path, 2)

    forked(other)
    assert publish._run == mine
    assert_taken_over(tmp_path, 3)
    # Not the next time either, nor in the background.
    assert_taken_over(tmp_path, 4)
    model, optimizer = trained(5)
    with pytest.raises(CheckpointError, match="another run saves"):
        hecate.async_save(tmp_path, model, optimizer, step=5).result(30)
    saving._under_way.clear()
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]
    assert load(tmp_path)[0].step == 2
    assert load(tmp_path, step=1)[1] == first


def test_taken_over_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    record = saving.record_files

    def other() -> None:
        monkeypatch.undo()
        save(tmp_path, 2)

    def slow(*arguments: Any) -> Any:
        forked(other)
        return record(*arguments)

    monkeypatch.setattr(saving, "record_files", slow)
    # The other removed the draft, so this may end before it looks whose the folder is.
    with pytest.raises(CheckpointError, match=r"another run saves|is missing"):
        save(tmp_path, 3)
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]
    assert load(tmp_path)[0].step == 2


def test_taken_over_before_it_publishes(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for owner in ("another", "", None):
        draft = publish.open_draft(tmp_path, 2)
        path = tmp_path / ".owner"
        mine = path.read_text()
        path.unlink() if owner is None else path.write_text(owner)
        with pytest.raises(PermissionError, match="another run saves"):
            publish.publish(draft, step=2, ranks=1, files={}, keep=None)
        publish.discard(draft)
        path.write_text(mine)
    assert steps(tmp_path) == ["step-00000001"]


def test_other_folders_are_not_taken_over(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, 1)
    forked(lambda: save(tmp_path / "a", 2))
    assert_taken_over(tmp_path / "a", 3)
    save(tmp_path / "b", 2)
    # One folder by another name is still the same.
    (tmp_path / "c").symlink_to(tmp_path / "a")
    assert_taken_over(tmp_path / "c", 3)


def test_a_folder_that_was_removed_may_be_used_again(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    subprocess.run(["rm", "-r", tmp_path / "run"], check=True)
    wanted = save(tmp_path / "run", 2)
    assert load(tmp_path / "run")[1] == wanted


def test_drafts_of_others_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    draft = publish.open_draft(tmp_path, 2)
    (tmp_path / "step-00000003.tmp-000000000000-00000000").mkdir()
    (tmp_path / "step-00000003.tmp-000000000000-00000000" / ".metadata").write_text("half")
    (tmp_path / "step-notes").mkdir()
    save(tmp_path, 4)
    assert steps(tmp_path) == ["step-00000001", draft.name, "step-00000004", "step-notes"]


def test_a_lock_that_is_never_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has it, such as a stopped process, is waited for, but not for ever."""
    wanted = save(tmp_path, 1)
    monkeypatch.setattr(publish, "_PATIENCE", 0.5)
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        start = time.monotonic()
        with bounded(10), pytest.raises(CheckpointError, match=r"rank 0: TimeoutError: .*\.lock for"):
            save(tmp_path, 2)
        assert time.monotonic() - start > 0.4
        assert steps(tmp_path) == ["step-00000001"]
        # Who reads needs no lock.
        assert load(tmp_path)[1] == wanted
    save(tmp_path, 2)


# --- which step ---


def test_a_step_that_is_there_gets_a_neighbour(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-00000001").iterdir()}
    for number in (2, 3):
        model, optimizer = trained(10 + number)
        wanted = bits(model, optimizer)
        path = hecate.save(tmp_path, model, optimizer, step=1, extra=number)
        assert path == tmp_path / f"step-00000001.{number}"
        found, restored, _ = load(tmp_path)
        assert (found.path, found.extra, restored) == (path, number, wanted)
        assert load(tmp_path, step=1)[1] == wanted
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-00000001").iterdir()} == before


def test_the_newest_is_what_was_saved_last(tmp_path: Path) -> None:
    """Not the highest number: who goes back to an earlier step goes on from there."""
    save(tmp_path, 100)
    wanted = save(tmp_path, 5)
    found, restored, _ = load(tmp_path)
    assert (found.step, restored) == (5, wanted)
    save(tmp_path, 10**12)
    assert load(tmp_path)[0].path.name == "step-1000000000000"


def test_keep(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    wanted = save(tmp_path, 5, keep=2)
    # What nobody can read is nobody's to remove.
    assert steps(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    save(tmp_path, 3, keep=1)
    assert steps(tmp_path) == ["step-00000002", "step-00000003"]
    assert wanted != load(tmp_path)[1]


# --- what cannot be written ---


def assert_not_saved(folder: Path, wanted: str, *words: str, model: nn.Module | None = None) -> None:
    before = steps(folder)
    with pytest.raises(CheckpointError) as error:
        hecate.save(folder, model if model is not None else trained(9)[0], step=9)
    for word in ("hecate.save: rank 0", *words):
        assert word in str(error.value), error.value
    assert steps(folder) == before == ["step-00000001"]
    assert load(folder)[1] == wanted


@pytest.mark.parametrize(
    ("call", "number"),
    [("fsync", errno.EIO), ("fsync", errno.ENOSPC), ("rename", errno.EDQUOT), ("mkdir", errno.EROFS)],
)
def test_calls_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    wanted = save(tmp_path, 1)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert_not_saved(tmp_path, wanted, f"[Errno {number}]")
    save(tmp_path, 2)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(CheckpointError, match=rf"rank 0: FileExistsError: \[Errno {errno.EEXIST}\]"):
        save(tmp_path / "run", 1)
    with pytest.raises(CheckpointError, match=rf"rank 0: NotADirectoryError: \[Errno {errno.ENOTDIR}\]"):
        save(tmp_path / "run" / "deeper", 1)
    assert (tmp_path / "run").read_text() == "x"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True)
    if made.returncode:
        # Only root may, and not in every container. Calls that fail are tested above without a disk.
        pytest.skip(f"cannot mount: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_folder_that_cannot_be_written_to(disk: Path) -> None:
    wanted = save(disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert_not_saved(disk, wanted, f"[Errno {errno.EROFS}]")
    with pytest.raises(CheckpointError, match=rf"rank 0: OSError: \[Errno {errno.EROFS}\]"):
        save(disk / "new", 1)


# What fills the disk: most of a tensor, its end, or the room for what follows.
@pytest.mark.parametrize(("kibibytes", "said"), [(8000, "ENOSPC"), (3000, ""), (2900, ""), (2500, "ENOSPC")])
def test_a_full_disk(disk: Path, kibibytes: int, said: str) -> None:
    wanted = save(disk, 1)
    words = [f"[Errno {getattr(errno, said)}]"] if said else []
    assert_not_saved(disk, wanted, *words, model=nn.Linear(256, kibibytes, bias=False))
    save(disk, 2)


def test_a_disk_that_is_full_already(disk: Path) -> None:
    wanted = save(disk, 1)
    with (disk / "other").open("wb") as file, pytest.raises(OSError):
        while True:
            os.write(file.fileno(), bytes(4096))
    before = steps(disk)
    with pytest.raises(CheckpointError, match="rank 0: ") as error:
        save(disk, 2)
    assert str(errno.ENOSPC) in str(error.value) or "no space left" in str(error.value)
    assert steps(disk) == before
    assert load(disk)[1] == wanted
