"""The operators that passes put into graphs, each with a fake, an autograd formula and a flop count.

The plain references that define them are in ``hecate.runtime.ops.reference``.

| operator | shapes | backward |
|---|---|---|
| ``gather_experts`` | ``[E_r,...] -> [E,...]`` | ``reduce_scatter_experts`` |
| ``place`` | ``-> [E,W], [S]``, this step's placement, and the experts in this rank's slots | none, integers only |
| ``sparse_all_gather`` | ``[E_r,...], [E,W], [S] -> [S,...]``, all tensors of a layer | ``sparse_reduce_scatter`` |
| ``gather_counts`` | ``[E] -> [W,E]``, rows of every rank for every expert; after ``place`` | none |
| ``calibrate`` | ``[W,E], [E,W] -> [E,W], [S']``, the placement after the gate | none |
| ``top_up`` | ``[E_r,...], [S,...], [S'] -> [S',...]``, what ``calibrate`` added | ``sparse_reduce_scatter`` |
| ``route`` | ``[W,E], [E,W] -> [S], [2,W], [n], [R']`` | none |
| ``count_rows`` | ``[E] -> [E]``, a copy; what ``route`` is at one rank | none |
| ``exchange`` | ``[R,...] -> [R',...]`` | ``exchange_back`` with the same ticket |
| ``exchange_back`` | ``[R',...] -> [R,...]`` | ``exchange`` with the same ticket |
| ``grouped_mm`` | ``[R,K], [S,K,N], [S] -> [R,N]`` | ``grouped_mm`` and ``grouped_mm_weight_grad`` |

R', S and n are unbacked sizes: they change with routing and placement and never cause a recompile. So is E_r, the
length of a shard, at more than one rank: owners may move without a recompile. A placement is data, int8 on the CPU
(2 owner, 1 replica), that flows from ``place`` to whatever uses it, so a backward always uses its forward's.

Those that communicate can be split into a start and a wait; see ``hecate.runtime.ops.registration``.

``layer`` is the id of a ``hecate.runtime.state.layer.Layer``. Operators return fresh tensors, never views
of their inputs; what is free at one rank (``own_experts``) is a plain autograd function instead.
"""

from __future__ import annotations

from hecate.runtime.ops import exchange, grouped_mm
from hecate.runtime.ops.experts import own_experts

__all__ = ["exchange", "grouped_mm", "own_experts"]
