// Split every expert's rows over its holders: the twin of planner/balance.py, which says what is done and why.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>

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

inline void split_anew(const Block& block, const Layer& layer, Int* split, std::vector<Int>& level) {
    const Int* ranks = layer.holders + block.at;
    Int* quota = split + block.at;
    if (block.size == 2) {
        Int a = level[ranks[0]] - quota[0], b = level[ranks[1]] - quota[1];
        Int share = std::clamp<Int>(floor_half(block.rows + b - a + 1), 0, block.rows);
        quota[0] = share, quota[1] = block.rows - share;
        level[ranks[0]] = a + share, level[ranks[1]] = b + block.rows - share;
        return;
    }
    static thread_local std::vector<Int> below, sorted;
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

// Returns the rows of each rank; alone are those that no other rank can take.
inline std::vector<Int> even_out(const std::vector<Int>& alone, std::vector<Block>& blocks, const Layer& layer, Int* split) {
    std::vector<Int> level = alone;
    std::sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) {
        return a.rows != b.rows ? a.rows > b.rows : a.expert < b.expert;
    });
    for (const Block& block : blocks)
        for (Int i = block.at; i < block.at + block.size; i++) level[layer.holders[i]] += split[i];
    Int sum = std::accumulate(level.begin(), level.end(), Int(0));
    Int least = std::max(*std::max_element(alone.begin(), alone.end()), (sum + layer.ranks - 1) / layer.ranks);
    Int bound = least * good_enough / of_bound, previous = *std::max_element(level.begin(), level.end());
    for (int sweep = 0; sweep < sweeps && previous > bound; sweep++) {
        for (const Block& block : blocks) {
            const Int *first = layer.holders + block.at, *last = first + block.size;
            if (std::any_of(first, last, [&](Int rank) { return level[rank] > bound; }))
                split_anew(block, layer, split, level);
        }
        Int highest = *std::max_element(level.begin(), level.end());
        if (highest * of_previous > previous * stalled) break;
        previous = highest;
    }
    return level;
}

// Divides rows over the holders at [begin, end) as local_split does, at 2**32nds.
inline void cut_locally(Int rows, const Layer& layer, Int begin, Int end, Int* split) {
    Int size = end - begin, inside = 0, most = size;
    static thread_local std::vector<Int> on_node;
    on_node.assign(size, 0);  // holders on the node of each
    for (Int i = begin; i < end;) {
        Int next = i, node = layer.node_of[layer.holders[i]];
        while (next < end && layer.node_of[layer.holders[next]] == node) next++;
        std::fill(on_node.begin() + (i - begin), on_node.begin() + (next - begin), next - i);
        most = std::lcm(most, next - i);
        inside += layer.node_size(node);
        i = next;
    }
    Int away = layer.ranks - inside, whole = 0, sum = 0, before = 0;
    auto weight = [&](Int i) {
        return layer.node_size(layer.node_of[layer.holders[i]]) * (most / on_node[i - begin]) + away * (most / size);
    };
    for (Int i = begin; i < end; i++) whole += weight(i);
    for (Int i = begin; i < end; i++) {
        sum += weight(i);
        auto part = ((__int128(sum) << 32) + whole - 1) / whole;
        Int cut = Int((rows * part) >> 32);
        split[i] = cut - before;
        before = cut;
    }
}

inline std::vector<Int> owners_rows(const Int* load, const Layer& layer) {
    std::vector<Int> level(layer.ranks, 0);
    for (Int e = 0; e < layer.experts; e++) level[layer.owners[e]] += load[e];
    return level;
}

inline void owners_only(const Int* load, const Layer& layer, Int* split) {
    for (Int e = 0; e < layer.experts; e++)
        for (Int i = layer.starts[e]; i < layer.starts[e + 1]; i++)
            split[i] = layer.holders[i] == layer.owners[e] ? load[e] : 0;
}

inline void everywhere(const Int* load, const Layer& layer, Int* split) {
    std::vector<Int> alone(layer.ranks, 0);
    std::vector<Block> blocks;
    for (Int e = 0; e < layer.experts; e++) {
        Int begin = layer.starts[e], size = layer.starts[e + 1] - begin;
        if (size == 1) {
            alone[layer.holders[begin]] += split[begin] = load[e];
        } else {
            cut_locally(load[e], layer, begin, begin + size, split);
            blocks.push_back({load[e], e, size, begin});
        }
    }
    std::vector<Int> level = even_out(alone, blocks, layer, split);
    Int highest = *std::max_element(level.begin(), level.end()), total = std::accumulate(load, load + layer.experts, Int(0));
    if (highest * layer.ranks <= total) return;
    level = owners_rows(load, layer);
    if (highest > *std::max_element(level.begin(), level.end())) owners_only(load, layer, split);
}

// No row leaves a node that holds its expert.
inline void in_nodes(const Int* load, const Layer& layer, Int* split) {
    std::vector<Int> alone(layer.ranks, 0);
    std::vector<Block> blocks;
    for (Int e = 0; e < layer.experts; e++) {
        Int begin = layer.starts[e], end = layer.starts[e + 1], whole = 0, sum = 0;
        for (Int i = begin; i < end; i++) {
            Int node = layer.node_of[layer.holders[i]];
            if (i == begin || node != layer.node_of[layer.holders[i - 1]]) whole += layer.node_size(node);
        }
        for (Int i = begin; i < end;) {
            Int next = i, node = layer.node_of[layer.holders[i]];
            while (next < end && layer.node_of[layer.holders[next]] == node) next++;
            Int size = next - i, until = sum + layer.node_size(node);
            Int count = load[e] * until / whole - load[e] * sum / whole;
            sum = until;
            for (Int k = 0; k < size; k++) split[i + k] = count * (k + 1) / size - count * k / size;
            if (size == 1)
                alone[layer.holders[i]] += count;
            else
                blocks.push_back({count, e, size, i});
            i = next;
        }
    }
    even_out(alone, blocks, layer, split);
}
}  // namespace balance
