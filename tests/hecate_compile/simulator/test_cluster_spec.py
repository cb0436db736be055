"""Cluster files: read, and refused with a message that says what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from hecate.simulator import ClusterError, ClusterSpec

GOOD = "nodes = 2\ngpus = 4\nflops = 1e12\nmemory_bytes = 1e11\nrank_bytes = 1e10\nnode_bytes = 1e9\n"
COMMITTED = Path(__file__).parents[3] / "benchmarks" / "cluster_files"


def test_a_file_becomes_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    spec = ClusterSpec.load(path)
    assert spec.name == "mine" and spec.ranks == 8
    assert spec.topology.node_of == (0, 0, 0, 0, 1, 1, 1, 1)
    assert spec.rates.node_bytes == 1e9 and spec.rates.hidden_seconds == 0
    # The planner is told what exchanges reach.
    path.write_text(GOOD + "crowded = 0.8\nring = 0\nlatency = 0\n")
    assert ClusterSpec.load(path).rates.node_bytes == 0.8e9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace("nodes = 2\n", ""), "missing nodes"),
        (GOOD + "speed = 3\n", "unknown speed"),
        (GOOD.replace("nodes = 2", "nodes = 0"), "nodes = 0, expected a whole number above 0"),
        (GOOD.replace("gpus = 4", "gpus = 4.5"), "gpus = 4.5"),
        (GOOD.replace("flops = 1e12", "flops = true"), "flops = True"),
        (GOOD.replace("flops = 1e12", "flops = nan"), "flops = nan"),
        (GOOD + "routed = 0.0\n", "routed = 0.0"),
        (GOOD + "latency = -1\n", "latency = -1, expected a number, 0 or more"),
        (GOOD + "crowded = 1.5\n", "crowded = 1.5, expected a number above 0, at most 1"),
        (GOOD + "cpus = 1\n", "cpus = 1, expected true or false"),
        (GOOD + "name = 3\n", "name = 3, expected a text"),
        ("nodes 2", "is not a cluster file"),
    ],
)
def test_bad_files_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ClusterError, match="hecate") as error:
        ClusterSpec.load(path)
    assert said in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none\.toml"):
        ClusterSpec.load(tmp_path / "none.toml")


def test_the_committed_clusters_load() -> None:
    files = sorted(COMMITTED.glob("*.toml"))
    assert {path.stem for path in files} >= {"paper-a", "paper-b", "h100-64", "h100-256", "h100-1024"}
    assert [ClusterSpec.load(path).ranks for path in files if path.stem.startswith("h100")] == [1024, 256, 64]
