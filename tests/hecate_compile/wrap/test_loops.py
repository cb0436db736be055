"""Loops over the experts that were hit, and loops that leave turns out: changed where that changes nothing."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hecate
from hecate.wrap.find_experts import find_experts
from hecate.wrap.loops import ChangedLoops, make_loops_traceable
from hecate.wrap.loops.empty_turns import keeps_rows
from hecate.wrap.swapped_class import class_before


class Experts(nn.Module):
    """Four experts; half of the tokens choose the first, none the last two."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.num_experts = 4
        self.w = nn.Parameter(torch.randn(4, 3, 3, generator=generator))
        self.tokens = torch.randn(6, 3, generator=generator)
        self.chosen = torch.tensor([0, 1, 0, 1, 0, 1]).reshape(6, 1)

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        return out + 1

    def mask(self) -> torch.Tensor:
        return nn.functional.one_hot(self.chosen, 4).permute(2, 1, 0)


class HitRows(Experts):
    def forward(self, out: torch.Tensor) -> torch.Tensor:
        mask = self.mask()
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert in hit:
            expert = expert[0]
            if expert == self.num_experts:
                continue
            _, token = torch.where(mask[expert])
            out.index_add_(0, token, self.tokens[token] @ self.w[expert])
        return out


class HitNumbers(Experts):
    def forward(self, out: torch.Tensor) -> torch.Tensor:
        mask = (self.chosen == torch.arange(4)).t()
        for expert in (mask.sum(-1) > 0).nonzero().flatten():
            (token,) = torch.where(mask[expert])
            out[token] += self.tokens[token] @ self.w[expert]
        return out


class HitItem(Experts):
    def forward(self, out: torch.Tensor) -> torch.Tensor:
        mask = self.mask()
        for row in mask.any(dim=-1).any(dim=-1).nonzero():
            expert = int(row.item())
            _, token = torch.where(mask[expert])
            if token.numel() == 0:
                continue
            out = out.index_add(0, token, self.tokens[token] @ self.w[expert])
        return out


class Guard(Experts):
    def forward(self, out: torch.Tensor) -> torch.Tensor:
        for expert in range(self.num_experts):
            rows = self.chosen[:, 0] == expert
            (token,) = torch.where(rows)
            current = self.tokens[token]
            if current.shape[0] == 0:
                continue
            out.index_add_(0, token, current @ self.w[expert])
        return out


class MaskGuard(Experts):
    def forward(self, out: torch.Tensor) -> torch.Tensor:
        for expert in range(self.num_experts):
            rows = self.chosen[:, 0] == expert
            if rows.any():
                out[rows] = self.tokens[rows] @ self.w[expert]
        return out


class Closure(Experts):
    def forward(self, out: torch.Tensor, scale: float = 2.0, *, more: float = 1.0) -> torch.Tensor:
        for expert in range(self.num_experts):
            (token,) = torch.where(self.chosen[:, 0] == expert)
            if not token.numel():
                continue
            out.index_add_(0, token, scale * more * (self.tokens[token] @ self.w[expert]))
        return super().finish(out)


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: Any, out: torch.Tensor) -> Any:
        return 2 * function(self, out)

    return wrapper


class Decorated(Experts):
    @doubled
    def forward(self, out: torch.Tensor) -> torch.Tensor:
        for expert in range(self.num_experts):
            (token,) = torch.where(self.chosen[:, 0] == expert)
            if len(token) > 0:
                out.index_add_(0, token, self.tokens[token] @ self.w[expert])
        return out


@pytest.mark.parametrize("kind", [HitRows, HitNumbers, HitItem, Guard, MaskGuard, Closure, Decorated])
def test_a_turn_for_every_expert(kind: type[Experts]) -> None:
    module = kind()
    expected = module(torch.zeros(6, 3))
    places = make_loops_traceable(module, find_experts(module)[0]).places
    source, start = inspect.getsourcelines(inspect.unwrap(vars(kind)["forward"]))
    loop = start + next(number for number, line in enumerate(source) if " for " in line)
    assert f"{__file__}:{loop}" in places
    assert torch.equal(module(torch.zeros(6, 3)), expected)
    assert inspect.unwrap(type(module).forward).__code__.co_filename == __file__
    # All of the loop is straight-line code now: it can be captured.
    options = dict(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
    with torch._dynamo.config.patch(options):
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        assert torch.allclose(compiled(torch.zeros(6, 3)), expected)


class Binned(Experts):
    """Rows in expert order, parted by counts."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        order = self.chosen[:, 0].argsort(stable=True)
        parts = self.tokens[order].split(torch.bincount(self.chosen[:, 0], minlength=self.num_experts).tolist())
        return out[order] + torch.cat([part @ self.w[expert] for expert, part in enumerate(parts)])


class BinnedMethod(Experts):
    def forward(self, out: torch.Tensor) -> torch.Tensor:
        counts = self.chosen.flatten().int().bincount(minlength=4)
        return out + counts.sum() + counts.dtype.itemsize


@pytest.mark.parametrize("kind", [Binned, BinnedMethod])
def test_counts_of_a_known_length(kind: type[Experts]) -> None:
    module = kind()
    expected = module(torch.zeros(6, 3))
    assert len(make_loops_traceable(module, find_experts(module)[0]).places) == 1
    assert torch.equal(module(torch.zeros(6, 3)), expected)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        assert torch.allclose(compiled(torch.zeros(6, 3)), expected)
    module.chosen = torch.full((6, 1), 4)
    with pytest.raises(IndexError):
        module(torch.zeros(6, 3))


class Counts(Experts):
    """A turn adds to something that is no row."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        turns = 0
        for expert in self.mask_of().sum(-1).nonzero():
            turns += 1
            (token,) = torch.where(self.mask_of()[expert[0]])
            out.index_add_(0, token, self.tokens[token])
        return out * turns

    def mask_of(self) -> torch.Tensor:
        return (self.chosen == torch.arange(4)).t()


class Other(Experts):
    """What is left out has rows in another way than what is written."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        for expert in range(self.num_experts):
            (token,) = torch.where(self.chosen[:, 0] == expert)
            everybody = torch.arange(6)
            if token.numel() == 0:
                continue
            out.index_add_(0, everybody, self.tokens @ self.w[expert])
        return out


class Threshold(Experts):
    """Experts with few tokens are left out, too."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        mask = self.mask()
        hit = torch.greater(mask.sum(dim=(-1, -2)), 3).nonzero()
        for expert in hit:
            _, token = torch.where(mask[expert[0]])
            out.index_add_(0, token, self.tokens[token] @ self.w[expert[0]])
        return out


class Carried(Experts):
    """A turn needs what the last one with rows has left."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        last = torch.zeros(1, 3)
        for expert in range(self.num_experts):
            (token,) = torch.where(self.chosen[:, 0] == expert)
            if token.numel() == 0:
                continue
            current = self.tokens[token] @ self.w[expert] + last
            last = current[:1]
            out.index_add_(0, token, current)
        return out


class AnotherMask(Experts):
    """The mask changes between the hits and the loop."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        mask = self.mask()
        hit = mask.sum(dim=(-1, -2)).nonzero()
        mask = mask.flip(0)
        for expert in hit:
            _, token = torch.where(mask[expert[0]])
            out.index_add_(0, token, self.tokens[token] @ self.w[expert[0]])
        return out


class Stops(Experts):
    def forward(self, out: torch.Tensor) -> torch.Tensor:
        for expert in range(self.num_experts):
            (token,) = torch.where(self.chosen[:, 0] == expert)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, self.tokens[token] @ self.w[expert])
            if expert > 2:
                break
        return out


class OtherGuard(Experts):
    """A guard in a loop over hits that asks for something else than rows."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        mask = self.mask()
        hit = mask.sum(dim=(-1, -2)).greater(0).nonzero()
        for expert in hit:
            _, token = torch.where(mask[expert[0]])
            strong = self.tokens[token, 0] > 5
            if not strong.any():
                continue
            out.index_add_(0, token, self.tokens[token] @ self.w[expert[0]])
        return out


class Pooled(Experts):
    """What is written is the expert's own line, rows or not."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        parts = self.tokens.split([3, 3, 0, 0])
        for expert in range(self.num_experts):
            rows = parts[expert]
            if rows.shape[0] == 0:
                continue
            out[expert] = (rows @ self.w[expert]).sum(0) + 1
        return out


class Used(Experts):
    def forward(self, out: torch.Tensor) -> torch.Tensor:
        dispatch = self.mask().sum(1).bool()
        used = torch.zeros(4)
        for expert in range(self.num_experts):
            mask = dispatch[expert]
            if not mask.any():
                continue
            used[expert] += 1
            out[mask] += self.tokens[mask] @ self.w[expert]
        return out * used.sum()


class ChangedThrough(Experts):
    """Through a view, or a method that changes its tensor."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        mask, used = self.mask(), torch.zeros(4)
        for expert in mask.sum(dim=(-1, -2)).nonzero():
            _, token = torch.where(mask[expert[0]])
            line = used[token[:1]].add_(1)
            out.index_add_(0, token, self.tokens[token] + line.sum())
        return out


class SomeExperts(Experts):
    """Not all experts of the mask, but some of them."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        mask = self.mask()
        hit = mask[:1].sum(dim=(-1, -2)).greater(0).nonzero()
        for expert in hit:
            _, token = torch.where(mask[expert[0]])
            out.index_add_(0, token, self.tokens[token] @ self.w[expert[0]])
        return out


class Given(Experts):
    """The hits may come from outside."""

    def forward(self, out: torch.Tensor, hit: torch.Tensor | None = None) -> torch.Tensor:
        mask = self.mask()
        if hit is None:
            hit = mask.sum(dim=(-1, -2)).greater(0).nonzero()
        for expert in hit:
            _, token = torch.where(mask[expert[0]])
            out.index_add_(0, token, self.tokens[token] @ self.w[expert[0]])
        return out


class Mean(Experts):
    """A mean over no rows is not a number, and so is its gradient."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        for expert in range(self.num_experts):
            (token,) = torch.where(self.chosen[:, 0] == expert)
            if token.numel() == 0:
                continue
            scale = self.tokens[token].abs().mean()
            out.index_add_(0, token, self.tokens[token] @ (self.w[expert] * scale))
        return out


class Renamed(Experts):
    """The name that is asked has become something else."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        for expert in range(self.num_experts):
            (token,) = torch.where(self.chosen[:, 0] == expert)
            rows = self.tokens[token]
            rows = self.w.new_zeros(self.num_experts - expert - 1)
            if rows.numel() == 0:
                continue
            out.index_add_(0, token, self.tokens[token] @ self.w[expert] + 1)
        return out


class Again(Experts):
    """The loop's variable has another use in the function."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        mask = self.mask()
        for expert in mask.sum(dim=(-1, -2)).nonzero():
            _, token = torch.where(mask[expert[0]])
            out.index_add_(0, token, self.tokens[token] @ self.w[expert[0]])
        return out + expert


class Sentinel(Experts):
    """Ids beyond the experts, of tokens that were dropped."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        return out + torch.bincount(self.chosen[:, 0] + 3, minlength=4)[:4].sum()


@pytest.mark.parametrize(
    "kind",
    [
        Counts,
        Other,
        Threshold,
        Carried,
        AnotherMask,
        Stops,
        OtherGuard,
        Pooled,
        Used,
        ChangedThrough,
        SomeExperts,
        Given,
        Mean,
        Renamed,
        Again,
        Sentinel,
    ],
)
def test_left_alone(kind: type[Experts]) -> None:
    module = kind()
    assert make_loops_traceable(module, find_experts(module)[0]) == ChangedLoops()
    assert type(module) is kind is class_before(module)


def test_modules_around_the_experts_are_looked_at_and_others_are_not() -> None:
    model = nn.ModuleDict({"block": nn.Sequential(Guard()), "aside": nn.Sequential(Guard())})
    found = [experts for experts in find_experts(model)[0] if experts.name.startswith("block")]
    assert len(make_loops_traceable(model, found).places) == 1
    assert type(model["block"][0]) is not Guard and class_before(model["block"][0]) is Guard
    assert type(model["aside"][0]) is Guard


@pytest.mark.parametrize(
    ("call", "keeps"),
    [
        ("h.mean(0)", False),
        ("h.mean()", False),
        ("h.abs().amax()", False),
        ("h.std(dim=0)", False),
        ("h.amax((0, 1))", False),
        ("torch.max(h)", False),
        ("h.max(0)", False),
        ("h.item()", False),
        ("h.mean(-1)", True),
        ("h.mean(1, keepdim=True)", True),
        ("h.norm(dim=1)", True),
        ("h.amax(dim=(-1,))", True),
        ("torch.norm(h, 2, -1)", True),
        ("torch.max(h, zero)", True),
        ("h.min(other=limit)", True),
    ],
)
def test_what_is_defined_without_rows(call: str, keeps: bool) -> None:
    (node,) = (part.value for part in ast.parse(call).body if isinstance(part, ast.Expr))
    assert isinstance(node, ast.Call) and keeps_rows(node) is keeps


def test_the_change_can_be_dumped_and_switched_off(tmp_path: Path) -> None:
    text = []
    for number, off in enumerate(((), ("make_loops_traceable",))):
        folder = tmp_path / str(number)
        model = nn.Sequential(Guard())
        config = hecate.Config(backend="aot_eager", dump=str(folder), disable_passes=off)
        text.append(hecate.explain(hecate.compile(model, config)).loops)
        diff = folder / "rank0" / "make_loops_traceable.diff"
        assert diff.exists() is (not off)
        if not off:
            lines = diff.read_text().splitlines()
            assert any(line.startswith("-") and "continue" in line for line in lines), lines
    assert text[0] and not text[1]
