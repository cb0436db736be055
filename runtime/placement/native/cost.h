// Predict a step's seconds: the twin of planner/cost.py, and of split_fastest in planner/fastest.py.
#pragma once
#include <algorithm>

#include "balance.h"
#include "layer.h"

namespace cost {
constexpr int passes_of_compute = 3, passes_of_rows = 4;

inline double compute(double rows, const Machine& machine) {
    return passes_of_compute * rows * machine.row_flops / machine.flops;
}

// Rows that ranks (or nodes) receive, and those that stay there.
struct Exchanged {
    std::vector<double> received, stayed;

    void reset(Int places) {
        received.assign(places, 0.0);
        stayed.assign(places, 0.0);
    }

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

inline Work work(const Int* load, const Int* split, const Machine& machine, const Held& held) {
    double total = double(held.total(load)), ranks = double(machine.ranks), seconds = 0;
    static thread_local std::vector<double> computed;
    static thread_local Exchanged nodes, single;
    computed.assign(machine.ranks, 0.0);
    nodes.reset(machine.nodes);
    single.reset(machine.ranks);
    for (Int e = 0; e < held.experts; e++) {
        for (Int i = held.starts[e], next; i < held.starts[e + 1]; i = next) {
            next = held.next_node(e, i, machine);
            Int node = machine.node_of[held.holders[i]], on_node = 0;
            for (Int k = i; k < next; k++) {
                on_node += split[k];
                computed[held.holders[k]] += double(split[k]);
                single.add(held.holders[k], double(load[e]) / ranks, double(split[k]));
            }
            nodes.add(node, double(load[e]) * (double(machine.node_size(node)) / ranks), double(on_node));
        }
    }
    if (machine.nodes > 1) {
        double most = 0;
        for (Int n = 0; n < machine.nodes; n++) {
            double own = total * (double(machine.node_size(n)) / ranks);
            most = std::max({most, nodes.received[n], own - nodes.stayed[n]});
        }
        seconds = most / machine.node_bytes;
    }
    if (machine.ranks > machine.nodes) {
        double most = 0, own = total / ranks;
        for (Int k = 0; k < machine.ranks; k++) most = std::max({most, single.received[k], own - single.stayed[k]});
        seconds = std::max(seconds, most / machine.rank_bytes);
    }
    double busiest = *std::max_element(computed.begin(), computed.end());
    return {compute(busiest, machine), passes_of_rows * seconds * machine.row_bytes};
}

inline Work owners_work(const Int* load, const Machine& machine, const Held& held) {
    Ints level = balance::owners_rows(load, machine, held);
    Int total = held.total(load);
    double seconds = 0;
    if (machine.nodes > 1) {
        for (Int n = 0; n < machine.nodes; n++) {
            double share = double(machine.node_size(n)) / double(machine.ranks);
            auto first = level.begin() + machine.node_starts[n], last = level.begin() + machine.node_starts[n + 1];
            Int owned = std::accumulate(first, last, Int(0));
            seconds = std::max({seconds, double(owned) * (1 - share), double(total - owned) * share});
        }
        seconds /= machine.node_bytes;
    }
    auto [lowest, highest] = std::minmax_element(level.begin(), level.end());
    if (machine.ranks > machine.nodes) {
        double most = double(std::max(*highest * (machine.ranks - 1), total - *lowest)) / double(machine.ranks);
        seconds = std::max(seconds, most / machine.rank_bytes);
    }
    return {compute(double(*highest), machine), passes_of_rows * seconds * machine.row_bytes};
}

// Replicas travel to the first holder on each node, and from there to the others.
inline double replica_seconds(const Machine& machine, const Held& held) {
    if (held.pairs() == held.experts) return 0.0;
    Ints rank_out(machine.ranks, 0), rank_in(machine.ranks, 0), node_out(machine.nodes, 0), node_in(machine.nodes, 0);
    for (Int e = 0; e < held.experts; e++) {
        Int owner = held.owners[e], home = machine.node_of[owner];
        for (Int i = held.starts[e], next; i < held.starts[e + 1]; i = next) {
            next = held.next_node(e, i, machine);
            Int node = machine.node_of[held.holders[i]], leader = node == home ? owner : held.holders[i];
            if (node != home) node_out[home]++, node_in[node]++;
            for (Int k = i; k < next; k++)
                if (held.holders[k] != leader) rank_out[leader]++, rank_in[held.holders[k]]++;
        }
    }
    auto most = [](const Ints& out, const Ints& in) {
        return double(std::max(*std::max_element(out.begin(), out.end()), *std::max_element(in.begin(), in.end())));
    };
    double copies = most(node_out, node_in) / machine.node_bytes;
    copies += most(rank_out, rank_in) / machine.rank_bytes;
    return machine.expert_transfers * copies * machine.expert_bytes;
}

inline double exposed_seconds(const Machine& machine, const Held& held) {
    return std::max(0.0, replica_seconds(machine, held) - machine.hidden_seconds);
}

inline double step(const Int* load, const Int* split, const Machine& machine, const Held& held) {
    return work(load, split, machine, held).seconds() + exposed_seconds(machine, held);
}

// The fastest of three ways.
inline void split_fastest(const Int* load, const Machine& machine, const Held& held, Int* split) {
    constexpr double may_gain = 0.03, rounding = 1e-9;
    if (machine.nodes == 1 || held.pairs() == held.experts) return balance::everywhere(load, machine, held, split);
    balance::in_nodes(load, machine, held, split);
    Work best = work(load, split, machine, held);
    double least = best.seconds(), even = double(held.total(load)) / double(machine.ranks);
    if (machine.nodes > 2 || best.compute - compute(even, machine) > may_gain * least) {
        Ints other(held.pairs());
        balance::everywhere(load, machine, held, other.data());
        double seconds = work(load, other.data(), machine, held).seconds();
        if (seconds < least) {
            least = seconds;
            std::copy(other.begin(), other.end(), split);
        }
    }
    double alone = owners_work(load, machine, held).seconds();
    if (alone < least * (1 - rounding)) balance::owners_only(load, held, split);
}
}  // namespace cost
