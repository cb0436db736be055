"""Draw the chart of the README from the committed samples: ``python -m benchmarks.overview``.

It has one cell, with skewed and with even routing, and writes ``docs/pictures/results.svg``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.compare import store
from benchmarks.compare.figures import BASE, Spread, times_as_long
from benchmarks.results_folder import COMMITTED

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "results.svg"
CELL = "gpt-moe-s.a"
ROUTINGS = {"natural": "natural routing", "zipf": "zipf", "balanced": "even routing"}
SYSTEMS = {
    "hecate (auto)": "Hecate",
    "FlexMoE": "FlexMoE",
    "post-gate": "post-gate (UltraEP)",
    "LAER": "LAER",
    "FasterMoE": "FasterMoE",
    "static EP (node-wise)": "static EP, node-wise",
    "transformers EP": "transformers EP",
    "DDP": "DDP",
    "FSDP2": "FSDP2",
    "SmartMoE": "SmartMoE",
}


def speedups(cell: dict[str, Any]) -> dict[str, dict[str, Spread]]:
    """Speedup over static EP by workload and system, as in the tables."""
    return {
        workload: {system: times_as_long(cell, workload, BASE, system) for system in SYSTEMS} for workload in ROUTINGS
    }


def draw(path: Path, cell: dict[str, Any]) -> None:
    """One panel for each routing, a bar for each system, and a line over the range of its launches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Text stays text, and nothing in the file says when it was drawn: equal samples give an equal file.
    settings = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": CELL, "font.sans-serif": ["DejaVu Sans"]}
    with plt.rc_context(settings):
        figure, axes = plt.subplots(1, len(ROUTINGS), figsize=(9, 3), layout="constrained", sharex=True, sharey=True)
        for axis, (workload, found) in zip(axes, speedups(cell).items(), strict=True):
            for place, (system, spread) in enumerate(found.items()):
                color = "tab:orange" if system == "hecate (auto)" else "tab:gray"
                axis.barh(place, spread.middle, 0.7, color=color)
                axis.plot([spread.least, spread.most], [place, place], color="black", lw=1)
                axis.text(spread.most + 0.06, place, f"{spread.middle:.2f}", va="center")
            axis.axvline(1, color="black", lw=0.8, ls=":")
            axis.set_title(ROUTINGS[workload], fontsize=9)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_yticks(range(len(SYSTEMS)), list(SYSTEMS.values()))
        axes[0].invert_yaxis()
        axes[0].set_xlim(0, 3.7)
        figure.supxlabel("speedup over static EP; median and range of three launches", fontsize=9)
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE, store.load(COMMITTED)[CELL])
