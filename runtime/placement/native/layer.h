// A layer in one step, as the planner sees it: who holds which experts, on which nodes, and how fast the machine is.
// All numbers of rows are whole. The few doubles are computed in the order of the Python functions of the same names, so
// that results are equal to the last bit, and ranks with and without a compiler may be mixed.
#pragma once
#include <cstdint>

using Int = int64_t;

struct Layer {
    Int ranks, nodes, experts, slots, rank;
    const Int* starts;       // [E + 1] where each expert's holders begin
    const Int* holders;      // [n] ranks, ascending for each expert
    const Int* owners;       // [E]
    const Int* node_of;      // [W] ascending: a node's ranks follow one another
    const Int* node_starts;  // [N + 1]
    const Int* slot_experts; // [S] experts of this rank's slots
    double row_flops, row_bytes, flops, rank_bytes, node_bytes;

    Int pairs() const { return starts[experts]; }
    Int node_size(Int node) const { return node_starts[node + 1] - node_starts[node]; }
};
