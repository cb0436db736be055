"""What is committed and quoted, a chart and a table, is that of the committed numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import overview, paper_models
from benchmarks.compare import store
from benchmarks.results_folder import COMMITTED
from benchmarks.simulate_clusters import ROOT, STUDIES, table
from hecate.simulator import ClusterSpec


def test_the_committed_chart_has_the_numbers_of_the_samples(tmp_path: Path) -> None:
    cell = store.load(COMMITTED)[overview.CELL]
    overview.draw(tmp_path / "results.svg", cell)
    drawn, committed = (
        re.findall(r">([^<>\n]+)</text>", path.read_text()) for path in (tmp_path / "results.svg", overview.PICTURE)
    )
    assert drawn == committed
    spreads = [spread for found in overview.speedups(cell).values() for spread in found.values()]
    assert [f"{spread.middle:.2f}" for spread in spreads] == [
        text for text in drawn if re.fullmatch(r"\d\.\d\d", text)
    ]


def test_the_rows_of_the_readme_are_in_the_tables() -> None:
    root = overview.PICTURE.parents[2]
    rows = re.findall(r"(?m)^\| [^|]*link a[^|]* \| (.*) \|$", (root / "README.md").read_text())
    assert len(rows) == 5
    lines = (root / "docs" / "benchmarks.md").read_text().splitlines()
    for row in rows:
        numbers = re.findall(r"\d\.\d\d", row)
        assert len(numbers) == 3 and any(
            line.startswith("| `") and all(n in line for n in numbers) for line in lines
        ), row


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
