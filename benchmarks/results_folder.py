"""Where benchmarks write: not into the checkout, unless asked to.

``benchmarks/results`` holds the samples that the README quotes. ``HECATE_RESULTS=benchmarks/results`` replaces them.
"""

from __future__ import annotations

import os
from pathlib import Path

COMMITTED = Path(__file__).parent / "results"


def results_folder() -> Path:
    """``HECATE_RESULTS``, or ``build/benchmarks`` in the checkout; it exists afterwards."""
    folder = Path(os.environ.get("HECATE_RESULTS") or Path(__file__).parents[1] / "build" / "benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
