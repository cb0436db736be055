"""Numbers of which the graph says that none comes twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from hecate.passes.analysis.distinct_numbers import come_once
from hecate.passes.analysis.torch_values import GraphFacts

T, K, EXPERTS = 12, 3, 5
Choice = Callable[[Tensor], Tensor]


def _changed(scores: Tensor) -> Tensor:
    ids = scores.topk(K).indices
    ids[:, 0] = 0
    return torch.where(ids == 0)[0]


def _copy_changed(scores: Tensor) -> Tensor:
    ids = scores.topk(K).indices.clone()
    ids[:, 0] = 0
    return torch.where(ids == 0)[0]


def _mask_changed(scores: Tensor) -> Tensor:
    mask = (scores.topk(K)[1] == 2).float()
    mask[:, :2] = 1
    return torch.where(mask)[0]


def _numbers_changed(scores: Tensor) -> Tensor:
    numbers = torch.where(scores.topk(K)[1] == 2)[0]
    numbers.clamp_(max=1)
    return numbers


DISTINCT: dict[str, Choice] = {
    "topk": lambda s: torch.where(s.topk(K)[1] == 2)[0],
    "topk by name": lambda s: torch.where(torch.topk(s, K, dim=1).indices.long() == 2)[0],
    "a line": lambda s: torch.where(s.argmax(-1) == 2)[0],
    "a line of booleans": lambda s: torch.where(s[:, 0] > 0)[0],
    "nonzero": lambda s: (s.topk(K)[1] == 2).nonzero(as_tuple=True)[0],
    "transposed": lambda s: torch.where((s.topk(K)[1] == 2).t())[1],
    "topk of columns": lambda s: torch.where(s.t().topk(K, dim=0)[1] == 2)[1],
    "permuted, with all experts": lambda s: torch.where(
        (s.topk(K)[1].unsqueeze(-1) == torch.arange(EXPERTS)).permute(2, 0, 1)[2]
    )[0],
    "one_hot": lambda s: torch.where(
        torch.nn.functional.one_hot(s.topk(K)[1], EXPERTS).permute(2, 1, 0)[2]
    )[1],
    "one_hot, the last dimension": lambda s: torch.where(
        torch.nn.functional.one_hot(s.topk(K)[1], EXPERTS)[..., 2].bool()
    )[0],
    "unbound": lambda s: torch.where((s.topk(K)[1][..., None] == torch.arange(EXPERTS)).unbind(-1)[2])[0],
    "some of an order": lambda s: torch.where(s.argsort(dim=-1, descending=True)[:, :K] == 2)[0],
    "in another shape": lambda s: torch.where(s.view(2, -1, EXPERTS).topk(K)[1].view(-1, K) == 2)[0],
    "a mask of floats, squeezed": lambda s: torch.where(
        torch.nn.functional.one_hot(s.topk(K)[1], EXPERTS)[..., 2].float().unsqueeze(0).squeeze(0)
    )[0],
    "names of dimensions": lambda s: torch.where(
        (s.topk(K)[1] == 2).unsqueeze(dim=0).transpose(dim0=1, dim1=2)[0]
    )[1],
    "what an expert has chosen": lambda s: s.t().topk(K).indices[2],
    "what experts have chosen, unbound": lambda s: torch.topk(s, K, dim=0)[1].long().unbind(1)[1],
    "one number for each token": lambda s: torch.where(s.topk(K)[1] == s.argmin(-1, keepdim=True))[0],
}  # fmt: skip

UNKNOWN: dict[str, Choice] = {
    "the choices": lambda s: torch.where(s.topk(K)[1] == 2)[1],
    "any two of a row": lambda s: torch.where(s > 0)[0],
    "at least one expert": lambda s: torch.where(s.topk(K)[1] >= 2)[0],
    "two scores of a token": lambda s: torch.where((s * 2).long() == 2)[0],
    "another number for each choice": lambda s: torch.where(s.topk(K)[1] == torch.arange(K))[0],
    "topk of another dimension": lambda s: torch.where(s.topk(K, dim=0)[1] == 2)[0],
    "tokens behind one another": lambda s: torch.where(s.topk(4)[1].reshape(-1, 2 * 4) == 2)[0],
    "several dimensions": lambda s: torch.where(s.view(2, -1, EXPERTS).topk(K)[1] == 2)[0],
    "rounded": lambda s: torch.where(s.topk(K)[1].half() == 2)[0],
    "changed in place": _changed,
    "a copy changed in place": _copy_changed,
    "a mask changed in place": _mask_changed,
    "numbers changed in place": _numbers_changed,
    "numbers as booleans": lambda s: torch.where(s.topk(K)[1].to(torch.bool) == 1)[0],
    "numbers of eight bits": lambda s: torch.where(s.topk(K)[1].to(torch.uint8) == 2)[0],
    "not squeezed": lambda s: torch.where(torch.nn.functional.one_hot(s.topk(K)[1], EXPERTS)[..., 2].squeeze(0))[1],
    "what an expert has chosen, changed in place": lambda s: s.t().topk(K).indices[2].clamp_(max=1),
    "not the numbers of a mask": lambda s: s.topk(K)[1][:, 0],
}


def captured(choose: Choice, scores: Tensor) -> GraphModule:
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, inputs: object) -> GraphModule:
        graphs.append(gm)
        return gm

    options = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(options):
        torch.compile(choose, backend=keep, fullgraph=True)(scores)
    return graphs[0]


@pytest.mark.parametrize("name", [*DISTINCT, *UNKNOWN])
def test_numbers_come_once(name: str) -> None:
    choose = DISTINCT.get(name) or UNKNOWN[name]
    gm = captured(choose, torch.randn(T, EXPERTS))
    (result,) = gm.graph.output_node().args[0]
    assert isinstance(result, Node)
    known = come_once(result, {storage for _, storage in GraphFacts(gm.graph).changes})
    assert known == (name in DISTINCT)
    drawn = [choose(torch.randn(T, EXPERTS)).tolist() for _ in range(20 if known else 0)]
    assert all(len(set(numbers)) == len(numbers) for numbers in drawn)
