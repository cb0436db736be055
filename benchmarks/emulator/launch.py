"""Start the ranks of a cluster and wait for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.emulator import network, quota

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What to build.

    Attributes:
        nodes, ranks: machines, and ranks on each.
        cores: of CPU time for the main thread of each rank; None for no limit.
        between_nodes: bytes per second of a node's link in each direction; None for no limit.
        quota_by_script: the script enters its quota itself, with ``benchmarks.emulator.throttled``.
    """

    nodes: int = 1
    ranks: int = 2
    cores: float | None = None
    between_nodes: float | None = None
    quota_by_script: bool = False

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks


def run(cluster: Cluster, command: Sequence[str], *, timeout: float = 3600.0) -> int:
    """Run a Python command line, such as ``["script.py", "--option"]``, on every rank.

    Returns:
        0 if all ranks ended with 0; else the first other exit code. When one rank fails, all are ended.

    Raises:
        TimeoutError: after ``timeout`` seconds.
    """
    prefix = f"hecate-{os.getpid()}"
    reaper = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.emulator.reaper", prefix],
        stdin=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    assert reaper.stdin is not None
    try:
        nodes, groups = _build(cluster, prefix)
        ranks = []
        port = _free_port()
        for rank in range(cluster.world_size):
            group = groups[rank] if groups else None
            process = _start(cluster, nodes, group, rank, port, command)
            print(process.pid, file=reaper.stdin, flush=True)
            ranks.append(process)
        return _wait(ranks, timeout)
    finally:
        reaper.stdin.close()
        reaper.wait()


def _build(cluster: Cluster, prefix: str) -> tuple[list[network.Node] | None, list[quota.Group] | None]:
    why = network.available()
    nodes = None
    if why is None:
        nodes = network.make_network(prefix, cluster.nodes, cluster.between_nodes)
    elif cluster.nodes > 1 or cluster.between_nodes is not None:
        print(f"cluster: links are not shaped: {why}", file=sys.stderr)
    groups = None
    if cluster.cores is not None:
        version = quota.find_version()
        if version is None:
            print("cluster: no control groups (not root?): ranks throttle themselves, coarsely", file=sys.stderr)
        else:
            groups = quota.make_groups(prefix, cluster.world_size, cluster.cores, version)
    return nodes, groups


def _start(
    cluster: Cluster,
    nodes: list[network.Node] | None,
    group: quota.Group | None,
    rank: int,
    port: int,
    command: Sequence[str],
) -> subprocess.Popen[bytes]:
    number, local = divmod(rank, cluster.ranks)
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "GROUP_RANK": str(number),
        "WORLD_SIZE": str(cluster.world_size),
        "LOCAL_WORLD_SIZE": str(cluster.ranks),
        "MASTER_ADDR": nodes[0].address if nodes else "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "HECATE_CLUSTER_CORES": str(cluster.cores or 0),
        "HECATE_CLUSTER_BY_SCRIPT": str(int(cluster.quota_by_script)),
    }
    if nodes:
        environment["GLOO_SOCKET_IFNAME"] = "eth0"
    if group is not None:
        environment["HECATE_CLUSTER_GROUP"] = f"{group.version}:{group.path}:{group.outside}"
        if group.version == 2:
            # The process joins the threaded domain as a whole; its main thread gets the quota later.
            environment["HECATE_CLUSTER_JOIN"] = str(group.path.parent / "cgroup.procs")
    # Not "ip netns exec", which mounts a /sys without control groups.
    inside = ["nsenter", f"--net=/run/netns/{nodes[number].namespace}"] if nodes else []
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "benchmarks.emulator.rank", *command], env=environment, start_new_session=True
    )


def _wait(ranks: list[subprocess.Popen[bytes]], timeout: float) -> int:
    """Until all ranks have ended, or one has failed; the reaper ends the others."""
    end = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in ranks]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            return failed
        if all(code == 0 for code in codes):
            return 0
        if time.monotonic() > end:
            raise TimeoutError(f"cluster: ranks {[r for r, code in enumerate(codes) if code is None]} did not end")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
