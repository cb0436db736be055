"""Every MoE family of the installed transformers on two ranks: found, rewritten, right?

    python -m benchmarks.families                     all of them, about 20 minutes on two cores
    python -m benchmarks.families qwen3_moe dbrx      some
    python -m benchmarks.families --write             also writes the table into docs/models.md
    python -m benchmarks.families --images            models that see images, on all ranks and on one alone

A line for each: MoE layers and experts, layers that exchange rows (the others gather, with the reason), the worst
error of the loss and of any gradient of two steps against data parallelism in one process, graphs, and the seconds of
the first step with compilation. A family fails if it is wrong by more than 1e-5, or does not end.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers

from benchmarks.families.images import ON_ALL_RANKS, ON_ONE_RANK
from benchmarks.families.models import not_covered
from benchmarks.families.table import FAMILIES, WRAPPERS
from benchmarks.results_folder import results_folder
from tests.support.ranks import RanksFailed, run_ranks

TOLERANCE = 1e-5
_PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_START, _END = "<!-- families: start -->\n", "<!-- families: end -->\n"
_HEAD = ("family", "MoE layers", "experts", "exchange rows", "loss", "gradients", "graphs", "s", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--backend", default="aot_eager", choices=("aot_eager", "inductor"))
    parser.add_argument("--policy", default="hecate")
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    parser.add_argument("--images", action="store_true", help="print the table of models that see images")
    options = parser.parse_args()
    if options.images:
        _print_images(options.names or WRAPPERS, options.policy)
        return
    unknown = sorted(set(options.names) - set(FAMILIES))
    if unknown:
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    if options.write and options.names:
        parser.error("--write takes all families")
    results: dict[str, dict[str, Any]] = {}
    print(_line(_HEAD))
    for name in options.names or FAMILIES:
        results[name] = _measure(name, options.backend, options.policy)
        print(_line(_cells(name, results[name])), flush=True)
    (results_folder() / "families.json").write_text(json.dumps(results, indent=1) + "\n")
    missing = not_covered()
    print("\n" + _summary(results, missing))
    if options.write:
        _write(results, missing)
    if missing or any(_is_wrong(result) for result in results.values()):
        raise SystemExit(1)


def _print_images(names: Iterable[str], policy: str) -> None:
    """A line for each family: the worst errors of losses and of gradients, or what was raised."""
    print(_line(("family", "images on all ranks: loss", "gradients", "on one rank: loss", "gradients")))
    for name in names:
        cells = [name]
        for steps in (ON_ALL_RANKS, ON_ONE_RANK):
            try:
                ranks = run_ranks(
                    "benchmarks.families.images:measure", 2, timeout=600, name=name, steps=steps, policy=policy
                )
            except RanksFailed as error:
                cells += [_reason(str(error)), ""]
            else:
                cells += [f"{max(rank[what] for rank in ranks):.0e}" for what in ("loss", "gradient")]
        print(_line(tuple(cells)), flush=True)


def _measure(name: str, backend: str, policy: str) -> dict[str, Any]:
    result = _run(name, backend=backend, policy=policy)
    if result.get("error", "").partition(":")[0].endswith(("NoExpertsError", "UntracedReadError")):
        refused = result["error"]
        result = _run(name, backend=backend, policy="replicate") | {"refused": refused}
    if "error" not in result and _is_wrong(result):
        # Sums that cancel are inexact in float32. What is wrong is so in float64, too.
        exact = _run(name, backend=backend, policy=policy, dtype="float64")
        result |= exact if "error" in exact else {"float64_error": exact["gradient_error"]}
    return result


def _run(name: str, **options: Any) -> dict[str, Any]:
    try:
        first, *_ = run_ranks("benchmarks.families.case:run", 2, timeout=600, name=name, **options)
    except RanksFailed as error:
        return dict(error=_reason(str(error)), details=str(error)[-4000:])
    result: dict[str, Any] = first
    return result


def _reason(text: str) -> str:
    """What a rank raised: the last line of the first traceback that starts with the name of an error."""
    part = text.partition("--- rank 0\n")[2].partition("\n--- ")[0]
    lines = [line for line in part.splitlines() if line and not line.startswith(" ") and ":" in line]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "Failed"))]
    return (named or lines or text.splitlines())[-1][:300]


def _is_wrong(result: dict[str, Any]) -> bool:
    gradient = result.get("float64_error", result.get("gradient_error"))
    # Not by a maximum: NaN is smaller than everything.
    return "error" in result or not (result["loss_error"] <= TOLERANCE and gradient <= TOLERANCE)


def _cells(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    if "error" in result:
        return (name, "", "", "", "", "", "", "", result["error"])
    remark = "; ".join(result["reasons"])
    if "refused" in result:
        remark = f'refused, trained with `policy="replicate"`: {_short(result["refused"])}'
    if "float64_error" in result:
        remark += f"{result['worst']}: {result['float64_error']:.0e} in float64"
    if result["graphs"] > 1:
        remark += f"{'; ' if remark else ''}{result['graphs'] - 1} graph breaks or recompiles"
    return (
        name,
        str(result["layers"]),
        str(result["experts"]),
        str(result["rewritten"]),
        f"{result['loss_error']:.0e}",
        f"{result['gradient_error']:.0e}",
        str(result["graphs"]),
        f"{result['seconds']:.0f}",
        remark,
    )


def _short(error: str) -> str:
    """Without the name of the error and who says it."""
    return error.partition(": ")[2].removeprefix("hecate.compile: ").removeprefix("hecate: ").rstrip(".")


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _summary(results: dict[str, dict[str, Any]], missing: list[str]) -> str:
    ran = [result for result in results.values() if "error" not in result]
    refused = [name for name, result in results.items() if "refused" in result]
    exchanging = sum(result["rewritten"] == result["layers"] for result in ran) - len(refused)
    worst = max((result["gradient_error"] for result in ran), default=0.0)
    failed = [name for name, result in results.items() if _is_wrong(result)]
    text = (
        f"{len(results)} models of transformers {transformers.__version__}: {exchanging} exchange rows in every "
        f"MoE layer, {len(ran) - exchanging - len(refused)} gather experts in some, {len(refused)} are refused "
        f'without policy="replicate" ({", ".join(refused) or "none"}); the worst gradient is {worst:.0e} off; '
        f"{len(failed)} failed{': ' + ', '.join(failed) if failed else ''}."
    )
    return text + (f" Not in this table: {', '.join(missing)}." if missing else "")


def _write(results: dict[str, dict[str, Any]], missing: list[str]) -> None:
    before, _, rest = _PAGE.read_text().partition(_START)
    _, _, after = rest.partition(_END)
    rule = "|" + "---|" * len(_HEAD)
    table = "\n".join([_line(_HEAD), rule, *(_line(_cells(name, result)) for name, result in results.items())])
    _PAGE.write_text(f"{before}{_START}{_summary(results, missing)}\n\n{table}\n{_END}{after}")


if __name__ == "__main__":
    main()
