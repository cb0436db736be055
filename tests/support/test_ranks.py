"""A hung or failing rank ends the whole run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.ranks import RanksFailed, lives, run_ranks


def hang(folder: str) -> None:
    rank = os.environ["RANK"]
    (Path(folder) / rank).write_text(str(os.getpid()))
    if rank == "1":
        time.sleep(600)


def fail() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("planted")


@pytest.mark.distributed
def test_failures_are_shown_and_hangs_end_with_all_processes(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="ValueError: planted"):
        run_ranks(fail, 2, timeout=60)
    # The server from which ranks are forked is there by now.
    with pytest.raises(RanksFailed, match="no end after 4 s"):
        run_ranks(hang, 2, timeout=4, folder=str(tmp_path))
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    time.sleep(0.2)
    assert not any(map(lives, pids))
