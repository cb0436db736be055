"""The command line; see ``benchmarks.emulator``."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from typing import Any

from benchmarks.emulator.launch import Cluster, run
from benchmarks.emulator.self_test import self_test


def parse_rate(text: str) -> float:
    """``"20MB/s"`` -> 20e6."""
    found = re.fullmatch(r"([\d.]+)\s*([kMG]?)B/s", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate such as 20MB/s")
    return float(found.group(1)) * {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}[found.group(2)]


def parse_cores(text: str) -> float:
    cores = float(text)
    if not 0.05 <= cores <= 1.0:
        raise argparse.ArgumentTypeError(f"a quota of {cores} cores; give 0.05 to 1")
    return cores


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulator", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2, help="on each node")
    parser.add_argument("--quota", type=parse_cores, default=None, help="cores of CPU time for each rank")
    parser.add_argument("--inter", type=parse_rate, default=None, help="a node's link, such as 20MB/s")
    parser.add_argument("--quota-by-script", action="store_true", help="the script enters its quota itself")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds; then all ranks are ended")
    parser.add_argument("--self-test", action="store_true", help="measure stragglers and links, and compare")
    parser.add_argument("command", nargs="*", help="script.py and its options, after --")
    args = parser.parse_args()
    # The finally blocks of the launcher run on SIGTERM as they do on Ctrl-C, which shells switch off for what they
    # start in the background.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if args.self_test:
        sys.exit(self_test())
    if not args.command:
        parser.error("no script: python -m benchmarks.emulator --nodes 2 -- script.py")
    options: dict[str, Any] = dict(nodes=args.nodes, ranks=args.ranks, cores=args.quota, between_nodes=args.inter)
    if args.nodes < 1 or args.ranks < 1:
        parser.error("--nodes and --ranks must be at least 1")
    sys.exit(run(Cluster(**options, quota_by_script=args.quota_by_script), args.command, timeout=args.timeout))


if __name__ == "__main__":
    main()
