"""The study of larger clusters names what exists, and its table is that of its numbers."""

from __future__ import annotations

import json

import pytest

from benchmarks import paper_models
from benchmarks.results_folder import COMMITTED
from benchmarks.simulate_clusters import ROOT, STUDIES, table
from hecate.simulator import ClusterSpec


@pytest.mark.parametrize("study", STUDIES)
def test_models_and_clusters_exist(study: str) -> None:
    model, clusters, _, _ = STUDIES[study]
    file, _, function = model.partition(":")
    assert (ROOT / file).samefile(paper_models.__file__)
    assert hasattr(paper_models, function)
    for name in clusters:
        assert ClusterSpec.load(ROOT / "benchmarks" / "cluster_files" / f"{name}.toml").name == name


def test_the_committed_table_is_that_of_the_committed_numbers() -> None:
    results = json.loads((COMMITTED / "simulated_clusters.json").read_text())
    assert list(results) == list(STUDIES)
    for study, rows in results.items():
        _, clusters, policies, _ = STUDIES[study]
        assert [(row["cluster"], row["policy"]) for row in rows] == [(c, p) for c in clusters for p in policies]
    assert (COMMITTED / "simulated_clusters.md").read_text() == table(results)
