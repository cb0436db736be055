"""The ceremony around passes: switching off, counting, dumping, verifying, and the list itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule

from hecate.passes import PASSES, Outcome, PassContext, summary_of
from hecate.passes.captured.share_gathers import share_gathers
from hecate.passes.fingerprint import fingerprint
from hecate.passes.invariants import InvalidGraphError
from hecate.passes.runner import GraphDump, run_passes
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


def test_dump_has_before_after_and_diff_in_run_order(tmp_path: Path) -> None:
    run_passes(region(GraphUnderTest()), CONTEXT, dump=GraphDump(tmp_path, 3))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3 * len(PASSES)
    assert names[0] == "graph003.01.drop_causal_masks.1.before.py"
    before, after, diff = sorted(tmp_path.glob("graph003.*.exchange_rows.*"))
    assert "+" in diff.read_text()
    assert "exchange_back" in after.read_text()
    assert "exchange_back" not in before.read_text()


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
            if "exchange_back" in node.name:
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
