"""Compile time and step time of hecate.compile beside what a user would run instead.

    make bench-step                      all of it, about 15 minutes on two cores
    python -m benchmarks.compile_and_step --only two --rounds 100

Five measurements on one Qwen3-MoE with random weights, in fp32 with Inductor:

    compile   first forward and backward with empty caches: plain torch.compile, hecate.compile,
              in separate processes, alternating, one rank each
    one       a training step at one rank: plain torch.compile, hecate.compile
    two       a training step at two ranks (gloo): hecate.compile, DistributedDataParallel under torch.compile,
              transformers' own expert parallelism (eager, as it ships), hecate with policy="static" and "gather"
    skewed    the same with a router that prefers one rank's experts: hecate.compile, hecate with policy="static"
    floor     its MoE layers alone, kept from the compiler: hecate.compile, which runs them as Python with all experts
              gathered, and FSDP2's fully_shard of each

A step is forward, backward, AdamW and zero_grad. Systems alternate step by step in the same processes, so that
whatever else the machine does hits all of them; a ratio is the median over rounds of (system / baseline) in the
same round, with the quartiles as spread. Raw samples are written to build/benchmarks/compile_and_step.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.results_folder import results_folder

TOKENS = (8, 128)


def build_model(**changes: int) -> torch.nn.Module:
    """Build the Qwen3-MoE that is measured, with ``changes`` of its config."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes | changes, use_cache=False, bos_token_id=None, eos_token_id=None)
    )


def compile_plain(model: torch.nn.Module) -> torch.nn.Module:
    model.compile()
    return model


def compile_hecate(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    import hecate

    return hecate.compile(model, hecate.Config(**options))


def wrap_ddp(model: torch.nn.Module) -> torch.nn.Module:
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped.compile()
    return wrapped


def load_expert_parallel(model: torch.nn.Module) -> torch.nn.Module:
    """transformers' expert parallelism only starts from a checkpoint, so one is written first."""
    from transformers import Qwen3MoeForCausalLM
    from transformers.distributed import DistributedConfig

    folder = os.environ["HECATE_BENCHMARK_FOLDER"]
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    size = dist.get_world_size()
    return Qwen3MoeForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(fsdp_size=size, ep_size=size)
    ).train()


Step = Callable[[torch.Tensor], None]


def make_step(model: torch.nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_steps(systems: dict[str, Step], rounds: int, warm_up: int) -> dict[str, list[float]]:
    """Seconds per step of each system, one step of each per round; ranks start and end a step together."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    samples: dict[str, list[float]] = {name: [] for name in systems}
    for index in range(warm_up + rounds):
        ids = torch.randint(0, 512, TOKENS, generator=generator)
        for name, step in systems.items():
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            step(ids)
            if dist.is_initialized():
                dist.barrier()
            if index >= warm_up:
                samples[name].append(time.perf_counter() - start)
    return samples


# --- what runs in child processes ---


def child_compile(system: str) -> dict[str, float]:
    """Seconds from the call of compile to the end of the first backward."""
    model = build_model()
    ids = torch.randint(0, 512, TOKENS)
    start = time.perf_counter()
    model = {"plain": compile_plain, "hecate": compile_hecate}[system](model)
    model(input_ids=ids, labels=ids).loss.backward()
    return {"seconds": time.perf_counter() - start}


def child_one(rounds: str) -> dict[str, list[float]]:
    systems = {
        "torch.compile": make_step(compile_plain(build_model())),
        "hecate": make_step(compile_hecate(build_model())),
    }
    return time_steps(systems, int(rounds), 3)


def child_two(rounds: str) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    systems = {
        "hecate": make_step(compile_hecate(build_model())),
        "DDP + torch.compile": make_step(wrap_ddp(build_model())),
        "transformers expert parallel": make_step(load_expert_parallel(build_model())),
        "hecate, policy=static": make_step(compile_hecate(build_model(), policy="static")),
        "hecate, policy=gather": make_step(compile_hecate(build_model(), policy="gather")),
    }
    samples = time_steps(systems, int(rounds), 3)
    dist.barrier()
    return samples


def child_skewed(rounds: str) -> dict[str, list[float]]:
    dist.init_process_group("gloo")
    systems = {
        "hecate": make_step(compile_hecate(skew(build_model()))),
        "hecate, policy=static": make_step(compile_hecate(skew(build_model()), policy="static")),
    }
    samples = time_steps(systems, int(rounds), 3)
    dist.barrier()
    return samples


def skew(model: torch.nn.Module) -> torch.nn.Module:
    """Let the first four experts, all of one rank, be chosen far more often."""
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data[:4] *= 5
    return model


class Layers(torch.nn.Module):
    """The MoE layers of a model with residuals between them, which no graph may have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layer.mlp for layer in build_model().model.layers)
        for layer in self.layers:
            layer.forward = torch.compiler.disable(layer.forward)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


def child_floor(rounds: str) -> dict[str, list[float]]:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    sharded = Layers()
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(512, 256, generator=generator)

    def stepping(model: torch.nn.Module) -> Step:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step(ids: torch.Tensor) -> None:
            model(table[ids]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    systems = {"FSDP2": stepping(sharded), "hecate, layers as Python": stepping(compile_hecate(Layers()))}
    samples = time_steps(systems, int(rounds), 3)
    dist.barrier()
    return samples


def run_child(
    mode: str,
    argument: str,
    *,
    ranks: int,
    caches: str,
    timeout: float,
    module: str = "benchmarks.compile_and_step",
) -> Any:
    """Run ``child_<mode>(argument)`` of ``module`` on ``ranks`` processes; returns rank 0's result."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        launcher = (
            [
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                str(ranks),
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                "127.0.0.1:0",
            ]
            if ranks > 1
            else []
        )
        command = [sys.executable, *launcher, "-m", module, "--child", mode, argument, str(out)]
        threads = str(max(1, (os.cpu_count() or 1) // ranks))
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "TORCHINDUCTOR_CACHE_DIR": caches,
            "HECATE_BENCHMARK_FOLDER": folder,
        }
        subprocess.run(command, env=environment, check=True, timeout=timeout, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


# --- the report ---


def spread(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def table(samples: dict[str, list[float]], baseline: str, unit: float, name: str) -> str:
    """Median time and ratio to the baseline in the same round, each with quartiles, as Markdown."""
    lines = [f"| system | {name} | ratio to {baseline} |", "|---|---|---|"]
    for system, values in samples.items():
        low, middle, high = spread([value * unit for value in values])
        r_low, ratio, r_high = spread([a / b for a, b in zip(values, samples[baseline], strict=True)])
        lines.append(
            f"| {system} | {middle:.1f} ({low:.1f} - {high:.1f}) | {ratio:.2f} ({r_low:.2f} - {r_high:.2f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", choices=["compile", "one", "two", "skewed", "floor"], help="one of the measurements"
    )
    parser.add_argument("--rounds", type=int, default=40, help="rounds of steps")
    parser.add_argument("--compiles", type=int, default=3, help="compilations of each system")
    parser.add_argument("--child", nargs=3, metavar=("MODE", "ARGUMENT", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        mode, argument, out = args.child
        children = {"compile": child_compile, "one": child_one, "two": child_two, "skewed": child_skewed}
        result = (children | {"floor": child_floor})[mode](argument)
        if os.environ.get("RANK", "0") == "0":
            Path(out).write_text(json.dumps(result))
        return

    results = results_folder() / "compile_and_step.json"
    found: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    found["machine"] = {
        "cpu cores": os.cpu_count(),
        "processor": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": " ".join(["python", "benchmarks/compile_and_step.py", *sys.argv[1:]]),
    }
    if args.only in (None, "compile"):
        samples: dict[str, list[float]] = {"plain": [], "hecate": []}
        for _ in range(args.compiles):
            for system in samples:
                with tempfile.TemporaryDirectory() as caches:
                    result = run_child("compile", system, ranks=1, caches=caches, timeout=900)
                    samples[system].append(result["seconds"])
        found["compile"] = samples
        print(table(samples, "plain", 1, "first forward and backward, s"), end="\n\n", flush=True)
    with tempfile.TemporaryDirectory() as caches:
        steps = (("one", 1, "torch.compile"), ("two", 2, "hecate"), ("skewed", 2, "hecate"), ("floor", 2, "FSDP2"))
        for mode, ranks, baseline in steps:
            if args.only in (None, mode):
                found[mode] = run_child(mode, str(args.rounds), ranks=ranks, caches=caches, timeout=1800)
                print(table(found[mode], baseline, 1e3, f"step at {ranks} rank(s), ms"), end="\n\n", flush=True)
    results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
