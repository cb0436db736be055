"""Peak memory of a training step on every rank, activations included: measured, and as the simulator predicts it.

    python -m benchmarks.activations            about 5 minutes on two cores

Four ranks train a small Qwen3-MoE with AdamW. Its routers replay: once all experts get the same, once a few are hot
(``zipf``). Counted is every tensor that operators return, inside of the compiled graphs and outside
(``benchmarks/bytes_alive.py``); graphs run as they stand (``aot_eager``). The simulator predicts the same step from
graphs alone. Results go to build/benchmarks/activations.json.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.bytes_alive import Ledger, Watching
from benchmarks.compare import routing
from benchmarks.results_folder import results_folder
from benchmarks.two_ranks import is_rank, run_on_ranks

REPLICAS, STEPS = 2, 4
SYSTEMS = ("static EP", "hecate", "rematerialize")
WORKLOADS = ("balanced", "zipf")
# Bytes of a parameter's two moments.
ADAMW = 8.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and the batch of a rank.

    Attributes:
        skew: exponent of the zipf workload.
    """

    ranks: int = 4
    layers: int = 4
    hidden: int = 128
    ffn: int = 128
    experts: int = 16
    top_k: int = 2
    sequences: int = 4
    sequence: int = 256
    skew: float = 2.0

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence


def build_model(size: Size) -> torch.nn.Module:
    """The same weights on every rank."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=256,
            hidden_size=size.hidden,
            intermediate_size=size.hidden,
            moe_intermediate_size=size.ffn,
            num_hidden_layers=size.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=size.hidden // 4,
            num_experts=size.experts,
            num_experts_per_tok=size.top_k,
            max_position_embeddings=size.sequence,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def counts_of(workload: str, size: Size) -> NDArray[np.int64]:
    """Rows ``[step, layer, rank, expert]``."""
    from hecate.simulator.workloads import make

    return make(
        workload,
        steps=STEPS,
        layers=size.layers,
        ranks=size.ranks,
        experts=size.experts,
        rows=size.tokens * size.top_k,
        skew=size.skew,
    )


def config_of(system: str) -> Any:
    """A machine on which experts travel for nothing, so that replicas depend on the rows alone."""
    import hecate
    from hecate.runtime.placement.hecate_policy import Hecate
    from hecate.runtime.placement.policy import Static

    rates = hecate.Rates(flops=1e9, rank_bytes=1e12, node_bytes=1e12, memory_bytes=1e12, hidden_seconds=1.0)
    policy = Static() if system == "static EP" else Hecate(replicas=REPLICAS)
    return hecate.Config(
        backend="aot_eager", policy=policy, replicas=REPLICAS, rates=rates, rematerialize=system == "rematerialize"
    )


def measure(system: str, workload: str, size: Size) -> dict[str, Any]:
    """What this rank holds in the last of some steps; rows are of all ranks, ``[layer, rank]``."""
    import hecate

    rank = dist.get_rank()
    watching, counts = Watching(), counts_of(workload, size)
    with watching.compiled_graphs(), routing.replayed_routers():
        model = build_model(size)
        replayed = routing.prepare(model, size.tokens)
        model = hecate.compile(model, config_of(system))
        optimizer = torch.optim.AdamW(model.parameters())
        states: list[torch.Tensor] = []
        for step in range(STEPS):
            rng = np.random.default_rng(step)
            for layer, choices in enumerate(replayed):
                dealt = routing.deal(counts[step, layer, rank], size.tokens, size.top_k, rng)
                choices.copy_(torch.from_numpy(dealt))
            ids = torch.randint(
                0, 256, (size.sequences, size.sequence), generator=torch.Generator().manual_seed(rank)
            )
            if step == STEPS - 1:
                moments = [value for state in optimizer.state.values() for value in state.values()]
                states = [*model.parameters(), *(value for value in moments if isinstance(value, torch.Tensor))]
                watching.ledger = Ledger([*states, *model.buffers(), *replayed, ids])
            # Nothing of the forward runs outside of its one graph.
            loss = model(input_ids=ids, labels=ids).loss
            with watching.operators():
                loss.backward()
                if watching.ledger is not None:
                    watching.ledger.name((parameter.grad for parameter in model.parameters()), "gradients")
                optimizer.step()
            optimizer.zero_grad()
        assert watching.ledger is not None
        peak = watching.ledger.peak()
        rows = [layer.rows for layer in hecate.stats(model).layers]
    held = sum(tensor.untyped_storage().nbytes() for tensor in states)
    del model, optimizer, states
    gc.collect()
    torch._dynamo.reset()
    return {"states": held, "peak": held + peak.all, **asdict(peak), "rows": rows}


def predict(system: str, size: Size, workloads: Sequence[str] = WORKLOADS) -> dict[str, dict[str, Any]]:
    """The same for all ranks, without any: lists over ranks, for each workload."""
    from hecate.simulator import ClusterSpec, capture, walk
    from hecate.simulator.live_bytes import LiveBytes

    config = config_of(system)
    cluster = ClusterSpec(
        name="small", nodes=1, gpus=size.ranks, flops=1e9, memory_bytes=1e12, rank_bytes=1e12, node_bytes=1e12
    )
    with routing.replayed_routers():
        model = build_model(size)
        routing.prepare(model, size.tokens)
        ids = torch.zeros(size.sequences, size.sequence, dtype=torch.int64)
        made = capture(model, {"input_ids": ids, "labels": ids}, cluster, config)
    live, found = LiveBytes(made), {}
    for workload in workloads:
        ((_, (routed,)),) = walk(
            # A policy remembers steps.
            copy.deepcopy(config.policy),
            counts_of(workload, size)[None],
            [layer.owners for layer in made.layers],
            topology=cluster.topology,
            rates=config.rates,
            sizes=made.sizes,
            steps=[STEPS - 1],
        )
        held = vars(live.step(routed, optimizer_bytes=ADAMW))
        found[workload] = {key: np.round(value).astype(int).tolist() for key, value in held.items()}
        found[workload]["rows"] = [layer.rows.sum(0).tolist() for layer in routed]
    return found


def run_rank(size: Size) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, dict[str, Any]] = {}
    for system in SYSTEMS:
        for workload in WORKLOADS:
            mine = measure(system, workload, size)
            ranks: list[Any] = [None] * size.ranks
            dist.all_gather_object(ranks, mine)
            lists = {key: [one[key] for one in ranks] for key in mine if key != "rows"}
            found.setdefault(system, {})[workload] = {**lists, "rows": mine["rows"]}
    if dist.get_rank() == 0:
        (results_folder() / "activations.json").write_text(
            json.dumps({"size": asdict(size), "measured": found}, indent=1) + "\n"
        )
    dist.barrier()
    dist.destroy_process_group()


def report(found: dict[str, Any]) -> str:
    """A table in Markdown: MB of the rank with most, and of ranks on average."""
    lines = [
        "| system | routing | rows, max/mean | states | peak, max | mean | predicted, max | mean "
        "| activations, max | mean | predicted, max | mean |",
        "|---" * 12 + "|",
    ]
    for system, workloads in found["measured"].items():
        for workload, one in workloads.items():
            said = found["predicted"][system][workload]
            rows = np.asarray(one["rows"])
            cells = [_megabytes(np.max(one["states"]))]
            for key in ("peak", "most_activations"):
                for source in (one, said):
                    cells += [_megabytes(np.max(source[key])), _megabytes(np.mean(source[key]))]
            ratio = (rows.max(1) / rows.mean(1)).mean()
            lines.append(f"| {system} | {workload} | {ratio:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _megabytes(count: Any) -> str:
    return f"{float(count) / 1e6:.1f}"


def summary(found: dict[str, Any]) -> str:
    """One line: what balancing saves."""

    def most(system: str, workload: str) -> float:
        return float(max(found["measured"][system][workload]["most_activations"])) / 1e6

    even = most("static EP", "balanced")
    parts = [
        f"{system} {most(system, 'zipf'):.1f} MB ({most(system, 'zipf') / even:.2f} of even)" for system in SYSTEMS
    ]
    return f"activations of the busiest rank: {', '.join(parts)}; with even routing {even:.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=Size.ranks)
    parser.add_argument("--layers", type=int, default=Size.layers)
    parser.add_argument("--skew", type=float, default=Size.skew)
    parser.add_argument("--report", action="store_true", help="predict again, beside what was measured last")
    args = parser.parse_args()
    size = Size(ranks=args.ranks, layers=args.layers, skew=args.skew)
    if is_rank():
        run_rank(size)
        return
    if not args.report:
        run_on_ranks("benchmarks.activations", size.ranks, timeout=1500)
    path = results_folder() / "activations.json"
    found = json.loads(path.read_text())
    found["predicted"] = {system: predict(system, Size(**found["size"])) for system in SYSTEMS}
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(report(found))
    print(summary(found))


if __name__ == "__main__":
    main()
