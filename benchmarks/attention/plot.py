"""Times as fast over length, and bytes of the cache, as a picture."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.attention.timing import ratios


def plot(results: dict[str, Any], path: Path) -> None:
    """Times as fast over length, beside the bound; and bytes of the cache."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: pip install 'hecate-compile[benchmarks]'")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    rows = results.get("alone") or []
    if rows:
        lengths = [row["length"] for row in rows]
        left.plot(lengths, [1 / row["share"] for row in rows], "k--", label="bound by blocks")
        for key, label in (("forward", "forward"), ("both", "forward and backward")):
            values = [statistics.median(ratios(row[key], "s2", "dense")) for row in rows]
            left.plot(lengths, values, marker="o", label=label)
        if all("flex" in row["forward"] for row in rows):
            values = [statistics.median(ratios(row["forward"], "flex", "dense")) for row in rows]
            left.plot(lengths, values, marker="s", label="flex_attention, forward")
        left.set(xscale="log", xlabel="tokens", ylabel="times as fast as causal SDPA", ylim=(0, None))
        left.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
        left.legend()
    for heads in sorted({tuple(row["heads"]) for row in results.get("decode") or []}):
        mine = [row for row in results["decode"] if tuple(row["heads"]) == heads]
        values = [statistics.median(ratios(row["samples"], "s2", "dense")) for row in mine]
        right.plot([row["length"] for row in mine], values, marker="o", label=f"{heads[1]} heads of keys")
        kept = [row["bytes"][0] / row["bytes"][1] for row in mine]
        right.plot([row["length"] for row in mine], kept, "--", label=f"{heads[1]} heads of keys, bytes")
    right.set(xlabel="keys", ylabel="one token: times as fast, and times fewer bytes", ylim=(0, None))
    if results.get("decode"):
        right.legend()
    figure.savefig(path, dpi=120)
