"""The code in the docs runs."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks

DOCS = Path(__file__).parents[1] / "docs"
SECTIONS = ("A pass", "A policy", "A collective")


def section_of(title: str) -> str:
    """All blocks of code of one section of docs/extending.md, as one program."""
    text = (DOCS / "extending.md").read_text()
    assert re.findall(r"(?m)^## (.*)$", text) == list(SECTIONS), "every section is run"
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    return "\n\n".join(re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL))


def run_section(title: str) -> list[str]:
    """On one rank. In a process of its own, because what it registers stays registered."""
    names: dict[str, Any] = {"__name__": "docs"}
    exec(compile(section_of(title), f"extending.md, {title}", "exec"), names)
    return sorted(names)


@pytest.mark.distributed
@pytest.mark.parametrize("title", SECTIONS)
def test_extending(title: str) -> None:
    ranks = run_ranks("tests.test_docs:run_section", 2 if title == "A collective" else 1, title=title)
    expected = {"A pass": "drop_double_relu", "A policy": "HottestEverywhere", "A collective": "MOST_ROWS"}
    assert all(expected[title] in names for names in ranks)


@pytest.mark.parametrize("module", ["hecate.runtime.placement.planner"])
def test_examples_in_docstrings(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0 and found.failed == 0


@pytest.mark.parametrize("page", sorted([*DOCS.glob("*.md"), DOCS.parent / "README.md"]), ids=lambda page: page.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for path in re.findall(r"`((?:hecate_compile|passes|runtime|tests|benchmarks|examples|docs)/[\w/.]+)`", text):
        found = DOCS.parent / path
        assert found.exists() or found.with_suffix(".py").exists(), f"{page.name} names {path}"
