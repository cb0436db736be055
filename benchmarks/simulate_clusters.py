"""The paper's clusters, and 64 to 1,024 H100s: ``hecate simulate`` for all of them.

    python -m benchmarks.simulate_clusters        30 minutes

Written are build/benchmarks/simulated_clusters.json and .md, with the commands.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results_folder import results_folder

ROOT = Path(__file__).parents[1]

PAPER_S = "benchmarks/paper_models.py:gpt_moe_s_32"
NATURAL = ("--trace", "benchmarks/traces/natural.npz", "--replicas", "5", "--optimizer-bytes", "12")
ZIPF = ("--workload", "zipf")
# What is simulated: model, clusters, policies, options.
STUDIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "GPT-MoE-S, 32 experts, natural trace": (
        PAPER_S,
        ("paper-a-16", "paper-a", "paper-b"),
        ("static", "paper", "hecate"),
        NATURAL,
    ),
    "the same, re-materialized": (
        PAPER_S,
        ("paper-a-16",),
        ("static", "paper", "hecate"),
        (*NATURAL, "--rematerialize"),
    ),
    "GPT-MoE-S, 64 experts, zipf 1.0": (
        "benchmarks/paper_models.py:gpt_moe_s",
        ("paper-a", "paper-b"),
        ("static", "paper", "hecate"),
        (*ZIPF, "--skew", "1.0", "--replicas", "5", "--optimizer-bytes", "12"),
    ),
    "modern, top 8 of 128 experts, zipf 0.8": (
        "benchmarks/paper_models.py:modern",
        ("h100-64",),
        ("static", "paper", "hecate"),
        (*ZIPF, "--skew", "0.8"),
    ),
    "the same on more": (
        "benchmarks/paper_models.py:modern",
        ("h100-256", "h100-1024"),
        ("static", "hecate"),
        (*ZIPF, "--skew", "0.8"),
    ),
    "the same in groups of 64": (
        "benchmarks/paper_models.py:modern",
        ("h100-256", "h100-1024"),
        ("static", "hecate"),
        (*ZIPF, "--skew", "0.8", "--expert-group", "64"),
    ),
}


def command_of(study: str) -> list[str]:
    """The arguments of ``hecate``."""
    model, clusters, policies, options = STUDIES[study]
    given = [f"--cluster=benchmarks/cluster_files/{name}.toml" for name in clusters]
    return ["simulate", model, *given, *(f"--policy={name}" for name in policies), *options]


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown."""
    lines = [
        "# Clusters that are not there",
        "",
        "`python -m benchmarks.simulate_clusters`; simulated, not measured.",
    ]
    for study, rows in results.items():
        lines += ["", f"## {study}", "", f"`hecate {shlex.join(command_of(study))}`", ""]
        lines += [
            "| cluster | policy | step, ms | times as fast as static | max/mean rows | replicas per layer "
            "| GB of states | GB of slots |",
            "|---" * 8 + "|",
        ]
        static: dict[str, float] = {}
        for row in rows:
            base = static.setdefault(row["cluster"], row["seconds"])
            lines.append(
                f"| {row['cluster']} | {row['policy']} | {row['seconds'] * 1e3:.0f} | {base / row['seconds']:.2f} "
                f"| {row['imbalance']:.2f} | {row['replicas']:.0f} | {row['states'] / 1e9:.2f} "
                f"| {row['slot_bytes'] / 1e9:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        for study in STUDIES:
            command = [sys.executable, "-m", "hecate.cli", *command_of(study), "--json", str(out)]
            subprocess.run(command, cwd=ROOT, check=True)
            results[study] = json.loads(out.read_text())
    (results_folder() / "simulated_clusters.json").write_text(json.dumps(results, indent=1) + "\n")
    (results_folder() / "simulated_clusters.md").write_text(table(results))


if __name__ == "__main__":
    main()
