"""SmartMoE: experts change places every few steps (Zhai et al., ATC 2023, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.policy import LayerView, Policy


@dataclass
class SmartMoE(Policy):
    """Owners are permuted so that ranks have even loads, each as many experts of a layer as before; no replicas.

    Experts go by descending load to the rank with least load that has room. Ranks then trade what they got, so that
    few experts move. A layer takes the new owners if a step is predicted to be faster by more than the move takes,
    spread over the steps until the next one; theirs is a performance model of the workload, here it is the engine's.
    That ranks trade is ours. What the engine cannot show: the search over parallel strategies (the offline pool).

    Attributes:
        reshard_every: optimizer steps between permutations.
    """

    reshard_every: int = 25

    def choose_owners(self, layers: Sequence[LayerView]) -> list[Owners]:
        return [self._permute(layer) for layer in layers]

    def _permute(self, layer: LayerView) -> Owners:
        rows, old, costs = layer.long_load.tolist(), layer.owners, layer.costs
        free, load = list(old.counts), [0] * old.world_size
        ranks = [0] * len(rows)
        for expert in sorted(range(len(rows)), key=lambda e: (-rows[e], e)):
            rank = min((r for r in range(old.world_size) if free[r]), key=lambda r: (load[r], r))
            ranks[expert] = rank
            free[rank] -= 1
            load[rank] += rows[expert]
        new = _relabelled(Owners(tuple(ranks), old.world_size), old)
        gain = sum(costs.owners_work(rows, old)) - sum(costs.owners_work(rows, new))
        return new if gain * self.reshard_every > costs.reshard_seconds(old, new) else old


def _relabelled(new: Owners, old: Owners) -> Owners:
    """The same groups of experts, each on a rank that owns most of them already and has as many."""
    common = [[0] * old.world_size for _ in range(old.world_size)]
    for group, rank in zip(new.ranks, old.ranks, strict=True):
        common[group][rank] += 1
    pairs = sorted(
        (-common[g][r], g, r)
        for g in range(old.world_size)
        for r in range(old.world_size)
        if new.counts[g] == old.counts[r]
    )
    rank_of: dict[int, int] = {}
    for _, group, rank in pairs:
        if group not in rank_of and rank not in rank_of.values():
            rank_of[group] = rank
    return Owners(tuple(rank_of[group] for group in new.ranks), old.world_size)
