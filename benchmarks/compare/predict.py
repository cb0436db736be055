"""Does ``hecate simulate`` predict what was measured?

    python -m benchmarks.compare.predict benchmarks/results     all cells of a folder; a minute for each launch

The simulated cluster has the links that the emulated one was given, the rates that its ranks measured with their
quota outside of training, and no number that was fitted to the steps. Each launch is predicted from its own rates.
Moves between steps are on neither side. The simulator does not predict planning: its CPU time is what ranks spent on
it in these steps. So the same samples give the same numbers on any machine. Written are simulated.json and
simulated.md in that folder, by default build/benchmarks.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import hecate
from benchmarks.compare import routing, shapes, store, systems
from benchmarks.compare.figures import Spread
from benchmarks.compare.machine import pace_of
from benchmarks.compare.rank import MANY
from benchmarks.compare.workloads import counts_of
from benchmarks.emulator.quota import QUOTA_US
from benchmarks.results_folder import results_folder
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.planner import Rates
from hecate.runtime.placement.policy import Policy, Static
from hecate.simulator import Capture, ClusterSpec, Simulator, capture, walk
from hecate.simulator.program import Start
from hecate.simulator.replay import LayerStep
from hecate.simulator.step import UPDATE_PASSES, PredictedSpan, Prediction
from hecate.simulator.workloads import make

# Of a packet of 1,514 bytes, headers of Ethernet, IP and TCP leave this part.
PAYLOAD = 1448 / 1514
# The shape on which the simulator was built, and its rates were chosen. All others were predicted afterwards.
TUNED_ON = "gpt-moe-s"
# What others are held against.
REFERENCE = "static EP"


def cluster_of(launch: dict[str, Any], shape: shapes.Shape) -> ClusterSpec:
    """The emulated cluster, as its ranks measured it outside of training.

    Experts cross a node's link at the rate that it was given, less what headers take. Exchanges of rows reach less of
    it, as measured; where a chain of them came out faster than its link, part of their latency was hidden, and the
    link's rate is taken. Rates of compute are those of single operators; a whole graph takes longer.
    By how much, a model of the same shape says that exchanges nothing, once with the rows of a rank and once with
    four times as many. What static EP's step takes beyond that, with even routing and on links that take no time, is
    what collectives cost their ranks; less what a rank gets for nothing each time it waited, a quota of CPU time.
    Every collective is taken to be waited for. Half a millisecond in which static EP plans is in there and in
    :func:`planned`.
    """
    rates, link = launch["machine"], PAYLOAD * launch["link"]
    rates = rates | {"node_bytes": link, "crowded": min(1.0, rates["node_bytes"] / link)}
    measured = ClusterSpec(name="emulated", nodes=shapes.NODES, gpus=shapes.RANKS_PER_NODE, cpus=True, **rates)
    alone = launch["alone"]
    few, many = (_seconds_alone(shape, times, measured) for times in (1, MANY))
    rows = (many - few) / (MANY - 1)
    per_row = (alone["many"] - alone["step"]) / (many - few)
    slower = (alone["step"] - per_row * rows) / (few - rows)
    parts = Simulator(_capture(shape, measured, Static()), measured).parts
    starts = sum(isinstance(item, Start) for _, items in parts for item in items)
    # Counts travel in these steps too, once a layer.
    beyond = alone["free"] - alone["step"] - alone["update"] - shape.layers * measured.latency
    # A rank that waited has a whole quota. Periods begin at different times, so the slowest of all ranks gains less.
    ranks = measured.ranks
    lost = QUOTA_US / 1e6 / shapes.CORES / 2 * (ranks - 1) / (ranks + 1)
    for_nothing = QUOTA_US / 1e6 * (1 / shapes.CORES - 1) - lost
    # In the steps on free links ranks wait for counts only.
    start = (beyond - (starts - shape.layers) * for_nothing) / starts
    return replace(
        measured,
        flops=measured.flops / slower,
        memory_bytes=measured.memory_bytes / slower,
        operator=measured.operator * slower,
        routed=per_row / slower,
        start=max(0.0, start),
    )


def _seconds_alone(shape: shapes.Shape, times: int, cluster: ClusterSpec) -> float:
    """What the simulator says of a model that exchanges nothing."""
    one, small = replace(cluster, nodes=1, gpus=1), systems.alone(shape, times)
    made = _capture(small, one, Static())
    even = make("balanced", steps=1, layers=shape.layers, ranks=1, experts=small.experts, rows=small.rows)
    ((_, (routed,)),) = walk(
        Static(),
        even[None],
        [layer.owners for layer in made.layers],
        topology=one.topology,
        rates=one.rates,
        sizes=made.sizes,
    )
    return Simulator(made, one).step(routed).seconds


def _capture(
    shape: shapes.Shape, cluster: ClusterSpec, policy: Policy, rates: Rates | None = None, system: str = ""
) -> Capture:
    ids = torch.zeros(shape.sequences, shape.sequence, dtype=torch.int64)
    with routing.replayed_routers():
        model = shapes.build(shape)
        routing.prepare(model, shape.tokens)
        config = hecate.Config(policy=policy, replicas=systems.REPLICAS, rates=rates, **systems.options(system))
        return capture(model, {"input_ids": ids, "labels": ids}, cluster, config)


def predict(cell: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Predicted seconds of every launch: workload -> system -> seconds."""
    shape = shapes.SHAPES[cell["cell"]["shape"]]
    found = [predict_launch(shape, cell["cell"]["systems"], launch) for launch in cell["launches"]]
    return {
        workload: {name: [one[workload][name] for one in found] for name in seconds}
        for workload, seconds in found[0].items()
    }


def predict_launch(shape: shapes.Shape, names: Sequence[str], launch: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Median predicted seconds over the steps of a launch."""
    cluster = cluster_of(launch, shape)
    captured: dict[Any, Capture] = {}
    found: dict[str, dict[str, float]] = {workload: {} for workload in launch["samples"]}
    # Bytes whose update takes as long as it was measured to.
    update = launch["alone"]["update"] * cluster.memory_bytes / UPDATE_PASSES
    rates = Rates(**launch["rates"])
    for name, policy in systems.policies(shape).items():
        if name not in names:
            continue
        key = (policy.replicates, policy.calibrates, str(systems.options(name)))
        if key not in captured:
            captured[key] = _capture(shape, cluster, policy, rates, name)
        made = captured[key]
        for workload in found:
            counts = counts_of(workload, shape, cluster.ranks, launch["seed"])
            samples = launch["samples"][workload][name]
            steps = [sample["step"] for sample in samples]
            owners = [Owners.contiguous(shape.experts, cluster.ranks)] * shape.layers
            # A policy remembers steps, so each workload gets its own.
            walked = walk(
                copy.deepcopy(policy),
                counts[None],
                owners,
                topology=cluster.topology,
                rates=rates,
                sizes=made.sizes,
                steps=steps,
            )
            done = [
                beside(Simulator(made, _slowed(cluster, times)), layers, update, launch["alone"]["beside"])
                for (_, (layers,)), times in zip(walked, paces(launch, workload, name), strict=True)
            ]
            found[workload][name] = statistics.median(
                one.seconds + planned(sample["planning"], one.spans, shape.layers)
                for sample, one in zip(samples, done, strict=True)
            )
    return found


def paces(launch: Mapping[str, Any], workload: str, system: str) -> list[float]:
    """How many times as long compute took around each step of a system as when rates were measured.

    Between steps ranks time a model that exchanges nothing: one without the engine, in older launches one on it. Of
    each rank the times right before and right after a step count. In older launches it was timed before a round only,
    and their rounds are taken together; launches from before say 1.
    """
    timed = launch.get("pace", {}).get(workload)
    samples = launch["samples"][workload][system]
    if not timed:
        return [1.0] * len(samples)
    alone = launch["alone"]
    usual = float(alone.get("plain", alone["step"]))
    around = [timed[s["turn"] : s["turn"] + 2] if "turn" in s else timed for s in samples]
    return [pace_of(times) / usual for times in around]


def beside(simulator: Simulator, layers: Sequence[LayerStep], update: float, times: float) -> Prediction:
    """A step of the emulated cluster, whose ranks compute more slowly while rows travel.

    How long rows do, a step at full speed says. Transfers of experts and of gradients are not counted: the slow-down
    was measured beside exchanges of rows, and on the shape that the simulator was tuned on steps with replicas come
    out too slow if it is taken for all that travels.

    Args:
        times: as long as compute takes then (``benchmarks.compare.machine.measure_beside``).
    """
    first = simulator.step(layers, update=update)
    rows = [(span.begun, span.ended) for span in first.spans if "exchange" in span.operator]
    travels = covered(rows) / first.seconds
    slower = copy.copy(simulator)
    slower.cluster = _slowed(simulator.cluster, 1 + (times - 1) * travels)
    return slower.step(layers, update=update)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans is under way."""
    total, until = 0.0, 0.0
    for begun, ended in sorted(spans):
        total += max(0.0, ended - max(begun, until))
        until = max(until, ended)
    return total


def _slowed(cluster: ClusterSpec, times: float) -> ClusterSpec:
    return replace(
        cluster,
        flops=cluster.flops / times,
        memory_bytes=cluster.memory_bytes / times,
        operator=cluster.operator * times,
        start=cluster.start * times,
    )


def planned(planning: Mapping[str, Sequence[float]], spans: Sequence[PredictedSpan], layers: int) -> float:
    """Seconds by which planning makes a step longer on a rank.

    The next step is planned while a layer's rows are on their way to experts; only what takes longer counts. The
    rest of planning is in the way of the exchange.

    Args:
        planning: CPU seconds of a policy's calls, of every rank, ``before`` the gate and ``after`` it. A rank has
            only a share of a core. Layers are taken to be alike, and the median rank counts.
        spans: of the predicted step.
        layers: of the model.
    """
    before, after = (statistics.median(planning[when]) / shapes.CORES for when in ("before", "after"))
    going = ("exchange", "exchange_nodes")
    chunks = [s.ended - s.begun for s in spans if s.part == "forward" and s.operator in going]
    # The first chunk of each layer.
    there = chunks[:: max(1, len(chunks) // layers)]
    return sum(max(0.0, before / layers - seconds) for seconds in there) + after


def measured_seconds(cell: dict[str, Any], workload: str, system: str) -> Spread:
    """Median over launches of their medians, with the range of launches; a single launch has quartiles instead."""
    launches = [[x["seconds"] for x in launch["samples"][workload][system]] for launch in cell["launches"]]
    if len(launches) > 1 or len(launches[0]) < 2:
        return Spread.of([statistics.median(seconds) for seconds in launches])
    low, middle, high = statistics.quantiles(launches[0], n=4, method="inclusive")
    return Spread(low, middle, high, 1)


def relative(seconds: Mapping[str, Sequence[float]], system: str) -> float:
    """Of static EP's time, the part that ``system`` takes: the median over launches."""
    return statistics.median(a / b for a, b in zip(seconds[system], seconds[REFERENCE], strict=True))


def measured_relative(cell: dict[str, Any], workload: str, system: str) -> float:
    """The same of what was measured."""
    taken = {
        name: [
            statistics.median(x["seconds"] for x in launch["samples"][workload][name]) for launch in cell["launches"]
        ]
        for name in (system, REFERENCE)
    }
    return relative(taken, system)


def errors(cells: dict[str, Any], predicted: dict[str, Any]) -> dict[str, float]:
    """Median and worst relative error, and the share of pairs of systems that come in the measured order.

    Of seconds (``median``, ``worst``), and of times over static EP's in the same launch (``relative``,
    ``relative_worst``): a machine that is not as fast while rates are measured as it is later is in the first only.
    Pairs count where what was measured does not overlap.
    """
    off, off_relative, right = [], [0.0], []
    for name, by_workload in predicted.items():
        for workload, found in by_workload.items():
            measured = {s: measured_seconds(cells[name], workload, s) for s in found}
            seconds = {s: statistics.median(launches) for s, launches in found.items()}
            off += [abs(seconds[s] / measured[s].middle - 1) for s in found]
            off_relative += [
                abs(relative(found, s) / measured_relative(cells[name], workload, s) - 1)
                for s in found
                if s != REFERENCE and REFERENCE in found
            ]
            right += [
                seconds[a] < seconds[b] for a in seconds for b in seconds if measured[a].most < measured[b].least
            ]
    return {
        "median": statistics.median(off),
        "worst": max(off),
        "order": statistics.mean(right) if right else 1.0,
        "relative": statistics.median(off_relative[1:] or off_relative),
        "relative_worst": max(off_relative),
    }


def said_of(cells: dict[str, Any], predicted: dict[str, Any]) -> list[str]:
    """The errors in words: of all cells, and of those that the simulator was not tuned on."""
    kinds = {
        "All cells": predicted,
        "Tuned on": {n: found for n, found in predicted.items() if cells[n]["cell"]["shape"] == TUNED_ON},
        "Not tuned on": {n: found for n, found in predicted.items() if cells[n]["cell"]["shape"] != TUNED_ON},
    }
    lines = []
    for kind, part in kinds.items():
        if part:
            found = errors(cells, part)
            count = sum(len(seconds) for by_workload in part.values() for seconds in by_workload.values())
            lines.append(
                f"- {kind} ({', '.join(part)}; {count} lines): median error {found['median']:.1%}, worst "
                f"{found['worst']:.1%}; over static EP's time {found['relative']:.1%}, worst "
                f"{found['relative_worst']:.1%}; {found['order']:.0%} of pairs in the measured order."
            )
    return lines


def markdown(cells: dict[str, Any], predicted: dict[str, Any]) -> str:
    """Predicted beside measured seconds, and how far they are apart."""
    lines = [
        "# Simulated steps beside measured ones",
        "",
        "Made by `python -m benchmarks.compare.predict`. Seconds of a step without moves between steps, over the",
        "same steps of the traces: the median over launches of their medians. Nothing was fitted to these steps:",
        "rates are what the ranks measured outside of them. Planning is not predicted: what it took ranks in these",
        "steps is added where it does not hide. Which rates are measured, and how, was chosen on",
        f"{TUNED_ON}. Pairs of systems count where the ranges of their launches do not overlap; of a single launch,",
        "its quartiles. *Over static EP*: the median over launches of a step's time over static EP's in the same",
        "launch. The machine is not equally fast in all minutes of a launch, so seconds are off by what it was",
        "slower or faster while rates were measured, and this is not.",
        "",
        *said_of(cells, predicted),
        "",
        "| cell | workload | system | measured, s | simulated, s | | over static EP, measured | simulated | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, by_workload in predicted.items():
        for workload, found in by_workload.items():
            for system, launches in found.items():
                measured = measured_seconds(cells[name], workload, system).middle
                value = statistics.median(launches)
                real, simulated = measured_relative(cells[name], workload, system), relative(found, system)
                lines.append(
                    f"| {name} | {workload} | {system} | {measured:.3f} | {value:.3f} | {value / measured - 1:+.1%} "
                    f"| {real:.3f} | {simulated:.3f} | {simulated / real - 1:+.1%} |"
                )
    return "\n".join(lines) + "\n"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else results_folder()
    cells = store.load(folder)
    if not cells:
        raise SystemExit(f"compare: no compare.*.json in {folder}; python -m benchmarks.compare measures them")
    predicted = {name: predict(cell) for name, cell in cells.items()}
    (folder / "simulated.json").write_text(json.dumps(predicted, indent=1) + "\n")
    (folder / "simulated.md").write_text(markdown(cells, predicted))
    print((folder / "simulated.md").read_text())


if __name__ == "__main__":
    main()
