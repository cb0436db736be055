"""Numbers that tell how balanced a layer is."""

from __future__ import annotations

import pytest

from hecate.reports.stats import LayerStats


def layer(*expert_rows: int) -> LayerStats:
    return LayerStats(
        name="experts",
        rows=(sum(expert_rows),),
        expert_rows=expert_rows,
        bytes_sent=(0,),
        node_bytes_sent=(0,),
        replicas=0,
        expert_bytes_sent=(0,),
    )


@pytest.mark.parametrize(
    ("rows", "violation", "variation", "entropy", "dead"),
    [
        ((5, 5, 5, 5), 0.0, 0.0, 1.0, ()),
        ((0, 0, 8, 0), 3.0, 3**0.5, 0.0, (0, 1, 3)),
        ((4, 4, 0, 0), 1.0, 1.0, 0.5, (2, 3)),
        ((1, 2, 3, 2), 0.5, 0.5**0.5 / 2, 0.952820, ()),
        ((0, 0, 0, 0), 0.0, 0.0, 1.0, (0, 1, 2, 3)),
        ((7,), 0.0, 0.0, 1.0, ()),
    ],
)
def test_balance_of_experts(
    rows: tuple[int, ...], violation: float, variation: float, entropy: float, dead: tuple[int, ...]
) -> None:
    found = layer(*rows)
    assert found.max_violation == pytest.approx(violation) and found.variation == pytest.approx(variation)
    assert found.entropy == pytest.approx(entropy, abs=1e-6) and found.dead_experts == dead
