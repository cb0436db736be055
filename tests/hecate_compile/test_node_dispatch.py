"""With ``dispatch="nodes"`` a token's row crosses to each node once, and everything else is as before."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.hecate_compile.test_overlap import train
from tests.hecate_compile.test_parity import measure
from tests.support.extent import ALL
from tests.support.models import batch, build
from tests.support.parity import run_step
from tests.support.ranks import RanksFailed, run_ranks

_HERE = "tests.hecate_compile.test_node_dispatch"
# By world size: a name, and the options of a model with random replicas in every step. Nodes are even, uneven, mixed.
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "gpt_oss": {"nodes": (0, 1)},
        "split": {"nodes": (0, 1)},
        "one expert": {"family": "qwen3_moe", "nodes": (0, 1), "one_hot": True},
        "bf16": {"family": "qwen3_moe", "nodes": (0, 1), "dtype": "bfloat16", "wire_dtype": torch.bfloat16},
        "fewer bytes": {"family": "qwen3_moe", "nodes": (0, 1), "wire_dtype": torch.bfloat16},
    },
    3: {"plain": {"nodes": (0, 1, 1)}},
    4: {
        "qwen3_moe": {"nodes": (0, 0, 1, 1), "rematerialize": True, "layers": 2},
        "plain": {"nodes": (0, 0, 1, 1), "policy": "static", "changes": {"experts": 4}},
        "deepseek_v3": {"nodes": (1, 0, 1, 0)},
    },
}
WIDTH = 32
# Of these there are others like them in ``make test``.
if not ALL:
    CASES = {
        2: {name: CASES[2][name] for name in ("split", "one expert")},
        # Two layers are in "late".
        4: {"qwen3_moe": CASES[4]["qwen3_moe"] | {"layers": 1}, "plain": CASES[4]["plain"]},
    }
# Where rows are to cross once if that pays, it is decided as in tests/passes.
WAYS = ("rows", "nodes", "auto") if ALL else ("rows", "nodes")
# All of it takes two and a half minutes. ``make test`` has Inductor and all ways to write experts with rows alone.
_ONLY_ALL = pytest.mark.skipif(not ALL, reason="more than a minute more: with HECATE_TESTS=all")


def measure_all(size: int) -> dict[str, Any]:
    """On one rank: every case of one world size, in one set of processes."""
    from hecate import Topology

    found = {}
    for name, case in CASES[size].items():
        options = {"family": name, "layers": 1, "policy": "anything", "steps": 2} | case
        topology = Topology(tuple(options.pop("nodes")))
        found[name] = measure(options.pop("family"), dispatch="nodes", topology=topology, **options)
        found[name]["recompiles"] = len(torch._dynamo.utils.counters["recompiles"])
    if size == 2:
        late = {"checkpointed": True, "dense": "shard", "rematerialize": True}
        found["late"] = train(dispatch="nodes", topology=Topology((0, 1)), **late)
    if size == 4:
        found["bytes"] = {how: count_bytes(how, (0, 1, 1, 0)) for how in WAYS}
    return found


def count_bytes(dispatch: Any, nodes: tuple[int, ...]) -> dict[str, Any]:
    """Bytes between nodes in a step with four choices of each token, and which nodes its experts are on."""
    import hecate

    changes = {"layers": 1, "num_experts_per_tok": 4}
    reference, model = build("qwen3_moe", **changes), build("qwen3_moe", **changes)
    owners: list[int] = []
    reference.model.layers[0].mlp.gate.register_forward_hook(
        lambda module, args, result: owners.extend((t // 2).tolist() for t in result if not t.is_floating_point())
    )
    # With a link between nodes that is slow enough for the second hop to pay.
    config = hecate.Config(
        backend="aot_eager",
        policy="static",
        dispatch=dispatch,
        topology=hecate.Topology(nodes),
        rates=hecate.Rates(flops=1e12, rank_bytes=1e9, node_bytes=1e3),
    )
    hecate.compile(model, config)
    run_step(model, batch(0))
    mine = batch(0).chunk(len(nodes))[dist.get_rank()]
    reference(input_ids=mine)
    (layer,) = hecate.stats(model).layers
    return {"sent": layer.node_bytes_sent, "all": layer.bytes_sent, "owners": owners[0]}


@cache
def results(size: int) -> list[dict[str, Any]] | RanksFailed:
    """One run for all cases of a world size. A failure is remembered too, so that it is waited for once."""
    try:
        return run_ranks(f"{_HERE}:measure_all", size, timeout=900, size=size)
    except RanksFailed as failure:
        return failure


def found(size: int, name: str) -> list[dict[str, Any]]:
    """The results of one case on all ranks."""
    ranks = results(size)
    if isinstance(ranks, RanksFailed):
        pytest.fail(str(ranks))
    return [rank[name] for rank in ranks]


@pytest.mark.distributed
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("size", "name"), [pytest.param(size, name, id=f"{size}ranks-{name}") for size in CASES for name in CASES[size]]
)
def test_equals_one_process(size: int, name: str) -> None:
    # bf16 has 8 bits; see test_parity.
    rounded = "wire_dtype" in CASES[size][name]
    for result in found(size, name):
        assert result["skipped"] == []
        assert result["loss"] < (1e-2 if rounded else 1e-5)
        assert result["gradient"] < (5e-2 if rounded else 1e-5), result["worst"]
        assert (result["gradient"] > 1e-5) == rounded
        assert (result["graphs"], result["breaks"], result["recompiles"]) == (1, 0, 0)
        # On two ranks there are none in some steps.
        assert size == 2 or "policy" in CASES[size][name] or min(result["replicas"]) > 0


@pytest.mark.distributed
@pytest.mark.timeout(1000)
def test_late_collectives_and_checkpointed_layers_change_nothing() -> None:
    for result in found(2, "late"):
        assert result["loss"] < 1e-5
        assert result["gradient"] < 1e-5, result["worst"]
        assert result["late"] > 0
        # What is told to relays, and rows, travel in the forward alone; gradients in the backward.
        operators = [operator for operator, _ in result["notes"]]
        assert operators.count("route_nodes") == 2
        assert operators.count("exchange_nodes") == operators.count("exchange_nodes_back") == 4


@pytest.mark.distributed
@pytest.mark.timeout(1000)
def test_bytes_between_nodes_are_those_of_pairs_of_token_and_node() -> None:
    nodes, row = (0, 1, 1, 0), WIDTH * 4
    by_rows, by_nodes, *auto = ([rank[how] for rank in found(4, "bytes")] for how in WAYS)
    assert auto == [by_nodes] * ALL
    crossing = [
        [nodes[owner] for owner in choices if nodes[owner] != nodes[rank]]
        for rank, of_rank in enumerate(by_nodes)
        for choices in of_rank["owners"]
    ]
    choices, pairs = sum(map(len, crossing)), sum(len(set(of_token)) for of_token in crossing)
    assert 0 < pairs < 0.7 * choices
    # There and back, forward and backward; with a weight for each row there, and its gradient back.
    assert sum(by_rows[0]["sent"]) == 4 * choices * row
    assert sum(by_nodes[0]["sent"]) == 4 * pairs * row + 2 * choices * 4
    for how in (by_rows, by_nodes):
        assert all(sent <= total for sent, total in zip(how[0]["sent"], how[0]["all"], strict=True))


# Blocks of docs/models.md in which it is not proven, and a word of the reason.
BY_ROWS = {"RepeatedTokens": "setitem", "AllTokens": "no gather by token", "Capacity": "no gather by token"}


@_ONLY_ALL
@pytest.mark.distributed
def test_every_way_to_write_experts() -> None:
    for found in run_ranks("tests.test_docs:train_models", 2, nodes=(0, 1)):
        assert (found["graphs"], found["skipped"]) == (1, len(BY_ROWS)) and found["error"] < 1e-5, found
        for name, one in found["blocks"].items():
            assert one["exchanged"] == 1 and one["error"] < 1e-5, (name, one)
            assert len(one["skipped"]) == (name in BY_ROWS), (name, one)
            assert all(BY_ROWS[name] in reason for reason in one["skipped"]), (name, one)


def measure_by_inductor() -> dict[str, Any]:
    """On one of three ranks."""
    from hecate import Topology

    return measure(
        "qwen3_moe", backend="inductor", policy="anything", dispatch="nodes", topology=Topology((0, 1, 1)), layers=1
    )


@_ONLY_ALL
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_compiled_by_inductor() -> None:
    for result in run_ranks(f"{_HERE}:measure_by_inductor", 3, timeout=900):
        assert result["skipped"] == []
        assert result["loss"] < 1e-5
        assert result["gradient"] < 1e-5, result["worst"]
        assert (result["graphs"], result["breaks"]) == (1, 0)
