"""The emulator starts ranks like torchrun, and leaves nothing behind."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import benchmarks.compare.__main__ as compare
from benchmarks.emulator import network, quota, self_test, throttle
from benchmarks.emulator.__main__ import parse_cores, parse_rate
from benchmarks.emulator.launch import REPOSITORY, Cluster, run
from tests.support.ranks import lives

SCRIPT = """
import json, os, sys, time
out = sys.argv[1]
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
text = json.dumps({name: os.environ[name] for name in names} | {"pid": os.getpid(), "tail": sys.argv[2:]})
open(f"{out}/{os.environ['RANK']}.json", "w").write(text)
if "sleep" in sys.argv:
    time.sleep(600)
sys.exit(int(os.environ["RANK"]) * 7 if "fail" in sys.argv else 0)
"""
# These tests are about namespaces and groups, and CI may have no root. The launcher's fallback is tested without.
needs_root = pytest.mark.skipif(
    network.available() is not None or quota.find_version() is None, reason="needs root, iproute2 and control groups"
)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def leftovers(prefix: str = "hecate-") -> list[str]:
    groups = [path.name for base in (quota.ROOT, quota.ROOT / "cpu") for path in base.glob(f"{prefix}*")]
    spaces = network.namespaces(prefix.rstrip("-")) if network.available() is None else []
    return [*groups, *spaces]


def results(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def test_ranks_find_what_torchrun_would_tell_them(script: str, tmp_path: Path) -> None:
    assert run(Cluster(ranks=2), [script, str(tmp_path), "--more"], timeout=60) == 0
    first, second = results(tmp_path, 2)
    assert (first["RANK"], second["RANK"], first["WORLD_SIZE"]) == ("0", "1", "2")
    assert second["LOCAL_RANK"] == "1" and first["tail"] == ["--more"]


@needs_root
def test_nodes_quotas_and_links_are_removed_afterwards(script: str, tmp_path: Path) -> None:
    cluster = Cluster(nodes=2, ranks=2, cores=0.5, between_nodes=1e7)
    assert run(cluster, [script, str(tmp_path)], timeout=60) == 0
    found = results(tmp_path, 4)
    assert [one["GROUP_RANK"] for one in found] == ["0", "0", "1", "1"]
    assert {one["MASTER_ADDR"] for one in found} == {"10.77.0.1"}
    assert leftovers(f"hecate-{os.getpid()}") == []


def test_a_rank_that_fails_ends_the_others(script: str, tmp_path: Path) -> None:
    assert run(Cluster(ranks=2), [script, str(tmp_path), "fail"], timeout=60) == 7


def test_a_rank_that_never_ends_is_a_timeout(script: str, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] did not end"):
        run(Cluster(ranks=2), [script, str(tmp_path), "sleep"], timeout=3)
    assert not any(lives(one["pid"]) for one in results(tmp_path, 2))


@needs_root
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_killed_it_leaves_nothing(script: str, tmp_path: Path, how: signal.Signals) -> None:
    options = ["--nodes", "2", "--ranks", "1", "--quota", "0.5", "--inter", "10MB/s"]
    command = [sys.executable, "-m", "benchmarks.emulator", *options, "--", script, str(tmp_path), "sleep"]
    launcher = subprocess.Popen(command, cwd=REPOSITORY)
    prefix = f"hecate-{launcher.pid}"
    wait_for(lambda: len(list(tmp_path.glob("*.json"))) == 2)
    assert len(leftovers(prefix)) == 4, "a group, two nodes and a switch"
    launcher.send_signal(how)
    launcher.wait(20)
    wait_for(lambda: leftovers(prefix) == [])
    assert not any(lives(one["pid"]) for one in results(tmp_path, 2))


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)


def test_rates_and_quotas_are_read_or_refused() -> None:
    assert parse_rate("20MB/s") == 20e6 and parse_rate("1.5 GB/s") == 1.5e9
    assert parse_cores("0.12") == 0.12
    for parse, text in ((parse_rate, "20"), (parse_rate, "fast"), (parse_cores, "0.01"), (parse_cores, "2")):
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)


@pytest.mark.parametrize(("slowest", "link", "code"), [(4.0, 20e6, 0), (3.2, 20e6, 1), (4.0, 15e6, 1)])
def test_an_emulator_that_is_off_by_too_much_is_refused(
    slowest: float, link: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(cluster: Cluster, command: list[str], *, timeout: float) -> int:
        seconds = {"balanced": 1.0, "2x": 2.0, "4x": slowest, "zipf": 2.71}
        found = {"seconds": seconds, "rates": {"there": link, "and back": 20e6}, "inside": 1e9}
        Path(command[2]).write_text(json.dumps(found))
        return 0

    monkeypatch.setattr(self_test, "run", fake)
    assert self_test.self_test() == code
    assert "worst deviation" in capsys.readouterr().out
    if code:
        monkeypatch.setattr(compare, "self_test", self_test.self_test)
        monkeypatch.setattr(compare, "calibrate", lambda: 0.01)
        monkeypatch.setattr(sys, "argv", ["compare"])
        with pytest.raises(SystemExit, match="nothing was measured"):
            compare.main()


def test_a_block_without_quota_is_in_one_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Group:
        def enter(self, thread: int) -> None:
            assert thread == threading.get_native_id()
            seen.append("in")

        def leave(self, thread: int) -> None:
            if thread == threading.get_native_id():
                seen.append("out")

    monkeypatch.setattr(throttle, "group_of_environment", Group)
    with throttle.unthrottled():
        assert seen == [], "there is no quota to leave"
    with throttle.throttled():
        with throttle.unthrottled():
            assert seen == ["in", "out"]
        assert seen == ["in", "out", "in"]
    assert seen == ["in", "out", "in", "out"]
    with throttle.unthrottled():
        assert len(seen) == 4
