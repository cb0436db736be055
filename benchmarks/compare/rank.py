"""What one rank runs: all systems of one shape, on all workloads, taking turns.

rank.py CELL.json OUT.json         started by ``python -m benchmarks.compare`` through benchmarks.emulator
"""

from __future__ import annotations

import gc
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist

from benchmarks.compare import routing, shapes
from benchmarks.compare.machine import measure, measure_beside, measure_in_turns, measure_pace, seconds_of
from benchmarks.compare.systems import Alone, Entry, free_links, make_entries
from benchmarks.compare.workloads import counts_of, timed_steps
from benchmarks.emulator.throttle import throttled
from hecate.runtime.comm.measure_rates import measure_rates
from hecate.runtime.comm.world import World, find_topology, find_world
from hecate.runtime.state.overlap_window import measure_hidden

HIDDEN_STEPS = 3
# Steps of a system that are not timed. DDP fills its buckets anew after the first.
WARM_UP = 2
# A busy rank has this many times its share of rows.
MANY = 4


def bytes_sent_by_node() -> int:
    """What left this node since it was made."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


class Runner:
    """Runs one step of one system and gathers what every rank saw."""

    def __init__(self, shape: shapes.Shape) -> None:
        self.shape, self.rank = shape, dist.get_rank()
        self.spans: list[Any] = []

    def load(self, entry: Entry, counts: Any, step: int) -> None:
        """Bring a system to ``step`` of a trace ``[step, layer, rank, expert]``, and its tokens' choices."""
        entry.system.catch_up(counts, step)
        for layer, replayed in enumerate(entry.system.replayed):
            # The same for every system, another for every step, layer and rank.
            rng = np.random.default_rng([step, layer, self.rank])
            choices = routing.deal(counts[step, layer, self.rank], self.shape.tokens, self.shape.top_k, rng)
            replayed.copy_(torch.from_numpy(choices))

    def time(self, entry: Entry, ids: torch.Tensor) -> dict[str, Any]:
        """A step: seconds from barrier to barrier, and of each rank the CPU time of its main thread and of all."""
        with free_links() if entry.free else nullcontext():
            dist.barrier()
            sent, cpu, whole = bytes_sent_by_node(), time.thread_time(), time.process_time()
            start = time.perf_counter()
            entry.system.step(ids)
            cpu, whole = time.thread_time() - cpu, time.process_time() - whole
            dist.barrier()
            seconds = time.perf_counter() - start
        mine = {"cpu": cpu, "process": whole, "sent": bytes_sent_by_node() - sent, **entry.system.saw()}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        sample: dict[str, Any] = {"seconds": seconds}
        for key in ("cpu", "process"):
            sample[key] = [one[key] for one in everyone]
        sample["sent"] = [one["sent"] for one in everyone[:: shapes.RANKS_PER_NODE]]
        # What moves, moves on links; on free ones in no time.
        sample |= dict.fromkeys(("moves", "moments"), 0.0) if entry.free else entry.system.moves()
        for key in ("rows", "replicas", "held"):
            if key in mine:
                sample[key] = [one[key] for one in everyone]
        for key in ("waits", "planning"):
            if key in mine:
                sample[key] = {kind: [one[key][kind] for one in everyone] for kind in mine[key]}
        if "routed" in mine:
            # What the engine counted, to compare with the trace; the same on all ranks.
            sample["routed"] = mine["routed"]
        if "spans" in mine:
            # Relative to the start of the step; all ranks are on one machine, so they share a clock.
            self.spans = [[(*s[:2], *(t - start for t in s[2:])) for s in one["spans"]] for one in everyone]
        return sample


def free_step(runner: Runner, entry: Entry, ids: torch.Tensor) -> float:
    """Seconds of a step in which nothing takes time on links, from barrier to barrier."""
    with free_links():
        return float(runner.time(entry, ids)["seconds"])


def hidden_time(runner: Runner, entry: Entry, counts: Any, ids: torch.Tensor, world: World) -> float:
    """What hecate.compile would measure in its first steps, with even routing and before anything is replicated."""
    found = []
    for _ in range(HIDDEN_STEPS):
        runner.load(entry, counts, 0)
        entry.system.step(ids)
        found.append(measure_hidden(entry.system.spans(), world))
    return median(found)


def main() -> None:
    cell = json.loads(Path(sys.argv[1]).read_text())
    seed = cell["seed"]
    shape = shapes.SHAPES[cell["shape"]]
    torch.set_num_threads(1)
    # All systems share the code of one model, and Dynamo counts each of the others as a recompile.
    torch._dynamo.config.recompile_limit = 64
    # And takes for dynamic what differs between them, such as the choices of a token, which no training changes.
    torch._dynamo.config.automatic_dynamic_shapes = False
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    world = find_world(None, torch.device("cpu"))
    with throttled():
        # What hecate.compile would measure if it ran with the quota.
        rates = measure_rates(torch.float32, find_topology(None, world), world)
        machine = measure(shape, world)
    started = time.perf_counter()
    with routing.replayed_routers():
        entries = make_entries(cell["systems"], shape, rates)
        traces = {name: counts_of(name, shape, world_size, seed) for name in cell["workloads"]}
        even = counts_of("balanced", shape, world_size)
        ids = torch.randint(
            shapes.VOCABULARY, (shape.sequences, shape.sequence), generator=torch.Generator().manual_seed(rank)
        )
        runner = Runner(shape)
        lonely = {times: Alone(shape, ids, times) for times in (1, MANY)}
        plain = Alone(shape, ids, 1, compiled=False)
        for one in (*lonely.values(), plain):
            one.step()
            one.optimizer.step()
        # Everything is compiled before quotas begin.
        for entry in entries.values():
            entry.system.begin()
            for step in range(WARM_UP):
                runner.load(entry, even, step)
                entry.system.step(ids)
            entry.system.begin()
            entry.system.check()
        # Owners that change collect garbage, and would look through all models that were built here.
        gc.collect()
        gc.freeze()
        compiled = time.perf_counter() - started
        found: dict[str, Any] = {"compile_seconds": compiled, "samples": {}, "timelines": {}, "bytes": {}}
        with throttled():
            rates = replace(rates, hidden_seconds=hidden_time(runner, entries["static EP"], even, ids, world))
            for entry in entries.values():
                entry.system.learn(rates)
            static = entries["static EP"]
            works = {
                "step": lambda: seconds_of(lonely[1].step),
                "update": lambda: seconds_of(lonely[1].optimizer.step),
                "many": lambda: seconds_of(lonely[MANY].step),
                "plain": lambda: seconds_of(plain.step),
                "free": lambda: free_step(runner, static, ids),
            }
            runner.load(static, even, 0)
            found["alone"] = measure_in_turns(works)
            found["alone"]["beside"] = measure_beside(lonely[1].step, shape, world)
            found["pace"] = {}
            for number, (workload, counts) in enumerate(traces.items()):
                for entry in entries.values():
                    entry.system.begin()
                steps = cell["steps"].get(workload) or timed_steps(
                    workload, counts, cell["first"], cell["rounds"], seed
                )
                samples: dict[str, list[Any]] = {name: [] for name in entries}
                # Whatever a system leaves behind, in caches or on the link, is there for another one each time.
                turns = np.random.default_rng([seed, number])
                paces = found["pace"][workload] = []
                for step in steps:
                    for name in turns.permutation(list(entries)).tolist():
                        entry = entries[name]
                        runner.load(entry, even if entry.balanced else counts, step)
                        # The machine is not as fast in all seconds: paces before and after a step are its own.
                        paces.append(measure_pace(plain.step))
                        turn = len(paces) - 1
                        samples[name].append(runner.time(entry, ids) | {"step": step, "turn": turn})
                        if runner.spans:
                            found["timelines"].setdefault(workload, {})[name] = runner.spans
                            runner.spans = []
                paces.append(measure_pace(plain.step))
                found["samples"][workload] = samples
                if rank == 0:
                    medians = {n: round(float(np.median([s["seconds"] for s in v])), 3) for n, v in samples.items()}
                    print(workload, medians, flush=True)
        for name, entry in entries.items():
            size = torch.tensor([entry.system.state_bytes()])
            dist.all_reduce(size, op=dist.ReduceOp.MAX)
            found["bytes"][name] = int(size)
    found["machine"] = machine
    # What policies were told.
    found["rates"] = asdict(rates)
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
