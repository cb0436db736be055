"""What each rank runs under Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch

import hecate
from hecate.runtime.comm.world import find_world
from hecate.runtime.kernels import launch
from hecate.runtime.ops.experts import hold
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.policy import LayerView
from tests.runtime.kernels.device import kernel_modules
from tests.runtime.ops.test_ops import OWNERS, REPLICAS, TOPOLOGIES, replicating_layer, routed, slot_grads
from tests.support import reference
from tests.support.adversaries import Anything
from tests.support.extent import ALL
from tests.support.models import batch, build
from tests.support.parity import clear_gradients, compare, error_of, run_step

_launched: set[str] = set()
MODELS: dict[str, dict[str, Any]] = {
    "plain in two chunks": dict(family="plain", chunks=2),
}
if ALL:
    MODELS["gpt_oss in bf16"] = dict(family="gpt_oss", dtype="bfloat16")
    MODELS["qwen3_moe"] = dict(family="qwen3_moe")
    MODELS["plain, rows in bf16"] = dict(family="plain", wire_dtype=torch.bfloat16)


def run() -> dict[str, Any]:
    """Operators and whole steps, each with what was launched meanwhile."""
    assert launch.INTERPRETED
    for module in kernel_modules():
        module.launch = _counted(module.__name__.rsplit(".", 1)[1], module.launch)
    torch.distributed.init_process_group("gloo")
    compare_operators()
    found: dict[str, Any] = {"launched by operators": sorted(_launched)}
    for name, options in MODELS.items():
        found[name] = compare_steps(**options)
    return found


def _counted(name: str, launch: Any) -> Any:
    return lambda *args, **constants: (_launched.add(name), launch(*args, **constants))


def compare_operators() -> None:
    """Replicas, their gradients, and rows there and back, against the references."""
    world = find_world(None, torch.device("cpu"))
    rank, owners = world.rank, OWNERS["shuffled"]
    placement = Placement.with_replicas(owners, REPLICAS["some replicas"])
    layer = replicating_layer(world, placement, TOPOLOGIES["two nodes"])
    hecate = torch.ops.hecate

    generator = torch.Generator().manual_seed(0)
    fulls = [torch.randn(5, *shape, generator=generator) for shape in ((2, 3), (4,))]
    shards_of = [[full[owners.owned_by(other)] for other in range(3)] for full in fulls]
    grads_of = [slot_grads(placement, tuple(full.shape[1:]), full.dtype) for full in fulls]
    shards = [of[rank].clone().requires_grad_() for of in shards_of]
    placed, held = hecate.place(shards[0], layer.id)
    outs = hecate.sparse_all_gather(shards, placed, held, layer.id)
    for out, of in zip(outs, shards_of, strict=True):
        assert torch.equal(out, reference.sparse_all_gather(of, placement)[rank])
    owned, grads = len(shards[0]), [of[rank] for of in grads_of]
    torch.autograd.backward(
        hold(layer.id, placed, *shards, *outs), [*(g[:owned] for g in grads), *(g[owned:] for g in grads)]
    )
    for shard, of in zip(shards, grads_of, strict=True):
        torch.testing.assert_close(shard.grad, reference.sparse_reduce_scatter(of, placement)[rank])

    rows, offsets = routed(rank)
    counts = hecate.gather_counts(offsets, placed, layer.id)
    _, *ticket = hecate.route(counts, placed, offsets, owned + len(held), 0, 1, layer.id)
    back = hecate.exchange_back(hecate.exchange(rows, *ticket, layer.id) * 2, *ticket, len(rows), layer.id)
    assert torch.equal(back, rows * 2)


class Same(Anything):
    """Random replicas, but the same in every step."""

    def place(self, layer: LayerView) -> Placement:
        self._random.seed(0)
        return super().place(layer)


def compare_steps(family: str, dtype: str = "float32", **options: Any) -> dict[str, Any]:
    """One step of one compiled model, with kernels and without, each beside one process."""
    model, reference = (build(family, layers=1, dtype=getattr(torch, dtype)) for _ in range(2))
    hecate.compile(model, hecate.Config(backend="aot_eager", policy=Same(), **options))
    _launched.clear()
    by_kernels = _step(model, reference)
    launched = sorted(_launched)
    launch._ALLOWED = False
    _launched.clear()
    plain = _step(model, reference)
    assert not _launched
    launch._ALLOWED = True
    return {
        "launched": launched,
        "missing": sorted(set(plain) ^ set(by_kernels)),
        "errors": {
            name: error_of(by_kernels[name], plain[name], relative=True) for name in plain if name != "one process"
        },
        "one process": float(by_kernels["one process"]),
    }


def _step(model: torch.nn.Module, reference: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The loss, every gradient, and the worst gradient's error beside one process."""
    clear_gradients(model, reference)
    loss = run_step(model, batch(0))
    reference_loss = reference(input_ids=batch(0), labels=batch(0))["loss"]
    reference_loss.backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    error = compare(model, loss, reference, reference_loss.detach())
    return found | {"loss": loss.float(), "one process": torch.tensor(max(error.loss, error.gradient))}
