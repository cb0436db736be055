"""Removes what a cluster left behind, when its launcher has ended, however it ended.

It waits for the end of its standard input, which the launcher holds: a killed launcher closes it too. Lines on it are
ids of ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from benchmarks.emulator.network import namespaces, processes, remove_network
from benchmarks.emulator.quota import remove_groups


def main() -> None:
    prefix = sys.argv[1]
    # Ctrl-C ends the launcher; this process must stay to clean up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ranks = [int(line) for line in sys.stdin]
    for rank in ranks:
        # A rank leads a group of its own, with all that it started.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank, signal.SIGKILL)
    if os.geteuid() == 0:
        for namespace in namespaces(prefix):
            for process in processes(namespace):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        remove_network(prefix)
        remove_groups(prefix)


if __name__ == "__main__":
    main()
