"""Does the emulator tell the truth? Stragglers wait in proportion to their work, and links have their rate."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.emulator.launch import Cluster, run

# Relative work of each rank; the slowest decides.
SKEWS = {
    "balanced": [1.0] * 8,
    "2x": [2.0] + [6 / 7] * 7,
    "4x": [4.0] + [4 / 7] * 7,
    "zipf": [2.71, 1.49, 1.05, 0.82, 0.68, 0.57, 0.5, 0.18],
}
CLUSTER = Cluster(nodes=2, ranks=4, cores=0.12, between_nodes=20e6)
ALLOWED = 0.15


def self_test(cluster: Cluster = CLUSTER) -> int:
    """Print measured against expected; 1 if anything is off by more than 15 %.

    Args:
        cluster: two nodes of four ranks, with a quota and a link.
    """
    link = cluster.between_nodes
    assert link is not None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        code = run(cluster, [str(Path(__file__).with_name("probe.py")), json.dumps(SKEWS), str(out)], timeout=600)
        if code != 0 or not out.exists():
            print("cluster: the probe failed")
            return code or 1
        found = json.loads(out.read_text())
    worst = 0.0
    for name, work in SKEWS.items():
        expected = max(work) / max(SKEWS["balanced"])
        measured = found["seconds"][name] / found["seconds"]["balanced"]
        worst = max(worst, abs(measured / expected - 1))
        print(f"straggler {name:9} {measured:5.2f} of balanced, expected {expected:4.2f}")
    for name, rate in found["rates"].items():
        worst = max(worst, abs(rate / link - 1))
        print(f"link {name:14} {rate / 1e6:5.1f} MB/s between nodes, configured {link / 1e6:.1f}")
    print(f"link inside a node   {found['inside'] / 1e6:5.0f} MB/s")
    print(f"worst deviation {worst:.0%}, allowed {ALLOWED:.0%}")
    return int(worst > ALLOWED)
