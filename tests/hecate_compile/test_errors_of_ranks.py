"""Wrong input on several ranks: all of them say the same, and none waits for another."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import hecate
from tests.support.models import PlainLanguageModel, batch, build
from tests.support.parity import rank_and_size
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.test_errors_of_ranks"
EAGER = hecate.Config(backend="aot_eager")


def single_rows() -> list[list[str]]:
    """Warnings of models with as many experts as ranks, or as many rows of something else, and with more."""
    found = []
    for experts, options in ((2, {}), (4, {}), (4, {"dense": "shard"})):
        model = PlainLanguageModel(hidden=8, layers=1, experts=experts)
        model.scale = nn.Parameter(torch.ones(2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hecate.compile(model, hecate.Config(backend="aot_eager", **options))
        found.append([str(one.message) for one in caught if "one row of" in str(one.message)])
        whole = PlainLanguageModel(hidden=8, layers=1, experts=experts).blocks[0].w_in
        said = message_of(
            lambda model=model, whole=whole: whole.data.copy_(dict(model.named_parameters())["blocks.0.w_in"])
        )
        assert ("must match" in said) == (experts == 4), said
    return found


@pytest.mark.distributed
def test_what_torch_would_spread_over_all_rows_is_told() -> None:
    first, second = run_ranks(f"{_HERE}:single_rows", 2)
    (experts,), others, (scale,) = first
    assert "hecate: every rank has one row of blocks.0.w_in" in experts and "by state_dict()" in experts
    assert others == [] and "one row of scale." in scale
    assert second == [[], [], []], "rank 0 says it"


def direct_call_of_a_part() -> str:
    model = hecate.compile(build("mixtral"), EAGER)
    experts = model.model.layers[0].mlp.experts
    tokens = torch.randn(4, 32)
    return message_of(lambda: experts(tokens, torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)))


@pytest.mark.distributed
def test_direct_call_of_a_part() -> None:
    for message in run_ranks(f"{_HERE}:direct_call_of_a_part", 2):
        assert message.startswith("UntracedReadError")
        assert "call the compiled model instead" in message


def different_models() -> list[str]:
    hecate.compile(build("plain"), EAGER)  # starts torch.distributed
    rank, _ = rank_and_size()
    found = []
    for model, config in (
        (build("plain", layers=2 + rank), EAGER),
        (build("plain", hidden=32 + 8 * rank), EAGER),
        (build("plain"), hecate.Config(backend="aot_eager", policy="gather" if rank else "static")),
    ):
        names = [name for name, p in model.named_parameters()]
        found.append(message_of(lambda model=model, config=config: hecate.compile(model, config)))
        assert [name for name, p in model.named_parameters()] == names, "nothing was changed"
    return found


@pytest.mark.distributed
def test_different_models_on_different_ranks() -> None:
    for layers, hidden, policy in run_ranks(f"{_HERE}:different_models", 2):
        for message in (layers, hidden, policy):
            assert message.startswith("DisagreementError: hecate: ranks disagree on the model or its options")
            assert "rank 0, line" in message and "rank 1, line" in message
        assert "parameter norms.2.weight [32]" in layers
        assert "[96, 32]" in hidden and "[96, 40]" in hidden
        assert "option policy = 'gather'" in policy


class RankDependent(PlainLanguageModel):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = super().forward(input_ids, labels)
        if self.odd:
            out["loss"] = out["loss"].tanh()
        return out


def different_graphs(evaluate_first: bool) -> str:
    torch.manual_seed(0)
    model = hecate.compile(RankDependent(layers=1, experts=3), EAGER)
    model.odd = False
    if evaluate_first:
        with torch.no_grad():
            model(batch(0), batch(0))
    model.odd = rank_and_size()[0] == 1
    return message_of(lambda: model(batch(0), batch(0)))


@pytest.mark.distributed
@pytest.mark.parametrize("evaluate_first", [False, True])
def test_planted_graph_difference_is_named_on_all_ranks(evaluate_first: bool) -> None:
    for message in run_ranks(f"{_HERE}:different_graphs", 3, timeout=120, evaluate_first=evaluate_first):
        assert message.startswith(f"DisagreementError: hecate: ranks disagree on graph {int(evaluate_first)}")
        assert "rank 0, line" in message and "tanh" in message
        assert "HECATE_DUMP" in message


def wrapped_before() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    fsdp, inner = build("plain"), build("plain")
    fully_shard(fsdp, mesh=mesh)
    fully_shard(inner.norms[1], mesh=mesh)
    wrapped = [nn.parallel.DistributedDataParallel(build("plain")), fsdp, inner]
    return [message_of(lambda model=model: hecate.compile(model, EAGER)) for model in wrapped]


def split_before() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh, plane = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))

    def refused(*names: str, into: Any = mesh, over: Any = None) -> str:
        model = build("plain")
        for name in names:
            owner, _, key = name.rpartition(".")
            holder, placements = model.get_submodule(owner), [Shard(0), *[Replicate()] * (into.ndim - 1)]
            holder._parameters[key] = nn.Parameter(distribute_tensor(holder._parameters[key], into, placements))
        before = dict(model.named_parameters())
        found = message_of(lambda: hecate.compile(model, EAGER, mesh=over))
        assert all(after is before[name] for name, after in model.named_parameters()), "nothing has changed"
        return found

    with_buffer = build("plain")
    with_buffer.register_buffer("table", DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    return {
        "experts": refused("head.weight", "blocks.1.w_in"),
        "same ranks": refused("head.weight", over=mesh),
        "a plane": refused("head.weight", into=plane),
        "buffer": message_of(lambda: hecate.compile(with_buffer, EAGER)),
    }


@pytest.mark.distributed
def test_compile_of_what_others_have_split_or_wrapped() -> None:
    for ddp, fsdp, inner in run_ranks(f"{_HERE}:wrapped_before", 2):
        assert "wrapped in DistributedDataParallel; pass the model inside" in ddp
        assert "PlainLanguageModel went through fully_shard (FSDP2)" in fsdp and 'Config(dense="shard")' in fsdp
        assert "hecate.compile: norms.1 went through fully_shard" in inner


@pytest.mark.distributed
def test_compile_of_split_tensors_that_it_does_not_take() -> None:
    for found in run_ranks(f"{_HERE}:split_before", 2):
        assert "hecate.compile: blocks.1.w_in is a DTensor, (Shard(dim=0),)" in found["experts"]
        assert 'the style "replicate"' in found["experts"]
        assert "split between ranks [(0, 1)], and is trained on [0, 1]" in found["same ranks"]
        assert 'mesh=mesh["dp"], or no mesh' in found["same ranks"]
        assert "expected a mesh of one dimension" in found["a plane"]
        assert "hecate.compile: table is a DTensor" in found["buffer"] and "a buffer" in found["buffer"]


def in_several_pieces() -> list[str]:
    dist.init_process_group("gloo")
    experts, dense = build("plain"), build("plain")
    for module, key in ((experts.blocks[1], "w_in"), (dense.blocks[0].router, "weight")):
        # As a quantized parameter has its numbers and their scales.
        piece = getattr(module, key).detach()
        setattr(module, key, nn.Parameter(TwoTensor(piece, piece.clone()), requires_grad=False))
    return [message_of(lambda model=model: hecate.compile(model, EAGER)) for model in (experts, dense)]


@pytest.mark.distributed
def test_parameters_that_are_several_tensors_in_one() -> None:
    for experts, dense in run_ranks(f"{_HERE}:in_several_pieces", 2, timeout=60):
        assert experts.startswith("ValueError: hecate.compile: blocks.1.w_in is a torch.") and "TwoTensor" in experts
        assert dense.startswith("ValueError: hecate.compile: blocks.0.router.weight is a torch.")
        assert "quantize the weights afterwards" in experts and "quantize the weights afterwards" in dense


def mesh_of_many_dimensions() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("pp", "tp", "dp"))
    model = build("plain", layers=1, experts=4)
    refused = message_of(lambda: hecate.compile(model, EAGER, mesh=mesh))
    hecate.compile(model, EAGER, mesh=mesh["dp"])
    model(batch(0), batch(0))["loss"].backward()
    return [refused, str(list(model.blocks[0]._parameters["w_in"].shape))]


@pytest.mark.distributed
def test_mesh_of_many_dimensions() -> None:
    for refused, shape in run_ranks(f"{_HERE}:mesh_of_many_dimensions", 2):
        assert "mesh has 3 dimensions" in refused and "mesh['dp']" in refused
        assert shape == "[2, 32, 16]"


def moved_after_compile() -> str:
    model = hecate.compile(build("plain"), EAGER)
    # As far away as a GPU, and everywhere.
    model.to("meta")
    return message_of(lambda: model(batch(0), batch(0)))


@pytest.mark.distributed
def test_a_model_that_was_moved_after_compile() -> None:
    for rank, message in enumerate(run_ranks(f"{_HERE}:moved_after_compile", 2)):
        assert f"on rank {rank} the model was on cpu in hecate.compile and is on meta now" in message
        assert "Move it before hecate.compile" in message and "Trainer" in message


def other_groups_than_in_compile() -> list[str]:
    """A group that begins after compile, and one that ends and begins anew."""

    def compiled(config: hecate.Config = EAGER, **options: Any) -> nn.Module:
        return hecate.compile(build("plain", layers=1, experts=2), config, **options)

    given = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    early, single = compiled(), compiled()
    early(batch(0), batch(0))["loss"].backward()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    single(batch(0), batch(0))["loss"].backward()
    torch.distributed.destroy_process_group()
    os.environ.update(given)
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.DeviceMesh("cpu", [int(given["RANK"])])
    alone, together = compiled(mesh=mesh), compiled()
    whole = compiled(hecate.Config(backend="aot_eager", policy="replicate"))
    for model in (alone, together, whole):
        model(batch(0), batch(0))["loss"].backward()
    found = [message_of(lambda model=model: model(batch(0), batch(0))) for model in (early, single, alone)]
    torch.distributed.destroy_process_group()
    ended = message_of(lambda: together(batch(0), batch(0)))
    with torch.no_grad():
        found += [ended, message_of(lambda: whole(batch(0), batch(0)))]
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    found.append(message_of(lambda: together(batch(0), batch(0))))
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.distributed
def test_a_group_that_begins_or_ends_after_compile() -> None:
    for early, single, alone, ended, whole, anew in run_ranks(f"{_HERE}:other_groups_than_in_compile", 2):
        for message in (early, single):
            assert "compiled before init_process_group; call it first" in message and "there are 2 now" in message
        assert alone == whole == "no error"
        assert ended == anew and "the process group of 2 ranks in which the model was compiled was destroyed" in anew
