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
    """Every MoE block of docs/models.md, one after another in a small language model, on one rank.

    Args:
        nodes: of each rank; rows then cross to each once, where that can be.
    """
    import torch

    import hecate
    from tests.support.models import PlainLanguageModel, batch
    from tests.support.models_page import blocks_of_page
    from tests.support.parity import state_error

    kinds, models = blocks_of_page(), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(PlainLanguageModel(layers=len(kinds), experts=4))
        models[-1].blocks = torch.nn.ModuleList(kind(32, 16, 4, 2) for kind in kinds.values())
    model, reference = models
    by_node = {} if nodes is None else {"dispatch": "nodes", "topology": hecate.Topology(nodes)}
    hecate.compile(model, hecate.Config(backend="aot_eager", **by_node))
    rank = torch.distributed.get_rank()
    parts = [batch(0, rows=3), batch(1, rows=3)]
    model(parts[rank], parts[rank])["loss"].backward()
    sum(reference(part, part)["loss"] for part in parts).div(2).backward()
    with torch.no_grad():
        for one in models:
            for parameter in one.parameters():
                parameter.copy_(0 * parameter if parameter.grad is None else parameter.grad)
    gradients, expected = model.state_dict(), reference.state_dict()
    explanation, layers = hecate.explain(model), hecate.stats(model).layers
    blocks = {}
    for number, name in enumerate(kinds):
        place = f"blocks.{number}."
        own = {key: value for key, value in expected.items() if key.startswith(place)}
        blocks[name] = {
            "error": state_error(gradients, own, relative=True),
            "exchanged": sum(f"{layer.name}.".startswith(place) for layer in layers),
            "skipped": [skip.reason for skip in explanation.skipped if f"{skip.where}.".startswith(place)],
        }
    return {
        "blocks": blocks,
        "error": state_error(gradients, expected, relative=True),
        "graphs": len(explanation.graphs),
        "skipped": len(explanation.skipped),
    }


@pytest.mark.distributed
def test_models() -> None:
    for found in run_ranks("tests.test_docs:train_models", 2):
        assert len(found["blocks"]) == 11
        for name, one in found["blocks"].items():
            assert (one["exchanged"], one["skipped"]) == (1, []), (name, one)
            assert one["error"] < 1e-5, (name, one)
        assert (found["graphs"], found["skipped"]) == (1, 0) and found["error"] < 1e-5, found


def program_of(text: str) -> str:
    """All blocks of Python of a page, or of a part of one, as one program."""
    return "\n\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))


def section_of(title: str) -> str:
    """All blocks of code of one section of docs/extending.md, as one program."""
    sections = (DOCS / "extending.md").read_text().split("\n## ")[1:]
    programs = {section.partition("\n")[0]: program_of(section) for section in sections}
    assert [name for name, program in programs.items() if program] == list(SECTIONS), "all code is run"
    return programs[title]


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


def run_page(name: str, folder: str) -> list[str]:
    """On one rank: what a page's program leaves in ``folder``, where a user would run it."""
    os.chdir(folder)
    exec(compile(program_of((DOCS / name).read_text()), name, "exec"), {"__name__": "__main__"})
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
    page, tutorial = (path.read_text() for path in (tmp_path / "runs/tutorial/report.html", DOCS / "tutorial.md"))
    for part in ("Alerts", "Balance", "Load of ranks", "Time", "Timeline of a step", "Layers"):
        assert f"<h2>{part}" in page and f"**{part}**" in tutorial
    # What explain and bisect are given there.
    script = tmp_path / "train.py"
    script.write_text(program_of(tutorial))
    assert "input_ids" in build(f"{script}:build").batches[0]


@pytest.mark.parametrize(
    "module",
    [
        "hecate.runtime.placement.planner",
        "hecate.runtime.placement.planner.balance",
        "hecate.passes.analysis.torch_values",
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
