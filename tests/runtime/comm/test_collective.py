"""What is known about each collective, and that nobody takes an unknown one for something else."""

from __future__ import annotations

import inspect
import sys
from typing import get_args

import pytest
import torch

import hecate.runtime.ops as ops
from hecate.passes import PassContext
from hecate.passes.final.collective_notes import write_note
from hecate.runtime.comm.collective import (
    Carries,
    Collective,
    Role,
    add_collective,
    collective_named,
    collective_of,
    collectives,
    start_of,
    wait_of,
    whole_of,
)
from tests.support import reference
from tests.support.graphs import GraphUnderTest


def test_all_are_here() -> None:
    """A new one is one more line here, and then the tests below say what it still lacks."""
    assert {collective.name for collective in collectives()} == {
        "gather_experts",
        "reduce_scatter_experts",
        "sparse_all_gather",
        "sparse_reduce_scatter",
        "top_up",
        "gather_counts",
        "exchange",
        "exchange_back",
        "route_nodes",
        "exchange_nodes",
        "exchange_nodes_back",
        "gather_dense",
        "reduce_scatter_dense",
        "average_gradients",
        "average_fractions",
    }


@pytest.mark.parametrize("collective", collectives(), ids=lambda collective: collective.name)
def test_a_record_is_complete_and_makes_sense(collective: Collective) -> None:
    """It is found by its name and its operators, and has a reference and a line in the table of its file."""
    assert collective_named(collective.name) is collective
    for find, operator in ((whole_of, collective.whole), (start_of, collective.start), (wait_of, collective.wait)):
        assert find(operator) is collective is collective_of(operator)
        assert sum(other(operator) is not None for other in (whole_of, start_of, wait_of)) == 1
    assert collective.role in get_args(Role) and collective.carries in get_args(Carries)
    assert collective.ring_rounds in (0, 1, 2)
    assert collective.hops == 1 or collective.carries == "rows"
    assert not collective.homeward or collective.carries == "rows"
    assert collective.gathered_again == "never" or collective.role == "gather"
    # Rows and plans belong to one step: computed again, they would be those of a later one.
    if collective.carries in ("rows", "counts", "tickets"):
        assert collective.saved_in_checkpoints == "always"
    names = [argument.name for argument in collective.whole._schema.arguments]
    of_layer = collective.carries not in ("dense", "bucket", "fractions")
    assert ("layer" in names) == of_layer, "notes name a layer, or what is carried"
    assert callable(getattr(reference, collective.name)), "tests/support/reference.py"
    files = [module for name, module in sys.modules.items() if name.startswith(f"{ops.__name__}.")]
    assert any(f"| ``{collective.name}``" in (inspect.getdoc(file) or "") for file in files)


def test_unknown_names_and_operators_and_a_name_again_are_errors() -> None:
    with pytest.raises(
        LookupError, match="'exchang' is no collective; there are average_fractions, average_gradients"
    ):
        collective_named("exchang")
    assert collective_of(torch.ops.aten.add.Tensor) is None
    g = GraphUnderTest()
    node = g.call(torch.add, g.input(torch.ones(2)), 1)
    with pytest.raises(LookupError, match="add is no collective"):
        write_note(node, PassContext(world_size=2))
    with pytest.raises(ValueError, match="there is a collective exchange already"):
        add_collective(collective_named("exchange"))
