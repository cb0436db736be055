"""S2-Attention's pattern: which blocks of keys a block of queries sees, as arithmetic on whole numbers.

Blocks are cut by absolute position. Queries of block i see keys of block j <= i, none after the query, if

    i - j < local                                  the last ``local`` blocks, the own one included, or
    (j + h * step + offset) % stride == 0          every ``stride``-th block, others for every pattern h

A block that is neither is never looked at again, so a cache may drop it for good. Source: S2-Attention, arXiv
2407.17678, and the causal case of DKernel's ``get_sparse_attn_mask``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pattern:
    """The pattern of one layer; tokens may be symbolic in :meth:`stored`, :meth:`first_local` and :meth:`groups`."""

    block: int  # tokens of a block
    local: int  # blocks that every head sees, the own one included
    stride: int  # of the blocks before those, a head sees every stride-th one
    offset: int  # shifts all residues
    # Number of different heads: key heads, query heads, or 1. It divides the number of query heads, and neighbouring
    # heads have the same pattern.
    patterns: int

    @property
    def numbers(self) -> list[int]:
        """Numbers of the pattern for an operator; ``Pattern(*numbers)`` is this again."""
        return [self.block, self.local, self.stride, self.offset, self.patterns]

    @property
    def step(self) -> int:
        """Difference between the residues of neighbouring patterns."""
        return max(1, self.stride // self.patterns)

    @property
    def coverage(self) -> float:
        """The part of the context before the local blocks that all heads together see, at most 1."""
        return len({self.residue(h) for h in range(self.patterns)}) / self.stride

    def residue(self, pattern: int) -> int:
        """Return the residue of a pattern's strided blocks j at any distance: ``j % stride`` is equal to it."""
        return -(pattern * self.step + self.offset) % self.stride

    def residues(self, heads: int) -> list[int]:
        """Return the residue of each of ``heads`` heads; raise ValueError unless ``patterns`` divides them."""
        if heads % self.patterns:
            raise ValueError(f"hecate: {heads} heads cannot have {self.patterns} patterns: it is no divisor")
        return [self.residue(head // (heads // self.patterns)) for head in range(heads)]

    def attends(self, pattern: int, i: int, j: int) -> bool:
        """Tell whether queries of block ``i`` see keys of block ``j``."""
        return j <= i and (i - j < self.local or j % self.stride == self.residue(pattern))

    def blocks(self, tokens: int) -> int:
        """Return how many blocks must be computed for all patterns together, for ``tokens`` tokens."""
        n = self.blocks_of(tokens)
        near = min(n, self.local)
        count = self.patterns * (near * n - near * (near - 1) // 2)
        for pattern in range(self.patterns):
            # Block j is seen by the query blocks j + local to n - 1 in addition.
            count += sum(n - self.local - j for j in range(self.residue(pattern), n - self.local, self.stride))
        return count

    def share(self, tokens: int) -> float:
        """Return the blocks computed, in parts of those of causal attention; 1 / share bounds the speedup."""
        n = self.blocks_of(tokens)
        return self.blocks(tokens) / (self.patterns * n * (n + 1) // 2)

    def cache_share(self, tokens: int) -> float:
        """Return the part of keys and values that a cache keeps."""
        return min(1.0, self.stored(tokens) / tokens)

    def blocks_of(self, tokens: int) -> int:
        """Return the number of blocks of so many tokens, the last of which may not be full."""
        return -(-tokens // self.block)

    # --- what a cache keeps of ``tokens`` tokens: groups of strided blocks, one block for each head, then the tokens
    # --- from the first local block on

    def first_local(self, tokens: Any) -> Any:
        """Return the first block that is local to the last token; all blocks before it are whole."""
        first = (tokens - 1) // self.block - self.local + 1
        return _at_least_zero(first)

    def groups(self, tokens: Any) -> Any:
        """Return how many strided blocks of a head have room; some heads do not have the last one yet."""
        return (self.first_local(tokens) + self.stride - 1) // self.stride

    def stored(self, tokens: Any) -> Any:
        """Return the tokens for which a head has room: at most ``(local + n / stride + 1) * block`` with n blocks."""
        return self.groups(tokens) * self.block + tokens - self.first_local(tokens) * self.block


def _at_least_zero(number: Any) -> Any:
    if isinstance(number, int):
        return max(0, number)
    # A symbolic size is compared without a decision, which would be a graph for each outcome.
    return number.__sym_max__(0)
