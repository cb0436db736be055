"""Kill runs again and again, and print a summary."""

from __future__ import annotations

import argparse
import sys
import time

from rich.progress import track

from tests.soak.cycle import Soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.monotonic()
    with Soak(args.seed) as soak:
        for _ in track(range(args.cycles), description="cycles"):
            soak.cycle()
            if soak.summary.problems:
                print(soak.summary.problems[-1], flush=True)
    print(soak.summary.text())
    print(f"{time.monotonic() - start:.0f} s, seed {args.seed}")
    sys.exit(bool(soak.summary.problems))


if __name__ == "__main__":
    main()
