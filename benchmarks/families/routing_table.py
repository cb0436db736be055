"""Families whose routing is recorded and replayed, as a table and as a paragraph of the documentation."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.families.lines import table_line, what_was_raised
from benchmarks.results_folder import results_folder
from tests.support.ranks import RanksFailed, run_ranks

_PAGE = Path(__file__).parents[2] / "docs" / "routing.md"
_START, _END = "<!-- routing: start -->\n", "<!-- routing: end -->\n"
_HEAD = ("family", "layers", "experts", "of a token", "replayed", "drawn: loss", "gradients", "")


def routing_table(names: Iterable[str], *, write: bool) -> None:
    """Print a line for each family, and write the summary into the page if ``write``."""
    results: dict[str, dict[str, Any]] = {}
    print(table_line(_HEAD))
    for name in names:
        try:
            results[name] = run_ranks("benchmarks.families.replayed:run", 2, timeout=300, name=name)[0]
        except RanksFailed as error:
            results[name] = dict(error=what_was_raised(str(error)))
        print(table_line(_cells(name, results[name])), flush=True)
    (results_folder() / "routing.json").write_text(json.dumps(results, indent=1) + "\n")
    summary = _summary(results)
    print("\n" + summary)
    if write:
        before, _, rest = _PAGE.read_text().partition(_START)
        _, _, after = rest.partition(_END)
        _PAGE.write_text(f"{before}{_START}{summary}\n{_END}{after}")


def _cells(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    if "error" in result:
        return (name, *[""] * 6, result["error"])
    sizes = [str(result[key]) for key in ("layers", "experts", "chosen")]
    return (name, *sizes, *[f"{result[key]:.0e}" for key in ("replay_error", "loss_error", "gradient_error")], "")


def _summary(results: dict[str, dict[str, Any]]) -> str:
    ran = {name: result for name, result in results.items() if "error" not in result}
    exact = sum(result["replay_error"] == 0 for result in ran.values())
    worst = [max(result[key] for result in ran.values()) for key in ("replay_error", "loss_error", "gradient_error")]
    text = (
        f"Of {len(results)} families {len(ran)} replay on two ranks. A replayed recording gives the loss and all "
        f"gradients of its step to the bit in {exact}, and at most {worst[0]:.0e} off in the others. Of a drawn "
        f"routing loss and gradients are at most {worst[1]:.0e} and {worst[2]:.0e} off those of one process whose "
        "routers were overwritten. Not found or refused:"
    )
    lines = [*textwrap.wrap(text, width=120), ""]
    lines += [f"- {name}: {_reason(result['error'])}" for name, result in results.items() if "error" in result]
    return "\n".join(lines)


def _reason(error: str) -> str:
    """Without the name of the error and who says it, and of the first layer alone."""
    said = error.partition(": ")[2].removeprefix("hecate.record_routing: ").removeprefix("hecate.compile: ")
    return said.partition("; ")[0]
