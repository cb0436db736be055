"""Run a trace through a policy, step by step: who holds what, which rows go where, and how long that takes."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import CostModel, LayerSizes, Rates
from hecate.runtime.placement.policy import LayerView, Policy
from hecate.runtime.placement.topology import Topology

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LayerStep:
    """The routing of one layer in one step, with the placement before the gate (``planned``) and after it.

    ``rows`` go from each rank to each, int64 ``[W, W]``; ``computed`` are those of each expert on each rank, int64
    ``[E, W]``; ``moved`` experts changed owners before this step.
    """

    planned: Placement
    placement: Placement
    rows: Ints
    computed: Ints
    moved: int


def walk(
    policy: Policy,
    counts: Ints,
    owners: Sequence[Owners],
    *,
    topology: Topology,
    rates: Rates,
    sizes: Sequence[LayerSizes],
    steps: Sequence[int] | None = None,
) -> Iterator[tuple[int, list[list[LayerStep]]]]:
    """Run ``policy`` through counts, int64 ``[group, step, layer, rank, expert]``; it sees earlier steps only.

    Yields the number of each of ``steps``, and its layers by group; in others rows are not split, which is most of
    the work. Each group makes placements of its own in its ``topology``; the first chooses the owners of all, from
    their mean load.
    """
    groups, count, layers = counts.shape[:3]
    current, policies = list(owners), [policy, *(copy.deepcopy(policy) for _ in counts[1:])]
    # The last is the mean of groups.
    recent: list[list[deque[Any]]] = [[deque(maxlen=policy.window) for _ in owners] for _ in range(groups + 1)]
    total, seen = np.zeros((layers, counts.shape[4]), dtype=np.int64), 0
    wanted = None if steps is None else set(steps)

    def view(group: int, layer: int) -> LayerView:
        return LayerView(
            id=layer,
            owners=current[layer],
            loads=tuple(recent[group][layer]),
            long_load=total[layer] // max(1, seen),
            topology=topology,
            sizes=sizes[layer],
            rates=rates,
        )

    for step in range(count):
        moved = [0] * layers
        if policy.reshard_every and step and step % policy.reshard_every == 0:
            new = policy.choose_owners([view(groups, layer) for layer in range(layers)])
            moved = [
                sum(a != b for a, b in zip(o.ranks, n.ranks, strict=True)) for o, n in zip(current, new, strict=True)
            ]
            current, total, seen = new, np.zeros_like(total), 0
        found: list[list[LayerStep]] = [[] for _ in policies]
        for layer in range(layers):
            for group, own in enumerate(policies):
                rows, known = counts[group, step, layer], view(group, layer)
                planned = own.place(known)
                if wanted is None or step in wanted:
                    found[group].append(_layer_step(own, known, planned, rows, moved[layer]))
                recent[group][layer].append(rows.sum(0))
            mean = counts[:, step, layer].sum((0, 1)) // groups
            recent[groups][layer].append(mean)
            total[layer] += mean
        seen += 1
        if found[0]:
            yield step, found


def _layer_step(policy: Policy, view: LayerView, planned: Placement, counts: Ints, moved: int) -> LayerStep:
    placement = policy.calibrate(view, planned, counts) if policy.calibrates else planned
    world_size = view.topology.world_size
    rows, computed = np.empty((world_size, world_size), dtype=np.int64), np.zeros_like(counts.T)
    for rank in range(world_size):
        sends = policy.assign(view, placement, counts, rank).sends
        rows[rank] = sends.sum(0)
        computed += sends
    return LayerStep(planned=planned, placement=placement, rows=rows, computed=computed, moved=moved)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The model and the machine that a trace is of."""

    sizes: tuple[LayerSizes, ...]
    rates: Rates
    topology: Topology


def load_recorded(path: Path) -> Recorded:
    """Read the notes of ``hecate.record`` on the model and the machine; ValueError if there are none."""
    of_layer, of_machine = ([field.name for field in fields(kind)] for kind in (LayerSizes, Rates))
    try:
        with np.load(path) as archive:
            sizes, rates, nodes = (archive[name].tolist() for name in ("sizes", "rates", "nodes"))
        return Recorded(
            sizes=tuple(LayerSizes(**dict(zip(of_layer, line, strict=True))) for line in sizes),
            rates=Rates(**dict(zip(of_machine, rates, strict=True))),
            topology=Topology(tuple(nodes)),
        )
    except (OSError, KeyError, ValueError, TypeError, EOFError, BadZipFile) as error:
        raise ValueError(
            f"{path} does not say what model it is of ({error}): hecate.record writes that since 0.1.0. "
            "python -m benchmarks.replay plays any trace back with the sizes of the paper's model."
        ) from None


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The result of one policy for a trace: ``rows`` ``[step, layer, rank]``, the rest ``[step, layer]``.

    Rows that leave their node are ``crossing``; ``moved`` counts experts that changed owners. Of the predicted
    ``seconds``, replicas travel exposed in ``transfers``; ``moves`` are further ones, hidden behind nothing, in which
    experts move with optimizer states.
    """

    rows: np.ndarray[Any, Any]
    replicas: np.ndarray[Any, Any]
    crossing: np.ndarray[Any, Any]
    moved: int
    seconds: np.ndarray[Any, Any]
    transfers: np.ndarray[Any, Any]
    moves: np.ndarray[Any, Any]

    def mean_seconds(self, first: int = 0) -> float:
        """Return the mean of a layer and step from step ``first`` on, with its share of all moves, earlier or not."""
        return float(self.seconds[first:].mean() + self.moves.mean())

    @property
    def imbalance(self) -> np.ndarray[Any, Any]:
        """Rows of the busiest rank over the mean, ``[step, layer]``; 1 for a step without rows."""
        mean = self.rows.mean(-1)
        return np.where(mean > 0, self.rows.max(-1) / np.maximum(mean, 1e-9), 1.0)


def replay(
    counts: np.ndarray[Any, Any],
    owners: np.ndarray[Any, Any],
    policy: Policy,
    topology: Topology,
    *,
    rates: Rates,
    sizes: Sequence[LayerSizes],
    keeps_states: bool = False,
) -> Replay:
    """Run ``policy`` through counts, int64 ``[step, layer, rank, expert]``, from owners ``[layer, expert]``.

    With ``keeps_states`` replicas stay from step to step, with optimizer states, which travel when one is made.
    """
    steps, layers, ranks, _ = counts.shape
    rows = np.zeros((steps, layers, ranks), dtype=np.int64)
    replicas, crossing = np.zeros((steps, layers), dtype=np.int64), np.zeros((steps, layers), dtype=np.int64)
    seconds, exposed, moves = (np.zeros((steps, layers)) for _ in range(3))
    moved = 0
    start = [Owners(tuple(line.tolist()), ranks) for line in owners]
    costs = [CostModel(topology=topology, sizes=one, rates=rates) for one in sizes]
    last = [Placement.owned(one) for one in start]
    same_node = topology.nodes[:, None] == topology.nodes[None, :]
    for step, (routed,) in walk(policy, counts[None], start, topology=topology, rates=rates, sizes=sizes):
        for layer, made in enumerate(routed):
            moved += made.moved
            moves[step, layer] = _move_seconds(last[layer], made.planned, costs[layer], keeps_states)
            last[layer] = made.planned
            # Replicas that are added after the gate hide behind nothing.
            planned, late = made.planned, 0.0
            if made.placement is not planned:
                travel = [costs[layer].replica_seconds(p) for p in (planned, made.placement)]
                late = max(0.0, travel[1] - travel[0])
            rows[step, layer], replicas[step, layer] = made.rows.sum(0), made.placement.num_replicas
            crossing[step, layer] = made.rows[~same_node].sum()
            split = [made.computed[e, list(held)].tolist() for e, held in enumerate(made.placement.holders)]
            total = counts[step, layer].sum(0).tolist()
            time = costs[layer].step(total, split, made.placement)
            exposed[step, layer] = max(0.0, time.experts - late - rates.hidden_seconds) + late
            seconds[step, layer] = time.compute + time.rows + exposed[step, layer]
    return Replay(
        rows=rows, replicas=replicas, crossing=crossing, moved=moved, seconds=seconds, transfers=exposed, moves=moves
    )


def _move_seconds(before: Placement, after: Placement, costs: CostModel, keeps_states: bool) -> float:
    """Predict the seconds in which experts move to new owners; with ``keeps_states`` to all ranks without a copy."""
    if not keeps_states:
        return costs.reshard_seconds(before.owners, after.owners)
    nodes, sources, destinations = costs.topology.node_of, [], []
    for had, have in zip(before.holders, after.holders, strict=True):
        for rank in set(have) - set(had):
            sources.append(min(had, key=lambda copy: (nodes[copy] != nodes[rank], copy)))
            destinations.append(rank)
    return costs.move_seconds(np.asarray(sources, dtype=np.int64), np.asarray(destinations, dtype=np.int64))
