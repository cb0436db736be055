"""Loops over the experts that were hit, and loops that leave turns out: changed where that changes nothing."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from textwrap import indent
from typing import Any

import pytest
import torch
from torch import nn

import hecate
from hecate.wrap.find_experts import find_experts
from hecate.wrap.loops import ChangedLoops, make_loops_traceable
from hecate.wrap.loops.experts_without_rows import keeps_rows
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


class RowLists(Experts):
    """Makes lists of the numbers, as Mixtral's first version."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        mask = self.mask()
        for expert in range(self.num_experts):
            choice, token = torch.where(mask[expert])
            if token.shape[0] == 0:
                continue
            tokens = token.tolist()
            choices = choice.tolist()
            current = self.tokens[None, tokens].reshape(-1, 3) @ self.w[expert]
            out.index_add_(0, token, current * (1 + self.chosen[tokens, choices, None]))
        return out


class MaskGuard(Experts):
    def forward(self, out: torch.Tensor) -> torch.Tensor:
        for expert in range(self.num_experts):
            rows = self.chosen[:, 0] == expert
            if rows.any():
                out[rows] = self.tokens[rows] @ self.w[expert]
        return out


class MaskViewGuard(Experts):
    """Asks a view of a mask, as makeMoE does, and writes by the mask."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        folded = out.view(2, 3, 3)
        for expert in range(self.num_experts):
            mask = (self.chosen.view(2, 3, 1) == expert).any(dim=-1)
            flat = mask.view(-1)
            if flat.any():
                current = self.tokens[flat]
                folded[mask] = current @ self.w[expert]
        return out


class NumbersBehindGuard(Experts):
    """Looks up numbers of tokens behind the guard."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(6)
        for expert in range(self.num_experts):
            choice = (self.chosen.view(-1) == expert).nonzero(as_tuple=True)[0]
            if choice.numel() == 0:
                continue
            token = numbers[choice]
            out.index_add_(0, token, self.tokens[token] @ self.w[expert])
        return out


class OtherQuestionsFirst(Experts):
    """Asks integers that have nothing to do with rows, too."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        left_out, quiet = 3, 0
        for expert in range(self.num_experts):
            if expert == left_out:
                continue
            scale = 1.0
            if quiet:
                scale = 2.0
            token = torch.where(self.chosen[:, 0] == expert)[0]
            if token.numel() == 0:
                continue
            out[token, :] += scale * self.tokens[token, :] @ self.w[expert]
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


KINDS = [
    HitRows,
    HitNumbers,
    HitItem,
    Guard,
    RowLists,
    MaskGuard,
    MaskViewGuard,
]
KINDS += [NumbersBehindGuard, OtherQuestionsFirst, Closure, Decorated]


def assert_captured(module: nn.Module, expected: torch.Tensor) -> None:
    """In one graph, which computes the same."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        assert torch.allclose(compiled(torch.zeros(6, 3)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_for_every_expert(kind: type[Experts]) -> None:
    assert_every_turn(kind)


def assert_every_turn(kind: type[Experts]) -> None:
    """Its loop is changed, computes the same, and is captured in one graph."""
    module = kind()
    expected = module(torch.zeros(6, 3))
    places = make_loops_traceable(module, find_experts(module)[0]).places
    source, start = inspect.getsourcelines(inspect.unwrap(vars(kind)["forward"]))
    loop = start + next(number for number, line in enumerate(source) if " for " in line)
    assert f"{inspect.getfile(kind)}:{loop}" in places
    assert torch.equal(module(torch.zeros(6, 3)), expected)
    assert inspect.unwrap(type(module).forward).__code__.co_filename == inspect.getfile(kind)
    # All of the loop is straight-line code now.
    assert_captured(module, expected)


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
    assert_captured(module, expected)
    module.chosen = torch.full((6, 1), 4)
    with pytest.raises(IndexError):
        module(torch.zeros(6, 3))


GUARDED = """
def forward(self, out):
    for expert in range(self.num_experts):
        (token,) = torch.where(self.chosen[:, 0] == expert)
        if token.numel() == 0:
            continue
        out.index_add_(0, token, self.tokens[token] @ self.w[expert])
    return out
"""
HITS = """
def forward(self, out):
    mask = self.mask()
    hit = mask.sum(dim=(-1, -2)).greater(0).nonzero()
    for expert in hit:
        _, token = torch.where(mask[expert[0]])
        out.index_add_(0, token, self.tokens[token] @ self.w[expert[0]])
    return out
"""
LISTS = GUARDED.replace("out.", "rows = token.tolist()\n        out.").replace(
    "self.tokens[token]", "self.tokens[rows]"
)
COUNTS = """
def forward(self, out):
    return out + torch.bincount(self.chosen[:, 0] + 3, minlength=4).sum()
"""
# A loop, and what is another in it.
LEFT_ALONE = {
    "a turn counts": (HITS, "_, token", "turns += 1\n        _, token"),
    "other rows are written": (GUARDED, "index_add_(0, token", "index_add_(0, everybody"),
    "experts with few tokens are left out, too": (HITS, "greater(0)", "greater(3)"),
    "a turn needs what the last one left": (
        GUARDED,
        "out.index_add_(0, token, self.tokens[token] @ self.w[expert])",
        "now = self.tokens[token] @ self.w[expert] + last\n"
        "        last = now[:1]\n"
        "        out.index_add_(0, token, now)",
    ),
    "the mask changes after the hits": (HITS, "for expert", "mask = mask.flip(0)\n    for expert"),
    "a turn ends the loop": (GUARDED, "    return out", "        if expert > 2:\n            break\n    return out"),
    "a guard asks for something else": (
        HITS,
        "out.",
        "strong = self.tokens[token, 0] > 5\n        if not strong.any():\n            continue\n        out.",
    ),
    "rows that nothing found": (GUARDED, "torch.where(self.chosen[:, 0] == expert)", "ids[expert]"),
    "the expert's own line is written": (GUARDED, "out.index_add_(0, token, self", "out[expert] = (self"),
    "the expert's own line is changed, too": (GUARDED, "out.", "used[expert] += 1\n        out."),
    "changed through a view": (HITS, "out.", "line = used[token[:1]].add_(1)\n        out."),
    "some of the experts": (HITS, "mask.sum", "mask[:1].sum"),
    "hits that may be given": (HITS, "(self, out)", "(self, out, hit)"),
    "a mean over no rows": (GUARDED, "self.w[expert])", "(self.w[expert] * self.tokens[token].abs().mean()))"),
    "the name that is asked is another": (
        GUARDED,
        "if token",
        "rows = self.tokens[token]\n        rows = self.w.new_zeros(self.num_experts - expert - 1)\n        if rows",
    ),
    "numbers of which others remain": (
        GUARDED,
        "if token",
        "found = token\n        token = token[1:]\n        if token",
    ),
    "a mask that is changed before it is asked": (
        GUARDED,
        "if token.numel() == 0:",
        "mask = self.chosen[:, 0] == expert\n        token = torch.where(mask)[0]\n        mask &= mask.flip(0)\n"
        "        if not mask.any():",
    ),
    "a part of a mask": (
        GUARDED,
        "if token.numel() == 0:",
        "mask = self.chosen[:, 0] == expert\n        token = torch.where(mask)[0]\n"
        "        part = mask.narrow(0, 0, 2)\n"
        "        if not part.any():",
    ),
    "numbers that may be others": (
        GUARDED,
        "if token",
        "if self.training:\n            token = torch.arange(expert)\n        if token",
    ),
    "numbers as a mask": (
        GUARDED,
        GUARDED[GUARDED.index("(token,)") : GUARDED.index("    return")].rstrip(),
        "hot = self.mask()[expert, 0]\n        token = torch.where(hot)[0]\n        if token.numel() == 0:\n"
        "            continue\n        out[hot] += self.tokens[0] @ self.w[expert]",
    ),
    "some of the rows, picked by booleans of each": (
        GUARDED,
        "if token.numel() == 0:",
        "keep = self.valid[token]\n        kept = token[keep]\n        if kept.numel() == 0:",
    ),
    "numbers that are searched": (
        GUARDED,
        "if token.numel() == 0:",
        "load = self.load[token]\n        hot = load.nonzero().flatten()\n        if hot.numel() == 0:",
    ),
    "a list of rows that is counted": (LISTS, "self.w[expert]", "self.w[expert] / len(rows)"),
    "a list of rows that were others": (LISTS, "out.", "token = token.flip(0)\n        out."),
    "a list of rows that changes": (LISTS, "out.", "rows.reverse()\n        out."),
    "a list of rows that outlives its turn": (LISTS, "    return out", "    return out + self.tokens[rows].sum()"),
    "a list of a turn with rows": (
        GUARDED,
        "out.",
        "if expert < 2:\n            rows = token.tolist()\n        out = out + self.tokens[rows]\n        out.",
    ),
    "a list of numbers that nothing found": (LISTS, "token.tolist()", "self.chosen.tolist()"),
    "the loop's variable has another use": (HITS, "return out", "return out + expert"),
    "ids beyond the experts, of dropped tokens": (COUNTS, "4).sum", "4)[:4].sum"),
}


def changed_in(forward: str, path: Path) -> ChangedLoops:
    """What is changed in a module with this forward, whose source is in a file."""
    path.write_text("class Case(Experts):" + indent(forward, " " * 4))
    kind = run_path(str(path), {"Experts": Experts, "torch": torch})["Case"]
    module = kind()
    changed = make_loops_traceable(module, find_experts(module)[0])
    assert (type(module) is kind) is (not changed.places) and class_before(module) is kind
    return changed


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name: str, tmp_path: Path) -> None:
    assert_left_alone(*LEFT_ALONE[name], tmp_path)


def assert_left_alone(code: str, old: str, new: str, tmp_path: Path) -> None:
    """A loop is changed, and with ``new`` in the place of ``old`` it is not."""
    assert code.count(old) == 1
    assert changed_in(code, tmp_path / "as it is.py").places
    assert changed_in(code.replace(old, new), tmp_path / "another.py") == ChangedLoops()


def test_modules_around_the_experts_are_looked_at_and_others_are_not() -> None:
    model = nn.ModuleDict({"block": nn.Sequential(Guard()), "aside": nn.Sequential(Guard())})
    found = [experts for experts in find_experts(model)[0] if experts.name.startswith("block")]
    assert len(make_loops_traceable(model, found).places) == 1
    assert type(model["block"][0]) is not Guard and class_before(model["block"][0]) is Guard
    assert type(model["aside"][0]) is Guard


MIX_ROWS = ["h.mean(0)", "h.mean()", "h.abs().amax()", "h.std(dim=0)", "h.amax((0, 1))", "torch.max(h)", "h.max(0)"]
MIX_ROWS += ["h.item()"]
KEEP_ROWS = ["h.mean(-1)", "h.mean(1, keepdim=True)", "h.norm(dim=1)", "h.amax(dim=(-1,))", "torch.norm(h, 2, -1)"]
KEEP_ROWS += ["torch.max(h, zero)", "h.min(other=limit)"]


@pytest.mark.parametrize("call", (*MIX_ROWS, *KEEP_ROWS))
def test_what_is_defined_without_rows(call: str) -> None:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call) and keeps_rows(node) is (call in KEEP_ROWS)


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
