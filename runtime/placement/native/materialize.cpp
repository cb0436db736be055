// Which ranks get replicas of which experts, and who owns them: the twin of planner/fastest.py and of swap_owners in
// planner/resharding.py.
#include <algorithm>
#include <cmath>
#include <optional>

#include "cost.h"
#include "layer.h"
#include "recipes.h"

namespace {
using recipes::Case, recipes::Proposal, recipes::Recipe;

constexpr double worth = 0.95, insured_by = 1.05, almost = 1.03, worth_swapping = 0.998;
constexpr Int swapped = 16, partners = 8, most_swaps = 64, effort = 1 << 14;

struct Alone {
    Ints starts;
    Held held;

    explicit Alone(const Case& given) : starts(given.experts + 1) {
        std::iota(starts.begin(), starts.end(), Int(0));
        held = {given.experts, given.owners, starts.data(), given.owners};
    }
};

struct Choice {
    std::optional<Recipe> recipe;  // none if nothing is replicated
    double seconds;
    Ints starts, holders;

    // Nothing is replicated.
    Choice(const Case& given, const Alone& alone)
        : seconds(cost::step(given.load, given.load, given.machine, alone.held)),
          starts(alone.starts),
          holders(given.owners, given.owners + given.experts) {}
};

Choice fastest(const Case& given, Int fills) {
    const Machine& machine = given.machine;
    Alone alone(given);
    Choice best(given, alone);
    const double nothing = best.seconds;
    if (!given.slots || machine.ranks == 1 || !alone.held.total(given.load)) return best;
    Ints hottest = recipes::hottest_of(given), spreads{0, Int(hottest.size())};
    for (Int many = 1; many <= Int(hottest.size()); many *= 2) spreads.push_back(many);
    std::sort(spreads.begin(), spreads.end());
    spreads.erase(std::unique(spreads.begin(), spreads.end()), spreads.end());
    // The best proposal of each way to even out ranks.
    Proposal proposal, winners[2];
    double least[2] = {INFINITY, INFINITY};
    for (Int many : spreads)
        for (Int way = 0; way < (machine.nodes > 1 ? 2 : 1); way++) {
            recipes::propose(given, hottest, {many, way, fills}, proposal);
            double seconds = cost::step(given.load, proposal.split.data(), machine, proposal.held(given));
            if (seconds < least[way]) {
                least[way] = seconds;
                std::swap(winners[way], proposal);
            }
        }
    // Those that beat nothing are timed again as their rows will be dispatched, unfilled and filled.
    double bound = nothing;
    auto consider = [&](const Proposal& one, Int filled) {
        Held held = one.held(given);
        Ints split(held.pairs());
        cost::split_fastest(given.load, machine, held, split.data());
        double seconds = cost::step(given.load, split.data(), machine, held);
        double insured = filled ? seconds / insured_by : seconds;
        if (insured > bound || seconds >= worth * nothing) return;
        bound = insured;
        best.recipe = {one.recipe.spread, one.recipe.in_nodes, filled};
        best.seconds = seconds;
        best.starts = one.starts;
        best.holders = one.holders;
    };
    for (Int way = 0; way < 2; way++) {
        if (!(least[way] < nothing)) continue;
        if (fills != recipes::yes) consider(winners[way], recipes::no);
        if (fills == recipes::no) continue;
        bool filled = recipes::fill(given, winners[way]);
        if (filled || fills == recipes::yes) consider(winners[way], recipes::yes);
    }
    return best;
}

double seconds_of(const Case& given, const Recipe* recipe) {
    if (!recipe) return cost::owners_work(given.load, given.machine, Alone(given).held).seconds();
    static thread_local Proposal proposal;
    recipes::propose(given, recipes::hottest_of(given), *recipe, proposal);
    return cost::step(given.load, proposal.split.data(), given.machine, proposal.held(given));
}

// What Python gets: where each expert's holders begin, [E + 1], and they, room for [E * W].
void give(const Ints& starts, const Ints& holders, Int* out_starts, Int* out_holders) {
    std::copy(starts.begin(), starts.end(), out_starts);
    std::copy(holders.begin(), holders.end(), out_holders);
}
}  // namespace

extern "C" {
// The fastest placement; with ``frugal`` that of the fewest slots that come near it. Returns the slots, and the recipe
// with a spread of -1 if nothing is replicated.
Int search(const Machine& machine, Int experts, const Int* load, const Int* owners, Int slots, Int fills, Int frugal,
           Int* recipe, Int* starts, Int* holders) {
    Choice best = fastest({machine, experts, load, owners, slots}, fills);
    Int used = slots;
    for (Int fewer = 1; frugal && best.recipe && fewer < slots; fewer *= 2) {
        Choice other = fastest({machine, experts, load, owners, fewer}, fills);
        if (!other.recipe || other.seconds > almost * best.seconds) continue;
        best = other;
        used = fewer;
        break;
    }
    Recipe found = best.recipe.value_or(Recipe{-1, 0, 0});
    recipe[0] = found.spread, recipe[1] = found.in_nodes, recipe[2] = found.fills;
    give(best.starts, best.holders, starts, holders);
    return used;
}

// The best of a few recipes, whose number is returned.
Int choose(const Machine& machine, Int experts, const Int* load, const Int* owners, Int slots, const Recipe* given_recipes,
           Int count, Int* starts, Int* holders) {
    Case given{machine, experts, load, owners, slots};
    Ints hottest = recipes::hottest_of(given);
    Proposal best, proposal;
    Int number = 0;
    double least = INFINITY;
    for (Int x = 0; x < count; x++) {
        recipes::propose(given, hottest, given_recipes[x], proposal);
        double seconds = cost::work(load, proposal.split.data(), machine, proposal.held(given)).seconds();
        if (seconds < least) seconds += cost::exposed_seconds(machine, proposal.held(given));
        if (x == 0 || seconds < least) {
            least = seconds;
            number = x;
            std::swap(best, proposal);
        }
    }
    Alone alone(given);
    if (count > 1 && least >= cost::owners_work(load, machine, alone.held).seconds()) {
        give(alone.starts, Ints(owners, owners + experts), starts, holders);
        return number;
    }
    if (best.recipe.fills == recipes::yes) recipes::fill(given, best);
    give(best.starts, best.holders, starts, holders);
    return number;
}

// The predicted seconds of a step with a recipe's placement, unfilled; without a recipe, of owners alone.
double predict(const Machine& machine, Int experts, const Int* load, const Int* owners, Int slots, const Recipe* recipe) {
    return seconds_of({machine, experts, load, owners, slots}, recipe);
}

// Lets pairs of experts change places in ``owners``, which is changed.
void swap_owners(const Machine& machine, Int experts, const Int* load, Int* owners, Int slots, const Recipe* recipe) {
    Ints order(experts), now(owners, owners + experts), found, trial;
    std::iota(order.begin(), order.end(), Int(0));
    std::stable_sort(order.begin(), order.end(), [&](Int a, Int b) { return load[a] > load[b]; });
    auto seconds_with = [&](const Ints& owned) { return seconds_of({machine, experts, load, owned.data(), slots}, recipe); };
    double least = seconds_with(now);
    Int left = std::min(most_swaps, effort / (machine.ranks + experts));
    for (bool better = true; better;) {
        better = false;
        for (Int place = 0; place < std::min(swapped, experts); place++) {
            Int expert = order[place];
            found = now;
            for (Int turn = 1; turn <= partners; turn++) {
                Int other = order[(place + turn * experts / partners) % experts];
                if (now[other] == now[expert]) continue;
                if (!left) {
                    std::copy(found.begin(), found.end(), owners);
                    return;
                }
                left--;
                trial = now;
                std::swap(trial[expert], trial[other]);
                double seconds = seconds_with(trial);
                if (seconds < worth_swapping * least) found = trial, least = seconds, better = true;
            }
            now = found;
        }
    }
    std::copy(now.begin(), now.end(), owners);
}
}
