"""Wrong input: a clear message that names the module and the way out, before anything is lost."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hecate
from hecate.passes import REQUIRED
from hecate.runtime.comm.world import World
from hecate.runtime.one_sided import carrier
from hecate.runtime.placement.topology import Topology
from tests.support.adversaries import Anything
from tests.support.models import PlainLanguageModel, PlainMoE, batch, build

EAGER = hecate.Config(backend="aot_eager")


def test_no_experts() -> None:
    with pytest.raises(hecate.NoExpertsError, match="no experts found in Linear"):
        hecate.compile(nn.Linear(3, 3))


def test_not_a_module() -> None:
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got function"):
        hecate.compile(lambda x: x)


def test_optimizer_before_compile_leaves_the_model_as_it_was() -> None:
    model = build("plain")
    before = {name: id(p) for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match=r"AdamW already holds parameters.*after hecate.compile"):
        hecate.compile(model, EAGER)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    del optimizer
    hecate.compile(model, EAGER)


def test_compile_twice() -> None:
    model = hecate.compile(build("plain"), EAGER)
    with pytest.raises(RuntimeError, match="compiled already"):
        hecate.compile(model, EAGER)
    with pytest.raises(RuntimeError, match="inner inside this model is compiled already"):
        hecate.compile(nn.ModuleDict({"inner": model}), EAGER)


def test_torch_compile_before() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.compile before"):
        hecate.compile(torch.compile(build("plain")), EAGER)
    model = build("plain")
    model.compile()
    with pytest.raises(RuntimeError, match=r"torch\.compile before"):
        hecate.compile(model, EAGER)


def test_config_of_another_type() -> None:
    with pytest.raises(TypeError, match=r"config is a dict, expected a hecate\.Config"):
        hecate.compile(build("plain"), {"backend": "aot_eager"})


def test_copy_and_pickle_say_what_to_do_instead() -> None:
    model = hecate.compile(build("plain"), EAGER)
    for function in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*state_dict"):
            function(model)


def test_replaced_parameter_is_named() -> None:
    model = hecate.compile(build("plain"), EAGER)
    model.blocks[0].w_in = nn.Parameter(torch.zeros(8, 32, 16))
    with pytest.raises(RuntimeError, match=r"blocks\.0\.w_in is no longer the shard"):
        model.state_dict()


def test_norms_of_no_order() -> None:
    with pytest.raises(ValueError, match="norm_type must be greater than 0, got 0"):
        hecate.clip_grad_norm_([torch.zeros(3, requires_grad=True)], 1.0, 0)


class Positions(nn.Module):
    """A model with a buffer that nothing initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = PlainMoE(8, 6, 4, 2)
        self.register_buffer("positions", torch.arange(6), persistent=False)


def test_meta_tensors_that_nothing_initializes_are_named() -> None:
    with torch.device("meta"):
        model = Positions()
    with pytest.warns(
        UserWarning, match=r"nothing initialized positions, moe\.w_in, moe\.w_out.*computing them again"
    ):
        hecate.compile(model, EAGER)
    assert model.moe.router.weight.isfinite().all(), "nn.Linear has reset_parameters"
    assert model.moe._parameters["w_in"].isnan().all()


def test_unknown_pass_name_lists_the_passes() -> None:
    first = "'make_loops_traceable', 'drop_causal_masks'"
    with pytest.raises(ValueError, match=rf"\['exchange_row'\]; the passes are \[{first}"):
        hecate.compile(build("plain"), hecate.Config(disable_passes=("exchange_row",)))


@pytest.mark.parametrize("name", REQUIRED)
def test_what_cannot_be_switched_off_says_why(name: str) -> None:
    with pytest.raises(ValueError, match=f"names '{name}'; without it"):
        hecate.compile(build("plain"), hecate.Config(disable_passes=(name,)))


class Splits(Anything):
    """Splits rows over the holders in its own way."""

    def assign(self, *args: Any) -> Any:
        return super().assign(*args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "magic"}, "policy='magic', expected one of"),
        ({"objective": "speed"}, "objective='speed', expected one of"),
        ({"prefetch_bytes": -1}, "prefetch_bytes=-1, expected a whole number of at least 0"),
        ({"replicas": True}, "replicas=True, expected a whole number"),
        ({"rematerialize": "yes"}, "rematerialize='yes', expected True or False"),
        ({"piecewise": 1}, "piecewise=1, expected True or False"),
        ({"piecewise": True, "backend": "aot_eager"}, 'piecewise=True is a way of backend="inductor"'),
        ({"replicas": -1}, "replicas=-1, expected a whole number of at least 0"),
        ({"replicas": "all"}, "replicas='all', expected a whole number of at least 0 or \"auto\""),
        ({"replica_memory": -0.1}, "replica_memory=-0.1, expected a number of at least 0"),
        ({"replica_memory": "8 GB"}, "replica_memory='8 GB', expected a number of at least 0"),
        ({"window": 0}, "window=0, expected a whole number of at least 1"),
        ({"reshard_every": 1.5}, "reshard_every=1.5, expected a whole number"),
        ({"topology": (0, 0, 1)}, r"topology is a tuple, expected a hecate\.Topology"),
        ({"rates": 3.0}, r"rates is a float, expected a hecate\.Rates"),
        ({"backend": "eager"}, "backend='eager'"),
        ({"dense": "split"}, "dense='split'"),
        ({"disable_passes": "exchange_rows"}, "is a string, expected a tuple"),
        ({"mixed_precision": torch.bfloat16}, "expected a torch.distributed.fsdp.MixedPrecisionPolicy"),
        ({"wire_dtype": torch.float32}, "expected torch.bfloat16, torch.float16 or None"),
        ({"dispatch": "node"}, "expected one of"),
        ({"attention": {"block": 64}}, r"attention is a dict, expected a hecate\.S2Attention"),
        (
            {"attention": hecate.S2Attention(), "disable_passes": ("shard_context",)},
            "disable_passes names 'shard_context', which is what attention",
        ),
        ({"chunks": 0}, "expected a whole number of at least 1"),
        ({"capacity": 0.5}, "capacity=0.5, expected a number of at least 1"),
        ({"transport": "nccl"}, "transport='nccl', expected one of"),
        ({"transport": "symmetric", "chunks": 2}, "does not go with chunks=2: rows travel in one part"),
        ({"transport": "symmetric", "dispatch": "nodes"}, "all ranks are on one node"),
        ({"transport": "symmetric", "policy": "gather"}, "no rows travel"),
        ({"transport": "symmetric", "calibrate": True}, "the host does not know the rows"),
        ({"transport": "symmetric", "policy": Anything(calibrates=True)}, "the host does not know the rows"),
        ({"transport": "symmetric", "objective": "paper"}, "on the device, evenly"),
        ({"transport": "symmetric", "policy": Splits()}, "on the device, evenly"),
        ({"chunks": "two"}, "expected a whole number of at least 1"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        hecate.Config(**options)


def test_a_transport_of_rows_wants_experts() -> None:
    config = hecate.Config(transport="symmetric", attention=hecate.S2Attention())
    with pytest.raises(ValueError, match="carries rows to experts, and none were found"):
        hecate.compile(torch.nn.Linear(2, 2), config)


@pytest.mark.parametrize(
    ("device", "hip", "message"),
    [
        ("cuda:1", "7.0", 'needs GPUs of NVIDIA, .* and this torch is for AMD\'s. Use transport="collectives"'),
        ("xpu:1", None, "needs ranks on CUDA devices, .*; the model is on xpu:1"),
        ("cuda:1", None, ""),
        ("cpu", "7.0", ""),
    ],
)
def test_a_transport_of_rows_wants_gpus_of_nvidia(
    device: str, hip: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    world = World(rank=0, size=2, group=None, device=torch.device(device))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        carrier._check_ranks(Topology((0, 0)), world)


def test_functions_want_the_compiled_model() -> None:
    model = build("plain")
    for function in (hecate.explain, hecate.stats, lambda m: hecate.set_requires_gradient_sync(m, False)):
        with pytest.raises(ValueError, match=r"was not compiled with hecate.compile"):
            function(model)


class MixingMoE(PlainMoE):
    """Normalizes over all rows of an expert between the matmuls: rows are not independent."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        chosen = self.router(tokens).argmax(-1)
        out = torch.zeros_like(tokens)
        for expert in range(self.w_in.shape[0]):
            (token,) = torch.where(chosen == expert)
            h = tokens[token] @ self.w_in[expert]
            out.index_add_(0, token, (h - h.sum(0, keepdim=True)) @ self.w_out[expert])
        return out.view_as(hidden) + self.b_out.sum(0)


def test_region_that_cannot_be_rewritten_gathers_and_warns_once() -> None:
    torch.manual_seed(0)
    model = PlainLanguageModel(MixingMoE)
    expected = model(batch(0), batch(0))["loss"].item()
    hecate.compile(model, EAGER)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [model(batch(0), batch(0))["loss"].item() for _ in range(2)]
    assert losses == pytest.approx([expected] * 2)
    ours = [str(w.message) for w in caught if "hecate" in str(w.message)]
    assert len(ours) == 2, "one warning for each of the two layers"
    assert "blocks.0" in ours[0] and "keep rows apart" in ours[0] and "gathers all its experts" in ours[0]
    assert any("keep rows apart" in skip.reason for skip in hecate.explain(model).skipped)
    assert "keep rows apart" in str(hecate.explain(model))


def test_float16_works_and_warns() -> None:
    model = build("mixtral", dtype=torch.float16)
    with pytest.warns(UserWarning, match=r"float16.*GradScaler.*bfloat16, or float32 with Config\(mixed_precision"):
        hecate.compile(model, EAGER)
    loss = model(input_ids=batch(0), labels=batch(0))["loss"]
    loss.backward()
    assert torch.isfinite(loss)


def test_reads_of_shards_at_one_rank_are_plain() -> None:
    model = hecate.compile(build("mixtral"), EAGER)
    assert model.model.layers[0].mlp.experts.down_proj.shape == (8, 32, 16)
