"""One new token behind many, and the bytes of the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.attention.timing import measure, ratios, said
from hecate.runtime.attention.pattern import Pattern


def run(lengths: list[int], rounds: int, *, width: int = 64) -> list[Any]:
    """One query for each head against a cache of some length, and the cache's own step."""
    found = []
    for heads, key_heads, local in ((16, 16, 4), (16, 8, 4)):
        for length in lengths:
            torch.manual_seed(0)
            p = Pattern(block=64, local=local, stride=min(16, key_heads), offset=0, patterns=key_heads)
            q = torch.randn(1, heads, 1, width)
            k, v = (torch.randn(1, key_heads, length, width) for _ in range(2))
            kept = [torch.ops.hecate.s2_store(None, x, 0, p.numbers) for x in (k, v)]
            token = torch.randn(1, key_heads, 1, width)
            grouped = q.view(1, key_heads, heads // key_heads, width)
            with torch.no_grad():
                samples = measure(
                    {
                        "dense": lambda g=grouped, k=k, v=v: F.scaled_dot_product_attention(g, k, v),
                        "s2": lambda q=q, c=kept, n=length, p=p: torch.ops.hecate.s2_decode(
                            q, *c, n, None, p.numbers, width**-0.5
                        ),
                        "dense, appended": lambda k=k, t=token: torch.cat([k, t], 2),
                        "s2, appended": lambda c=kept, t=token, n=length, p=p: torch.ops.hecate.s2_store(
                            c[0], t, n, p.numbers
                        ),
                    },
                    rounds,
                )
            size = [sum(x.numel() * x.element_size() for x in pair) for pair in ((k, v), kept)]
            found.append({"length": length, "heads": [heads, key_heads], "bytes": size, "samples": samples})
    return found


def table(rows: list[Any]) -> list[str]:
    lines = [
        "",
        "One new token, float32, blocks of 64, 4 local: times as fast, and the cache of one layer",
        "",
        "| keys | heads, of keys | attention | appending | cache, MB | part |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        before, after = row["bytes"]
        attention = said(ratios(row["samples"], "s2", "dense"))
        appending = said(ratios(row["samples"], "s2, appended", "dense, appended"))
        lines.append(
            f"| {row['length']:,} | {row['heads'][0]}, {row['heads'][1]} | {attention} | {appending} | "
            f"{before / 1e6:.0f} to {after / 1e6:.1f} | {after / before:.1%} |"
        )
    return lines
