// From the counts of a step to the rows that one rank sends and receives: the twin of planner/dispatch.py.
#include <algorithm>
#include <cstring>
#include <vector>

#include "balance.h"
#include "cost.h"
#include "layer.h"

namespace {
using Ints = std::vector<Int>;

Int common(Int start, Int end, Int other_start, Int other_end) {
    return std::max<Int>(std::min(end, other_end) - std::max(start, other_start), 0);
}

// What all ranks have, summed up as this rank needs it.
struct Counts {
    const Int* of_ranks;  // [W, E]
    Ints of_nodes;        // [N, E]
    Ints lead;            // [E] of the ranks before this one on its node
    Ints load;            // [E]

    Counts(const Int* counts, const Layer& layer)
        : of_ranks(counts), of_nodes(layer.nodes * layer.experts, 0), lead(layer.experts), load(layer.experts, 0) {
        for (Int n = 0; n < layer.nodes; n++) {
            Int* sum = &of_nodes[n * layer.experts];
            for (Int k = layer.node_starts[n]; k < layer.node_starts[n + 1]; k++) {
                if (k == layer.rank) std::copy(sum, sum + layer.experts, lead.begin());
                const Int* line = counts + k * layer.experts;
                for (Int e = 0; e < layer.experts; e++) sum[e] += line[e];
            }
            for (Int e = 0; e < layer.experts; e++) load[e] += sum[e];
        }
    }
};

// Rows of this rank for each holder of an expert; see sent_of. ``want`` is left with what holders want of any node.
void send(Int e, const Layer& layer, const Counts& counts, const Ints& kept, Ints& want, Int* sent) {
    Int here = layer.node_of[layer.rank], begin = layer.starts[e], end = layer.starts[e + 1];
    // Rows that this rank has left, behind those of ranks before it on its node, and on nodes before it.
    Int left = counts.of_ranks[layer.rank * layer.experts + e], before = counts.lead[e], earlier = 0;
    for (Int n = 0; n < here; n++) earlier += counts.of_nodes[n * layer.experts + e];
    for (Int i = begin; i < end; i++) {
        Int rank = layer.holders[i], node = layer.node_of[rank];
        sent[i] = rank == layer.rank ? kept[i] : 0;
        if (rank == layer.rank) left -= kept[i];
        if (node == here && rank < layer.rank) before -= kept[i];
        if (node < here) earlier -= kept[i];
    }
    if (1 < layer.nodes && layer.nodes < layer.ranks) {
        // On each node the line of rows that are left meets that of rows that are wanted.
        for (Int i = begin; i < end;) {
            Int node = layer.node_of[layer.holders[i]], next = i, have = counts.of_nodes[node * layer.experts + e], wanted = 0;
            for (; next < end && layer.node_of[layer.holders[next]] == node; next++) have -= kept[next], wanted += want[next];
            Int amount = std::min(have, wanted), run = 0;
            Int start = std::min(before, amount), stop = std::min(before + left, amount);
            for (; i < next; i++) {
                Int from = std::min(run, amount), to = std::min(run + want[i], amount);
                run += want[i];
                want[i] -= to - from;
                if (node == here) sent[i] += common(from, to, start, stop);
            }
            if (node == here) left -= stop - start, before -= start;
            if (node < here) earlier -= amount;
        }
    }
    Int start = earlier + before, run = 0;
    for (Int i = begin; i < end; i++) {
        sent[i] += common(run, run + want[i], start, start + left);
        run += want[i];
    }
}

// Rows of an expert that this rank, its holder at ``mine``, gets from each rank; see received_of.
void receive(Int e, Int mine, const Layer& layer, const Counts& counts, const Int* quota, const Ints& kept,
             const Ints& want, Ints& left, Int* got) {
    for (Int k = 0; k < layer.ranks; k++) left[k] = counts.of_ranks[k * layer.experts + e];
    for (Int i = layer.starts[e]; i < layer.starts[e + 1]; i++) left[layer.holders[i]] -= kept[i];
    std::fill(got, got + layer.ranks, 0);
    got[layer.rank] = kept[mine];
    if (1 < layer.nodes && layer.nodes < layer.ranks) {
        for (Int n = 0, i = layer.starts[e]; n < layer.nodes; n++) {
            Int have = 0, wanted = 0, start = 0, run = 0, first = layer.node_starts[n], last = layer.node_starts[n + 1];
            for (Int k = first; k < last; k++) have += left[k];
            for (; i < layer.starts[e + 1] && layer.node_of[layer.holders[i]] == n; i++) {
                if (i == mine) start = wanted;
                wanted += quota[i] - kept[i];
            }
            Int amount = std::min(have, wanted), stop = std::min(start + quota[mine] - kept[mine], amount);
            start = std::min(start, amount);
            for (Int k = first; k < last; k++) {
                Int from = std::min(run, amount), to = std::min(run + left[k], amount);
                run += left[k];
                left[k] -= to - from;
                if (n == layer.node_of[layer.rank]) got[k] += common(from, to, start, stop);
            }
        }
    }
    Int start = 0, run = 0;
    for (Int i = layer.starts[e]; i < mine; i++) start += want[i];
    for (Int k = 0; k < layer.ranks; k++) {
        got[k] += common(run, run + left[k], start, start + want[mine]);
        run += left[k];
    }
}
}  // namespace

extern "C" {
// Which rows of ``counts`` [W, E] this rank sends to each holder, [n], and receives for each slot, [S, W].
void assign(const Layer* given, const Int* counts, Int* sent, Int* received) {
    const Layer& layer = *given;
    Counts sums(counts, layer);
    Ints quota(layer.pairs()), kept(layer.pairs()), want(layer.pairs()), left(layer.ranks);
    cost::split_fastest(sums.load.data(), layer, quota.data());
    for (Int e = 0; e < layer.experts; e++) {
        for (Int i = layer.starts[e]; i < layer.starts[e + 1]; i++) {
            kept[i] = std::min(counts[layer.holders[i] * layer.experts + e], quota[i]);
            want[i] = quota[i] - kept[i];
        }
        send(e, layer, sums, kept, want, sent);
    }
    for (Int s = 0; s < layer.slots; s++) {
        Int e = layer.slot_experts[s], mine = layer.starts[e];
        while (layer.holders[mine] != layer.rank) mine++;
        receive(e, mine, layer, sums, quota.data(), kept, want, left, received + s * layer.ranks);
    }
}

// The ranges [start, start + length) one behind the other.
void join(const Int* starts, const Int* lengths, Int ranges, Int* out) {
    for (Int r = 0; r < ranges; r++)
        for (Int i = 0; i < lengths[r]; i++) *out++ = starts[r] + i;
}
}
