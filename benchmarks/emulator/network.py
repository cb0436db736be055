"""Nodes as network namespaces on a bridge, with shaped links."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

_SUBNET = "10.77.0"


def available() -> str | None:
    """None if namespaces can be made; else why not, and the way out."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install iproute2 util-linux"
    return None


@dataclass(frozen=True)
class Node:
    """One machine of the cluster."""

    namespace: str
    address: str


def make_network(prefix: str, nodes: int, bytes_per_second: float | None) -> list[Node]:
    """Namespaces ``prefix-0`` ..., on a bridge in ``prefix-switch``; links shaped in both directions.

    Raises:
        subprocess.CalledProcessError: a command failed; its message was printed.
    """
    switch = f"{prefix}-switch"
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")
    made = []
    for number in range(nodes):
        node = Node(f"{prefix}-{number}", f"{_SUBNET}.{number + 1}")
        port = f"port{number}"
        _run("ip", "netns", "add", node.namespace)
        _run("ip", "-n", node.namespace, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
        _run("ip", "-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "eth0")
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
        for namespace, device in ((node.namespace, "lo"), (node.namespace, "eth0"), (switch, port)):
            _run("ip", "-n", namespace, "link", "set", device, "up")
        if bytes_per_second is not None:
            rate = f"{int(bytes_per_second * 8)}bit"
            for namespace, device in ((node.namespace, "eth0"), (switch, port)):
                # A small bucket, or a link that was idle carries the next bytes for nothing. A long queue, because
                # networks of clusters drop nothing, and a dropped packet costs its sender 200 ms.
                _run(
                    "tc",
                    "-n",
                    namespace,
                    "qdisc",
                    "add",
                    "dev",
                    device,
                    "root",
                    "tbf",
                    "rate",
                    rate,
                    "burst",
                    "32kb",
                    "latency",
                    "5000ms",
                )
        made.append(node)
    return made


def namespaces(prefix: str) -> list[str]:
    """The namespaces of a cluster."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"{prefix}-")]


def processes(namespace: str) -> list[int]:
    """Whatever runs in a namespace."""
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in found.split()]


def remove_network(prefix: str) -> None:
    """Remove all namespaces of a cluster; their links go with them."""
    for namespace in namespaces(prefix):
        subprocess.run(["ip", "netns", "delete", namespace], check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
