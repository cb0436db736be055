"""How much of the sparse collectives is hidden behind compute, on a link of a chosen speed.

    python -m benchmarks.overlap                     Inductor, two ranks, about 6 minutes on two cores
    python -m benchmarks.overlap --backend aot_eager

One Qwen3-MoE at two ranks whose policy replicates two experts on every rank in every step. Experts and their
gradients travel over a link that is simulated: a transfer sleeps until its bytes would have arrived. Its rate is set
so that the SparseAllGather of a layer takes 60 % of the time between two MoE layers in the forward (attention). All
else, the exchange of tokens included, travels as fast as the machine can.

Three systems alternate step by step in the same processes:

    overlap    hecate as it is
    no overlap the same with the pass ``schedule`` switched off: every collective is waited for where it starts
    free       the same as overlap with experts that travel in no time

Hidden is (no overlap - overlap) / (no overlap - free): the part of the time of sparse collectives that does not
show. A step is forward and backward. Samples and a timeline of one step (Chrome trace, open it in Perfetto, and a
PNG) are written to build/benchmarks.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.policies.neighbours import Neighbours
from benchmarks.results_folder import results_folder
from benchmarks.two_ranks import is_rank, run_on_two_ranks

TOKENS = (4, 256)
SHARE = 0.6
REPLICAS = 2


class Link:
    """A transfer takes its bytes / ``rate``, however fast the machine is; ``rate`` None: no time."""

    rate: float | None = None

    def all_to_all(self, rows: torch.Tensor, send: list[int], receive: list[int], world: Any) -> torch.Tensor:
        from hecate.runtime.comm import collectives

        start = time.perf_counter()
        out = collectives.all_to_all(rows, send, receive, world)
        if self.rate is not None:
            others = max(sum(send) - send[world.rank], sum(receive) - receive[world.rank])
            seconds = others * rows[:1].numel() * rows.element_size() / self.rate
            time.sleep(max(0.0, start + seconds - time.perf_counter()))
        return out


def build_model(layers: int) -> torch.nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=512,
            hidden_size=512,
            intermediate_size=512,
            moe_intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=64,
            num_experts=16,
            num_experts_per_tok=2,
            max_position_embeddings=256,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def run_rank(args: argparse.Namespace) -> None:
    import hecate
    from hecate.runtime.ops import sparse_collectives

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    link = Link()
    # Only what this module sends goes over the link; the exchange of tokens has its own.
    mock.patch.object(sparse_collectives, "collectives", SimpleNamespace(all_to_all=link.all_to_all)).start()
    systems: dict[str, Any] = {}
    for name, disabled in {"overlap": (), "no overlap": ("schedule",)}.items():
        config = hecate.Config(backend=args.backend, policy=Neighbours(REPLICAS), disable_passes=disabled)
        systems[name] = hecate.compile(build_model(args.layers), config)
    systems["free"] = systems["overlap"]
    ids = torch.randint(0, 512, TOKENS, generator=torch.Generator().manual_seed(rank))

    def step(model: torch.nn.Module) -> float:
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        dist.barrier()
        return time.perf_counter() - start

    # The link, from the time that attention takes where nothing overlaps.
    for name in ("overlap", "no overlap"):
        for _ in range(3):
            step(systems[name])
    gaps = []
    for _ in range(5):
        step(systems["no overlap"])
        gaps += between_layers(spans_of(systems["no overlap"]))
    layer = hecate.explain(systems["overlap"]).layers[0]
    attention = torch.tensor(statistics.median(gaps), dtype=torch.float64)
    dist.all_reduce(attention, op=dist.ReduceOp.MIN)
    rate = REPLICAS * layer.sizes.expert_bytes / (SHARE * float(attention))

    samples: dict[str, list[float]] = {name: [] for name in ("overlap", "no overlap", "free")}
    timeline: list[dict[str, Any]] = []
    for turn in range(args.rounds + 2):
        for name in samples:
            link.rate = None if name == "free" else rate
            seconds = step(systems[name])
            if turn >= 2:
                samples[name].append(seconds)
            if name == "overlap" and turn == args.rounds:
                hecate.save_timeline(systems[name], results_folder() / f"overlap_timeline.rank{rank}.json")
                timeline = [vars(span) | {} for span in spans_of(systems[name])]
    if rank == 0:
        Path(args.out).write_text(
            json.dumps(
                {
                    "attention_ms": float(attention) * 1e3,
                    "link_bytes_per_second": rate,
                    "expert_bytes_per_layer": REPLICAS * layer.sizes.expert_bytes,
                    "samples": samples,
                    "spans": timeline,
                }
            )
        )
    dist.barrier()
    dist.destroy_process_group()


def spans_of(model: torch.nn.Module) -> list[Any]:
    import hecate

    return list(hecate.explain(model).spans)


def between_layers(spans: list[Any]) -> list[float]:
    """Seconds from the end of a layer's exchanges to the counts of the next, less what the sparse gather took."""
    found, end, inside = [], None, 0.0
    for span in spans:
        name = span.operator
        if name == "exchange_back":
            end, inside = span.ready, 0.0
        elif name == "sparse_all_gather":
            inside += span.exposed
        elif name == "gather_counts" and end is not None:
            found.append(span.waited - end - inside)
    return found


def draw(spans: list[dict[str, Any]], path: Path) -> None:
    """When collectives ran, and when the compute stood still for them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    zero = min(span["started"] for span in spans)
    kinds = sorted({span["operator"] for span in spans})
    colours = dict(zip(kinds, plt.get_cmap("tab10").colors, strict=False))
    figure, axes = plt.subplots(figsize=(14, 3))
    for span in spans:
        ran = (span["begun"] - zero) * 1e3, (span["ended"] - span["begun"]) * 1e3
        still = (span["waited"] - zero) * 1e3, (span["ready"] - span["waited"]) * 1e3
        axes.broken_barh([ran], (1, 0.8), color=colours[span["operator"]])
        axes.broken_barh([still], (0, 0.8), color="grey")
    axes.set_yticks([0.4, 1.4], ["compute stands still", "collectives"])
    axes.set_xlabel("ms since the first collective of the step, rank 0")
    axes.legend(
        [plt.Rectangle((0, 0), 1, 1, color=colours[k]) for k in kinds],
        kinds,
        loc="upper center",
        bbox_to_anchor=(0.5, 1.25),
        ncols=len(kinds),
        fontsize=8,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", default=str(results_folder() / "overlap.json"))
    args = parser.parse_args()
    if is_rank():
        run_rank(args)
        return
    run_on_two_ranks("benchmarks.overlap", timeout=1500)
    found = json.loads(Path(args.out).read_text())
    draw(found.pop("spans"), results_folder() / "overlap_timeline.png")
    found |= {"backend": args.backend, "torch": torch.__version__, "machine": platform.machine()}
    Path(args.out).write_text(json.dumps(found) + "\n")
    report(found)


def report(found: dict[str, Any]) -> None:
    """Medians, quartiles, and the part that is hidden."""
    samples = found["samples"]
    for name, values in samples.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:12} {middle * 1e3:8.1f} ms ({low * 1e3:.1f} - {high * 1e3:.1f})")
    rounds = list(zip(samples["overlap"], samples["no overlap"], samples["free"], strict=True))
    shown = statistics.median(overlap - free for overlap, _, free in rounds)
    whole = statistics.median(off - free for _, off, free in rounds)
    print(f"between layers: {found['attention_ms']:.1f} ms in the forward")
    print(f"sparse collectives cost {whole * 1e3:.1f} ms without overlap and {shown * 1e3:.1f} ms with it: ", end="")
    print(f"{1 - shown / whole:.0%} hidden")


if __name__ == "__main__":
    main()
