// What the planner knows of a layer: the machine with the sizes that matter, and who holds which experts.
// All numbers of rows are whole. The few doubles are computed in the order of the Python functions of the same names, so
// that results are equal to the last bit, and ranks with and without a compiler may be mixed.
#pragma once
#include <cstdint>
#include <numeric>
#include <vector>

using Int = int64_t;
using Ints = std::vector<Int>;

// The whole part of rows * part / whole.
inline Int share_of(Int rows, Int part, Int whole) { return Int(__int128(rows) * part / whole); }

struct Machine {
    Int ranks, nodes;
    const Int* node_of;      // [W] ascending: a node's ranks follow one another
    const Int* node_starts;  // [N + 1]
    double row_flops, row_bytes, expert_bytes, expert_transfers;  // LayerSizes
    double flops, rank_bytes, node_bytes, hidden_seconds;         // Rates

    Int node_size(Int node) const { return node_starts[node + 1] - node_starts[node]; }
};

struct Held {
    Int experts;
    const Int* owners;   // [E]
    const Int* starts;   // [E + 1] where each expert's holders begin
    const Int* holders;  // [n] ranks, ascending for each expert, the owner among them

    Int pairs() const { return starts[experts]; }
    Int total(const Int* load) const { return std::accumulate(load, load + experts, Int(0)); }

    // The first place behind that of ``i`` where a holder of the expert is on another node.
    Int next_node(Int expert, Int i, const Machine& machine) const {
        Int node = machine.node_of[holders[i]];
        while (i < starts[expert + 1] && machine.node_of[holders[i]] == node) i++;
        return i;
    }
};
