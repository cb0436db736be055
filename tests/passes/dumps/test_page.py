"""The page of a dump in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.passes.test_runner import dumped
from tests.support.browser import look_at, needs_browser

# A link in the table leads to what is closed: the browser opens it.
_MEASURED = """(() => {
  const box = one => one.getBoundingClientRect();
  const link = document.querySelector("td a");
  const step = document.getElementById(link.getAttribute("href").slice(1));
  const before = step.checkVisibility();
  step.parentElement.open = true;
  const colour = document.querySelector(".carries-rows");
  return {
    reaches: document.documentElement.scrollWidth,
    before, after: step.checkVisibility(),
    drawings: [...document.querySelectorAll("svg")].map(one => one.querySelectorAll("g").length),
    rows: document.querySelectorAll("tbody tr").length,
    letters: parseFloat(getComputedStyle(document.querySelector("pre")).fontSize),
    mark: getComputedStyle(colour).boxShadow,
    added: getComputedStyle(document.querySelector(".plus")).backgroundColor,
  };
})()"""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_in_a_browser(width: int, tmp_path: Path) -> None:
    dumped(tmp_path / "rank0")
    page = (tmp_path / "rank0/index.html").read_text()
    seen = look_at(page, _MEASURED, width=width, folder=tmp_path)
    assert seen.console == () and seen.asked == ()
    found = seen.value
    assert found["reaches"] <= width, "nothing sticks out to the right"
    assert (found["before"], found["after"]) == (False, True)
    assert len(found["drawings"]) == 2 and min(found["drawings"]) > 5
    assert found["rows"] > 10 and found["letters"] >= 11
    assert "inset" in found["mark"] and found["added"] != "rgba(0, 0, 0, 0)"
