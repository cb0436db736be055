"""Overlap changes no number, keeps what travels alive, and never exchanges twice."""

from __future__ import annotations

import contextlib
import json
import re
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.adversaries import Anything
from tests.support.extent import ALL
from tests.support.hostile_transport import hostile
from tests.support.models import batch, build
from tests.support.parity import run_step, step_and_compare
from tests.support.ranks import run_ranks

_HERE = "tests.hecate_compile.test_overlap"


def train(
    backend: str = "aot_eager",
    checkpointed: bool = False,
    race: bool = True,
    reads_late: bool = False,
    steps: int = 3,
    policy: str = "anything",
    layers: int = 2,
    **options: Any,
) -> dict[str, Any]:
    """On one rank: the worst errors of some steps, on a hostile transport if ``race``."""
    import hecate

    torch._dynamo.utils.counters.clear()
    reference, model = build("qwen3_moe", layers=layers), build("qwen3_moe", layers=layers)
    if checkpointed:
        model.gradient_checkpointing_enable()
        model.train()
        reference.train()
    chosen: Any = Anything() if policy == "anything" else policy
    hecate.compile(model, hecate.Config(backend=backend, policy=chosen, **options))
    with hostile(reads_late=reads_late) if race else contextlib.nullcontext() as transport:
        errors = [step_and_compare(model, reference, batch(step)) for step in range(steps)]
    notes = [(span.operator, span.subject) for span in hecate.explain(model).spans]
    return {
        "loss": max(e.loss for e in errors),
        "gradient": max(e.gradient for e in errors),
        "worst": max(errors, key=lambda e: e.gradient).worst,
        "graphs": len(hecate.explain(model).graphs),
        "notes": notes,
        "late": transport.late if transport else 0,
        "poisoned": transport.poisoned if transport else 0,
    }


def _combination(
    rematerialize: bool, checkpointed: bool, dense: str, policy: str = "anything", chunks: int = 1, layers: int = 2
) -> dict[str, Any]:
    return {
        "rematerialize": rematerialize,
        "checkpointed": checkpointed,
        "dense": dense,
        "policy": policy,
        "chunks": chunks,
        "layers": layers,
    }


# Each option with both of its values; every pair of options; everything. Where no experts are gathered ahead of a
# layer one is enough.
OPPOSITES = [_combination(True, False, "shard", chunks=2), _combination(False, True, "replicate")]
PAIRWISE = [
    *OPPOSITES,
    _combination(True, True, "replicate"),
    _combination(False, True, "shard", "static", chunks=3, layers=1),
    _combination(False, False, "replicate", "static", layers=1),
]
EVERYTHING = [
    _combination(rematerialize, checkpointed, dense, policy, chunks)
    for rematerialize, checkpointed, dense in product((False, True), (False, True), ("replicate", "shard"))
    for policy in ("anything", "static")
    if policy == "anything" or not rematerialize
    for chunks in (1, 2, 3)
]
# With two processes also slots for some and for all experts of others, which the default policy fills as it likes.
EVERYTHING_ON_TWO = EVERYTHING + [
    {**combination, "policy": "hecate", "replicas": replicas}
    for combination in EVERYTHING
    if combination["policy"] == "anything"
    for replicas in (2, 8)
]


def train_all(backend: str, combinations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train(backend=backend, **combination) for combination in combinations]


def check(result: dict[str, Any], combination: dict[str, Any]) -> None:
    assert result["loss"] < 1e-5, combination
    assert result["gradient"] < 1e-5, (combination, result["worst"])
    assert result["graphs"] == 1
    assert result["late"] >= len(result["notes"]) > 0
    assert result["poisoned"] > result["late"]
    # In each layer rows travel once in the forward and once in the backward, also if layers are checkpointed.
    operators, layers = [operator for operator, _ in result["notes"]], combination["layers"]
    assert operators.count("exchange") == operators.count("exchange_back") == 2 * layers * combination["chunks"]
    assert operators.count("gather_counts") == layers
    gathers = 0 if combination["policy"] == "static" else 2 if combination["rematerialize"] else 1
    assert operators.count("sparse_all_gather") == gathers * layers
    assert operators.count("sparse_reduce_scatter") == min(gathers, 1) * layers


@pytest.mark.distributed
@pytest.mark.timeout(3600 if ALL else 600)
@pytest.mark.parametrize("size", [2, 3, 4] if ALL else [2])
def test_late_collectives_change_nothing(size: int) -> None:
    combinations = (EVERYTHING_ON_TWO if size == 2 else EVERYTHING) if ALL else PAIRWISE
    timeout = 3500 if ALL else 500
    ranks = run_ranks(f"{_HERE}:train_all", size, timeout=timeout, backend="aot_eager", combinations=combinations)
    for rank in ranks:
        for index, (result, combination) in enumerate(zip(rank, combinations, strict=True)):
            check(result, combination)
            assert result["notes"] == ranks[0][index]["notes"]


@pytest.mark.distributed
def test_a_collective_that_reads_a_reused_buffer_is_noticed() -> None:
    """The hostile transport itself: a planted fault makes the numbers wrong."""
    for result in run_ranks(f"{_HERE}:train", 2, reads_late=True, steps=1, layers=1):
        assert not result["gradient"] < 1e-5


def show(folder: str) -> dict[str, Any]:
    """On one rank: what explain, a dump and a timeline say after a step with one pass switched off and without."""
    import hecate

    found = {}
    for name, layers, disabled in (("on", 2, ()), ("off", 1, ("schedule",))):
        place = Path(folder) / name
        config = hecate.Config(
            backend="aot_eager", policy=Anything(), disable_passes=disabled, dump=place, dump_ranks="all"
        )
        model = hecate.compile(build("qwen3_moe", layers=layers), config)
        try:
            hecate.save_timeline(model, place / "early.json")
        except ValueError as error:
            found["early"] = str(error)
        run_step(model, batch(0))
        rank = torch.distributed.get_rank()
        hecate.save_timeline(model, place / "deeper" / f"{rank}.json")
        explained = hecate.explain(model)
        found[name] = {
            "explain": str(explained),
            "dump": (place / f"rank{rank}" / "graph0" / "schedule.txt").read_text(),
            "last": {
                part: (place / f"rank{rank}" / "graph0" / part / "03_order_collectives.py").read_text()
                for part in ("forward", "backward")
            },
            "later": {part: [(r.name, r.enabled) for r in done] for part, done in explained.graphs[0].later.items()},
            "dict": json.loads(json.dumps(explained.to_dict())),
            "events": json.loads((place / "deeper" / f"{rank}.json").read_text())["traceEvents"],
        }
    found["disagreement"] = _in_another_order_on_rank_1()
    return found


def _in_another_order_on_rank_1() -> str:
    import hecate
    from hecate.graph import lowering

    without = tuple(p for p in lowering.FINAL_PASSES if p.__name__ != "schedule")
    passes = without if torch.distributed.get_rank() == 1 else lowering.FINAL_PASSES
    model = hecate.compile(build("qwen3_moe", layers=1), hecate.Config(backend="aot_eager", policy=Anything()))
    with mock.patch.object(lowering, "FINAL_PASSES", passes):
        try:
            run_step(model, batch(0))
        except Exception as error:
            return str(error)
    return "nothing was said"


def _of_layer(number: int, schedule: str) -> str:
    (line,) = [s for s in schedule.splitlines() if s.startswith(f"forward model.layers.{number}.mlp.experts")]
    return line


def _check_names(last: dict[str, str]) -> None:
    """What autograd made of nodes still says who inserted them, and arguments say what they are in the model."""
    for part, lines in {
        "forward": (
            r'    send_index_L1: "i64\[\w+\]" = .*  # exchange_rows, L1',
            r"    rows_L0: .*exchange_wait.*  # split_collectives, L0",
            r'    primals_\d+: "f32\[96, 32\]",  # model\.embed_tokens\.weight',
        ),
        "backward": (
            r"    own_grads_L1: .*sparse_reduce_scatter_wait\.default\(sparse_reduce_scatter_started_L1, .*",
            r"    grad_rows_L0: .*exchange_wait.*  # split_collectives, L0",
            r'    mean_grad_model_norm_weight: "f32\[32\]" = mean_grads\[\d+\]  # bucket_gradients',
        ),
    }.items():
        for line in lines:
            assert re.search(rf"(?m)^{line}$", last[part]), f"{part}: {line}"


@pytest.mark.distributed
def test_explain_dump_and_timeline_show_the_schedule(tmp_path: Path) -> None:
    for result in run_ranks(f"{_HERE}:show", 2, folder=str(tmp_path)):
        assert "run a forward first" in result["early"]
        assert "ranks disagree on the order of collectives in the forward of graph 0" in result["disagreement"]
        on, off = result["on"], result["off"]
        final = ["split_collectives", "schedule", "order_collectives", "simplify_views", "select_rows"]
        assert list(on["later"]) == ["joint", "forward", "backward"]
        assert on["later"]["forward"] == [[one, True] for one in final]
        assert off["later"]["backward"] == [[one, one != "schedule"] for one in final]
        (one,) = [
            row
            for row in on["dict"]["schedule"]
            if (row["part"], row["subject"], row["operator"])
            == ("backward", "model.layers.0.mlp.experts", "exchange")
        ]
        assert one["count"] == 1 and one["predicted_bytes"] > 0 and one["took"] > 0
        assert "exposed" in on["explain"]
        line, other = _of_layer(1, on["dump"]), _of_layer(0, off["dump"])
        for operator in ("sparse_all_gather", "gather_counts", "exchange", "exchange_back"):
            assert f"{operator} " in line
        behind = [float(one.split("sparse_all_gather ")[1].split(";")[0].split()[2]) for one in (line, other)]
        assert behind[0] > 0.0 == behind[1], "attention lies between start and wait, or nothing"
        _check_names(on["last"])
        spans = [event for event in on["events"] if event["ph"] == "X"]
        assert {event["tid"] for event in spans} == {0, 1} and all(event["dur"] >= 0 for event in spans)
