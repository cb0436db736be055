"""Ranks that are killed, stopped, cut off or fail: the others end, and say which rank it was and what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hecate
from benchmarks.emulator import network
from hecate.runtime.comm import collectives, watch
from hecate.runtime.comm.history import current_label
from hecate.runtime.comm.world import World
from tests.support.extent import ALL
from tests.support.models import PlainLanguageModel, batch
from tests.support.ranks import ROOT, RanksFailed, run_ranks, torchrun

_HERE = "tests.hecate_compile.test_faults"
# Always run: a rank that is killed, one that raises, and how waits end (tests/runtime/comm).
only_with_all = pytest.mark.skipif(not ALL, reason="with HECATE_TESTS=all: most of it is waiting for timeouts")
_STEPS, _AT = 4, 2
# What a run may take to end after a fault, however long it compiled before.
_SOON = 60


def model(expert_group: int | None = None) -> torch.nn.Module:
    # Rows cross in every exchange. With replicas two ranks may have nothing for each other, and meet later.
    config = hecate.Config(backend="aot_eager", policy="static", expert_group=expert_group)
    return hecate.compile(PlainLanguageModel(hidden=8, layers=1, experts=4), config)


def step(compiled: torch.nn.Module, ids: torch.Tensor) -> None:
    compiled(ids, labels=ids)["loss"].backward()


# Written when the first step is done.
STARTED: Path | None = None


def break_down(fault: str, patience: float = 60, steps: int = _STEPS, group: int | None = None) -> None:
    """On one rank: some steps, and in one of them something happens to the last rank."""
    watch.TOLD, watch.PATIENCE = 1.0, 2.0
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience))
    compiled, last = model(expert_group=group), dist.get_rank() == dist.get_world_size() - 1
    for number in range(steps):
        ids = batch(number)
        if STARTED is not None and number == 1:
            STARTED.touch()
        if last and number == _AT:
            if fault == "killed":
                signal_in_exchange(signal.SIGKILL)
            elif fault == "stopped":
                signal_in_exchange(signal.SIGSTOP)
            elif fault in ("raises", "raises and goes on"):
                ids = ids + 10_000
            elif fault == "skips":
                skip_an_exchange()
        try:
            step(compiled, ids)
        except IndexError:
            if fault != "raises and goes on":
                raise
            time.sleep(40)


def signal_in_exchange(number: signal.Signals) -> None:
    """In the middle of a step: when rows are to be sent."""
    instead_of_exchanging(lambda: os.kill(os.getpid(), number))


def skip_an_exchange() -> None:
    instead_of_exchanging(lambda: None)


def instead_of_exchanging(function: Callable[[], None]) -> None:
    """Do something else in the next exchange of this rank."""
    original = collectives.all_to_all

    def all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], world: World) -> torch.Tensor:
        if not current_label().startswith("exchange "):
            return original(rows, send, receive, world)
        collectives.all_to_all = original
        function()
        return rows.new_zeros((sum(receive), *rows.shape[1:]))

    collectives.all_to_all = all_to_all


def ended(fault: str, ranks: int = 2, **options: Any) -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(f"{_HERE}:break_down", ranks, timeout=100, fault=fault, **options)
    return str(failure.value), time.monotonic() - start


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3] if ALL else [2])
def test_a_killed_rank_is_named(ranks: int) -> None:
    message, seconds = ended("killed", ranks)
    assert f"rank {ranks - 1} has not been heard of for" in message
    assert message.count("it was killed, stopped, or cut off from the others") >= ranks - 1
    assert "exchange of blocks.0, step 2 cannot end" in message
    assert seconds < _SOON


@pytest.mark.distributed
def test_a_rank_that_is_killed_in_one_group_ends_all_groups() -> None:
    message, seconds = ended("killed", 4, group=2)
    assert message.count("rank 3 has not been heard of for") >= 2, message
    assert all(f"--- rank {rank}" in message for rank in range(3))
    assert seconds < _SOON


@pytest.mark.distributed
@only_with_all
def test_a_stopped_rank_is_named_when_the_groups_timeout_is_over() -> None:
    message, seconds = ended("stopped", patience=6.0)
    assert "exchange of blocks.0, step 2 cannot end: rank 1 has not been heard of for" in message
    assert seconds < _SOON


@pytest.mark.distributed
@pytest.mark.parametrize("fault", ["raises", pytest.param("raises and goes on", marks=only_with_all)])
def test_a_rank_that_raises_in_its_forward_is_named_with_its_error(fault: str) -> None:
    """Whether its program ends with it, or catches it and does not come back."""
    message, seconds = ended(fault)
    assert "cannot end: rank 1 raised IndexError: index out of range in self in its forward" in message
    assert seconds < _SOON


@pytest.mark.distributed
@only_with_all
def test_a_rank_that_leaves_a_collective_out_is_named_on_both() -> None:
    message, seconds = ended("skips")
    assert message.count("DisagreementError: hecate: ranks disagree on collective") >= 2
    assert message.count("rank 0: exchange of blocks.0, step 2\n  rank 1: exchange_back of blocks.0, step 2") >= 2
    assert seconds < _SOON


def try_again() -> list[str]:
    """On one rank: what is raised when all ranks fail in the same step, and some are slow to try again."""
    watch.TOLD, watch.PATIENCE = 1.0, 2.0
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    compiled, found = model(), []
    for number in range(_STEPS):
        try:
            step(compiled, batch(number) + 10_000 * (number == _AT))
        except IndexError:
            time.sleep(5 * dist.get_rank())
            step(compiled, batch(number))
            found.append("again")
    return found


@pytest.mark.distributed
@only_with_all
def test_ranks_that_all_failed_may_try_again() -> None:
    assert run_ranks(f"{_HERE}:try_again", 2, timeout=100) == [["again"], ["again"]]


# --- nothing is left ---


def one_of_two(rank: int, port: int, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start ``command`` as one of two ranks, beside torchrun."""
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | own | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.distributed
@only_with_all
def test_processes_end_by_themselves_although_a_collective_is_on_its_way() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    code = f"from {_HERE} import break_down; break_down('skips', patience=600)"
    environment = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [one_of_two(rank, store.port, [sys.executable, "-c", code], environment) for rank in range(2)]
    try:
        for process in ranks:
            output, _ = process.communicate(timeout=90)
            assert process.returncode == 1, output
            assert "DisagreementError: hecate: ranks disagree on collective" in output
    finally:
        for process in ranks:
            process.kill()
            process.wait()


_NODE = """
import os, pathlib, sys
from tests.hecate_compile import test_faults
test_faults.STARTED = pathlib.Path(sys.argv[1])
test_faults.break_down("nothing", patience=10.0, steps=100_000)
"""


# The cut is made in network namespaces, which need root.
@pytest.mark.distributed
@only_with_all
@pytest.mark.skipif(network.available() is not None, reason=f"no networks of its own: {network.available()}")
def test_a_cut_link_ends_ranks_on_both_sides() -> None:
    prefix, nodes = f"hecate-cut-{os.getpid()}", list[subprocess.Popen[str]]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = network.make_network(prefix, 2, None)
            for rank, node in enumerate(made):
                environment = {
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": made[0].address,
                    "GLOO_SOCKET_IFNAME": "eth0",
                }
                command = ["ip", "netns", "exec", node.namespace, sys.executable, "-c", _NODE, f"{folder}/{rank}"]
                nodes.append(one_of_two(rank, 29500, command, environment))
            wait_until(lambda: all(Path(folder, str(rank)).exists() for rank in range(2)), 90)
            subprocess.run(["ip", "-n", made[1].namespace, "link", "set", "eth0", "down"], check=True)
            start = time.monotonic()
            first, second = (process.communicate(timeout=60)[0] for process in nodes)
        finally:
            for process in nodes:
                process.kill()
                process.wait()
            network.remove_network(prefix)
    assert "cannot end: rank 1 has not been heard of for" in first, first
    assert f"cannot end: the store of this run ({made[0].address}) has not answered for" in second, second
    assert time.monotonic() - start < 40


_WORKER = """
import os, pathlib, sys, time
import hecate.runtime.comm.world as world, torch
world.find_world(None, torch.device("cpu"))
path = pathlib.Path(sys.argv[1], os.environ["RANK"])
path.with_suffix(".part").write_text(str(os.getpid()))
path.with_suffix(".part").rename(path)
time.sleep(300)
"""


# The kernel's signal to orphans (PR_SET_PDEATHSIG) is Linux's own.
@pytest.mark.distributed
@only_with_all
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a process learns of its parent's end on Linux only")
def test_workers_end_with_their_agent() -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "worker.py")
        script.write_text(_WORKER)
        agent = subprocess.Popen(
            [*torchrun(2), str(script), folder],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        workers: list[int] = []
        try:
            files = [Path(folder, str(rank)) for rank in range(2)]
            wait_until(lambda: all(file.exists() for file in files), 60)
            workers = [int(file.read_text()) for file in files]
            agent.send_signal(signal.SIGKILL)
            agent.wait()
            wait_until(lambda: not any(alive(worker) for worker in workers), 10)
        finally:
            agent.kill()
            agent.wait()
            for worker in workers:
                if alive(worker):
                    os.kill(worker, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    # Who adopts it may not have asked for its end yet.
    return state != "Z"


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.1)
