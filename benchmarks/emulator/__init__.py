"""A cluster on one machine: ranks with a share of a core each, on nodes with slow links between them.

    python -m benchmarks.emulator --nodes 2 --ranks 4 --quota 0.12 --inter 20MB/s -- script.py --its options
    python -m benchmarks.emulator --self-test

Ranks find what torchrun would tell them (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, ...). A node is
a network namespace on a bridge, its link shaped in both directions; ranks of one node talk without limits. The main
thread of a rank runs in a control group with a quota of CPU time; the threads that communicate do not. So a rank with
twice the work takes twice as long, and a slow link is slow, although all of them share a few cores.

Needs root, iproute2 and control groups (v1 or v2). Without them compute is throttled inside each process, links are
not shaped, and a line says so. A helper process removes namespaces, groups and ranks when the launcher ends, however
it ends.
"""

from benchmarks.emulator.throttle import throttled

__all__ = ["throttled"]
