"""Control groups with a quota of CPU time, version 1 or 2."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
# The kernel's least quota. A thread that waited has a whole quota before it is stopped, so quotas must be short
# against the compute between two collectives: it gets one for nothing after each.
QUOTA_US = 1_000


def find_version() -> int | None:
    """1 or 2; None if groups cannot be made here."""
    if os.geteuid() != 0:
        return None
    for version, base in ((2, ROOT), (1, ROOT / "cpu")):
        marker = base / ("cgroup.controllers" if version == 2 else "cpu.cfs_period_us")
        if not marker.exists() or (version == 2 and "cpu" not in marker.read_text().split()):
            continue
        probe = base / f"hecate-probe-{os.getpid()}"
        try:
            probe.mkdir()
            probe.rmdir()
        except OSError:
            continue
        return version
    return None


@dataclass(frozen=True)
class Group:
    """The group of one rank.

    Attributes:
        path: folder of the group; threads are moved in and out by writing their ids.
        outside: where threads without a quota belong.
    """

    version: int
    path: Path
    outside: Path

    def enter(self, thread: int) -> None:
        (self.path / self._threads).write_text(str(thread))

    def leave(self, thread: int) -> None:
        # A thread may have ended by now.
        with contextlib.suppress(ProcessLookupError, OSError):
            (self.outside / self._threads).write_text(str(thread))

    @property
    def _threads(self) -> str:
        return "cgroup.threads" if self.version == 2 else "tasks"


def make_groups(prefix: str, ranks: int, cores: float, version: int) -> list[Group]:
    """One group for each rank, with ``cores`` of CPU time.

    Raises:
        OSError: the kernel refuses.
    """
    period = max(5 * QUOTA_US, round(QUOTA_US / cores))
    base = (ROOT if version == 2 else ROOT / "cpu") / prefix
    base.mkdir()
    if version == 2:
        # Threads of one process may be in different groups only below a threaded domain.
        (ROOT / "cgroup.subtree_control").write_text("+cpu")
        (base / "cgroup.subtree_control").write_text("+cpu")
    groups = []
    for rank in range(ranks):
        path = base / f"rank{rank}"
        path.mkdir()
        outside = base if version == 1 else base / f"free{rank}"
        if version == 2:
            outside.mkdir()
            for folder in (path, outside):
                (folder / "cgroup.type").write_text("threaded")
            (path / "cpu.max").write_text(f"{round(cores * period)} {period}")
        else:
            (path / "cpu.cfs_period_us").write_text(str(period))
            (path / "cpu.cfs_quota_us").write_text(str(round(cores * period)))
        groups.append(Group(version, path, outside))
    return groups


def remove_groups(prefix: str) -> None:
    """Remove all groups of a cluster whose processes are gone."""
    for base in (ROOT / prefix, ROOT / "cpu" / prefix):
        if not base.is_dir():
            continue
        folders = sorted((path for path in base.rglob("*") if path.is_dir()), reverse=True)
        for folder in (*folders, base):
            # Killed processes take a moment to leave.
            for _ in range(50):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.1)
