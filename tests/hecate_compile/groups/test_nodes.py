"""Groups on two nodes, by torchrun's two agents: network namespaces with a link between them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import hecate
from benchmarks.emulator import network
from hecate.compiled_model import compiled_model_of
from tests.hecate_compile.groups.models import EXACT, built
from tests.hecate_compile.test_faults import break_down
from tests.support.models import batch
from tests.support.parity import compiled_on_free_links, step_and_compare
from tests.support.ranks import ROOT

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(network.available() is not None, reason="needs root and iproute2, as namespaces do"),
]

_HERE = "tests.hecate_compile.groups.test_nodes"


@contextmanager
def two_nodes() -> Iterator[list[network.Node]]:
    prefix = f"hecate-test{os.getpid()}"
    try:
        yield network.make_network(prefix, 2, 2e8)
    finally:
        for namespace in network.namespaces(prefix):
            for process in network.processes(namespace):
                subprocess.run(["kill", "-9", str(process)], check=False)
        network.remove_network(prefix)


def run_on(nodes: list[network.Node], function: str, folder: Path, **arguments: Any) -> list[dict[str, Any]]:
    """What two ranks of each node return, or their errors, by rank."""
    first = nodes[0].address
    agents = []
    for number, node in enumerate(nodes):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        launcher += ["--node-rank", str(number), "--local-addr", node.address]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29511", "--rdzv-id", "nodes"]
        # Both namespaces have the name of this machine, by which an agent would know whether the store is its own.
        launcher += ["--rdzv-conf", f"is_host={int(number == 0)}"]
        program = ["--module", "tests.support.ranks", f"{_HERE}:{function}", str(folder), json.dumps(arguments)]
        with (folder / f"agent{number}.log").open("w") as log:
            agents.append(
                subprocess.Popen(
                    ["nsenter", f"--net=/run/netns/{node.namespace}", *launcher, *program],
                    cwd=ROOT,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        for agent in agents:
            agent.wait(timeout=200)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    told = [folder / f"{rank}.json" for rank in range(4)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in told]


def trained() -> dict[str, Any]:
    """Steps in groups of a node each, against one process."""
    model, reference = built("qwen3_moe"), built("qwen3_moe")
    compiled_on_free_links(model, expert_group=2, replicas=2)
    found = [step_and_compare(model, reference, batch(step)) for step in range(2)]
    mesh, placer = compiled_model_of(model, "test").mesh, compiled_model_of(model, "test").placer
    return {
        "error": max(max(one.loss, one.gradient) for one in found),
        "ranks": list(mesh.ranks),
        "nodes": placer.topology.num_nodes,
        "head": str(hecate.explain(model)).splitlines()[0],
    }


def broken() -> dict[str, Any]:
    """What this rank is told when the last one is killed, and seconds of all, compiling included."""
    start = time.monotonic()
    try:
        break_down("killed", group=2)
    except RuntimeError as error:
        return {"message": str(error), "seconds": time.monotonic() - start}
    return {"message": "", "seconds": 0.0}


def test_groups_of_a_node_train_as_one_process_does(tmp_path: Path) -> None:
    with two_nodes() as nodes:
        found = run_on(nodes, "trained", tmp_path)
    for rank, told in enumerate(found):
        assert "result" in told, told
        one = told["result"]
        assert one["error"] < EXACT
        assert one["ranks"] == ([0, 1] if rank < 2 else [2, 3]) and one["nodes"] == 1
        assert f"rank {rank} of 4: 2 groups of 2" in one["head"]


def test_a_rank_that_is_killed_on_one_node_ends_the_groups_of_both(tmp_path: Path) -> None:
    with two_nodes() as nodes:
        found = run_on(nodes, "broken", tmp_path)
    # The agent of the second node ends its other rank, too.
    for told in found[:2]:
        assert re.search("rank [23] has not been heard of for", told["result"]["message"]), found
        assert told["result"]["seconds"] < 60
