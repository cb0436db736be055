// Seconds of a step's compute and rows: the twin of CostModel.work and CostModel.owners_work in planner/cost.py.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>

#include "balance.h"
#include "layer.h"

namespace cost {
constexpr int passes_of_compute = 3, passes_of_rows = 4;

inline double compute(double rows, const Layer& layer) { return passes_of_compute * rows * layer.row_flops / layer.flops; }

inline double total(const Int* load, const Layer& layer) { return double(std::accumulate(load, load + layer.experts, Int(0))); }

// Rows that ranks (or nodes) receive and send.
struct Exchanged {
    std::vector<double> received, stayed;

    explicit Exchanged(Int places) : received(places, 0.0), stayed(places, 0.0) {}

    void add(Int where, double have, double computed) {
        double stay = std::min(have, computed);
        received[where] += computed - stay;
        stayed[where] += stay;
    }
};

struct Work {
    double compute, rows;
    double seconds() const { return compute + rows; }
};

inline Work of_split(const Int* load, const Int* split, const Layer& layer) {
    double all = total(load, layer), ranks = double(layer.ranks), seconds = 0;
    std::vector<double> computed(layer.ranks, 0.0);
    Exchanged nodes(layer.nodes), single(layer.ranks);
    for (Int e = 0; e < layer.experts; e++) {
        for (Int i = layer.starts[e]; i < layer.starts[e + 1];) {
            Int node = layer.node_of[layer.holders[i]];
            double on_node = 0;
            for (; i < layer.starts[e + 1] && layer.node_of[layer.holders[i]] == node; i++) {
                computed[layer.holders[i]] += double(split[i]);
                on_node += double(split[i]);
                single.add(layer.holders[i], double(load[e]) / ranks, double(split[i]));
            }
            nodes.add(node, double(load[e]) * (double(layer.node_size(node)) / ranks), on_node);
        }
    }
    if (layer.nodes > 1) {
        double most = 0;
        for (Int n = 0; n < layer.nodes; n++) {
            double own = all * (double(layer.node_size(n)) / ranks);
            most = std::max({most, nodes.received[n], own - nodes.stayed[n]});
        }
        seconds = most / layer.node_bytes;
    }
    if (layer.ranks > layer.nodes) {
        double most = 0, own = all / ranks;
        for (Int k = 0; k < layer.ranks; k++) most = std::max({most, single.received[k], own - single.stayed[k]});
        seconds = std::max(seconds, most / layer.rank_bytes);
    }
    double busiest = *std::max_element(computed.begin(), computed.end());
    return {compute(busiest, layer), passes_of_rows * seconds * layer.row_bytes};
}

inline Work of_owners(const Int* load, const Layer& layer) {
    std::vector<Int> level = balance::owners_rows(load, layer);
    Int all = std::accumulate(level.begin(), level.end(), Int(0));
    double seconds = 0;
    if (layer.nodes > 1) {
        for (Int n = 0; n < layer.nodes; n++) {
            double share = double(layer.node_size(n)) / double(layer.ranks);
            auto first = level.begin() + layer.node_starts[n], last = level.begin() + layer.node_starts[n + 1];
            Int owned = std::accumulate(first, last, Int(0));
            seconds = std::max({seconds, double(owned) * (1 - share), double(all - owned) * share});
        }
        seconds /= layer.node_bytes;
    }
    auto [lowest, highest] = std::minmax_element(level.begin(), level.end());
    if (layer.ranks > layer.nodes) {
        double most = double(std::max(*highest * (layer.ranks - 1), all - *lowest)) / double(layer.ranks);
        seconds = std::max(seconds, most / layer.rank_bytes);
    }
    return {compute(double(*highest), layer), passes_of_rows * seconds * layer.row_bytes};
}

// The fastest of three ways, as split_fastest in planner/fastest.py.
inline void split_fastest(const Int* load, const Layer& layer, Int* split) {
    constexpr double may_gain = 0.03, rounding = 1e-9;
    if (layer.nodes == 1 || layer.pairs() == layer.experts) return balance::everywhere(load, layer, split);
    balance::in_nodes(load, layer, split);
    Work best = of_split(load, split, layer);
    double least = best.seconds(), gain = best.compute - compute(total(load, layer) / double(layer.ranks), layer);
    if (layer.nodes > 2 || gain > may_gain * least) {
        std::vector<Int> other(layer.pairs());
        balance::everywhere(load, layer, other.data());
        double seconds = of_split(load, other.data(), layer).seconds();
        if (seconds < least) {
            least = seconds;
            std::copy(other.begin(), other.end(), split);
        }
    }
    if (of_owners(load, layer).seconds() < least * (1 - rounding)) balance::owners_only(load, layer, split);
}
}  // namespace cost
