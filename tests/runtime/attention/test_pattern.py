"""The pattern of S2-Attention against the definition, and the options that make it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hecate
from hecate.runtime.attention.pattern import Pattern


@st.composite
def patterns(draw: Any) -> Pattern:
    return Pattern(
        block=16,
        local=draw(st.integers(1, 6)),
        stride=draw(st.integers(1, 12)),
        offset=draw(st.integers(0, 5)),
        patterns=draw(st.integers(1, 12)),
    )


def attends(p: Pattern, h: int, i: int, j: int) -> bool:
    """The definition, word by word."""
    step = max(1, p.stride // p.patterns)
    return j <= i and (i - j < p.local or (j + h * step + p.offset) % p.stride == 0)


@settings(max_examples=200, deadline=None)
@given(patterns(), st.integers(1, 40))
def test_pattern_is_the_definition(p: Pattern, n: int) -> None:
    seen = [(h, i, j) for h in range(p.patterns) for i in range(n) for j in range(n) if attends(p, h, i, j)]
    mine = [(h, i, j) for h in range(p.patterns) for i in range(n) for j in range(n) if p.attends(h, i, j)]
    assert mine == seen
    for tokens in (n * p.block, (n - 1) * p.block + 1):
        assert p.blocks(tokens) == len(seen)
    assert p.share(n * p.block) == pytest.approx(len(seen) / (p.patterns * n * (n + 1) / 2))
    assert Pattern(*p.numbers) == p


@settings(max_examples=200, deadline=None)
@given(patterns())
def test_heads_see_the_whole_context_exactly_when_the_check_says_so(p: Pattern) -> None:
    n = p.local + 2 * p.stride + 1
    together = {(i, j) for h in range(p.patterns) for i in range(n) for j in range(n) if p.attends(h, i, j)}
    whole = together == {(i, j) for i in range(n) for j in range(i + 1)}
    assert whole == (p.coverage == 1) == (p.stride <= p.patterns)
    options = hecate.S2Attention(local=p.local, stride=p.stride, offset=p.offset)
    if whole:
        assert options.pattern(p.patterns, p.patterns).patterns == p.patterns
    else:
        with pytest.raises(ValueError, match=f"see only {p.coverage:.0%} of the context"):
            options.pattern(p.patterns, p.patterns)


@settings(max_examples=200, deadline=None)
@given(patterns(), st.integers(1, 600))
def test_what_is_dropped_is_never_seen_again(p: Pattern, tokens: int) -> None:
    """A cache keeps the tokens from the first local block on, and of the blocks before those of a head's residue."""
    now, first = (tokens - 1) // p.block, p.first_local(tokens)
    for h in range(p.patterns):
        dropped = [j for j in range(first) if j % p.stride != p.residue(h)]
        assert not any(p.attends(h, i, j) for j in dropped for i in range(now, now + 2 * p.stride + 2))
        kept = [j for j in range(first) if j % p.stride == p.residue(h)]
        assert p.groups(tokens) - 1 <= len(kept) <= p.groups(tokens)
        assert all(p.attends(h, now, j) for j in kept)
    stored = p.stored(tokens)
    assert stored <= (p.local + p.blocks_of(tokens) / p.stride + 1) * p.block
    assert stored - p.groups(tokens) * p.block == tokens - first * p.block


def test_residues_of_heads() -> None:
    p = Pattern(block=16, local=1, stride=2, offset=0, patterns=2)
    assert p.residues(4) == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="3 heads cannot have 2 patterns"):
        p.residues(3)
    # The first key of Phi-3-small's patterns lies one block before DKernel's.
    shifted = Pattern(block=16, local=1, stride=8, offset=1, patterns=8)
    assert [shifted.residue(h) for h in range(3)] == [7, 6, 5]


def test_patterns_of_a_layer() -> None:
    assert hecate.S2Attention().pattern(32, 8) == Pattern(64, 16, 8, 0, 8)
    assert hecate.S2Attention(per="q").pattern(32, 8) == Pattern(64, 16, 16, 0, 32)
    assert hecate.S2Attention(stride=4).pattern(32, 8).stride == 4
    one = hecate.S2Attention(homogeneous=True, stride=4, allow_holes=True).pattern(8, 8)
    assert (one.patterns, one.coverage) == (1, 0.25)
    with pytest.raises(ValueError, match="with stride=16 and 8 patterns all heads together see only 50%"):
        hecate.S2Attention(stride=16).pattern(32, 8)


def test_one_head_of_keys_has_nothing_to_share() -> None:
    with pytest.raises(ValueError, match=r'no block can be left out. per="q" gives every head'):
        hecate.S2Attention().pattern(8, 1)
    assert hecate.S2Attention(per="q").pattern(8, 1).stride == 8
    assert hecate.S2Attention(stride=1).pattern(8, 1).stride == 1


def test_dense_layers() -> None:
    def dense(**options: Any) -> list[int]:
        return [layer for layer in range(6) if hecate.S2Attention(**options).is_dense(layer)]

    assert dense() == [0, 1]
    assert dense(dense_layers=()) == []
    assert dense(dense_layers=[0, 3]) == [0, 3]
    assert dense(dense_layers="every 2nd") == [1, 3, 5]
    assert dense(dense_layers="every 3rd") == [2, 5]
    for wrong in (2, None):
        with pytest.raises(TypeError, match=rf"dense_layers={wrong}, expected numbers of layers, such as"):
            hecate.S2Attention(dense_layers=wrong)


def test_options_of_one_function_are_described_alike() -> None:
    def described(**options: Any) -> dict[str, Any]:
        return hecate.S2Attention(**options).described(8, 4, 4)

    one = described(dense_layers=(1, 3))
    assert one == described(dense_layers="every 2nd") == described(dense_layers=(3, 1), stride=4, offset=4)
    assert one["stride"] == 4 and one["dense_layers"] == [1, 3]
    for other in ({"per": "q"}, {"offset": 1}, {"local": 2}, {"stride": 2}):
        assert described(dense_layers=(1, 3), **other) != one
    assert hecate.S2Attention(per="q").described(4, 4, None) == hecate.S2Attention(offset=4).described(4, 4, None)
    assert hecate.S2Attention(dense_layers=(1, 0)).described(None, None, None)["stride"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 48}, "block=48, expected a power of two"),
        ({"block": 8}, "block=8, expected a whole number of at least 16"),
        ({"local": 0}, "local=0, expected a whole number of at least 1"),
        ({"stride": 0}, "stride=0, expected a whole number of at least 1"),
        ({"stride": True}, "stride=True, expected a whole number"),
        ({"offset": -1}, "offset=-1, expected a whole number of at least 0"),
        ({"per": "head"}, "per='head', expected one of"),
        ({"homogeneous": 1}, "homogeneous=1, expected True or False"),
        ({"homogeneous": True}, "give its stride"),
        ({"dense_layers": "all"}, "dense_layers='all', expected numbers of layers or a text"),
        ({"dense_layers": (0, -1)}, "dense_layers has -1, expected numbers of layers"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hecate.S2Attention(**options)
