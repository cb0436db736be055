"""What is hidden: predicted before the first step, then measured, and the same on every rank."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.runtime.comm.measure_rates import NO_LINK
from hecate.runtime.comm.queue import Span
from hecate.runtime.comm.world import World
from hecate.runtime.placement.planner import Rates
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state.overlap_window import fewest_tokens, measure_hidden, overlaps, predict_hidden
from tests.support.extent import ALL
from tests.support.models import batch, build
from tests.support.ranks import run_ranks
from tests.support.threads import on_threads


def test_the_rank_with_fewest_tokens_counts() -> None:
    """And nothing is free on one machine without a GPU."""
    rates = Rates(flops=1e9, rank_bytes=1e9, node_bytes=1e8)
    one_machine = replace(rates, node_bytes=NO_LINK)

    def check(world: World) -> None:
        found = predict_hidden(fewest_tokens(100 + world.rank, world), 5000, 2, rates)
        # 100 tokens, 2,500 elements between two layers, an operation each for multiply and add, three times.
        assert found.hidden_seconds == 3 * 2 * 100 * 2500 / 1e9
        assert (found.flops, found.node_bytes) == (rates.flops, rates.node_bytes)
        assert overlaps(rates, world) and not overlaps(one_machine, world)
        assert predict_hidden(0, 5000, 2, one_machine) == one_machine

    on_threads(check)


def span(part: str, operator: str, subject: str, started: float, waited: float, ready: float) -> Span:
    return Span(part, operator, subject, 0.0, 0.0, started=started, waited=waited, ready=ready)


def steps(slower: float = 0.0) -> list[Span]:
    """Two layers: 3 s between them forward, of which dense parameters have the link for 1 s; 5 s backward."""
    return [
        span("forward", "gather_counts", "first", 0, 1, 2),
        span("forward", "exchange", "first", 2, 3, 4),
        span("forward", "exchange_back", "first", 5, 5, 6),
        span("forward", "sparse_all_gather", "second", 6, 11, 12),
        on_link(span("forward", "gather_dense", "norm and 3 more", 5, 7, 8), begun=5.5, ended=7),
        span("forward", "gather_counts", "second", 9 + slower, 9 + slower, 10 + slower),
        span("forward", "exchange_back", "second", 13, 13, 14),
        span("backward", "exchange", "second", 20, 20, 21),
        span("backward", "exchange_back", "second", 22, 22, 23),
        span("backward", "sparse_reduce_scatter", "second", 24, 40, 41),
        span("backward", "exchange", "first", 28, 28, 29),
        # One that was started and never waited for.
        span("backward", "exchange_back", "first", 30, 0, 0),
    ]


def on_link(taken: Span, begun: float, ended: float) -> Span:
    taken.begun, taken.ended = begun, ended
    return taken


def test_what_lies_between_two_layers_is_measured() -> None:
    late = span("backward", "sparse_reduce_scatter", "second", 24, 25, 27)
    first = [s for s in steps() if s.subject == "first"]
    forward = [s for s in steps() if s.part == "forward"]

    def check(world: World) -> None:
        # Ranks 1 and 2 compute longer between the layers; the least counts.
        assert measure_hidden(steps(slower=world.rank / 2), world) == 2 + 5
        # While experts are waited for, nothing is hidden.
        assert measure_hidden([*steps(), late], world) == 2 + 5 - 2
        # A rank that saw no step leaves it to the others.
        assert measure_hidden(steps() if world.rank == 1 else [], world) == 2 + 5
        # With one layer, or without a backward, there is nothing to measure.
        assert measure_hidden(first, world) == measure_hidden(forward, world) == math.inf

    on_threads(check)


def train(policy: str, given: bool, skipped: int | None = None) -> list[float]:
    """On one rank, each its own node: hidden time after every one of eight steps, one of them without gradients."""
    rates = Rates(flops=1e12, rank_bytes=1e9, node_bytes=1e8, hidden_seconds=1.0) if given else None
    config = hecate.Config(backend="aot_eager", policy=policy, rates=rates, topology=Topology((0, 1)))
    model = hecate.compile(build("qwen3_moe"), config)
    hidden = []
    for step in range(8):
        ids = batch(step)
        with torch.set_grad_enabled(step != skipped):
            loss = model(input_ids=ids, labels=ids).loss
        if step != skipped:
            loss.backward()
        hidden.append(compiled_model_of(model, "the test").placer.rates.hidden_seconds)
    return hidden


@pytest.mark.slow
def test_the_first_steps_measure_what_was_predicted() -> None:
    first, second = run_ranks(train, 2, policy="hecate", given=False, skipped=2)
    assert first == second
    # The step without gradients is no training step, and its spans tell nothing of a backward.
    predicted, measured = first[0], first[4:]
    assert set(first[:4]) == {predicted}
    assert predicted not in measured
    assert min(measured) > 0
    # The median of three, and then no more.
    assert measured[2] == measured[3]
    low, high = sorted((measured[0], 2 * measured[1] - measured[0]))
    assert low - 1e-9 <= measured[2] <= high + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "given"), [("static", False), ("hecate", True)] if ALL else [("hecate", True)])
def test_given_rates_and_static_policies_stay_as_they_are(policy: str, given: bool) -> None:
    for hidden in run_ranks(train, 2, policy=policy, given=given):
        assert len(set(hidden)) == 1
