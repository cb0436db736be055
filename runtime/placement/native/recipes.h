// Proposals of placements: the twin of planner/recipes.py, of shed_excess in planner/balance.py, and of deal in
// planner/paper.py with _fill in planner/fastest.py.
#pragma once
#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "balance.h"
#include "cost.h"
#include "layer.h"

namespace recipes {
// What a load is planned for.
struct Case {
    const Machine& machine;
    Int experts;
    const Int *load, *owners;  // [E]
    Int slots;

    // The groups in which hot experts are spread: nodes, or the ranks of a single one.
    Int groups() const { return machine.nodes > 1 ? machine.nodes : machine.ranks; }
    Int group_start(Int group) const { return machine.nodes > 1 ? machine.node_starts[group] : group; }
    Int group_end(Int group) const { return machine.nodes > 1 ? machine.node_starts[group + 1] : group + 1; }
};

enum Fills : Int { no, yes, both };

struct Recipe {
    Int spread, in_nodes, fills;
};

// The smallest comes first; ties go to the smaller id.
template <typename Number>
using Queue = std::priority_queue<std::pair<Number, Int>, std::vector<std::pair<Number, Int>>, std::greater<>>;

struct Proposal {
    Recipe recipe{};
    std::vector<Ints> replicas;                         // of each expert the ranks beside its owner, in no order
    Ints free;                                          // slots that are left on each rank
    std::vector<std::vector<std::pair<Int, Int>>> have;  // of each rank (expert, rows)
    Ints starts, holders, split;

    Held held(const Case& given) const { return {given.experts, given.owners, starts.data(), holders.data()}; }

    // Works out who holds what.
    void place(const Case& given) {
        starts.assign(1, 0);
        holders.clear();
        for (Int e = 0; e < given.experts; e++) {
            holders.insert(holders.end(), replicas[e].begin(), replicas[e].end());
            holders.push_back(given.owners[e]);
            if (!replicas[e].empty()) std::sort(holders.begin() + starts.back(), holders.end());
            starts.push_back(holders.size());
        }
    }

    void count_split() {
        split.assign(holders.size(), 0);
        for (Int rank = 0; rank < Int(have.size()); rank++)
            for (auto [expert, rows] : have[rank])
                split[std::lower_bound(&holders[starts[expert]], &holders[0] + starts[expert + 1], rank) - &holders[0]] = rows;
    }
};

inline Ints by_load(const Case& given) {
    Ints order;
    for (Int e = 0; e < given.experts; e++)
        if (given.load[e]) order.push_back(e);
    std::stable_sort(order.begin(), order.end(), [&](Int a, Int b) { return given.load[a] > given.load[b]; });
    return order;
}

inline Ints hottest_of(const Case& given) {
    const Machine& machine = given.machine;
    Int groups = given.groups(), least = machine.ranks;
    for (Int g = 0; g < groups; g++) least = std::min(least, given.group_end(g) - given.group_start(g));
    Int most = (given.slots * least * groups + groups - 2) / (groups - 1);
    Ints order = by_load(given), wanted(machine.nodes, 0), chosen;
    if (machine.nodes == 1) {
        order.resize(std::min(Int(order.size()), most));
        return order;
    }
    std::vector<std::queue<Int>> waiting(machine.nodes);
    for (Int e : order) {
        Int node = machine.node_of[given.owners[e]];
        wanted[node] += given.load[e];
        waiting[node].push(e);
    }
    Queue<Int> queue;
    for (Int n = 0; n < machine.nodes; n++)
        if (wanted[n]) queue.push({-wanted[n], n});
    while (!queue.empty() && Int(chosen.size()) < most) {
        auto [count, node] = queue.top();
        queue.pop();
        chosen.push_back(waiting[node].front());
        waiting[node].pop();
        if (!waiting[node].empty()) queue.push({count + given.load[chosen.back()], node});
    }
    return chosen;
}

inline void spread(const Case& given, const Ints& hottest, Proposal& proposal) {
    const Machine& machine = given.machine;
    std::vector<double> expected(machine.ranks, 0.0);
    for (Int e = 0; e < given.experts; e++) expected[given.owners[e]] += double(given.load[e]);
    Int count = std::min(proposal.recipe.spread, Int(hottest.size())), groups = given.groups();
    for (Int x = 0; x < count; x++) {
        Int expert = hottest[x], owner = given.owners[expert];
        double share = double(given.load[expert]) / double(groups);
        for (Int g = 0; g < groups; g++) {
            Int begin = given.group_start(g), end = given.group_end(g), best = -1;
            if (begin <= owner && owner < end) continue;
            for (Int k = begin; k < end; k++)
                if (proposal.free[k] && (best < 0 || expected[k] < expected[best])) best = k;
            if (best < 0) continue;
            proposal.replicas[expert].push_back(best);
            proposal.free[best]--;
            expected[best] += share;
            expected[owner] -= share;
        }
    }
}

// Moves rows from ranks in [begin, end) with more than ``share`` to those with fewer and a free slot.
inline void move_excess(const Case& given, Int begin, Int end, Int share, Ints& level, Proposal& proposal) {
    Queue<Int> donors, takers;
    for (Int k = begin; k < end; k++) {
        if (level[k] > share) donors.push({-level[k], k});
        if (level[k] < share && proposal.free[k]) takers.push({level[k], k});
    }
    while (!donors.empty() && !takers.empty()) {
        Int donor = donors.top().second, taker = takers.top().second;
        donors.pop(), takers.pop();
        auto &gives = proposal.have[donor], &gets = proposal.have[taker];
        auto& hottest = *std::min_element(gives.begin(), gives.end(), [](auto& a, auto& b) {
            return a.second != b.second ? a.second > b.second : a.first < b.first;
        });
        Int expert = hottest.first, moved = std::min({level[donor] - share, share - level[taker], hottest.second});
        hottest.second -= moved;
        auto found = std::find_if(gets.begin(), gets.end(), [&](auto& one) { return one.first == expert; });
        if (found == gets.end())
            gets.push_back({expert, moved});
        else
            found->second += moved;
        level[donor] -= moved, level[taker] += moved;
        Ints& more = proposal.replicas[expert];
        if (taker != given.owners[expert] && std::find(more.begin(), more.end(), taker) == more.end()) {
            more.push_back(taker);
            proposal.free[taker]--;
        }
        if (level[donor] > share) donors.push({-level[donor], donor});
        if (level[taker] < share && proposal.free[taker]) takers.push({level[taker], taker});
    }
}

inline void shed_excess(const Case& given, Proposal& proposal) {
    const Machine& machine = given.machine;
    bool in_nodes = proposal.recipe.in_nodes;
    Ints level(machine.ranks, 0);
    proposal.have.resize(machine.ranks);
    for (auto& rows : proposal.have) rows.clear();
    proposal.place(given);
    Held held = proposal.held(given);
    for (Int e = 0; e < given.experts; e++) {
        // Rows are divided evenly over holders, or over nodes by their size and there over holders.
        Int begin = held.starts[e], end = held.starts[e + 1], whole = 0, ranks = 0, before = 0;
        for (Int i = begin; in_nodes && i < end; i = held.next_node(e, i, machine))
            whole += machine.node_size(machine.node_of[held.holders[i]]);
        for (Int i = begin, next; i < end; i = next) {
            next = in_nodes ? held.next_node(e, i, machine) : end;
            Int near = next - i, size = in_nodes ? machine.node_size(machine.node_of[held.holders[i]]) : 1;
            for (Int k = i; k < next; k++) {
                Int cut = share_of(given.load[e], ranks * near + size * (k - i + 1), (in_nodes ? whole : 1) * near);
                level[held.holders[k]] += cut - before;
                proposal.have[held.holders[k]].push_back({e, cut - before});
                before = cut;
            }
            ranks += size;
        }
    }
    Int even = (held.total(given.load) + machine.ranks - 1) / machine.ranks;
    for (Int n = 0; n < (in_nodes ? machine.nodes : 1); n++) {
        Int begin = in_nodes ? machine.node_starts[n] : 0, end = in_nodes ? machine.node_starts[n + 1] : machine.ranks;
        Int here = std::accumulate(level.begin() + begin, level.begin() + end, Int(0));
        Int share = std::max(even, (here + end - begin - 1) / (end - begin));
        move_excess(given, begin, end, share, level, proposal);
    }
}

inline void propose(const Case& given, const Ints& hottest, Recipe recipe, Proposal& proposal) {
    proposal.recipe = recipe;
    // Memory is used again: thousands of proposals are made for new owners.
    proposal.replicas.resize(given.experts);
    for (Ints& more : proposal.replicas) more.clear();
    proposal.free.assign(given.machine.ranks, given.slots);
    spread(given, hottest, proposal);
    shed_excess(given, proposal);
    proposal.place(given);
    proposal.count_split();
}

// --- slots that are left ---

// A rank without the expert, on a node with fewest copies, in turns from ``turn`` on; -1 if there is none.
inline Int take_rank(Int owner, const Ints& replicas, const Ints& copies, std::vector<Ints>& free, Int turn) {
    Ints levels = copies;
    std::sort(levels.begin(), levels.end());
    levels.erase(std::unique(levels.begin(), levels.end()), levels.end());
    Int nodes = copies.size();
    for (Int wanted : levels)
        for (Int x = 0; x < nodes; x++) {
            Int node = (turn + x) % nodes;
            if (copies[node] != wanted) continue;
            for (auto slot = free[node].begin(); slot != free[node].end(); slot++) {
                Int rank = *slot;
                if (rank == owner || std::find(replicas.begin(), replicas.end(), rank) != replicas.end()) continue;
                free[node].erase(slot);
                return rank;
            }
        }
    return -1;
}

inline void deal(const Case& given, const Ints& experts, std::vector<Ints>& replicas, std::vector<Ints>& free) {
    const Machine& machine = given.machine;
    auto rows_of = [&](Int e) { return -double(given.load[e]) / double(1 + Int(replicas[e].size())); };
    auto takes_more = [&](Int e) { return Int(replicas[e].size()) < machine.ranks - 1; };
    Queue<double> queue;
    for (Int e : experts)
        if (takes_more(e)) queue.push({rows_of(e), e});
    std::vector<Ints> copies(given.experts);  // of each expert on each node, when it has had a turn
    Int turn = 0, left = 0;
    for (const Ints& slots : free) left += slots.size();
    while (!queue.empty() && left) {
        Int expert = queue.top().second, owner = given.owners[expert];
        queue.pop();
        if (copies[expert].empty()) {
            copies[expert].assign(machine.nodes, 0);
            copies[expert][machine.node_of[owner]]++;
            for (Int rank : replicas[expert]) copies[expert][machine.node_of[rank]]++;
        }
        Int rank = take_rank(owner, replicas[expert], copies[expert], free, turn);
        if (rank < 0) continue;
        left--;
        replicas[expert].push_back(rank);
        copies[expert][machine.node_of[rank]]++;
        turn = (machine.node_of[rank] + 1) % machine.nodes;
        if (takes_more(expert)) queue.push({rows_of(expert), expert});
    }
}

// Adds replicas in free slots, as many as can travel in the hidden time; returns whether there are any. The split stays
// that of before.
inline bool fill(const Case& given, Proposal& proposal) {
    const Machine& machine = given.machine;
    double hidden = machine.hidden_seconds;
    if (hidden == 0 || (machine.nodes > 1 && cost::replica_seconds(machine, proposal.held(given)) >= hidden)) return false;
    Ints order = by_load(given);
    for (Int kept = 0; kept < given.slots; kept++) {
        std::vector<Ints> free(machine.nodes);
        Int slots = 0;
        for (Int turn = 0; turn < given.slots; turn++)
            for (Int k = 0; k < machine.ranks; k++)
                if (proposal.free[k] - kept > turn) free[machine.node_of[k]].push_back(k), slots++;
        if (!slots) break;
        Proposal more;
        more.replicas = proposal.replicas;
        deal(given, Ints(order.begin(), order.begin() + std::min(slots, Int(order.size()))), more.replicas, free);
        more.place(given);
        if (cost::replica_seconds(machine, more.held(given)) <= hidden) {
            proposal.replicas.swap(more.replicas);
            proposal.starts.swap(more.starts);
            proposal.holders.swap(more.holders);
            return true;
        }
    }
    return false;
}
}  // namespace recipes
