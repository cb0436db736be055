"""Every MoE family of the installed transformers on two ranks: found, rewritten, right?

    python -m benchmarks.families                     all of them, about 20 minutes on two cores
    python -m benchmarks.families qwen3_moe dbrx      some
    python -m benchmarks.families --write             also writes the table into docs/models.md
    python -m benchmarks.families --images            models that see images, on all ranks and on one alone
    python -m benchmarks.families --routing           routing that is recorded and replayed; --write: docs/routing.md

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
from benchmarks.families.lines import HEAD, cells_of, is_wrong, measure, table_line, what_was_raised
from benchmarks.families.models import not_covered
from benchmarks.families.routing_table import routing_table
from benchmarks.families.table import FAMILIES, WRAPPERS
from benchmarks.results_folder import results_folder
from tests.support.ranks import RanksFailed, run_ranks

_PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_START, _END = "<!-- families: start -->\n", "<!-- families: end -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--backend", default="aot_eager", choices=("aot_eager", "inductor"))
    parser.add_argument("--policy", default="hecate")
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    parser.add_argument("--images", action="store_true", help="print the table of models that see images")
    parser.add_argument("--routing", action="store_true", help="print the table of recorded and replayed routing")
    options = parser.parse_args()
    if options.images:
        _print_images(options.names or WRAPPERS, options.policy)
        return
    unknown = sorted(set(options.names) - set(FAMILIES))
    if unknown:
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    if options.write and options.names:
        parser.error("--write takes all families")
    if options.routing:
        routing_table(options.names or FAMILIES, write=options.write)
        return
    results: dict[str, dict[str, Any]] = {}
    print(table_line(HEAD))
    for name in options.names or FAMILIES:
        results[name] = measure(name, policy=options.policy, backend=options.backend)
        print(table_line(cells_of(name, results[name])), flush=True)
    (results_folder() / "families.json").write_text(json.dumps(results, indent=1) + "\n")
    missing = not_covered()
    print("\n" + _summary(results, missing))
    if options.write:
        _write(results, missing)
    if missing or any(is_wrong(result) for result in results.values()):
        raise SystemExit(1)


def _print_images(names: Iterable[str], policy: str) -> None:
    """A line for each family: the worst errors of losses and of gradients, or what was raised."""
    print(table_line(("family", "images on all ranks: loss", "gradients", "on one rank: loss", "gradients")))
    for name in names:
        cells = [name]
        for steps in (ON_ALL_RANKS, ON_ONE_RANK):
            try:
                ranks = run_ranks(
                    "benchmarks.families.images:measure", 2, timeout=600, name=name, steps=steps, policy=policy
                )
            except RanksFailed as error:
                cells += [what_was_raised(str(error)), ""]
            else:
                cells += [f"{max(rank[what] for rank in ranks):.0e}" for what in ("loss", "gradient")]
        print(table_line(tuple(cells)), flush=True)


def _summary(results: dict[str, dict[str, Any]], missing: list[str]) -> str:
    ran = [result for result in results.values() if "error" not in result]
    refused = [name for name, result in results.items() if "refused" in result]
    exchanging = sum(result["rewritten"] == result["layers"] for result in ran) - len(refused)
    worst = max((result["gradient_error"] for result in ran), default=0.0)
    failed = [name for name, result in results.items() if is_wrong(result)]
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
    rule = "|" + "---|" * len(HEAD)
    table = "\n".join(
        [table_line(HEAD), rule, *(table_line(cells_of(name, result)) for name, result in results.items())]
    )
    _PAGE.write_text(f"{before}{_START}{_summary(results, missing)}\n\n{table}\n{_END}{after}")


if __name__ == "__main__":
    main()
