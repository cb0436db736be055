"""Made-up routing is what its name says."""

from __future__ import annotations

import numpy as np
import pytest

from hecate.simulator.workloads import BURST_STEPS, STEPS_BETWEEN_MOVES, WORKLOADS, make

SHAPE = dict(steps=100, layers=3, ranks=8, experts=64, rows=4096)


def owned_imbalance(counts: np.ndarray) -> np.ndarray:
    """Rows of the busiest rank over the mean under expert parallelism, ``[step, layer]``."""
    ranks = counts.sum(2).reshape(*counts.shape[:2], 8, -1).sum(-1)
    return ranks.max(-1) / ranks.mean(-1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_rank_has_its_rows_and_the_seed_decides(name: str) -> None:
    counts = make(name, **SHAPE)
    assert counts.shape == (100, 3, 8, 64) and counts.dtype == np.int64
    assert (counts.sum(-1) == 4096).all() and (counts >= 0).all()
    assert (counts == make(name, **SHAPE)).all()
    assert name == "balanced" or (counts != make(name, **SHAPE, seed=1)).any()


def test_skews() -> None:
    assert owned_imbalance(make("balanced", **SHAPE)).max() == 1.0
    assert 3.5 < owned_imbalance(make("zipf", **SHAPE)).mean() < 5.5
    assert (owned_imbalance(make("one_hot", **SHAPE)) == 8.0).all()
    burst = owned_imbalance(make("burst", **SHAPE))
    assert np.median(burst) < 1.1 and burst.max() > 3


def test_drift_moves_one_hot_expert_at_a_time() -> None:
    load = make("drift", **SHAPE).sum(2)[:, 0].astype(float)
    change = np.abs(np.diff(load, axis=0)).sum(1) / load.sum(1)[1:]
    moves = change[STEPS_BETWEEN_MOVES - 1 :: STEPS_BETWEEN_MOVES]
    still = np.delete(change, np.arange(STEPS_BETWEEN_MOVES - 1, len(change), STEPS_BETWEEN_MOVES))
    assert moves.max() > 2 * still.max()
    assert still.max() < 0.1


def test_bursts_are_short() -> None:
    hot = make("burst", **SHAPE).sum(2)[:, 0].max(-1) > 8 * 4096 / 4
    assert 0 < hot.sum() <= BURST_STEPS * 3


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no workload 'flat'; there are balanced, zipf"):
        make("flat", **SHAPE)
