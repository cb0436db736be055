"""Options of graph dumps: ``Config(dump=...)`` and the environment, read once in ``hecate.compile``."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from hecate.config import Config
from hecate.passes.dumps.folder import MOST_BYTES


@dataclass(frozen=True)
class DumpOptions:
    """Options of a model whose graphs are dumped: by every rank or rank 0 alone, in files of so many bytes."""

    folder: Path
    every_rank: bool
    most_bytes: int


def dump_options(config: Config) -> DumpOptions | None:
    """Return the options of dumps, None if nothing is dumped; raise if an environment variable is wrong."""
    ranks = os.environ.get("HECATE_DUMP_RANKS") or "first"
    if ranks not in ("first", "all"):
        raise ValueError(f"hecate.compile: HECATE_DUMP_RANKS={ranks!r}, expected first or all")
    given = os.environ.get("HECATE_DUMP_MB") or str(MOST_BYTES / 2**20)
    try:
        megabytes = float(given)
    except ValueError:
        megabytes = -1.0
    if not 0 < megabytes < math.inf:
        raise ValueError(f"hecate.compile: HECATE_DUMP_MB={given!r}, expected a number of megabytes above 0")
    folder = config.dump or os.environ.get("HECATE_DUMP")
    if not folder:
        return None
    return DumpOptions(Path(folder), "all" in (ranks, config.dump_ranks), int(megabytes * 2**20))
