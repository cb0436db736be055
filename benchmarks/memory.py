"""Memory of parameters, gradients, optimizer states and gathered parameters, per rank, against formulas.

    python -m benchmarks.memory                 about 4 minutes on two cores

A training step with AdamW at two ranks, every rank holding two replicas beside its own experts in every layer. A
dispatch mode inside the compiled graphs sees every tensor that an operator returns. Counted are, at their peak:

    states     parameters, their gradients, and optimizer states, as they are between steps
    gathered   replicas and gathered dense parameters, while anybody holds their memory
    gradients  of slots, before they have reached the owners (and are in .grad, which counts as a state)

Activations are not counted. For experts the base is static expert parallelism (``policy="static"``), for dense
parameters ``dense="replicate"``. Results go to build/benchmarks/memory.json.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.policies.neighbours import Neighbours
from benchmarks.results_folder import results_folder
from benchmarks.two_ranks import is_rank, run_on_two_ranks

SLOTS = 2
SYSTEMS: dict[str, dict[str, Any]] = {
    "static": {"policy": "static"},
    "default": {},
    "rematerialize": {"rematerialize": True},
    "dense shard": {"policy": "static", "dense": "shard"},
}


class Tracker(TorchDispatchMode):
    """Bytes of the memory behind what interesting operators returned, as long as it is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.active = False
        self.alive: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self.peak: dict[str, int] = {"gathered": 0, "gradients": 0, "together": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = _kind(func)
        if kind is not None:
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), kind)
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        now = {"gathered": 0, "gradients": 0}
        for _, size, of in self.alive.values():
            now[of] += size
        for of, size in {**now, "together": sum(now.values())}.items():
            self.peak[of] = max(self.peak[of], size)
        return out


class Tracked:
    """A compiled graph whose operators the tracker sees while it is active."""

    def __init__(self, run: Callable[[list[Any]], Any], tracker: Tracker) -> None:
        self.run, self.tracker = run, tracker
        # It is called with one list, which it empties. An attribute of the object, since wrappers copy only those.
        self._boxed_call = True

    def __call__(self, args: list[Any]) -> Any:
        if not self.tracker.active:
            return self.run(args)
        with self.tracker:
            return self.run(args)


def _kind(func: Any) -> str | None:
    from hecate.runtime.comm.collective import wait_of

    collective = wait_of(func)
    if collective is not None and collective.role == "gather":
        return "gathered"
    weight_grads = (torch.ops.hecate.grouped_mm_weight_grad, torch.ops.hecate.grouped_mm_pair_weight_grad)
    return "gradients" if any(func is packet.default for packet in weight_grads) else None


def build_model(layers: int) -> torch.nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=64,
            moe_intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            num_experts=16,
            num_experts_per_tok=2,
            max_position_embeddings=64,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def measure(options: dict[str, Any], layers: int) -> dict[str, int]:
    """Peak bytes of one system, over a step that is not the first."""
    import hecate
    from hecate.graph import lowering
    from hecate.wrap.shard import shard_of

    tracker = Tracker()
    original = lowering.boxed_nop
    settings: dict[str, Any] = {"policy": Neighbours(SLOTS)} | options
    with mock.patch.object(lowering, "boxed_nop", lambda gm, inputs: Tracked(original(gm, inputs), tracker)):
        config = hecate.Config(backend="aot_eager", **settings)
        model = hecate.compile(build_model(layers), config)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            tracker.active = step == 1
            ids = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(dist.get_rank()))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            states = {"expert": 0, "dense": 0}
            for parameter in model.parameters():
                kind = "expert" if (shard := shard_of(parameter)) is not None and shard.part == "experts" else "dense"
                tensors = [parameter, parameter.grad, *optimizer.state[parameter].values()]
                states[kind] += sum(t.numel() * t.element_size() for t in tensors if t is not None and t.numel() > 1)
            optimizer.zero_grad()
    layer = hecate.explain(model).layers[0]
    found = {
        **states,
        **tracker.peak,
        "expert_bytes": layer.sizes.expert_bytes,
        "owned": layer.owners.counts[dist.get_rank()],
    }
    del model, optimizer
    gc.collect()
    torch._dynamo.reset()
    return found


def run_rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: measure(options, args.layers) for name, options in SYSTEMS.items()}
    if dist.get_rank() == 0:
        (results_folder() / "memory.json").write_text(
            json.dumps({"layers": args.layers, "ranks": dist.get_world_size(), **found}) + "\n"
        )
    dist.barrier()
    dist.destroy_process_group()


def report(found: dict[str, Any]) -> None:
    """Peaks in units of the base, beside the formulas."""
    layers, ranks = found["layers"], found["ranks"]
    static, dense = found["static"], found["dense shard"]
    own = static["expert"]
    base = own + static["dense"]
    slots = SLOTS * static["expert_bytes"]
    print(f"{layers} layers, {ranks} ranks, AdamW, fp32")
    print(f"per rank and layer {static['owned']} experts and {SLOTS} replicas")
    print(f"{'':14} {'states':>10} {'gathered':>10} {'gradients':>10}   gathered over experts' states, formula, all")
    for name in SYSTEMS:
        one = found[name]
        line = f"{name:14} {one['expert'] + one['dense']:10} {one['gathered']:10} {one['gradients']:10}"
        if name in ("default", "rematerialize"):
            # All layers' replicas, or those of this layer and the next.
            formula = slots * (layers if name == "default" else 2) / own
            more = (one["together"] - static["together"]) / own
            line += f"   {one['gathered'] / own:+28.1%} {formula:+8.1%} {more:+6.1%}"
        print(line)
    share = dense["dense"] / static["dense"]
    peak = (dense["dense"] + dense["gathered"]) / static["dense"]
    print(f"dense states: {share:.1%} of replicated ones (1/W = {1 / ranks:.1%}); with what is gathered {peak:.1%}")
    print(f"all states of static expert parallelism: {base} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    if is_rank():
        run_rank(args)
        return
    run_on_two_ranks("benchmarks.memory", timeout=1500)
    report(json.loads((results_folder() / "memory.json").read_text()))


if __name__ == "__main__":
    main()
