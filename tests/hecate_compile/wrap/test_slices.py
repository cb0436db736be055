"""Loops over slices of sorted rows that leave out experts without rows by a number or by bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hecate.wrap.find_experts import find_experts
from hecate.wrap.loops import ChangedLoops, make_loops_traceable
from tests.hecate_compile.wrap.test_loops import Experts, assert_every_turn, assert_left_alone, changed_in
from tests.support.extent import OLD_TORCH


class Sorted(Experts):
    """Rows in expert order; no token has chosen the second expert, or the last."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = 2 * self.chosen

    def in_order(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        counts = (self.chosen == torch.arange(4)).sum(0)
        order = self.chosen[:, 0].argsort(stable=True)
        return order, self.tokens[order], counts


class SlicesByCounts(Sorted):
    def forward(self, out: torch.Tensor) -> torch.Tensor:
        order, rows, counts = self.in_order()
        done, start = torch.zeros_like(rows), 0
        for expert, count in enumerate(counts.tolist()):
            end = start + count
            if count == 0:
                continue
            current = rows[start:end]
            done[start:end] = current @ self.w[expert]
            start = end
        return out.index_add(0, order, done)


class SlicesByEnds(Sorted):
    """As latent-moe has it."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        order, rows, counts = self.in_order()
        ends, done, start = counts.cumsum(0).tolist(), torch.zeros_like(rows), 0
        for expert, count in enumerate(counts.tolist()):
            if not count:
                continue
            end = ends[expert]
            done[start:end] = rows[start:end] @ self.w[expert]
            start = end
        return out.index_add(0, order, done)


class SlicesByBounds(Sorted):
    """As DeepSeek's inference code has it."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        order, _, counts = self.in_order()
        ends = counts.cumsum(0).tolist()
        for expert, end in enumerate(ends):
            start = 0 if expert == 0 else ends[expert - 1]
            if start == end:
                continue
            token = order[start:end]
            done = self.tokens[token] @ self.w[expert]
            out.scatter_add_(0, token.view(-1, 1).repeat(1, 3), done)
        return out


class SlicesByOffset(Sorted):
    def forward(self, out: torch.Tensor) -> torch.Tensor:
        order, rows, counts = self.in_order()
        offset = 0
        for expert, count in enumerate(counts.tolist()):
            if count > 0:
                out[order[offset : offset + count]] = rows[offset : offset + count] @ self.w[expert]
                offset += count
        return out


@pytest.mark.parametrize("kind", [SlicesByCounts, SlicesByEnds, SlicesByBounds, SlicesByOffset])
def test_a_turn_for_every_expert(kind: type[Sorted]) -> None:
    if OLD_TORCH and kind in (SlicesByCounts, SlicesByEnds):
        pytest.skip("torch before 2.12 cannot trace writes to slices whose bounds are data")
    assert_every_turn(kind)


class EndsApart(Sorted):
    """Ends of experts without tokens are behind those before, and there may be less than no tokens."""

    counts = (2, 0, 1, -2)

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        ends, start = torch.tensor((2, 3, 4, 2)).tolist(), 0
        for expert, count in enumerate(torch.tensor(self.counts).tolist()):
            if count <= 0:
                continue
            end = ends[expert]
            out[start:end] += self.tokens[start:end] @ self.w[expert]
            start = end
        return out


def test_a_turn_that_was_left_out_has_no_rows_wherever_they_would_end() -> None:
    module = EndsApart()
    expected = module(torch.zeros(6, 3))
    assert make_loops_traceable(module, find_experts(module)[0]).places
    assert torch.equal(module(torch.zeros(6, 3)), expected)


SLICES = """
def forward(self, out):
    order = self.chosen[:, 0].argsort(stable=True)
    rows, done, start = self.tokens[order], torch.zeros(6, 3), 0
    for expert, count in enumerate((self.chosen == torch.arange(4)).sum(0).tolist()):
        if count == 0:
            continue
        end = start + count
        done[start:end] = rows[start:end] @ self.w[expert]
        start = end
    return out.index_add(0, order, done)
"""

# What stands in the loop, and what is there instead.
LEFT_ALONE = {
    "slices that are counted": ("end = start", "self.turns += 1\n        end = start"),
    "slices of other bounds": ("done[start:end]", "done[last:end]"),
    "results of slices in a list": (
        "done[start:end] = rows[start:end] @ self.w[expert]",
        "done.append(rows[start:end] @ self.w[expert])",
    ),
    "the last end is used": ("return out", "return end + out"),
    "the next start is another": ("start = end", "start = end + 1"),
    "the end of rows below none": ("if count == 0:", "if count <= 0 and self.training:"),
    "a flag is no number of rows": ("if count == 0:", "quiet = self.training\n        if quiet:"),
    "tensors are no numbers of the host": (".sum(0).tolist()", ".sum(0)"),
    "what is divided by a number": ("@ self.w[expert]", "@ self.w[expert] / count"),
    "the row at a bound": ("@ self.w[expert]", "@ self.w[expert] * rows[start]"),
    "ends that are none": (
        "end = start + count",
        "end = start + count if expert < 3 else None",
    ),
    "another max": ("if count == 0:", "max = 3\n        if count <= 0:"),
    "a number has rows of another": ("if count == 0:", "if expert == 0:"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name: str, tmp_path: Path) -> None:
    assert_left_alone(SLICES, *LEFT_ALONE[name], tmp_path)


@pytest.mark.parametrize("value", ["len(rows) < 2", "len(rows)"])
def test_a_flag_does_not_decide_where_rows_end(value: str, tmp_path: Path) -> None:
    """It stands before the end of every turn, and is no guard of all that follows."""
    code = SLICES.replace(
        "end = start + count", "scale = 1.0\n        if loud:\n            scale = 2.0\n        end = ends[expert]"
    )
    code = code.replace(
        "for expert,",
        "ends, loud = (self.chosen == torch.arange(4)).sum(0).cumsum(0).tolist(), VALUE\n    for expert,",
    )
    code = code.replace("if count == 0:\n            continue\n        ", "")
    code = code.replace("VALUE", value)
    assert changed_in(code.replace("@ self.w", "* scale @ self.w"), tmp_path / "case.py") == ChangedLoops()
