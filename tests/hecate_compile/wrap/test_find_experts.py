from __future__ import annotations

import pytest
import torch
from torch import nn

from hecate.wrap.attention_config import AttentionConfig, attention_config
from hecate.wrap.find_experts import NoExpertsError, counts_experts, find_experts
from tests.support.models import FAMILIES, PlainMoE, build


@pytest.mark.parametrize("family", FAMILIES)
def test_finds_every_layer_of_every_family(family: str) -> None:
    found, passed = find_experts(build(family))
    assert len(found) == 2
    assert passed == []
    expected = {
        "gpt_oss": ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"),
        "plain": ("w_in", "w_out", "b_out"),
        "split": ("w_in", "w_out", "b_out"),
    }
    for experts in found:
        assert experts.num_experts == 8
        assert experts.parameters == expected.get(family, ("gate_up_proj", "down_proj"))


class Unnamed(nn.Module):
    """Experts and router in one module that says nothing about experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(4, 8))
        self.w = nn.Parameter(torch.randn(4, 8, 6))
        self.v = nn.Parameter(torch.randn(4, 6, 8))
        self.bias = nn.Parameter(torch.randn(4, 8))


def test_router_beside_the_weights_is_a_sign_and_is_not_sharded() -> None:
    (found,), _ = find_experts(Unnamed())
    assert found.parameters == ("w", "v", "bias")
    assert "router gate" in found.sign


class ListUnderAnotherName(nn.Module):
    """A list of as many modules as a router tells apart, beside one of as many layers as there are classes."""

    def __init__(self, router: str) -> None:
        super().__init__()
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8)) for _ in range(4))
        self.add_module(router, nn.Linear(8, 4, bias=False))


def test_a_router_beside_a_list_is_a_sign() -> None:
    model = nn.ModuleDict({"moe": ListUnderAnotherName("gate"), "dense": ListUnderAnotherName("head")})
    (found,), passed_over = find_experts(model)
    assert (found.name, found.num_experts, len(found.members)) == ("moe.mlp", 4, 4)
    assert found.sign == "the router gate.weight [4, 8]" and passed_over == []


class SlottedMoE(nn.Module):
    """A router with slots ``[E, s, d]`` around a list of experts, as soft-moe-pytorch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(4, 2, 8))
        self.experts = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(4))})


def test_a_matrix_for_each_of_a_list_of_experts_is_a_routers() -> None:
    model = nn.ModuleDict({"moe": SlottedMoE()})
    (found,), _ = find_experts(model)
    assert found.name == "moe.experts.experts"
    (named,), _ = find_experts(model, ["moe"])
    assert named.parameters == ("slots",)


class GatedLayers(nn.Module):
    """As many layers as their gate has lines, each with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": ListUnderAnotherName("gate").mlp}) for _ in range(4))
        self.gate = nn.Linear(8, 4)


def test_a_list_of_layers_with_experts_is_none_of_experts() -> None:
    found, _ = find_experts(GatedLayers())
    assert [experts.name for experts in found] == [f"layers.{layer}.experts" for layer in range(4)]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3)
        self.filters = nn.Parameter(torch.randn(4, 3, 5))


def test_other_three_dimensional_parameters_are_passed_over_with_a_reason() -> None:
    model = nn.ModuleDict({"a": PlainMoE(8, 6, 4, 2), "b": Convolutions()})
    found, passed = find_experts(model)
    assert [experts.name for experts in found] == ["a"]
    assert {p.name for p in passed} == {"b", "b.conv"}


class _Groups(nn.Module):
    """Experts in groups, as a router of two levels chooses them; ``shapes`` are those of their matrices."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.num_experts = shapes[0][0]
        for number, shape in enumerate(shapes):
            self.register_parameter(f"w{number}", nn.Parameter(torch.zeros(shape, device="cpu")))


def test_experts_in_groups_are_found_and_convolutions_are_not() -> None:
    found, passed_over = find_experts(nn.Sequential(_Groups((4, 2, 8, 16), (4, 2, 16, 8))))
    assert [(one.num_experts, one.parameters) for one in found] == [(4, ("w0", "w1"))] and not passed_over
    # Whatever is beside them.
    kernels = _Groups((64, 32, 3, 3), (64, 32, 3, 3))
    kernels.num_experts, kernels.squeeze = 0, nn.Linear(32, 64)
    with pytest.raises(NoExpertsError, match="4-D parameters, but no router"):
        find_experts(nn.Sequential(kernels))
    for shapes in ([(4, 8, 3, 3)], [(4, 8, 3, 3), (4, 4, 3, 3)], [(4, 1, 8, 16), (4, 1, 16, 8)]):
        with pytest.raises(NoExpertsError, match="no experts found"):
            find_experts(nn.Sequential(_Groups(*shapes)))


def test_patterns_decide_alone() -> None:
    model = nn.ModuleDict({"a": PlainMoE(8, 6, 4, 2), "b": Convolutions()})
    found, _ = find_experts(model, ["b"])
    assert [(experts.name, experts.parameters) for experts in found] == [("b", ("filters",))]
    with pytest.raises(NoExpertsError, match=r"Modules with such parameters: a, b, b\.conv"):
        find_experts(model, ["nowhere*"])
    with pytest.raises(NoExpertsError, match=r"typo\* matches no module"):
        find_experts(model, ["a", "typo*"])


def test_a_config_whose_layers_differ_says_nothing() -> None:
    """Those of transformers raise from 5.24 on, where hasattr and a default are of no help."""

    class Heterogeneous:
        num_hidden_layers, num_experts = 2, 8

        @property
        def num_attention_heads(self) -> int:
            raise RuntimeError("layers have numbers of their own")

        num_local_experts = num_attention_heads

    model = nn.Linear(1, 1)
    model.config = Heterogeneous()  # type: ignore[assignment]
    assert attention_config(model) == AttentionConfig()
    assert counts_experts(model.config)


def test_no_experts_says_what_was_looked_for() -> None:
    with pytest.raises(NoExpertsError, match=r"Passed over filters_only: 3-D") as caught:
        find_experts(nn.ModuleDict({"filters_only": Convolutions(), "dense": nn.Linear(3, 3)}))
    assert 'hecate.Config(experts=("*.experts",))' in str(caught.value)
