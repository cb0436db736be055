"""The code in the docs runs."""

from __future__ import annotations

import doctest
import importlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.runtime.kernels.device import kernel_modules
from tests.support.ranks import run_ranks

DOCS = Path(__file__).parents[1] / "docs"
# Sections of docs/extending.md, and a name that each defines.
SECTIONS = {
    "Write a pass": "drop_double_relu",
    "An idiom": "offsets",
    "A policy": "HottestEverywhere",
    "A checkpoint field": "Recording",
    "A transport": "Counted",
    "A collective": "MOST_ROWS",
}


def train_models(nodes: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Every MoE block of docs/models.md in a small language model, on one rank.

    Args:
        nodes: of each rank; rows then cross to each once, where that can be.
    """
    import torch

    import hecate
    from tests.support.models import PlainLanguageModel, batch
    from tests.support.models_page import blocks_of_page
    from tests.support.parity import state_error

    found = {}
    for name, kind in blocks_of_page().items():
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(PlainLanguageModel(kind, layers=1))
        model, reference = models
        by_node = {} if nodes is None else {"dispatch": "nodes", "topology": hecate.Topology(nodes)}
        hecate.compile(model, hecate.Config(backend="aot_eager", **by_node))
        rank = torch.distributed.get_rank()
        parts = [batch(0, rows=4), batch(1, rows=4)]
        model(parts[rank], parts[rank])["loss"].backward()
        sum(reference(part, part)["loss"] for part in parts).div(2).backward()
        with torch.no_grad():
            for one in models:
                for parameter in one.parameters():
                    parameter.copy_(0 * parameter if parameter.grad is None else parameter.grad)
        gradients, expected = model.state_dict(), reference.state_dict()
        explanation = hecate.explain(model)
        found[name] = {
            "error": state_error(gradients, expected, relative=True),
            "exchanged": len(hecate.stats(model).layers),
            "graphs": len(explanation.graphs),
            "skipped": [skip.reason for skip in explanation.skipped],
        }
    return found


@pytest.mark.distributed
def test_models() -> None:
    for found in run_ranks("tests.test_docs:train_models", 2):
        assert len(found) == 10
        for name, one in found.items():
            assert (one["exchanged"], one["graphs"], one["skipped"]) == (1, 1, []), (name, one)
            assert one["error"] < 1e-5, (name, one)


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
    ranks = 2 if title in ("A transport", "A collective") else 1
    assert all(SECTIONS[title] in names for names in run_ranks("tests.test_docs:run_section", ranks, title=title))


def program_of(name: str) -> str:
    """All blocks of Python of a page, as one program."""
    return "\n\n".join(re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), flags=re.DOTALL))


def run_page(name: str, folder: str) -> list[str]:
    """On one rank: what a page's program leaves in ``folder``, where a user would run it."""
    os.chdir(folder)
    exec(compile(program_of(name), name, "exec"), {"__name__": "__main__"})
    return sorted(path.name for path in Path().iterdir())


@pytest.mark.distributed
def test_graph_dumps(tmp_path: Path) -> None:
    (found,) = run_ranks("tests.test_docs:run_page", 1, name="graph-dumps.md", folder=str(tmp_path))
    assert found == ["hecate-dump"]


@pytest.mark.distributed
def test_tutorial(tmp_path: Path) -> None:
    from hecate.cli import app
    from hecate.commands.built import build

    run_ranks("tests.test_docs:run_page", 2, name="tutorial.md", folder=str(tmp_path))
    ran = CliRunner().invoke(app, ["report", str(tmp_path / "runs" / "tutorial")])
    assert ran.exit_code == 0 and "30 steps of 2 rank(s)" in ran.output, ran.output
    page = (tmp_path / "runs" / "tutorial" / "report.html").read_text()
    for part in ("Alerts", "Balance", "Load of ranks", "Time", "Timeline of a step", "Layers"):
        assert f"<h2>{part}" in page and f"**{part}**" in (DOCS / "tutorial.md").read_text()
    # What explain and bisect are given there.
    script = tmp_path / "train.py"
    script.write_text(program_of("tutorial.md"))
    assert "input_ids" in build(f"{script}:build").batches[0]


@pytest.mark.parametrize(
    "module",
    [
        "hecate.runtime.placement.planner",
        "hecate.runtime.placement.planner.balance",
        "hecate.passes.fx",
        "hecate.passes.match",
        *(module.__name__ for module in kernel_modules()),
    ],
)
def test_examples_in_docstrings(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0 and found.failed == 0


def test_every_decision_is_in_the_list() -> None:
    text = (DOCS / "decisions.md").read_text()
    titles = re.findall(r"(?m)^###? (.*)$", text)
    assert titles == re.findall(r"(?m)^ *- \[(.*)\]\(#", text)


@pytest.mark.parametrize("page", sorted([*DOCS.glob("*.md"), DOCS.parent / "README.md"]), ids=lambda page: page.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for path in re.findall(r"`((?:hecate_compile|passes|runtime|tests|benchmarks|examples|docs)/[\w/.]+)`", text):
        found = DOCS.parent / path
        assert found.exists() or found.with_suffix(".py").exists(), f"{page.name} names {path}"


def test_what_is_patched_is_listed() -> None:
    """Whoever assigns to an attribute of something that is not Hecate's, or registers with the process, has a row."""
    attributes = (
        "__class__",
        "__new__",
        "generate",
        "average_parameters",
        "excepthook",
        "save_model",
        "accelerator.load_state",
    )
    calls = (
        r"setattr\((?:clip_grad|GradScaler|trainer), [A-Z_]+",
        "set_compiled_call",
        "swap_tensors",
        "set_terminate",
        "addFilter",
        "addHandler",
        "atexit.register",
        "register_at_fork",
        r"register_optimizer_step_\w+_hook",
        r"register_module_\w+_hook",
    )
    patch = re.compile(rf"\.({'|'.join(attributes)}) = |({'|'.join(calls)})[(,]|_world\.pg_map, ")
    rows, found = (DOCS / "patches.md").read_text(), 0
    for folder in ("hecate_compile", "passes", "runtime"):
        for path in (DOCS.parent / folder).rglob("*.py"):
            name = str(path.relative_to(DOCS.parent))
            if (
                path.stem != "private"
                and str(path.resolve()) == str(DOCS.parent.resolve() / name)
                and patch.search(path.read_text())
            ):
                assert f"`{name}`" in rows, name
                found += 1
    assert found >= 15
