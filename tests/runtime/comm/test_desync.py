"""Ranks that do different things: each is told which rank, layer and step, long before the group's timeout."""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hecate.runtime.comm import heartbeat, supervise, watch
from hecate.runtime.comm.collectives import all_reduce
from hecate.runtime.comm.history import Call, History, as_plain, first_difference, from_plain, labelled, proven
from hecate.runtime.comm.world import World
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.policy import LayerView, Policy, Static
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state.layer import Layer
from hecate.runtime.state.placer import Placer
from tests.support.extent import ALL
from tests.support.layers import add_layer
from tests.support.ranks import run_ranks

_LAYERS, _EXPERTS, _WIDTH, _STEPS = 3, 6, 4, 4
# The timeout of the groups, and what a desync may take to be named.
_TIMEOUT, _SOON = 60, 20


# --- the comparison itself ---


def call(number: int, label: str = "exchange of a, step 0", **others: Any) -> Call:
    return Call(**{"number": number, "kind": "all_to_all", "label": label, "size": "4 float32", **others})


def test_equal_histories_and_slow_ranks_contradict_nothing() -> None:
    calls = [call(n, send=[2, 2], receive=[2, 2]) for n in range(5)]
    assert first_difference({0: calls, 1: calls}) is None
    assert first_difference({0: calls, 1: calls[:2]}) is None
    assert first_difference({0: calls, 1: []}) is None
    assert first_difference({0: calls[3:], 1: calls[:2]}) is None


def test_the_first_other_collective_is_named_with_those_that_are_in_it() -> None:
    calls = [call(n, f"exchange of {name}, step 3") for n, name in enumerate("abcd")]
    swapped = [*calls[:1], call(1, "exchange of c, step 3"), call(2, "exchange of b, step 3"), calls[3]]
    message = first_difference({0: calls, 1: swapped, 2: calls}) or ""
    assert "collective 1 since" in message
    assert "ranks 0, 2: exchange of b, step 3\n  rank 1: exchange of c, step 3" in message


def test_another_size_or_kind_is_a_difference_too() -> None:
    message = first_difference({0: [call(0)], 1: [call(0, size="8 float32")]}) or ""
    assert "rank 0: exchange of a, step 0 (all_to_all of 4 float32)" in message
    assert "rank 1: exchange of a, step 0 (all_to_all of 8 float32)" in message
    message = first_difference({0: [call(0, "")], 1: [call(0, "", kind="all_reduce")]}) or ""
    assert "rank 0: all_to_all of 4 float32\n  rank 1: all_reduce of 4 float32" in message


def test_splits_that_do_not_fit_are_named_pair_by_pair() -> None:
    first, second = call(0, send=[1, 5], receive=[1, 3]), call(0, send=[3, 2], receive=[4, 2])
    message = first_difference({0: [first], 1: [second]}) or ""
    assert "rank 0 sends 5 rows to rank 1, which expects 4, in exchange of a, step 0" in message
    assert "rank 1 sends" not in message
    assert first_difference({0: [first], 1: [call(0, send=[3, 2], receive=[5, 2])]}) is None


def histories(splits: list[tuple[list[int], list[int]]], labels: list[str]) -> list[History]:
    made = [History("group", rank, len(splits)) for rank in range(len(splits))]
    for history, one, label in zip(made, splits, labels, strict=True):
        with labelled(label):
            history.add("all_to_all", torch.zeros(sum(one[0]), 4), one)
    return made


def test_two_numbers_prove_that_ranks_did_the_same() -> None:
    fitting = [([1, 2, 3], [1, 4, 0]), ([4, 0, 1], [2, 0, 6]), ([0, 6, 5], [3, 1, 5])]
    assert proven([one.proof for one in histories(fitting, ["x"] * 3)])
    assert not proven([one.proof for one in histories(fitting, ["x", "y", "x"])])
    # One more here and one less there: sums of rows would still be equal.
    fitting[1] = [4, 1, 0], [2, 0, 6]
    wrong = histories(fitting, ["x"] * 3)
    assert not proven([one.proof for one in wrong])
    message = first_difference({rank: one.calls for rank, one in enumerate(wrong)}) or ""
    assert "rank 1 sends 0 rows to rank 2, which expects 1" in message


def test_calls_travel_as_json_and_old_splits_are_left_out() -> None:
    calls = [call(n, send=[1, 2], receive=[3, 4]) for n in range(3)]
    assert from_plain(as_plain(calls, splits=100)) == calls
    assert [one.send for one in from_plain(as_plain(calls, splits=8))] == [None, [1, 2], [1, 2]]


# --- planted ---


@dataclass(frozen=True)
class Fault:
    """What one rank does wrong.

    Attributes:
        kind: "skip", "reorder", "plan", "splits".
        operator: which one is skipped; or how splits are wrong: the rank expects fewer rows of another than that one
            sends, or more, or one row goes to another rank.
    """

    kind: str
    operator: str
    rank: int
    layer: int
    step: int
    replicates: bool


def faults(kind: str, number: int, ranks: int) -> list[Fault]:
    draw = random.Random(f"{kind} {ranks}")
    operators = {
        "skip": ("gather_counts", "exchange", "exchange_back", "backward"),
        "splits": ("fewer", "more", "moved"),
    }
    return [
        Fault(
            kind,
            draw.choice(operators.get(kind, ("",))),
            draw.randrange(ranks),
            # What is swapped with the next one, and a plan that nobody uses, is never the last layer's.
            draw.randrange(_LAYERS - 1 if kind == "reorder" else _LAYERS),
            draw.randrange(1, _STEPS - 1),
            draw.random() < 0.5,
        )
        for _ in range(number)
    ]


class Planted(Policy):
    """Replicas by chance, the same on all ranks but for one layer of one step."""

    replicates = True

    def __init__(self, fault: Fault, rank: int) -> None:
        self.fault, self.mine, self.steps = fault, rank == fault.rank, [0] * _LAYERS

    def place(self, layer: LayerView) -> Placement:
        index = layer.id % _LAYERS
        step, self.steps[index] = self.steps[index], self.steps[index] + 1
        draw = random.Random(1000 * step + index)
        size = layer.owners.world_size
        replicas = [{rank for rank in range(size) if draw.random() < 0.4} for _ in layer.owners.ranks]
        if self.fault.kind == "plan" and self.mine and (index, step) == (self.fault.layer, self.fault.step):
            owner = layer.owners.ranks[0]
            replicas[0] = set() if replicas[0] - {owner} else {(owner + 1) % size}
        return Placement.with_replicas(layer.owners, replicas)


class Steps:
    """Forwards and backwards of a few layers, by hand, with one fault in them."""

    def __init__(self, world: World, fault: Fault) -> None:
        self.world, self.fault = world, fault
        self.policy: Policy = Planted(fault, world.rank) if fault.replicates or fault.kind == "plan" else Static()
        placer = Placer(self.policy, Topology.even(world.size, world.size), world)
        owners = Owners(tuple(expert % world.size for expert in range(_EXPERTS)), world.size)
        self.layers: list[Layer] = []
        while len(self.layers) < _LAYERS:
            name = f"blocks.{len(self.layers)}.experts"
            layer = add_layer(name=name, owners=owners, world=world, placer=placer)
            # Numbers begin where a policy can tell layers by them.
            if self.layers or layer.id % _LAYERS == 0:
                self.layers.append(layer)

    def run(self) -> None:
        for step in range(_STEPS):
            order = list(range(_LAYERS))
            at = self.fault.layer
            if self.is_here("reorder", at, step):
                order[at : at + 2] = [at + 1, at]
            tickets = {index: self.forward(index, step) for index in order}
            for index in reversed(order):
                self.backward(index, step, *tickets[index])
            all_reduce(torch.zeros(11), self.world)

    def is_here(self, kind: str, layer: int, step: int, operator: str = "") -> bool:
        fault = self.fault
        found = Fault(kind, operator, self.world.rank, layer, step, fault.replicates)
        return fault == found

    def forward(self, index: int, step: int) -> tuple[Any, ...]:
        layer, ops = self.layers[index], torch.ops.hecate
        draw = torch.Generator().manual_seed(100 * step + 10 * index + self.world.rank)
        offsets = torch.randint(1, 9, (_EXPERTS,), generator=draw).cumsum(0).to(torch.int32)
        rows = torch.randn(int(offsets[-1]), _WIDTH, generator=draw)
        shard = torch.zeros(layer.owners.counts[self.world.rank], 3)
        placement, replicas = ops.place(shard, layer.id)
        ops.sparse_all_gather([shard], placement, replicas, layer.id)
        if self.is_here("skip", index, step, "gather_counts"):
            counts = torch.diff(offsets.long(), prepend=torch.zeros(1)).long().expand(self.world.size, -1).clone()
        else:
            counts = ops.gather_counts(offsets, placement, layer.id)
        _, splits, send_index, receive_index = ops.route(
            counts, placement, offsets, len(shard) + len(replicas), 0, 1, layer.id
        )
        if self.is_here("splits", index, step, self.fault.operator):
            splits = self.wrong(splits)
            receive_index = receive_index.clamp(max=int(splits[1].sum()) - 1)
        if self.is_here("skip", index, step, "exchange"):
            arrived = rows.new_zeros((len(receive_index), _WIDTH))
        else:
            arrived = ops.exchange(rows, splits, send_index, receive_index, layer.id)
        if not self.is_here("skip", index, step, "exchange_back"):
            ops.exchange_back(arrived, splits, send_index, receive_index, len(rows), layer.id)
        return rows, placement, splits, send_index, receive_index, len(replicas)

    def wrong(self, splits: torch.Tensor) -> torch.Tensor:
        wrong, peer = splits.clone(), (self.world.rank + 1) % self.world.size
        if self.fault.operator == "moved":
            wrong[0, peer] -= 1
            wrong[0, (peer + 1) % self.world.size] += 1
        else:
            wrong[1, peer] += 1 if self.fault.operator == "more" else -1
        return wrong

    def backward(
        self, index: int, step: int, rows: Any, placement: Any, splits: Any, send: Any, receive: Any, replicas: int
    ) -> None:
        layer, ops = self.layers[index], torch.ops.hecate
        if self.is_here("skip", index, step, "backward"):
            arrived = rows.new_zeros((len(receive), _WIDTH))
        else:
            arrived = ops.exchange(rows, splits, send, receive, layer.id)
        ops.exchange_back(arrived, splits, send, receive, len(rows), layer.id)
        owned = layer.owners.counts[self.world.rank]
        ops.sparse_reduce_scatter([torch.ones(owned, 3)], [torch.ones(replicas, 3)], placement, owned, layer.id)


def plant(kind: str, number: int, quick: bool = True) -> list[tuple[str, float]]:
    """On one rank: what is raised, and after how many seconds, for each of some faults."""
    if quick:
        heartbeat.EVERY, watch.TOLD, supervise.ROUND = 0.1, 0.3, 0.1
    dist.init_process_group("gloo")
    found = []
    for fault in faults(kind, number, dist.get_world_size()):
        group = dist.new_group(timeout=timedelta(seconds=_TIMEOUT))
        world = World(rank=dist.get_rank(), size=dist.get_world_size(), group=group, device=torch.device("cpu"))
        all_reduce(torch.zeros(1), world)
        start = time.monotonic()
        try:
            Steps(world, fault).run()
            message = "no error"
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        found.append((message, time.monotonic() - start))
        # A rank may hear of it later than another.
        dist.barrier()
    return found


@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "ranks"),
    list(product(("skip", "reorder", "plan", "splits"), (2, 3)))
    if ALL
    else [("skip", 3), ("reorder", 2), ("plan", 2), ("splits", 3)],
)
def test_a_planted_desync_is_named_on_all_ranks(kind: str, ranks: int) -> None:
    number = 10 if ALL else 1
    results = run_ranks(plant, ranks, timeout=800, kind=kind, number=number)
    for index, fault in enumerate(faults(kind, number, ranks)):
        for rank, result in enumerate(results):
            message, seconds = result[index]
            told = f"{fault} on rank {rank} after {seconds:.1f} s: {message}"
            assert message.startswith("DisagreementError: hecate: ranks disagree on"), told
            assert re.search(rf"\brank {fault.rank}\b", message), told
            assert f"blocks.{fault.layer}.experts, step {fault.step}" in message, told
            assert seconds < _SOON, told
