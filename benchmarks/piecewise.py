"""What ``Config(piecewise=True)`` brings and costs: compile time by depth, step time, memory of a step.

    python -m benchmarks.piecewise                          about 40 minutes on two cores
    python -m benchmarks.piecewise --only compile --layers 4 32

    compile   first forward and backward of a Qwen3-MoE of small layers at two ranks (gloo), with empty caches: plain
              torch.compile, hecate whole and piecewise, one after the other. CPU seconds of a rank and its compilers;
              how many of them Inductor took; how many pieces there were, and how many differed
    steps     a training step at two ranks (gloo), whole and piecewise in turns
    memory    the peak of resident memory in such a step, above what is held between steps

Results go to build/benchmarks/piecewise.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.compile_and_step import build_model, compile_hecate, make_step, run_child, table, time_steps
from benchmarks.results_folder import results_folder

SYSTEMS = {"hecate": False, "hecate, piecewise": True}
MODULE = "benchmarks.piecewise"


# A layer's sizes where depth is what counts.
SMALL = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_attention_heads=2, head_dim=32)


# --- what runs in child processes ---


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def child_compile(argument: str) -> dict[str, Any]:
    """CPU seconds from the call of compile to the end of the first backward, and Inductor's part of them."""
    from torch._inductor import compile_fx

    import hecate
    from hecate.compiled_model import compiled_model_of

    system, layers = argument.rsplit(" ", 1)
    dist.init_process_group("gloo")
    # Ranks that share caches would compile for each other.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] += f"/{dist.get_rank()}"
    model, ids = build_model(**SMALL, num_hidden_layers=int(layers)), torch.randint(0, 512, (2, 64))
    in_inductor, inner = [0.0], compile_fx.compile_fx_inner

    def timed(*args: Any, **options: Any) -> Any:
        start = cpu_seconds()
        try:
            return inner(*args, **options)
        finally:
            in_inductor[0] += cpu_seconds() - start

    with mock.patch.object(compile_fx, "compile_fx_inner", timed):
        start = cpu_seconds()
        if system == "plain":
            model.compile()
        else:
            hecate.compile(model, hecate.Config(piecewise=SYSTEMS[system]))
        model(input_ids=ids, labels=ids).loss.backward()
        seconds = cpu_seconds() - start
    pieces: dict[str, Any] = {}
    if system != "plain":
        pieces = {
            part: [found.all, found.different]
            for part, found in compiled_model_of(model, "pieces").backend.graphs[0].pieces.items()
        }
    dist.barrier()
    # Plain torch.compile does not go through what is timed, so of it that is unknown.
    return {"seconds": seconds, "inductor": in_inductor[0] or None, "pieces": pieces}


def child_steps(rounds: str) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    systems = {name: make_step(compile_hecate(build_model(), piecewise=on)) for name, on in SYSTEMS.items()}
    samples = time_steps(systems, int(rounds), 3)
    dist.barrier()
    return samples


def child_memory(system: str) -> float:
    """MB of resident memory that a step takes at its peak, above what is held between steps."""
    dist.init_process_group("gloo")
    model = compile_hecate(build_model(), piecewise=SYSTEMS[system])
    ids = torch.randint(0, 512, (32, 128), generator=torch.Generator().manual_seed(dist.get_rank()))
    step = make_step(model)
    peaks = []
    for _ in range(6):
        # Linux takes the peak from here on.
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        step(ids)
        peaks.append(_status("VmHWM") - before)
    dist.barrier()
    return statistics.median(peaks[2:])


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


# --- the report ---


def run(mode: str, argument: str) -> Any:
    with tempfile.TemporaryDirectory() as caches:
        return run_child(mode, argument, ranks=2, caches=caches, timeout=2400, module=MODULE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["compile", "steps", "memory"], help="one of the measurements")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 32, 48])
    parser.add_argument("--rounds", type=int, default=40, help="rounds of steps")
    parser.add_argument("--child", nargs=3, metavar=("MODE", "ARGUMENT", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        mode, argument, out = args.child
        children = {"compile": child_compile, "steps": child_steps, "memory": child_memory}
        result = children[mode](argument)
        if os.environ["RANK"] == "0":
            Path(out).write_text(json.dumps(result))
        return
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    results = results_folder() / "piecewise.json"
    found: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    found["machine"] = {"cpu cores": os.cpu_count(), "torch": torch.__version__}
    if args.only in (None, "compile"):
        print("| layers | system | CPU s | of them Inductor | pieces, different |\n|---|---|---|---|---|", flush=True)
        for layers in args.layers:
            for system in ("plain", *SYSTEMS):
                made = run("compile", f"{system} {layers}")
                found.setdefault("compile", {})[f"{system}, {layers} layers"] = made
                pieces = "; ".join(f"{part} {many}, {few}" for part, (many, few) in made["pieces"].items())
                inductor = f"{made['inductor']:.0f}" if made["inductor"] is not None else ""
                line = f"| {layers} | {system} | {made['seconds']:.0f} | {inductor} | {pieces} |"
                print(line, flush=True)
                results.write_text(json.dumps(found, indent=1) + "\n")
    if args.only in (None, "steps"):
        found["steps"] = run("steps", str(args.rounds))
        print(table(found["steps"], "hecate", 1e3, "step at 2 ranks, ms"), flush=True)
    if args.only in (None, "memory"):
        found["memory"] = {system: [run("memory", system) for _ in range(3)] for system in SYSTEMS}
        for system, peaks in found["memory"].items():
            print(
                f"{system}: a step takes {', '.join(f'{peak:.0f}' for peak in peaks)} MB more at its peak", flush=True
            )
    results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
