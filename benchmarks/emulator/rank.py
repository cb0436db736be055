"""One rank: runs a script as ``python`` would, with its quota."""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.emulator.throttle import throttled


def main() -> None:
    join = os.environ.get("HECATE_CLUSTER_JOIN")
    if join:
        Path(join).write_text(str(os.getpid()))
    script, sys.argv = sys.argv[1], sys.argv[1:]
    limit: Any = nullcontext() if os.environ["HECATE_CLUSTER_BY_SCRIPT"] == "1" else throttled()
    sys.path[0] = str(Path(script).parent)
    with limit:
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
