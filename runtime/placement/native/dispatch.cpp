// From the counts of a step to the rows that one rank sends and receives: the twin of planner/dispatch.py.
#include <algorithm>

#include "balance.h"
#include "cost.h"
#include "layer.h"

namespace {
// A rank's part is worked out: which it is, and the experts of its slots, [S].
struct Part {
    Int rank, slots;
    const Int* experts;
};

Int common(Int start, Int end, Int other_start, Int other_end) {
    return std::max<Int>(std::min(end, other_end) - std::max(start, other_start), 0);
}

// What all ranks have, summed up as this rank needs it.
struct Counts {
    const Int* of_ranks;  // [W, E]
    Ints of_nodes;        // [N, E]
    Ints lead;            // [E] of the ranks before this one on its node
    Ints load;            // [E]

    Counts(const Int* counts, Int experts, const Machine& machine, Int rank)
        : of_ranks(counts), of_nodes(machine.nodes * experts, 0), lead(experts), load(experts, 0) {
        for (Int n = 0; n < machine.nodes; n++) {
            Int* sum = of_nodes.data() + n * experts;
            for (Int k = machine.node_starts[n]; k < machine.node_starts[n + 1]; k++) {
                if (k == rank) std::copy(sum, sum + experts, lead.begin());
                for (Int e = 0; e < experts; e++) sum[e] += counts[k * experts + e];
            }
            for (Int e = 0; e < experts; e++) load[e] += sum[e];
        }
    }
};

// What holders compute, and of that what is theirs already, and what they want of others: all [n].
struct Quota {
    Ints all, kept, want;
};

// Rows of a rank for each holder of an expert; see sent_of. ``want`` is left with what holders want of other nodes.
void send(Int e, Int rank, const Machine& machine, const Held& held, const Counts& counts, Quota& quota, Int* sent) {
    Int here = machine.node_of[rank], begin = held.starts[e], end = held.starts[e + 1];
    // Rows that the rank has left, behind those of ranks before it on its node, and on nodes before it.
    Int left = counts.of_ranks[rank * held.experts + e], before = counts.lead[e], earlier = 0;
    for (Int n = 0; n < here; n++) earlier += counts.of_nodes[n * held.experts + e];
    for (Int i = begin; i < end; i++) {
        Int holder = held.holders[i], node = machine.node_of[holder];
        sent[i] = holder == rank ? quota.kept[i] : 0;
        left -= sent[i];
        if (node == here && holder < rank) before -= quota.kept[i];
        if (node < here) earlier -= quota.kept[i];
    }
    if (1 < machine.nodes && machine.nodes < machine.ranks) {
        // On each node the line of rows that are left meets that of rows that are wanted.
        for (Int i = begin, next; i < end; i = next) {
            next = held.next_node(e, i, machine);
            Int node = machine.node_of[held.holders[i]], have = counts.of_nodes[node * held.experts + e], wanted = 0;
            for (Int k = i; k < next; k++) have -= quota.kept[k], wanted += quota.want[k];
            Int amount = std::min(have, wanted), run = 0;
            Int start = std::min(before, amount), stop = std::min(before + left, amount);
            for (Int k = i; k < next; k++) {
                Int from = std::min(run, amount), to = std::min(run + quota.want[k], amount);
                run += quota.want[k];
                quota.want[k] -= to - from;
                if (node == here) sent[k] += common(from, to, start, stop);
            }
            if (node == here) left -= stop - start, before -= start;
            if (node < here) earlier -= amount;
        }
    }
    Int start = earlier + before, run = 0;
    for (Int i = begin; i < end; i++) {
        sent[i] += common(run, run + quota.want[i], start, start + left);
        run += quota.want[i];
    }
}

// Rows of an expert that a rank gets from each rank; see received_of. It is the expert's holder at ``mine``, and what
// holders want of their own nodes has been sent.
void receive(Int e, Int mine, const Machine& machine, const Held& held, const Counts& counts, const Quota& quota, Int* got) {
    static thread_local Ints left;
    Int rank = held.holders[mine], begin = held.starts[e], end = held.starts[e + 1];
    left.resize(machine.ranks);
    for (Int k = 0; k < machine.ranks; k++) left[k] = counts.of_ranks[k * held.experts + e];
    for (Int i = begin; i < end; i++) left[held.holders[i]] -= quota.kept[i];
    std::fill(got, got + machine.ranks, 0);
    got[rank] = quota.kept[mine];
    if (1 < machine.nodes && machine.nodes < machine.ranks) {
        for (Int n = 0, i = begin; n < machine.nodes; n++) {
            Int have = 0, wanted = 0, start = 0, run = 0, first = machine.node_starts[n], last = machine.node_starts[n + 1];
            for (Int k = first; k < last; k++) have += left[k];
            for (; i < end && machine.node_of[held.holders[i]] == n; i++) {
                if (i == mine) start = wanted;
                wanted += quota.all[i] - quota.kept[i];
            }
            Int amount = std::min(have, wanted), stop = std::min(start + quota.all[mine] - quota.kept[mine], amount);
            start = std::min(start, amount);
            for (Int k = first; k < last; k++) {
                Int from = std::min(run, amount), to = std::min(run + left[k], amount);
                run += left[k];
                left[k] -= to - from;
                if (n == machine.node_of[rank]) got[k] += common(from, to, start, stop);
            }
        }
    }
    Int start = 0, run = 0;
    for (Int i = begin; i < mine; i++) start += quota.want[i];
    for (Int k = 0; k < machine.ranks; k++) {
        got[k] += common(run, run + left[k], start, start + quota.want[mine]);
        run += left[k];
    }
}
}  // namespace

extern "C" {
// Which rows of ``counts`` [W, E] a rank sends to each holder, [n], and receives for each of its slots, [S, W].
void assign(const Machine& machine, const Held& held, const Part& part, const Int* counts, Int* sent, Int* received) {
    Counts sums(counts, held.experts, machine, part.rank);
    Quota quota{Ints(held.pairs()), Ints(held.pairs()), Ints(held.pairs())};
    cost::split_fastest(sums.load.data(), machine, held, quota.all.data());
    for (Int e = 0; e < held.experts; e++) {
        for (Int i = held.starts[e]; i < held.starts[e + 1]; i++) {
            quota.kept[i] = std::min(counts[held.holders[i] * held.experts + e], quota.all[i]);
            quota.want[i] = quota.all[i] - quota.kept[i];
        }
        send(e, part.rank, machine, held, sums, quota, sent);
    }
    for (Int s = 0; s < part.slots; s++) {
        Int e = part.experts[s], mine = held.starts[e];
        while (held.holders[mine] != part.rank) mine++;
        receive(e, mine, machine, held, sums, quota, received + s * machine.ranks);
    }
}

// Which segments of a rank's rows leave and come in one of several chunks, as segments_of in planner/segments.py: ``order``
// [n] are the places of holders in the order in which rows leave; ``leaving`` are starts and lengths, [2, n], and
// ``arriving`` likewise, [2, S, W].
void segments(const Held& held, const Part& part, Int ranks, const Int* order, const Int* sent, const Int* received,
              Int chunk, Int chunks, Int* splits, Int* leaving, Int* arriving) {
    auto cut = [&](Int length, Int expert, Int c) { return (length * c + expert % chunks) / chunks; };
    Ints begin(held.pairs()), length(held.pairs());
    std::fill(splits, splits + 2 * ranks, 0);
    Int first = 0, pairs = held.pairs(), parts = part.slots * ranks;
    for (Int e = 0; e < held.experts; e++)
        for (Int i = held.starts[e]; i < held.starts[e + 1]; i++) {
            Int from = cut(sent[i], e, chunk);
            begin[i] = first + from;
            length[i] = cut(sent[i], e, chunk + 1) - from;
            splits[held.holders[i]] += length[i];
            first += sent[i];
        }
    for (Int x = 0; x < pairs; x++) leaving[x] = begin[order[x]], leaving[pairs + x] = length[order[x]];
    for (Int rank = 0, at = 0; rank < ranks; rank++)
        for (Int s = 0; s < part.slots; s++) {
            Int e = part.experts[s], x = s * ranks + rank;
            arriving[x] = at;
            arriving[parts + x] = cut(received[x], e, chunk + 1) - cut(received[x], e, chunk);
            splits[ranks + rank] += arriving[parts + x];
            at += arriving[parts + x];
        }
}

// The ranges [start, start + length) one behind the other, and no more than ``total`` numbers.
void join(const Int* starts, const Int* lengths, Int ranges, Int total, Int* out) {
    for (Int r = 0; r < ranges; r++) {
        Int length = std::min(lengths[r], total);
        for (Int i = 0; i < length; i++) *out++ = starts[r] + i;
        total -= length;
    }
}
}
