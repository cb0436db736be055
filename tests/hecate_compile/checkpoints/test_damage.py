"""A step that was damaged in any way is refused by the name of a file, and the one before is loaded bit for bit."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hecate
from tests.support.extent import ALL

CHANGES = 1000 if ALL else 60
# Seconds within which anything is read.
PATIENCE = 5.0
FILES = [".metadata", "__0_0.distcp", "manifest.json", "rank0.json", "rank0.safetensors", "run.json", "tensors.json"]


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that has stepped, other numbers for each seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (1 + seed))
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A digest of all that a step restores: weights, optimizer state and options, random numbers."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {list(value.shape)}".encode())
            digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in sorted(value.items(), key=lambda pair: str(pair[0])):
                digest.update(f"{key!r}:".encode())
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif isinstance(value, np.ndarray):
            digest.update(value.tobytes())
        else:
            digest.update(repr(value).encode())

    add([model.state_dict(), optimizer.state_dict()])
    add([torch.get_rng_state(), np.random.get_state(), random.getstate()])
    return digest.hexdigest()


@dataclass(frozen=True)
class Run:
    """A folder with steps 1, 2 and so on, and what each of them restores."""

    folder: Path
    bits: dict[int, str]

    @property
    def newest(self) -> Path:
        return self.folder / f"step-{max(self.bits):08d}"

    @property
    def step(self) -> int:
        return max(self.bits)


def save_run(folder: Path) -> Run:
    found = {}
    for step in (1, 2, 3):
        model, optimizer = trained(step)
        found[step] = bits(model, optimizer)
        hecate.save(folder, model, optimizer, step=step, extra=extra_of(step))
    return Run(folder, found)


def extra_of(step: int) -> dict[str, Any]:
    return {"step": step, "tokens": torch.arange(5) + step}


@contextmanager
def bounded(seconds: float = PATIENCE) -> Iterator[None]:
    """Fail if the block takes longer; one without an end is ended by pytest's own timeout."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def load(folder: Path, **options: Any) -> tuple[hecate.Loaded, str, list[str]]:
    """Load into another model; what was found, what it restored, and the warnings."""
    model, optimizer = trained(77)
    with bounded(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = hecate.load(folder, model, optimizer, **options)
    return found, bits(model, optimizer), [str(one.message) for one in told]


def reason(folder: Path, **options: Any) -> str:
    """Why nothing is loaded; and nothing in the model changes."""
    model, optimizer = trained(77)
    before = bits(model, optimizer)
    with bounded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(hecate.NoCheckpointError) as error:
            hecate.load(folder, model, optimizer, **options)
    assert bits(model, optimizer) == before
    return str(error.value)


def assert_refused(run: Run, name: str, *, others: int = 0, step: int | None = None) -> None:
    """The newest step is refused, with ``name`` in the error, and that before it (and ``others``) is loaded."""
    number = run.step if step is None else step
    found, restored, told = load(run.folder)
    wanted = run.step - 1 - others
    assert found.step == wanted
    assert restored == run.bits[wanted]
    assert found.extra["step"] == wanted
    assert torch.equal(found.extra["tokens"], extra_of(wanted)["tokens"])
    assert len(found.skipped) == len(told) == 1 + others
    first = found.skipped[0]
    assert first.startswith(f"step-{number:08d}: ") and name in first, first
    assert f"step-{number:08d} is not used" in told[0] and name in told[0], told[0]
    said = reason(run.folder, step=number)
    assert f"no step {number} in" in said and name in said, said


def test_undamaged(run: Run) -> None:
    assert sorted(path.name for path in run.newest.iterdir()) == FILES
    for step, wanted in run.bits.items():
        found, restored, told = load(run.folder, step=step)
        assert (found.step, restored, found.skipped, told) == (step, wanted, (), [])
    assert len(set(run.bits.values())) == len(run.bits)


def test_changed_bytes(run: Run) -> None:
    """A bit of any file, its last byte, all of it, or whatever comes after some byte."""
    rng = random.Random(0)
    paths = [run.newest / name for name in FILES]
    each = [path for path in paths for _ in range(4)]
    for number, path in enumerate(each + rng.choices(paths, [path.stat().st_size for path in paths], k=CHANGES)):
        content = path.read_bytes()
        place, bit = rng.randrange(len(content)), rng.randrange(8)
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        path.write_bytes([damaged, content[:-1], b"", content[:place]][number % 4])
        assert_refused(run, path.name)
        path.write_bytes(content)
    assert load(run.folder)[0].step == run.step


# What stands in the place of a file, which is also elsewhere.
REPLACED: dict[str, Callable[[Path, Path], object]] = {
    "nothing": lambda path, elsewhere: None,
    "a folder": lambda path, elsewhere: path.mkdir(),
    "a link to the same": lambda path, elsewhere: path.symlink_to(elsewhere),
    "zeros": lambda path, elsewhere: path.symlink_to("/dev/zero"),
    "a pipe": lambda path, elsewhere: os.mkfifo(path),
}


@pytest.mark.parametrize("what", REPLACED)
def test_replaced_files(run: Run, tmp_path: Path, what: str) -> None:
    for name in FILES:
        path = run.newest / name
        content = path.read_bytes()
        path.rename(tmp_path / f"outside-{name}")
        REPLACED[what](path, tmp_path / f"outside-{name}")
        assert_refused(run, name)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        path.write_bytes(content)


def test_files_of_another_step(run: Run) -> None:
    # Tensors of both are in the same places.
    for name in (name for name in FILES if name != "tensors.json"):
        one, other = run.newest / name, run.folder / "step-00000002" / name
        mine, theirs = one.read_bytes(), other.read_bytes()
        one.write_bytes(theirs)
        assert_refused(run, name)
        other.write_bytes(mine)
        assert_refused(run, name, others=1)
        one.write_bytes(mine)
        other.write_bytes(theirs)


def test_all_damaged(run: Run) -> None:
    older = {1: "run.json", 2: ".metadata"}
    for step, name in older.items():
        (run.folder / f"step-{step:08d}" / name).unlink()
    for name in FILES:
        path = run.newest / name
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        said = reason(run.folder)
        assert "no checkpoint in" in said and f"not used: {run.newest.name}: " in said and name in said, said
        assert all(f"step-{step:08d}: {other} is missing" in said for step, other in older.items()), said
        # It is no start from nothing either.
        assert name in reason(run.folder, required=False)
        assert name in reason(run.folder, step=run.step, required=False)
        path.write_bytes(content)


@pytest.mark.parametrize("what", [what for what in REPLACED if what != "nothing"])
def test_an_extra_file_is_harmless(run: Run, tmp_path: Path, what: str) -> None:
    (tmp_path / "file").write_bytes(b"\xff" * 100)
    for name in ("notes.txt", "run.safetensors", "__1_0.distcp", "rank1.json", ".metadata.bak"):
        REPLACED[what](run.newest / name, tmp_path / "file")
        found, restored, told = load(run.folder)
        assert (found.step, restored, told) == (run.step, run.bits[run.step], []), name


def test_renamed_steps(run: Run) -> None:
    run.newest.rename(run.folder / "step-00000009")
    assert_refused(run, "manifest.json says that it is of step 3", step=9)
    assert "no step 3 in" in reason(run.folder, step=3)
    (run.folder / "step-00000009").rename(run.folder / "step-9")
    found, restored, told = load(run.folder)
    assert (found.step, restored, told) == (2, run.bits[2], [])


def test_folders_that_are_no_steps(run: Run) -> None:
    (run.folder / "step-00000007").mkdir()
    shutil.copytree(run.newest, run.folder / "step-00000008.tmp-0123456789ab-01234567")
    (run.folder / "step-00000009.tmp-0123456789ab-removed").mkdir()
    (run.folder / "step-00000010").write_text("a file")
    (run.folder / "step-00000011").symlink_to(run.newest)
    (run.folder / ".tmp-").mkdir()
    found, restored, told = load(run.folder)
    assert (found.step, restored) == (run.step, run.bits[run.step])
    assert found.skipped == ("step-00000007: manifest.json is missing",) and len(told) == 1
    for step in (7, 8, 9, 10, 11):
        assert f"no step {step} in" in reason(run.folder, step=step)


def test_a_link_to_the_folder_of_a_run_is_followed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(run.folder)
    assert load(tmp_path / "latest")[1] == run.bits[run.step]


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("missing", "empty", "file"):
        assert "no checkpoint in" in reason(tmp_path / name)
        assert hecate.load(tmp_path / name, required=False) is None


def test_the_newest_that_is_whole_wins(run: Run) -> None:
    """Of two neighbours of one number; the older of them stands in when the newer is damaged."""
    model, optimizer = trained(4)
    again = hecate.save(run.folder, model, optimizer, step=2, extra=extra_of(2))
    wanted = bits(model, optimizer)
    assert again.name == "step-00000002.2"
    assert load(run.folder)[1] == wanted == load(run.folder, step=2)[1]
    (again / "run.json").write_text("{}")
    found, restored, _ = load(run.folder)
    assert (found.step, restored) == (3, run.bits[3])
    found, restored, _ = load(run.folder, step=2)
    assert (found.step, restored) == (2, run.bits[2])
    assert found.skipped[0].startswith("step-00000002.2: run.json has 2 bytes")
