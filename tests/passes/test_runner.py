"""The ceremony around passes: switching off, counting, dumping, verifying, and the list itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.fx import GraphModule

from hecate.passes import PASSES, Outcome, PassContext, summary_of
from hecate.passes.captured.share_gathers import share_gathers
from hecate.passes.dumps.folder import DumpFolder
from hecate.passes.dumps.value_names import pass_of
from hecate.passes.fingerprint import fingerprint
from hecate.passes.invariants import InvalidGraphError
from hecate.passes.runner import run_passes
from tests.passes.captured.test_exchange_rows import region
from tests.support.graphs import GraphUnderTest, H, targets

CONTEXT = PassContext(world_size=2)


def test_all_passes_in_order_with_counts() -> None:
    gm = region(GraphUnderTest())
    records = run_passes(gm, CONTEXT)
    assert [record.name for record in records] == [function.__name__ for function in PASSES]
    assert {record.name: record.rewritten for record in records}["exchange_rows"] == 1
    assert all(record.seconds > 0 for record in records)


def test_switched_off_by_name() -> None:
    gm = region(GraphUnderTest())
    before = targets(gm)
    records = run_passes(gm, CONTEXT, disabled=[function.__name__ for function in PASSES])
    assert targets(gm) == before
    assert not any(record.enabled for record in records)


def dumped(folder: Path, **options: Any) -> DumpFolder:
    """A graph with one MoE layer, through all passes."""
    g = GraphUnderTest()
    names = {g.layer: "model.experts"}
    dumps = DumpFolder(folder, names, **options)
    run_passes(region(g), PassContext(world_size=2, replicates=True, layer_names=names), dump=dumps.part(3))
    return dumps


def test_dump_has_what_changed_in_run_order(tmp_path: Path) -> None:
    dumped(tmp_path)
    found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert found == [
        "graph3/00_model.py", "graph3/12_exchange_rows.diff", "graph3/12_exchange_rows.py",
        "graph3/layer_after.svg", "graph3/layer_before.svg", "index.html",
    ]  # fmt: skip
    assert "exchange_back" not in (tmp_path / "graph3/00_model.py").read_text()
    diff = (tmp_path / "graph3/12_exchange_rows.diff").read_text()
    assert re.search(r"(?m)^\+    results_L0: .*exchange_back.*  # exchange_rows, L0$", diff)


def test_every_node_of_a_dump_has_a_shape_and_it_is_python(tmp_path: Path) -> None:
    dumped(tmp_path)
    text = (tmp_path / "graph3/12_exchange_rows.py").read_text()
    ast.parse(text)
    calls = [line for line in text.splitlines() if line.startswith("    ") and " = " in line]
    assert len(calls) > 20
    without = [line for line in calls if not re.match(r'    \w+: "[^"?]+" = ', line)]
    assert not without
    for name in ("placement_L0", "slots_L0", "counts_L0", "ticket_L0", "send_index_L0", "rows_L0", "replica_L0"):
        assert re.search(rf"(?m)^    {name}: .*  # exchange_rows, L0$", text), name


def test_a_long_dump_is_cut_and_says_so(tmp_path: Path) -> None:
    dumped(tmp_path, most_bytes=400)
    text = (tmp_path / "graph3/00_model.py").read_text()
    last = text.splitlines()[-1]
    missing = re.fullmatch(r"# cut here: (\d+) more lines, \d+ bytes; HECATE_DUMP_MB=N allows N MB a file", last)
    assert missing and int(missing[1]) > 0 and len(text) < 600


def test_the_page_is_one_file_with_the_passes_and_a_drawing(tmp_path: Path) -> None:
    dumped(tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert 'name="viewport"' in page and "<script" not in page
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page), "no network"
    assert 'class="layer0 carries-rows"' in page and 'class="plus"' in page
    assert all(function.__name__ in page for function in PASSES)
    number = [function.__name__ for function in PASSES].index("exchange_rows") + 1
    assert f'href="#graph3-captured-{number}"' in page
    # A browser opens what a link leads into, not what it leads to.
    assert f'<details><summary>{number:02} exchange_rows</summary><div id="graph3-captured-{number}">' in page
    for name in ("before", "after"):
        drawing = ElementTree.parse(tmp_path / f"graph3/layer_{name}.svg").getroot()
        assert len(drawing.findall("{*}g")) > 5
        assert ("rows_L0" in "".join(drawing.itertext())) is (name == "after")


def test_a_graph_that_a_pass_broke_is_dumped(tmp_path: Path) -> None:
    def fail(gm: GraphModule, context: PassContext) -> Outcome:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_passes(region(GraphUnderTest()), CONTEXT, passes=(fail,), dump=DumpFolder(tmp_path).part(0))
    assert (tmp_path / "graph0/01_fail.broken.py").exists()


def test_values_keep_their_names_and_say_who_wrote_them() -> None:
    g = GraphUnderTest()
    gm = region(g)
    before = set(gm.graph.nodes)
    run_passes(gm, PassContext(world_size=2, layer_names={g.layer: "model.experts"}))
    new = [node for node in gm.graph.nodes if node not in before]
    assert new and {pass_of(node) for node in new} <= {function.__name__ for function in PASSES}
    assert len([node for node in gm.graph.nodes if node.name == "send_index_L0"]) == 1
    names = [node.name for node in gm.graph.nodes]
    run_passes(gm, PassContext(world_size=2, layer_names={g.layer: "model.experts"}), passes=())
    assert [node.name for node in gm.graph.nodes] == names
    gm.graph.lint()


def test_bodies_of_higher_order_operators_are_entered() -> None:
    inner = region(GraphUnderTest())
    outer = torch.nn.Module()
    outer.body = inner
    graph = torch.fx.Graph()
    graph.output(graph.get_attr("body"))
    records = run_passes(GraphModule(outer, graph), CONTEXT)
    assert {record.name: record.rewritten for record in records}["exchange_rows"] == 1


def test_a_pass_that_breaks_an_invariant_is_stopped() -> None:
    def lose_rows(gm: GraphModule, context: PassContext) -> Outcome:
        for node in list(gm.graph.nodes):
            if node.target is torch.ops.hecate.exchange_back.default:
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
        return Outcome()

    with pytest.raises(InvalidGraphError):
        run_passes(region(GraphUnderTest()), CONTEXT, passes=(*PASSES, lose_rows))


def test_every_pass_says_what_it_does() -> None:
    for function in PASSES:
        assert summary_of(function), function.__name__
        doc = __import__("sys").modules[function.__module__].__doc__
        assert all(word in doc for word in ("Needs", "Changes", "Never")), function.__name__
    assert summary_of(share_gathers) == "read every expert parameter once"


def test_fingerprint_sees_operators_and_widths_but_not_row_counts() -> None:
    def lines(rows: int, width: int, extra: bool) -> list[str]:
        g = GraphUnderTest()
        g.layer = 0
        x = g.call(torch.relu, g.input(torch.randn(rows, width)))
        g.experts(width)
        return fingerprint(g.finish(g.call(torch.neg, x) if extra else x))

    assert lines(3, H, False) == lines(5, H, False)
    assert lines(3, H, False) != lines(3, H, True)
    assert lines(3, H, False) != lines(3, H + 1, False)
