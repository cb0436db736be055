"""The package list, the public names and the import order."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import hecate

ROOT = Path(__file__).parents[1]


FOLDERS = {"hecate": "hecate_compile", "hecate.passes": "passes", "hecate.runtime": "runtime"}


def test_package_list_equals_the_disk() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-dir"] == FOLDERS
    found = set()
    for package, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([package, *init.parent.relative_to(ROOT / folder).parts]))
    assert project["tool"]["setuptools"]["packages"] == sorted(found)
    assert project["project"]["version"] == hecate.__version__


def test_public_names_exist_and_are_documented() -> None:
    for name in hecate.__all__:
        doc = getattr(hecate, name).__doc__
        assert doc, name
        assert not doc.startswith(f"{name}("), f"{name} has only the docstring that dataclass makes"


def test_readme_lists_every_pass_in_order() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"│ \d+ +│ (\w+)", readme) == [function.__name__ for function in hecate.passes.PASSES]
    assert "MEASURED" not in readme
