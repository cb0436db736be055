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
        left.set(xlabel="tokens", ylabel="times as fast as causal SDPA", ylim=(0, None))
        _of_lengths(left, lengths)
        left.legend()
    rows = results.get("decode") or []
    for heads in sorted({tuple(row["heads"]) for row in rows}):
        mine = [row for row in rows if tuple(row["heads"]) == heads]
        lengths = [row["length"] for row in mine]
        values = [statistics.median(ratios(row["samples"], "s2", "dense")) for row in mine]
        (line,) = right.plot(lengths, values, marker="o", label=f"{heads[1]} heads of keys: time")
        kept = [row["bytes"][0] / row["bytes"][1] for row in mine]
        right.plot(lengths, kept, "--", color=line.get_color(), label=f"{heads[1]} heads of keys: bytes")
    right.set(xlabel="keys in the cache", ylabel="one token: times as fast, times fewer bytes", ylim=(0, None))
    if rows:
        _of_lengths(right, sorted({row["length"] for row in rows}))
        right.legend()
    figure.savefig(path, dpi=120)


def _of_lengths(axes: Any, lengths: list[int]) -> None:
    """An axis of powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.minorticks_off()
