"""A run of three steps, and a copy of it to be tampered with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hecate_compile.checkpoints.tampering import ran
from tests.hecate_compile.checkpoints.test_damage import Run, save_run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return save_run(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def run(saved: Run, tmp_path: Path) -> Iterator[Run]:
    folder = tmp_path / "run"
    shutil.copytree(saved.folder, folder)
    ran()
    yield Run(folder, saved.bits)
    assert not ran()
