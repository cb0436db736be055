"""What is predicted to be hidden: the same on every rank."""

from __future__ import annotations

from hecate.runtime.measure import _NO_LINK, predict_hidden
from hecate.runtime.planner import Rates
from hecate.runtime.world import World
from tests.threads import on_threads


def test_the_rank_with_fewest_tokens_counts() -> None:
    rates = Rates(flops=1e9, rank_bytes=1e9, node_bytes=1e8)

    def check(world: World) -> None:
        found = predict_hidden(100 + world.rank, 5000, 2, rates, world)
        # 100 tokens, 2,500 elements between two layers, an operation each for multiply and add, three times.
        assert found.hidden == 3 * 2 * 100 * 2500 / 1e9
        assert (found.flops, found.node_bytes) == (rates.flops, rates.node_bytes)

    on_threads(check)


def test_nothing_is_free_on_one_machine_without_a_gpu() -> None:
    rates = Rates(flops=1e9, rank_bytes=1e9, node_bytes=_NO_LINK)

    def check(world: World) -> None:
        assert predict_hidden(100, 5000, 2, rates, world) == rates

    on_threads(check)
