"""The comparison: replayed routing, figures and tables from samples, and systems that do the same work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.compare import cells, figures, report, routing, shapes, store, systems
from benchmarks.compare.workloads import WORKLOADS, counts_of
from hecate.runtime.comm import collectives
from hecate.runtime.comm.world import SINGLE
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.planner import LayerSizes, Rates
from hecate.runtime.placement.topology import Topology
from hecate.simulator import walk
from hecate.simulator.workloads import fit, scale
from tests.support.extent import ALL

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CELLS = store.load(RESULTS)


def test_scaled_counts_add_up_and_keep_proportions() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 50, (3, 4, 16))
    scaled = scale(counts, 1000)
    assert (scaled.sum(-1) == 1000).all()
    assert np.abs(scaled - counts * 1000 / counts.sum(-1, keepdims=True)).max() < 1
    with pytest.raises(ValueError, match="without rows"):
        scale(np.zeros((1, 4), dtype=np.int64), 10)


def test_a_trace_fits_more_ranks_and_layers() -> None:
    counts = np.random.default_rng(0).integers(1, 50, (10, 2, 4, 8))
    fitted = fit(counts, layers=3, ranks=6, rows=100)
    assert fitted.shape == (10, 3, 6, 8) and (fitted.sum(-1) == 100).all()
    assert (fitted[:, :2, :4] == scale(counts, 100)).all()
    assert (fitted[0, 2] != fitted[0, 0]).any()


def test_which_experts_meet_in_a_token_is_chance() -> None:
    """As if drawn: of 31 other experts 15 are on the same node."""
    dealt = [routing.deal(np.full(32, 64), 1024, 2, np.random.default_rng(seed)) for seed in range(20)]
    on_node = np.concatenate(dealt) // 16
    assert np.mean(on_node[:, 0] == on_node[:, 1]) == pytest.approx(15 / 31, abs=0.05)
    assert len({tuple(sorted(pair)) for pair in dealt[0].tolist()}) > 200


@pytest.mark.parametrize("name", WORKLOADS)
def test_dealt_choices_have_the_counts_of_the_trace(name: str) -> None:
    shape = shapes.SHAPES["gpt-moe-s"]
    counts = counts_of(name, shape, shapes.WORLD_SIZE)
    assert (counts.sum(-1) == shape.rows).all()
    for step in (0, 150):
        line = counts[step, 1, 5]
        choices = routing.deal(line, shape.tokens, shape.top_k, np.random.default_rng(0))
        assert choices.shape == (shape.tokens, shape.top_k)
        assert (np.bincount(choices.reshape(-1), minlength=shape.experts) == line).all()
        if line.max() <= shape.tokens:
            assert (choices[:, 0] != choices[:, 1]).all(), "a token's experts differ"


def test_a_replayed_router_keeps_its_gradient() -> None:
    shape = shapes.SHAPES["gpt-moe-s"]
    with routing.replayed_routers():
        model = shapes.build(shape)
        replayed = routing.prepare(model, shape.tokens)
        assert [tuple(r.shape) for r in replayed] == [(shape.tokens, shape.top_k)] * shape.layers
        router = model.model.layers[0].mlp.gate
        _, scores, chosen = router(torch.randn(shape.tokens, shape.hidden))
        assert chosen.equal(replayed[0])
        torch.testing.assert_close(scores.sum(-1), torch.ones(shape.tokens))
        scores[:, 0].sum().backward()
        assert router.weight.grad.abs().sum() > 0


def test_a_replayed_choice_waits_for_its_logits() -> None:
    """As a real one does; else the schedule would send counts of rows before attention has computed."""
    shape = shapes.SHAPES["gpt-moe-s"]
    with routing.replayed_routers():
        model = shapes.build(shape)
        routing.prepare(model, shape.tokens)
        gm = make_fx(lambda hidden: model.model.layers[0].mlp.gate(hidden)[2])(
            torch.randn(shape.tokens, shape.hidden)
        )
    gm.graph.eliminate_dead_code()
    (hidden,) = (node for node in gm.graph.nodes if node.op == "placeholder")
    assert hidden.users


def test_every_name_is_built() -> None:
    for shape in shapes.SHAPES.values():
        assert {*systems.policies(shape)} == {*cells.ON_ENGINE, *cells.VARIANTS}
    for cell in (*cells.known(), *cells.short()):
        assert {*cell.systems} <= {*cells.NAMES}
        assert {*cell.workloads} <= {*cells.fitting(cell.shape)}
    assert tuple(systems.EXTERNAL) == cells.EXTERNAL
    assert set(cells.BOUNDS.values()) <= set(cells.ON_ENGINE)


def test_unknown_systems_and_cells_are_refused() -> None:
    (cell,) = cells.short()
    with pytest.raises(SystemExit, match="no system nonsense"):
        cell.change("hecate,nonsense", None, None)
    with pytest.raises(SystemExit, match="no workload mild"):
        cell.change(None, "mild", None)
    with pytest.raises(SystemExit, match="static EP must be"):
        cell.change("hecate", None, None)
    assert cell.change("hecate, static EP", "zipf", 2).systems == ("hecate", "static EP")
    assert cell.change("static EP, hecate (one chunk)", None, None).systems[1] in cells.VARIANTS


def test_the_committed_tables_are_those_of_the_raw_samples() -> None:
    assert "gpt-moe-s.a" in CELLS, "without samples the tests below would check nothing"
    again = "the tables were changed: HECATE_RESULTS=benchmarks/results python -m benchmarks.compare --report"
    assert (RESULTS / "compare.md").read_text() == report.text_of(CELLS), again


@pytest.mark.parametrize("name", CELLS)
def test_all_systems_computed_the_rows_of_the_trace(name: str) -> None:
    """The engine counts rows per expert after the gate; they must be those of the trace, for every policy."""
    shape = shapes.SHAPES[CELLS[name]["cell"]["shape"]]
    seen = set()
    every = [(launch, *item) for launch in CELLS[name]["launches"] for item in launch["samples"].items()]
    for launch, workload, samples in every:
        counts = counts_of(workload, shape, shapes.WORLD_SIZE, launch["seed"]).sum(2)
        even = counts_of("balanced", shape, shapes.WORLD_SIZE).sum(2)
        for system, found in samples.items():
            for sample in found:
                if "routed" in sample:
                    trace = even if cells.BOUNDS.get(system) == "static EP" else counts
                    assert sample["routed"] == trace[sample["step"]].tolist(), (workload, system)
                    assert (np.asarray(sample["rows"]).sum(0) == shape.rows * shapes.WORLD_SIZE).all()
                    seen.add(system)
    assert seen >= set(cells.ON_ENGINE) & set(CELLS[name]["cell"]["systems"])


@pytest.mark.parametrize("name", CELLS)
def test_policies_did_what_they_do_offline(name: str) -> None:
    """Rows of every rank and replicas in the measured steps are those of the policy walked through the trace.

    It fails too if a policy has changed since and does not say so in ``cells.CHANGED_POLICIES``: then what is claimed
    was not measured, and ``make bench-full`` is due. Each workload is of one launch; without HECATE_TESTS=all a cell
    has those that no cell before it has, or its first.
    """
    cell = CELLS[name]
    shape, topology = shapes.SHAPES[cell["cell"]["shape"]], Topology.even(shapes.WORLD_SIZE, shapes.RANKS_PER_NODE)
    sizes = LayerSizes(
        row_flops=6 * shape.hidden * shape.ffn, row_bytes=4 * shape.hidden, expert_bytes=shape.expert_bytes
    )
    owners = [Owners.contiguous(shape.experts, shapes.WORLD_SIZE)] * shape.layers
    launches, workloads = cell["launches"], figures.workloads_of(cell)
    before = {w for other in list(CELLS)[: list(CELLS).index(name)] for w in figures.workloads_of(CELLS[other])}
    some = workloads if ALL else [w for w in workloads if w not in before] or workloads[:1]
    every = [
        (launch, workload)
        for number, workload in enumerate(some)
        for launch in (launches if ALL else [launches[number % len(launches)]])
    ]
    for launch, workload in every:
        samples, counts = launch["samples"][workload], counts_of(workload, shape, shapes.WORLD_SIZE, launch["seed"])
        for system in set(samples) & {*cells.ON_ENGINE, *cells.VARIANTS} - set(cells.CHANGED_POLICIES):
            by_node = systems.options(system)["dispatch"] == "nodes"
            planned_with = replace(sizes, together=shape.top_k if by_node else 1)
            steps = walk(
                systems.policies(shape)[system],
                counts[None],
                owners,
                topology=topology,
                rates=Rates(**launch["rates"]),
                sizes=[planned_with] * shape.layers,
                steps=[sample["step"] for sample in samples[system]],
            )
            for sample, (_, (layers,)) in zip(samples[system], steps, strict=True):
                assert np.asarray(sample["rows"]).T.tolist() == [layer.rows.sum(0).tolist() for layer in layers]
                assert sample["replicas"][0] == [layer.placement.num_replicas for layer in layers], (workload, system)


def test_free_links_bring_nothing() -> None:
    rows, gradient = torch.ones(3, 2), torch.ones(4)
    with systems.free_links():
        arrived = collectives.all_to_all(rows, [1, 2], [2, 3], SINGLE)
        collectives.all_reduce(gradient, SINGLE)
    assert arrived.shape == (5, 2) and not arrived.any()
    assert gradient.all()
    assert torch.equal(collectives.all_to_all(rows, [3], [3], SINGLE), rows), "only inside the block"


def test_buckets_are_scaled_with_the_matrices() -> None:
    paper, here = 4 * 768 * 768, shapes.SHAPES["gpt-moe-s"].hidden
    assert shapes.BUCKET_MB / (4 * here * here) == 25 / paper


# --- figures of made-up samples with known answers ---

# The cell of most tests: one of Hecate beside static EP.
ZIPF = "zipf"


def sample(seconds: float, **more: Any) -> dict[str, Any]:
    return {"seconds": seconds, "moves": 0.0, "sent": [4, 2], "cpu": [0.1, 0.2], "process": [0.1, 0.2], **more}


def launch(samples: dict[str, list[dict[str, Any]]], workload: str = ZIPF, **more: Any) -> dict[str, Any]:
    return {"samples": {workload: samples}, "bytes": dict.fromkeys(samples, 100), **more}


def cell(*launches: dict[str, Any]) -> dict[str, Any]:
    return {"cell": {"shape": "gpt-moe-s"}, "launches": list(launches)}


def steps(*seconds: float) -> list[dict[str, Any]]:
    return [sample(value) for value in seconds]


def test_a_line_is_the_median_over_launches_with_their_range() -> None:
    found = cell(
        # A slow step counts as what it takes: 12 / 6, where most rounds say 4.
        launch({"static EP": steps(4, 4, 4), "hecate": steps(1, 1, 4)}),
        launch({"static EP": steps(4, 4, 4), "hecate": steps(1, 1, 1)}),
        launch({"static EP": steps(3, 3, 3), "hecate": steps(1, 1, 1)}),
    )
    line = figures.line_of(found, ZIPF, "hecate")
    assert line["speed-up"] == (2, 3, 4, 3) and str(line["speed-up"]) == "3.00 (2.00 - 4.00)"
    assert line["seconds"] == (1, 1, 2, 3)
    single = figures.line_of(cell(found["launches"][0]), ZIPF, "hecate")
    assert str(single["speed-up"]) == "2.00", "one launch has no range"


def test_moves_are_in_the_seconds() -> None:
    moving = [sample(1.0, moves=0.5), sample(1.25, moves=0.5), sample(0.75, moves=0.5)]
    line = figures.line_of(cell(launch({"static EP": steps(3, 3, 3), "SmartMoE": moving})), ZIPF, "SmartMoE")
    assert line["seconds"].middle == 1.5 and line["moves"] == 0.5 and line["speed-up"].middle == 2.0


def test_the_summary_compares_the_same_steps() -> None:
    samples = {"static EP": steps(2, 6, 2), "hecate": steps(1, 2, 2), "LAER": steps(2, 2, 1.5)}
    samples |= {"hecate (auto)": steps(0.25, 0.5, 0.5), "bound: free links": steps(0.1, 0.1, 0.1)}
    again = {"static EP": steps(3), "hecate": steps(1), "LAER": steps(2), "hecate (auto)": steps(0.75)}
    (line,) = report.summary({"one": cell(launch(samples), launch(again))}).splitlines()[2:]
    assert line == ("| one | zipf | 2.50 (2.00 - 3.00) | - | LAER: 1.55 (1.10 - 2.00) | 0.50 (0.25 - 0.75) | - |")


def test_balance_and_memory_of_a_line() -> None:
    uneven = [sample(2.0, rows=[[30], [10]], held=[[0, 0], [0, 0]]) for _ in range(2)]
    even = [sample(1.0, rows=[[20], [20]], held=[[0, 0], [30, 10]]) for _ in range(2)]
    best, base = figures.lines_of(cell(launch({"static EP": uneven, "hecate": even})), ZIPF)
    assert best["system"] == "hecate" and best["imbalance"] == 1.0 and base["imbalance"] == 1.5
    # Slots of all layers, and the gradients of those of the largest.
    assert best["bytes"] == 170 and base["bytes"] == 100 and best["sent"] == 4


def test_cpu_time_is_of_the_rank_with_most() -> None:
    found = [sample(1.0, cpu=[0.1, 0.2], process=[0.5, 0.3]), sample(1.0, cpu=[0.1, 0.4], process=[0.5, 0.5])]
    line = figures.line_of(cell(launch({"static EP": found})), ZIPF, "static EP")
    assert line["cpu"] == pytest.approx(0.3) and line["beside"] == pytest.approx(0.4)


def test_what_bounds_a_step() -> None:
    waits = {"rows": [0.4, 0.2], "counts": [0.2, 0.2], "experts": [0.0, 0.0], "dense gradients": [0.0, 0.2]}
    ours = [sample(2.0, moves=0.5, rows=[[1], [1]], waits=waits)]
    free = [sample(0.5)]
    found = cell(launch({"static EP": steps(5), "hecate": ours, "bound: free links": free}))
    line = figures.line_of(found, ZIPF, "hecate")
    assert line["bound"] == 0.2
    assert line["waits"] == pytest.approx({"rows": 0.15, "counts": 0.1, "experts": 0.0, "dense gradients": 0.05})
    assert "| one | zipf | 0.20 | 15 / 10 / 0 / 5 | 70 |" in report.bounds_table({"one": found})
    assert figures.waits_of(found, ZIPF, "static EP") is None, "as a system that is not on the engine"


def test_means_are_geometric_and_apart_for_even_routing() -> None:
    def one(workload: str, other: float, large: float | None = None) -> dict[str, Any]:
        samples = {"static EP": steps(other), "LAER": steps(other), "hecate": steps(1)}
        if large is not None:
            samples["hecate (LAER's memory)"] = steps(large)
        made = launch(samples, workload)
        made["bytes"]["LAER"] = 200
        return cell(made)

    measured = {"a": one("zipf", 2), "b": one("drift", 8, large=4), "c": one("balanced", 3)}
    found = {(mean.other, mean.ours): mean for mean in figures.means(measured)}
    laer = found["LAER", "hecate"]
    assert laer.skewed == pytest.approx(4) and laer.even == pytest.approx(3) and laer.lines == (2, 1)
    assert laer.memory == pytest.approx(2)
    large = found["LAER", "hecate (LAER's memory)"]
    assert large.skewed == pytest.approx(2) and large.even is None
    assert not any(other in figures.OWN for other, _ in found)
    assert "| LAER | hecate | 4.00 (2 lines) | 3.00 (1 line) | 2.00 |" in report.means_table(measured)


def test_every_system_has_a_note_on_overlap() -> None:
    assert set(cells.OVERLAPS) == {*cells.EXTERNAL, cells.IN_NODES}
