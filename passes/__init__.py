"""Graph passes: from "gather every expert, compute locally" to "move the tokens", and then beside the compute.

:data:`STAGES` is the table of contents: everything that rewrites a model's code or graphs, in the order in which it
runs. :data:`PASSES` are those on the graph that Dynamo captured, before autograd; :data:`JOINT_PASSES` on forward and
backward in one graph; :data:`FINAL_PASSES` on each of the two. Each can be switched off by name, and the program
stays right without it; but for those of :data:`REQUIRED`, and for ``shard_context``, which is an option of the user
and changes what is computed. ``hecate passes`` prints the table.
"""

from __future__ import annotations

import sys

from hecate.passes.attention.drop_causal_masks import drop_causal_masks
from hecate.passes.attention.shard_context import shard_context
from hecate.passes.attention.skip_blocks import skip_blocks
from hecate.passes.base import Outcome, Pass, PassContext, Remark, Rewrite, Skip, Stage
from hecate.passes.captured.accumulate_rows import accumulate_rows
from hecate.passes.captured.bucket_gathers import bucket_gathers
from hecate.passes.captured.bucket_gradients import bucket_gradients
from hecate.passes.captured.drop_sentinels import drop_sentinels
from hecate.passes.captured.exchange_rows import exchange_rows
from hecate.passes.captured.flatten_batches import flatten_batches
from hecate.passes.captured.functionalize_rows import functionalize_rows
from hecate.passes.captured.group_expert_loops import group_expert_loops
from hecate.passes.captured.hold_choices import hold_choices
from hecate.passes.captured.keep_plans import keep_plans
from hecate.passes.captured.normalize_matmuls import normalize_matmuls
from hecate.passes.captured.share_fractions import share_fractions
from hecate.passes.captured.share_gathers import share_gathers
from hecate.passes.captured.sort_lookups import sort_lookups
from hecate.passes.captured.unfold_experts import unfold_experts
from hecate.passes.eager.note_row_reads import note_row_reads
from hecate.passes.eager.select_rows import select_rows
from hecate.passes.eager.simplify_views import simplify_views
from hecate.passes.final.call_torch_products import call_torch_products
from hecate.passes.final.order_collectives import order_collectives
from hecate.passes.final.schedule import schedule
from hecate.passes.final.split_collectives import split_collectives
from hecate.passes.joint.read_permutations import read_permutations
from hecate.passes.joint.rematerialize import rematerialize
from hecate.passes.joint.sum_slots import sum_slots
from hecate.passes.joint.write_choices import write_choices

SOURCE_REWRITES: tuple[Rewrite, ...] = (
    Rewrite(  # for expert in hit: ... -> for expert in range(E): ...
        name="make_loops_traceable",
        file="hecate_compile/wrap/loops/rewrite.py",
        does="loops over the experts that tokens have chosen take a turn for every expert",
    ),
)

TRACE_REWRITES: tuple[Rewrite, ...] = (
    Rewrite(  # module.weight -> gather_experts(shard), replicate(parameter) or gather_dense([shard])
        name="install_reads",
        file="hecate_compile/wrap/parameter_reads.py",
        does="a parameter that is read is gathered from all ranks, or its gradient is averaged",
    ),
)

PASSES: tuple[Pass, ...] = (
    drop_causal_masks,    # a mask that is causal -> is_causal=True
    shard_context,        # Config(attention=...): causal attention -> its pattern as a mask
    skip_blocks,          # attention with such a mask -> the blocks that are seen
    share_gathers,        # read every expert parameter once
    unfold_experts,       # matrices with all experts one under the other -> expert by expert
    bucket_gathers,       # one all-gather per sharded dense parameter -> one per block
    drop_sentinels,       # masks of expert numbers that there are not -> nothing
    accumulate_rows,      # out[mask] += y -> out.index_put_(mask, y)
    functionalize_rows,   # out.add_(b) -> out = out + b
    group_expert_loops,   # a loop over experts -> grouped matmuls
    flatten_batches,      # bmm and einsum over experts -> grouped matmuls
    sort_lookups,         # einsums with w[ids] for every token -> grouped matmuls of sorted rows
    normalize_matmuls,    # three spellings of a grouped matmul -> one
    exchange_rows,        # gather all experts -> exchange tokens with their owners
    hold_choices,         # while routing is recorded or replayed: topk(scores) -> hold(topk(scores))
    share_fractions,      # Config(balance_loss="global"): fractions of own tokens -> those of all ranks
    bucket_gradients,     # one all-reduce per dense parameter -> one per bucket
    keep_plans,           # checkpointed layers keep plans and exchanged rows
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

INDUCTOR_PASSES: tuple[Pass, ...] = (
    call_torch_products,  # grouped products that torch's kernel takes -> torch's operator
)  # fmt: skip

EAGER_JOINT_PASSES: tuple[Pass, ...] = (
    note_row_reads,       # x[numbers] of which none is negative -> the same with a note
)  # fmt: skip

EAGER_PASSES: tuple[Pass, ...] = (
    simplify_views,       # views that change nothing -> nothing
    select_rows,          # x[numbers] -> x.index_select(0, numbers)
)  # fmt: skip

STAGES: tuple[Stage, ...] = (
    Stage(name="source", when="the model's code, in hecate.compile", entries=SOURCE_REWRITES),
    Stage(name="trace", when="the model, while Dynamo traces it", entries=TRACE_REWRITES),
    Stage(name="captured", when="the graph that Dynamo captured, before autograd", entries=PASSES),
    Stage(name="joint", when="forward and backward in one graph", entries=JOINT_PASSES),
    Stage(name="joint, aot_eager", when="the same, if it will run node by node", entries=EAGER_JOINT_PASSES),
    Stage(name="final", when="forward and backward, of several ranks", entries=FINAL_PASSES),
    Stage(name="final, Inductor", when="the same, if Inductor compiles them for a GPU", entries=INDUCTOR_PASSES),
    Stage(name="final, aot_eager", when="forward and backward, if they run node by node", entries=EAGER_PASSES),
)

# Entries that cannot be switched off, each with the reason.
REQUIRED = {
    "install_reads": "without it a module would read this rank's shard as if it were the whole parameter",
    "keep_plans": "without it a checkpointed layer would be computed again with the placement of a later step",
}

__all__ = [
    "EAGER_JOINT_PASSES",
    "EAGER_PASSES",
    "FINAL_PASSES",
    "INDUCTOR_PASSES",
    "JOINT_PASSES",
    "PASSES",
    "REQUIRED",
    "STAGES",
    "Outcome",
    "Pass",
    "PassContext",
    "Remark",
    "Rewrite",
    "Skip",
    "Stage",
    "name_of",
    "summary_of",
]


def name_of(entry: Pass | Rewrite) -> str:
    """Return the name by which an entry is switched off."""
    return entry.name if isinstance(entry, Rewrite) else entry.__name__


def summary_of(entry: Pass | Rewrite) -> str:
    """Return one line that says what an entry does; of a pass, the first of its module."""
    if isinstance(entry, Rewrite):
        return entry.does
    doc = getattr(sys.modules.get(entry.__module__), "__doc__", None) or ""
    return (doc.strip().splitlines() or [""])[0].partition(": ")[2].rstrip(".")
