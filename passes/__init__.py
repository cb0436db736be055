"""Graph passes: from "gather every expert, compute locally" to "move the tokens", and then beside the compute.

Three tables of contents, in the order in which they run: :data:`PASSES` on the graph that Dynamo captured, before
autograd; :data:`JOINT_PASSES` on forward and backward in one graph; :data:`FINAL_PASSES` on each of the two. Every
pass can be switched off by name, and the program stays right without any of them; but for ``shard_context``, which is
an option of the user and changes what is computed.
"""

from __future__ import annotations

import sys

from hecate.passes.attention.drop_causal_masks import drop_causal_masks
from hecate.passes.attention.shard_context import shard_context
from hecate.passes.attention.skip_blocks import skip_blocks
from hecate.passes.base import Outcome, Pass, PassContext, Remark, Skip
from hecate.passes.captured.accumulate_rows import accumulate_rows
from hecate.passes.captured.bucket_gathers import bucket_gathers
from hecate.passes.captured.bucket_gradients import bucket_gradients
from hecate.passes.captured.drop_sentinels import drop_sentinels
from hecate.passes.captured.exchange_rows import exchange_rows
from hecate.passes.captured.flatten_batches import flatten_batches
from hecate.passes.captured.functionalize_rows import functionalize_rows
from hecate.passes.captured.group_expert_loops import group_expert_loops
from hecate.passes.captured.normalize_matmuls import normalize_matmuls
from hecate.passes.captured.share_gathers import share_gathers
from hecate.passes.final.order_collectives import order_collectives
from hecate.passes.final.schedule import schedule
from hecate.passes.final.split_collectives import split_collectives
from hecate.passes.joint.read_permutations import read_permutations
from hecate.passes.joint.rematerialize import rematerialize
from hecate.passes.joint.sum_slots import sum_slots
from hecate.passes.joint.write_choices import write_choices

PASSES: tuple[Pass, ...] = (
    drop_causal_masks,    # a mask that is causal -> is_causal=True
    shard_context,        # Config(attention=...): causal attention -> its pattern as a mask
    skip_blocks,          # attention with such a mask -> the blocks that are seen
    share_gathers,        # read every expert parameter once
    bucket_gathers,       # one all-gather per sharded dense parameter -> one per block
    drop_sentinels,       # masks of expert numbers that there are not -> nothing
    accumulate_rows,      # out[mask] += y -> out.index_put_(mask, y)
    group_expert_loops,   # a loop over experts -> grouped matmuls
    flatten_batches,      # bmm and einsum over experts -> grouped matmuls
    normalize_matmuls,    # three spellings of a grouped matmul -> one
    functionalize_rows,   # out.add_(b) -> out = out + b
    exchange_rows,        # gather all experts -> exchange tokens with their owners
    bucket_gradients,     # one all-reduce per dense parameter -> one per bucket
)  # fmt: skip

JOINT_PASSES: tuple[Pass, ...] = (
    read_permutations,    # what a gradient adds to rows by a permutation is read by its inverse
    sum_slots,            # on accelerators: gradients of experts' biases are summed slot by slot, not with atomics
    write_choices,        # on accelerators: gradients of chosen scores are written, not added with atomics
    rematerialize,        # gather parameters again in the backward instead of keeping them
)  # fmt: skip

FINAL_PASSES: tuple[Pass, ...] = (
    split_collectives,    # a collective -> its start and its wait
    schedule,             # start early, wait late, compute in between
    order_collectives,    # one order of starts, as data flow
)  # fmt: skip

__all__ = ["FINAL_PASSES", "JOINT_PASSES", "PASSES", "Outcome", "Pass", "PassContext", "Remark", "Skip", "summary_of"]


def summary_of(function: Pass) -> str:
    """The first line of the pass's module: what it does."""
    doc = getattr(sys.modules.get(function.__module__), "__doc__", None) or ""
    return (doc.strip().splitlines() or [""])[0].partition(": ")[2].rstrip(".")
