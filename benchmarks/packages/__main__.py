"""MoE layers of packages on PyPI, unmodified, on ranks: found, rewritten, right?

    python -m benchmarks.packages                      all of them, about 20 minutes on two cores
    python -m benchmarks.packages litgpt mh-moe        some
    python -m benchmarks.packages --ranks 3            on three ranks, which own other numbers of experts
    python -m benchmarks.packages --write              also writes the table into docs/models.md

pip brings the packages into a folder of their own, without what they depend on. A line is as in benchmarks.families:
layers that exchange rows, and the worst error of the loss and of any gradient of two steps against data parallelism
in one process; evaluation is compared, too. Layers that do not exchange rows are named with the reason.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.families.lines import HEAD, TOLERANCE, cells_of, is_wrong, measure, table_line
from benchmarks.packages.models import MODELS
from benchmarks.results_folder import results_folder

_PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_START, _END = "<!-- packages: start -->\n", "<!-- packages: end -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL", help="; ".join(MODELS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("build/packages"), help="where packages are installed")
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(MODELS))
    if unknown:
        parser.error(f"no model {', '.join(unknown)}; there are {'; '.join(MODELS)}")
    if options.write and options.names:
        parser.error("--write takes all models")
    names = options.names or list(MODELS)
    _install(names, options.folder)
    results: dict[str, dict[str, Any]] = {}
    print(table_line(_head()))
    for name in names:
        results[name] = _measure(name, options.ranks, options.folder)
        print(table_line(cells_of(name, results[name])), flush=True)
    (results_folder() / f"packages.{options.ranks}.json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n" + _summary(results, options.ranks))
    if options.write:
        _write(results, options.ranks)
    if any(map(_fails, results.values())):
        raise SystemExit(1)


def _install(names: list[str], folder: Path) -> None:
    """Install what is not there yet, and let ranks find it."""
    marks = folder / "installed"
    marks.mkdir(parents=True, exist_ok=True)
    for need in dict.fromkeys(need for name in names for need in MODELS[name].requirements):
        if not (marks / need).exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", folder]
            subprocess.run([*pip, need], check=True)
            # Wheels that bring such folders would hide those of this repository.
            for ours in ("benchmarks", "examples", "tests"):
                shutil.rmtree(folder / ours, ignore_errors=True)
            (marks / need).touch()
    # Ranks take it from here. Last, so that nothing in it hides what is installed.
    sys.path.append(str(folder.resolve()))


def _measure(name: str, ranks: int, folder: Path) -> dict[str, Any]:
    model = MODELS[name]
    options = dict(models="benchmarks.packages.models", tolerance=model.tolerance, evaluates=model.evaluates)
    result = measure(name, ranks=ranks, policy="hecate", **options) | {"model": name}
    # Lines of packages, wherever these were installed.
    reasons = [reason.replace(f"{folder.resolve()}/", "") for reason in result.get("reasons", ())]
    return result | {"reasons": reasons}


def _fails(result: dict[str, Any]) -> bool:
    tolerance = MODELS[result["model"]].tolerance
    return is_wrong(result, tolerance) or not result["logits_error"] <= tolerance


def _head() -> tuple[str, ...]:
    return ("model", *HEAD[1:])


def _summary(results: dict[str, dict[str, Any]], ranks: int) -> str:
    ran = [result for result in results.values() if "error" not in result]
    refused = [name for name, result in results.items() if "refused" in result]
    exchanging = sum(result["rewritten"] == result["layers"] > 0 for result in ran)
    failed = [name for name, result in results.items() if _fails(result)]
    exact = [result for result in ran if MODELS[result["model"]].tolerance <= TOLERANCE]
    worst = max((result["gradient_error"] for result in exact), default=0.0)
    return (
        f"{len(results)} models of packages on {ranks} ranks: {exchanging} exchange rows in every MoE layer, "
        f"{len(ran) - exchanging - len(refused)} gather experts in some, {len(refused)} are refused; the worst "
        f"gradient in float32 is {worst:.0e} off; {len(failed)} failed{': ' + ', '.join(failed) if failed else ''}."
    )


def _write(results: dict[str, dict[str, Any]], ranks: int) -> None:
    before, _, rest = _PAGE.read_text().partition(_START)
    _, _, after = rest.partition(_END)
    lines = [_head(), ("---",) * len(HEAD), *(cells_of(name, result) for name, result in results.items())]
    table = "\n".join(map(table_line, lines))
    _PAGE.write_text(f"{before}{_START}{_summary(results, ranks)}\n\n{table}\n{_END}{after}")


if __name__ == "__main__":
    main()
