"""The ceremony around passes: switching off, counting, dumping, verifying, and the list itself."""

from __future__ import annotations

import ast
import logging
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.fx import GraphModule

from hecate.passes import PASSES, REQUIRED, STAGES, Outcome, PassContext, Rewrite, name_of, summary_of
from hecate.passes.dumps.folder import DumpFolder, graph_log, own_folder
from hecate.passes.dumps.value_names import pass_of
from hecate.passes.fingerprint import fingerprint
from hecate.passes.invariants import InvalidGraphError
from hecate.passes.runner import run_passes
from tests.passes.captured.test_exchange_rows import region
from tests.support.graphs import GraphUnderTest, H, targets

ROOT = Path(__file__).parents[2]
CONTEXT = PassContext(world_size=2)
EXCHANGE = [function.__name__ for function in PASSES].index("exchange_rows") + 1


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
    dumps = DumpFolder(folder, **options)
    log = graph_log(3, "", names, dumps)
    run_passes(region(g), PassContext(world_size=2, replicates=True, layer_names=names), dump=log)
    return dumps


def test_dump_has_what_changed_in_run_order(tmp_path: Path) -> None:
    dumped(tmp_path)
    found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert found == [
        "graph3/00_model.py",
        "graph3/14_exchange_rows.diff",
        "graph3/14_exchange_rows.py",
        "graph3/layer_after.svg",
        "graph3/layer_before.svg",
        "index.html",
    ]
    assert "exchange_back" not in (tmp_path / "graph3/00_model.py").read_text()
    diff = (tmp_path / "graph3/14_exchange_rows.diff").read_text()
    assert re.search(r"(?m)^\+    results_L0: .*exchange_back.*  # exchange_rows, L0$", diff)


def test_every_node_of_a_dump_has_a_shape_and_it_is_python(tmp_path: Path) -> None:
    dumped(tmp_path)
    text = (tmp_path / "graph3/14_exchange_rows.py").read_text()
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
    assert f'href="#graph3-captured-{EXCHANGE}"' in page
    # A browser opens what a link leads into, not what it leads to.
    assert f'<details><summary>{EXCHANGE:02} exchange_rows</summary><div id="graph3-captured-{EXCHANGE}">' in page
    for name in ("before", "after"):
        drawing = ElementTree.parse(tmp_path / f"graph3/layer_{name}.svg").getroot()
        assert len(drawing.findall("{*}g")) > 5
        assert ("rows_L0" in "".join(drawing.itertext())) is (name == "after")


def test_a_graph_that_a_pass_broke_is_dumped(tmp_path: Path) -> None:
    def fail(gm: GraphModule, context: PassContext) -> Outcome:
        raise ZeroDivisionError

    log = graph_log(0, "", {}, DumpFolder(tmp_path))
    with pytest.raises(ZeroDivisionError):
        run_passes(region(GraphUnderTest()), CONTEXT, passes=(fail,), dump=log)
    assert (tmp_path / "graph0/01_fail.broken.py").exists()
    assert "01 fail.broken" in (tmp_path / "index.html").read_text()


def test_a_dump_that_cannot_be_written_ends_and_the_passes_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody reads traces; torch finds that out when it sends the first one.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])
    (tmp_path / "file").write_text("")
    g = GraphUnderTest()
    names, dumps = {g.layer: "model.experts"}, DumpFolder(tmp_path / "file")
    log = graph_log(0, "", names, dumps)
    with pytest.warns(UserWarning, match="the training goes on") as warned:
        records = run_passes(region(g), PassContext(world_size=2, layer_names=names), dump=log)
    assert len(warned) == 1 and dumps.failed and not dumps.whole
    assert {record.name: record.rewritten for record in records}["exchange_rows"] == 1
    assert graph_log(1, "", names, dumps) is None


def test_what_fails_in_printing_or_naming_does_not_hide_the_error_of_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AttributeError("torch has no such thing any more")

    def fail(gm: GraphModule, context: PassContext) -> Outcome:
        monkeypatch.setattr("hecate.passes.dumps.folder.print_graph", refuse)
        raise ZeroDivisionError

    dumps = DumpFolder(tmp_path)
    log = graph_log(0, "", {}, dumps)
    with pytest.warns(UserWarning, match="no dump of this graph"), pytest.raises(ZeroDivisionError):
        run_passes(region(GraphUnderTest()), CONTEXT, passes=(fail,), dump=log)
    assert not dumps.whole and not dumps.failed, "what comes later can be written"
    monkeypatch.setattr("hecate.passes.runner.name_values", refuse)
    gm = region(GraphUnderTest())
    with pytest.warns(UserWarning, match="no names of values"):
        records = run_passes(gm, CONTEXT)
    assert {record.name: record.rewritten for record in records}["exchange_rows"] == 1
    gm.graph.lint()


def test_every_model_of_a_process_has_a_folder_and_old_graphs_go_once(tmp_path: Path) -> None:
    for old in ("rank0/graph0", "rank0/graph7", "rank0/mine", "rank0-model2/graph0", "rank0-model3/graph0"):
        (tmp_path / old).mkdir(parents=True)
    first = own_folder(tmp_path / "rank0")
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["rank0", "rank0/mine"]
    dumped(first)
    assert own_folder(tmp_path / "rank0") == tmp_path / "rank0-model2"
    assert (first / "graph3/00_model.py").exists()


def test_a_page_has_a_longest_size(tmp_path: Path, g: GraphUnderTest) -> None:
    names, dumps = {g.layer: "model.experts"}, DumpFolder(tmp_path, most_bytes=20_000)
    for graph in range(12):
        context = PassContext(world_size=2, layer_names=names)
        h = GraphUnderTest()
        h.layer = g.layer
        run_passes(region(h), context, dump=graph_log(graph, "", names, dumps))
    page = (tmp_path / "index.html").read_text()
    assert len(page) < 4 * 20_000 + 10_000
    assert f'<a href="#graph0-captured-{EXCHANGE}">' in page
    assert f'href="graph3/{EXCHANGE:02}_exchange_rows.py"' in page
    assert re.search(r"This page is full: \d+ more parts", page)


def test_a_graph_that_comes_with_rows_exchanged_has_no_picture_of_before(tmp_path: Path, g: GraphUnderTest) -> None:
    names, dumps = {g.layer: "model.experts"}, DumpFolder(tmp_path)
    gm = region(g)
    run_passes(gm, PassContext(world_size=2, layer_names=names))
    run_passes(gm, PassContext(world_size=2, layer_names=names), passes=(), dump=graph_log(0, "", names, dumps))
    assert (tmp_path / "graph0/layer_after.svg").exists() and not (tmp_path / "graph0/layer_before.svg").exists()


def test_values_keep_their_names_and_say_who_wrote_them(g: GraphUnderTest) -> None:
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

    with pytest.raises(InvalidGraphError, match="never come back"):
        run_passes(region(GraphUnderTest()), CONTEXT, passes=(*PASSES, lose_rows))


def test_every_entry_of_the_list_says_what_it_does() -> None:
    entries = [entry for stage in STAGES for entry in stage.entries]
    names = [name_of(entry) for entry in entries]
    assert len(set(names)) == len(names) and {*REQUIRED} <= {*names}
    for entry in entries:
        assert summary_of(entry), entry
        if isinstance(entry, Rewrite):
            assert f"def {entry.name}(" in (ROOT / entry.file).read_text()
            continue
        doc = sys.modules[entry.__module__].__doc__
        assert doc and all(word in doc for word in ("Needs", "Changes", "Never")), entry.__name__


def test_every_pass_is_in_the_list() -> None:
    """A pass takes a graph and a context; there is none in the folders that nobody runs."""
    found = {
        node.name
        for path in (ROOT / "passes").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name == path.stem
        and ast.unparse(node.returns or node) == "Outcome"
    }
    assert found == {name_of(entry) for stage in STAGES for entry in stage.entries if not isinstance(entry, Rewrite)}


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
