// Split every expert's rows over its holders: the twin of planner/balance.py, which says what is done and why.
#pragma once
#include <algorithm>
#include <numeric>

#include "layer.h"

namespace balance {
constexpr int sweeps = 20;
constexpr Int good_enough = 1003, of_bound = 1000, stalled = 999, of_previous = 1000;

// Rows of one expert, and holders among which they may be shared in any way.
struct Block {
    Int rows, expert, size;
    Int at;  // of its first holder among the layer's pairs
};

inline Int floor_half(Int value) { return value >= 0 ? value / 2 : -((1 - value) / 2); }

inline void split_anew(const Block& block, const Held& held, Int* split, Ints& level) {
    const Int* ranks = held.holders + block.at;
    Int* quota = split + block.at;
    if (block.size == 2) {
        Int a = level[ranks[0]] - quota[0], b = level[ranks[1]] - quota[1];
        Int share = std::clamp<Int>(floor_half(block.rows + b - a + 1), 0, block.rows);
        quota[0] = share, quota[1] = block.rows - share;
        level[ranks[0]] = a + share, level[ranks[1]] = b + block.rows - share;
        return;
    }
    static thread_local Ints below, sorted;
    below.resize(block.size);
    for (Int i = 0; i < block.size; i++) below[i] = level[ranks[i]] - quota[i];
    sorted = below;
    std::sort(sorted.begin(), sorted.end());
    Int surface = 0, total = block.rows, sharing = 0;
    for (Int height : sorted) {
        if (sharing && height > surface) break;
        total += height;
        surface = total / ++sharing;
    }
    Int over = total - surface * sharing;
    for (Int i = 0; i < block.size; i++) {
        Int count = below[i] <= surface ? surface - below[i] : 0;
        if (below[i] <= surface && over) count++, over--;
        quota[i] = count;
        level[ranks[i]] = below[i] + count;
    }
}

// Returns the rows of each rank; ``alone`` are those that no other rank can take.
inline Ints even_out(const Ints& alone, std::vector<Block>& blocks, const Held& held, Int* split) {
    Ints level = alone;
    std::sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) {
        return a.rows != b.rows ? a.rows > b.rows : a.expert < b.expert;
    });
    for (const Block& block : blocks)
        for (Int i = block.at; i < block.at + block.size; i++) level[held.holders[i]] += split[i];
    Int ranks = level.size(), sum = std::accumulate(level.begin(), level.end(), Int(0));
    Int least = std::max(*std::max_element(alone.begin(), alone.end()), (sum + ranks - 1) / ranks);
    Int bound = least * good_enough / of_bound, previous = *std::max_element(level.begin(), level.end());
    for (int sweep = 0; sweep < sweeps && previous > bound; sweep++) {
        for (const Block& block : blocks) {
            const Int *first = held.holders + block.at, *last = first + block.size;
            if (std::any_of(first, last, [&](Int rank) { return level[rank] > bound; }))
                split_anew(block, held, split, level);
        }
        Int highest = *std::max_element(level.begin(), level.end());
        if (highest * of_previous > previous * stalled) break;
        previous = highest;
    }
    return level;
}

// Divides rows over the holders of an expert as local_split does, at 2**32nds: a node's rows among its holders, and those
// of nodes without one among all.
inline void cut_locally(Int expert, Int rows, const Machine& machine, const Held& held, Int* split) {
    Int begin = held.starts[expert], end = held.starts[expert + 1], holders = end - begin, away = machine.ranks;
    for (Int i = begin; i < end; i = held.next_node(expert, i, machine))
        away -= machine.node_size(machine.node_of[held.holders[i]]);
    Int ranks = 0, before = 0;  // of nodes so far; rows so far
    for (Int i = begin, next; i < end; i = next) {
        next = held.next_node(expert, i, machine);
        Int near = next - i, size = machine.node_size(machine.node_of[held.holders[i]]);
        for (Int k = i; k < next; k++) {
            Int until = (ranks * near + size * (k - i + 1)) * holders + away * (k - begin + 1) * near;
            Int whole = machine.ranks * near * holders;
            Int cut = Int((rows * (((__int128(until) << 32) + whole - 1) / whole)) >> 32);
            split[k] = cut - before;
            before = cut;
        }
        ranks += size;
    }
}

inline Ints owners_rows(const Int* load, const Machine& machine, const Held& held) {
    Ints level(machine.ranks, 0);
    for (Int e = 0; e < held.experts; e++) level[held.owners[e]] += load[e];
    return level;
}

inline void owners_only(const Int* load, const Held& held, Int* split) {
    for (Int e = 0; e < held.experts; e++)
        for (Int i = held.starts[e]; i < held.starts[e + 1]; i++)
            split[i] = held.holders[i] == held.owners[e] ? load[e] : 0;
}

inline void everywhere(const Int* load, const Machine& machine, const Held& held, Int* split) {
    Ints alone(machine.ranks, 0);
    std::vector<Block> blocks;
    for (Int e = 0; e < held.experts; e++) {
        Int begin = held.starts[e], size = held.starts[e + 1] - begin;
        if (size == 1) {
            alone[held.holders[begin]] += split[begin] = load[e];
        } else {
            cut_locally(e, load[e], machine, held, split);
            blocks.push_back({load[e], e, size, begin});
        }
    }
    Ints level = even_out(alone, blocks, held, split);
    Int highest = *std::max_element(level.begin(), level.end());
    if (highest * machine.ranks <= held.total(load)) return;
    level = owners_rows(load, machine, held);
    if (highest > *std::max_element(level.begin(), level.end())) owners_only(load, held, split);
}

// No row leaves a node that holds its expert.
inline void in_nodes(const Int* load, const Machine& machine, const Held& held, Int* split) {
    Ints alone(machine.ranks, 0);
    std::vector<Block> blocks;
    for (Int e = 0; e < held.experts; e++) {
        Int begin = held.starts[e], end = held.starts[e + 1], whole = 0, sum = 0;
        for (Int i = begin; i < end; i = held.next_node(e, i, machine))
            whole += machine.node_size(machine.node_of[held.holders[i]]);
        for (Int i = begin, next; i < end; i = next) {
            next = held.next_node(e, i, machine);
            Int size = next - i, until = sum + machine.node_size(machine.node_of[held.holders[i]]);
            Int count = share_of(load[e], until, whole) - share_of(load[e], sum, whole);
            sum = until;
            for (Int k = 0; k < size; k++) split[i + k] = share_of(count, k + 1, size) - share_of(count, k, size);
            if (size == 1)
                alone[held.holders[i]] += count;
            else
                blocks.push_back({count, e, size, i});
        }
    }
    even_out(alone, blocks, held, split);
}
}  // namespace balance
