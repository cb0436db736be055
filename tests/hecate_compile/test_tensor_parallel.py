"""Models whose dense parameters are split by tensor parallelism, along another mesh than that of the experts."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import Graph

import hecate
from hecate.graph.lowering import NotRun, capturing
from hecate.passes.fx import is_foreign_collective
from hecate.runtime.comm.collective import start_of, wait_of
from hecate.runtime.placement.planner import Rates
from hecate.wrap.shard import shard_of
from tests.support.adversaries import Anything
from tests.support.models import batch, build
from tests.support.parity import compiled_on_free_links, error_of
from tests.support.ranks import message_of, run_ranks

pytestmark = pytest.mark.distributed

_HERE = "tests.hecate_compile.test_tensor_parallel"
EXACT = 1e-5


def _by_torch(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.model.layers:
        plan = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel()) | {"o_proj": RowwiseParallel()}
        parallelize_module(layer.self_attn, mesh, plan)


def _shared_expert(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.model.layers:
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        parallelize_module(layer.mlp.shared_experts, mesh, plan)


def _by_transformers(model: nn.Module, mesh: DeviceMesh) -> None:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = {name: style for name, style in model.tp_plan.items() if ".experts" not in name}
    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(plan))


CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "torch": ("mixtral", _by_torch, {"replicas": 2}),
    "transformers": ("qwen3_moe", _by_transformers, {"replicas": 2}),
    "sharded dense": ("qwen3_moe", _by_transformers, {"dense": "shard", "replicas": 2}),
    "a shared expert": ("deepseek_v3", _shared_expert, {"replicas": 2}),
    "groups of one": ("qwen3_moe", _by_transformers, {"expert_group": 1}),
}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _models(name: str, **more: Any) -> tuple[nn.Module, nn.Module, DeviceMesh]:
    family, split, options = CASES[name]
    layers = 2 if name in ("torch", "a shared expert") else 1
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    reference = build(family, layers=layers)
    # Rank 0 of each data-parallel mesh has the weights that win.
    torch.manual_seed(0 if mesh["dp"].get_local_rank() == 0 else 1)
    model = build(family, layers=layers)
    split(model, mesh["tp"])
    compiled_on_free_links(model, mesh=None if name == "transformers" else mesh["dp"], **options, **more)
    return model, reference, mesh


def _backward(model: nn.Module, ids: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    mine = ids.chunk(2)[mesh["dp"].get_local_rank()]
    loss = model(input_ids=mine, labels=mine).loss
    loss.backward()
    return loss.detach()


def _errors(model: nn.Module, reference: nn.Module) -> dict[str, float]:
    """How far each gradient is off, relative to its largest element."""
    theirs, errors = dict(reference.named_parameters()), {}
    for name, parameter in model.named_parameters():
        shard, wanted = shard_of(parameter), theirs[name].grad
        if shard is not None:
            wanted = shard.slice(wanted)
        if wanted.numel():
            errors[name] = error_of(_whole(parameter.grad), wanted, relative=True)
    return errors


def trained(name: str) -> dict[str, Any]:
    """Steps of a model in (dp 2, tp 2) against one process; ranks along the second dimension have other rates."""
    model, reference, mesh = _models(name)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3, foreach=False) for one in (model, reference)]
    worst, norms = 0.0, []
    for step in range(3):
        ids = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = _backward(model, ids, mesh)
        expected = reference(input_ids=ids, labels=ids).loss
        expected.backward()
        dist.all_reduce(loss)
        worst = max(worst, error_of(loss / 4, expected.detach()), *_errors(model, reference).values())
        clip = hecate.clip_grad_norm_ if step else nn.utils.clip_grad_norm_
        # Torch's own takes tensors beside DTensors one by one only.
        found = clip(model.parameters(), 0.1, foreach=None if step else False)
        norms.append(error_of(found, nn.utils.clip_grad_norm_(reference.parameters(), 0.1), relative=True))
        for optimizer in optimizers:
            optimizer.step()
    return {"worst": worst, "norms": norms, "graphs": len(hecate.explain(model).graphs), "norm": float(found)}


def accumulated() -> float:
    """The worst gradient after two micro-batches, the first of which is averaged with the second."""
    model, reference, mesh = _models("torch")
    for step in range(2):
        hecate.set_requires_gradient_sync(model, step == 1)
        _backward(model, batch(step), mesh)
        reference(input_ids=batch(step), labels=batch(step)).loss.backward()
    return max(_errors(model, reference).values())


def ordered() -> list[list[list[str]]]:
    """Collectives of forward and backward, ours and the model's, in the order in which they stand, for two rates."""
    found = []
    for flops, link in ((1e12, 1e-3), (1e3, 1e15)):
        rates = Rates(flops=flops, rank_bytes=link, node_bytes=link)
        model, _, mesh = _models("a shared expert", rates=rates)
        with capturing() as graphs, contextlib.suppress(NotRun):
            _backward(model, batch(0), mesh)
        found.append([_collectives_in(one.graph.graph) for one in graphs])
    return found


def _collectives_in(graph: Graph) -> list[str]:
    return [
        str(node.target)
        for node in graph.nodes
        if start_of(node.target) or wait_of(node.target) or is_foreign_collective(node)
    ]


def exported(folder: str) -> tuple[bool, ...]:
    """Whether a model is as it was after an export that was loaded into a plain model, and into one that is split."""
    import transformers

    model, _, _ = _models("transformers")
    hecate.export(model, folder)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    kept = {name: _whole(value).clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    hecate.load_pretrained(model, folder)
    back = {name: _whole(value) for name, value in model.state_dict().items()}
    return all(torch.equal(plain[name], kept[name]) for name in kept), all(
        torch.equal(back[n], kept[n]) for n in kept
    )


def other_batches() -> str:
    """What ranks are told that have other batches, but parts of one model."""
    model, _, _ = _models("torch")
    own = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))

    def train() -> None:
        for _ in range(5):
            model(input_ids=own, labels=own).loss.backward()

    return message_of(train)


def split_afterwards() -> str:
    model = compiled_on_free_links(build("mixtral", layers=1))
    model(input_ids=batch(0), labels=batch(0)).loss.backward()
    _by_torch(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"])
    return message_of(lambda: model(input_ids=batch(0), labels=batch(0)))


def split_otherwise() -> list[str]:
    """What is refused: other placements on ranks with other batches, and tensors without values."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), []
    for changed in ("placements", "meta"):
        model = build("mixtral", layers=1)
        with torch.device("meta") if changed == "meta" else contextlib.nullcontext():
            head = nn.Parameter(torch.zeros(model.lm_head.weight.shape))
        placement = Shard(mesh["dp"].get_local_rank() if changed == "placements" else 0)
        model.lm_head.weight = nn.Parameter(distribute_tensor(head, mesh["tp"], [placement]))
        found.append(message_of(lambda model=model: compiled_on_free_links(model)))
    return found


def counted() -> list[int]:
    """Rows of experts, which copies compute, too, and the tokens' own choices."""
    model, _, mesh = _models("torch")
    _backward(model, batch(0), mesh)
    return [sum(layer.expert_rows) for layer in hecate.stats(model).layers] + [2 * batch(0).numel()]


def everything(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {name: trained(name) for name in CASES}
    return found | {
        "accumulated": accumulated(),
        "exported": exported(folder),
        "counted": counted(),
        "other batches": other_batches(),
        "otherwise": split_otherwise(),
        "afterwards": split_afterwards(),
    }


@cache
def _everything() -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        return run_ranks(f"{_HERE}:everything", 4, timeout=400, folder=folder)


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process_does(name: str) -> None:
    for found in _everything():
        assert found[name]["worst"] < EXACT and max(found[name]["norms"]) < EXACT, found
        assert found[name]["norm"] == _everything()[0][name]["norm"], "ranks clip alike, to the bit"
        # transformers puts hooks on norms in the first forward, which makes a graph without them for the others.
        assert found[name]["graphs"] == (1 if name in ("torch", "a shared expert") else 2)


def test_gradients_accumulate() -> None:
    assert max(found["accumulated"] for found in _everything()) < EXACT


def test_copies_count_once_in_stats() -> None:
    for found in _everything():
        assert len({*found["counted"]}) == 1, found["counted"]


def test_what_would_train_something_else_is_told() -> None:
    for found in _everything():
        assert "DisagreementError" in found["other batches"] and "num_replicas=mesh" in found["other batches"]
        assert "compute the same of one batch" in found["other batches"]
        placements, meta = found["otherwise"]
        assert "ranks disagree on the model or its options" in placements and "Shard" in placements
        assert "lm_head.weight is a DTensor" in meta and "has no values yet" in meta
        assert (
            "q_proj.weight is a DTensor on" in found["afterwards"] and "before hecate.compile" in found["afterwards"]
        )


def test_export_and_load_pretrained_know_split_parameters() -> None:
    assert all(found["exported"] == [True, True] for found in _everything())


def test_collectives_of_the_model_keep_their_place_among_ours_whatever_the_rates() -> None:
    for slow, fast in run_ranks(f"{_HERE}:ordered", 4, timeout=200):
        assert len(slow) == 2 and all("_c10d_functional.all_reduce.default" in graph for graph in slow)
        assert slow == fast


def stage(directory: str, tensor_ranks: int, first: bool) -> dict[str, Any]:
    """Load what the last stage saved, train on, clipped, with owners that move, and save."""
    torch.manual_seed(0)
    model, mesh = build("qwen3_moe"), None
    if tensor_ranks > 1:
        size = int(os.environ["WORLD_SIZE"])
        mesh = init_device_mesh("cpu", (size // tensor_ranks, tensor_ranks), mesh_dim_names=("dp", "tp"))
        _by_transformers(model, mesh["tp"])
    compiled_on_free_links(model, policy=Anything(reshard_every=1), dense="shard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    at = 0 if first else hecate.load(directory, model, optimizer).step
    loaded = _sums(model)
    torch.manual_seed(mesh["dp"].get_local_rank() if mesh is not None else int(os.environ.get("RANK", 0)))
    for _ in range(2):
        ids = torch.randint(0, 96, (2, 16))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        hecate.clip_grad_norm_(model, 0.1)
        optimizer.step()
    hecate.save(directory, model, optimizer, step=at + 2)
    return {"loaded": loaded, "saved": _sums(model)}


def _sums(model: nn.Module) -> list[float]:
    """Numbers that change with the order of elements, too."""
    with torch.no_grad():
        wholes = [_whole(p).double().flatten() for p in model.state_dict().values()]
        return [float((whole * torch.arange(1, 1 + len(whole))).sum()) for whole in wholes]


def test_checkpoints_go_between_any_ranks(tmp_path: Path) -> None:
    stages = [(4, 2), (1, 1), (2, 2), (4, 1)]
    found = [
        run_ranks(f"{_HERE}:stage", ranks, timeout=200, directory=str(tmp_path), tensor_ranks=split, first=not number)
        for number, (ranks, split) in enumerate(stages)
    ]
    for before, after in pairwise(found):
        assert all(one["loaded"] == before[0]["saved"] for one in after)
