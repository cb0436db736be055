"""Compare policies on one cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from torch import nn

from hecate.config import Config
from hecate.runtime.placement.policy import Policy
from hecate.runtime.state.overlap_window import dense_seconds
from hecate.simulator.capture import Capture, capture
from hecate.simulator.cluster import ClusterSpec
from hecate.simulator.live_bytes import LiveBytes, count_memory
from hecate.simulator.replay import LayerStep, walk
from hecate.simulator.step import Simulator
from hecate.simulator.workloads import Counts

# Steps that a policy has seen before the first that is simulated, and steps of a made-up workload: more than lie
# between two re-shardings.
HISTORY, STEPS = 20, 150

Build = Callable[[], tuple[nn.Module, Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that are the same for all policies, each of which takes the place of the config's own.

    ``steps`` are spread over the trace; ``optimizer_bytes`` are of one parameter besides itself and its gradient.
    """

    config: Config = field(default_factory=Config)
    steps: int = 3
    optimizer_bytes: float = 8.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a policy on a cluster: means over the simulated steps, each of them of the slowest group.

    Attributes:
        seconds, waited: seconds of a step, and in which the rank that computes least stands still.
        imbalance: rows of the busiest rank over the mean.
        replicas: replicas on all ranks, per layer.
        node_bytes: bytes that leave the node that sends most in a step.
        states, slot_bytes: memory of the rank with most; gradients count as states.
        peak, mean_peak: most bytes at one time, of the rank with most and of all on average (``live_bytes``).
        activations, mean_activations: the same without states, gradients and replicas.
    """

    cluster: str
    policy: str
    seconds: float
    imbalance: float
    waited: float
    replicas: float
    node_bytes: float
    states: float
    slot_bytes: float
    peak: float
    mean_peak: float
    activations: float
    mean_activations: float


def study(
    build: Build,
    cluster: ClusterSpec,
    policies: Mapping[str, Policy],
    routing: Callable[[Capture], Counts],
    options: Options,
) -> list[Result]:
    """Simulate every policy with the same model and routing, ``[step, layer, rank, expert]`` for a captured model.

    ``build`` makes the model and a batch of one rank; it is called once for each kind of graph.
    """
    captured: dict[Any, Capture] = {}
    results = []
    for name, policy in policies.items():
        kind = policy.replicates, policy.calibrates
        if kind not in captured:
            model, inputs = build()
            captured[kind] = capture(model, inputs, cluster, replace(options.config, policy=policy))
        results.append(_run(captured[kind], cluster, name, policy, routing, options))
    return results


def _run(
    made: Capture,
    cluster: ClusterSpec,
    name: str,
    policy: Policy,
    routing: Callable[[Capture], Counts],
    options: Options,
) -> Result:
    counts = routing(made)
    first = min(HISTORY, len(counts) - 1)
    # Drawn, because steps at equal distances would meet a workload's and a policy's own periods.
    later = np.random.default_rng(0).permutation(np.arange(first, len(counts)))[: options.steps]
    wanted = sorted(later.tolist())
    hidden = dense_seconds(made.tokens, made.dense_parameters, len(made.layers), cluster.flops)
    size = cluster.ranks // made.groups
    walked = walk(
        policy,
        np.stack(np.split(counts[: wanted[-1] + 1], made.groups, axis=2)),
        [layer.owners for layer in made.layers],
        topology=cluster.of_group(size).topology,
        rates=replace(cluster.rates, hidden_seconds=hidden),
        sizes=made.sizes,
        steps=wanted,
    )
    simulator, live, found = Simulator(made, cluster), LiveBytes(made), []
    for _, groups in walked:
        each = [_result(name, routed, made, cluster, simulator, live, options) for routed in groups]
        slowest = max(each, key=lambda one: one.seconds)
        replicas = sum(one.replicas for one in each)
        found.append(replace(slowest, replicas=replicas, imbalance=max(one.imbalance for one in each)))
    numbers = [key for key, value in asdict(found[0]).items() if isinstance(value, float)]
    means: dict[str, Any] = {key: float(np.mean([getattr(one, key) for one in found])) for key in numbers}
    return replace(found[0], **means)


def _result(
    name: str,
    routed: Sequence[LayerStep],
    made: Capture,
    cluster: ClusterSpec,
    simulator: Simulator,
    live: LiveBytes,
    options: Options,
) -> Result:
    """Return the result of one step, of one group."""
    update = made.dense_bytes + sum(
        np.asarray(step.placement.owners.counts, dtype=np.float64) * layer.sizes.expert_bytes
        for step, layer in zip(routed, made.layers, strict=True)
    )
    predicted = simulator.step(routed, update=update)
    memory = count_memory(
        made, routed, optimizer_bytes=options.optimizer_bytes, rematerialize=options.config.rematerialize
    )
    held = live.step(routed, optimizer_bytes=options.optimizer_bytes)
    loads = [step.computed.sum(0) for step in routed]
    return Result(
        cluster=cluster.name,
        policy=name,
        seconds=predicted.seconds,
        waited=float(predicted.waited.max()),
        imbalance=float(np.mean([load.max() / max(1e-9, load.mean()) for load in loads])),
        replicas=float(np.mean([step.placement.num_replicas for step in routed])),
        node_bytes=float(predicted.sent.max()),
        states=memory.states,
        slot_bytes=memory.slots,
        peak=float(held.peak.max()),
        mean_peak=float(held.peak.mean()),
        activations=float(held.most_activations.max()),
        mean_activations=float(held.most_activations.mean()),
    )
