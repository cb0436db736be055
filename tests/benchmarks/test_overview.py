"""The chart of the README is that of the committed samples."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import overview
from benchmarks.compare import store
from benchmarks.results_folder import COMMITTED


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
