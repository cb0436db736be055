"""Loops over experts that run as Python: refused where data choose the experts, and left alone where they do not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from textwrap import indent
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import hecate
import tests
from hecate.graph import backend
from hecate.graph.backend import refuse_chosen_experts
from hecate.wrap.untraced import UntracedReadError

TEMPLATE = """
import random
from functools import partial

import torch
from torch import nn
from torch._dynamo import graph_break

LIMIT, TABLE = 2, torch.ones(3)

class Expert(nn.Module):
    hidden = 4

    def __init__(self):
        super().__init__()
        self.up, self.act, self.scale = nn.Linear(4, 4), nn.ReLU(), 1
        self.register_buffer("load", torch.ones(3))

    def forward(self, x, scores=None, scale=1.0):
{expert}

def free(expert, x):
{free}

def cut(x):
    graph_break()
    return x

class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(3))
        self.shared, self.most, self.noisy, self.used = {{0, 2}}, 2, False, 0
        self.register_buffer("load", torch.ones(3))

    def run(self, number, x, expert):
{method}

    def forward(self, hidden, depth=1):
        x = hidden.reshape(-1, hidden.shape[-1])
        weights, chosen = self.router(x).softmax(-1).topk(3)
        counts = chosen.flatten().bincount(minlength=3)
        parts = x.repeat(3, 1).split(counts.tolist())
        out = []
        graph_break()
{loop}
        return torch.cat(out).sum() + hidden
"""

# Parts of the template that most cases leave alone. "turn" stands in front of the call in a turn.
USUAL = {
    "turn": "",
    "call": "expert(rows)",
    "own turn": "{turn}\nout.append({call})",
    "loop": "for number, expert in enumerate(self.experts):\n    graph_break()\n    rows = parts[number]\n{own turn}",
    "expert": "return self.act(self.up(x)) * scale",
    "free": "return expert(x)",
    "method": "return expert(x)",
}
MARK = "  # decides"


def read_cases() -> dict[str, dict[str, str]]:
    """The parts of each case, by its name. A case with a marked line is refused, and the message names the line."""
    cases: dict[str, dict[str, str]] = {}
    for case in (Path(tests.__file__).parent / "data" / "untraced_loops.txt").read_text().split("=== ")[1:]:
        name, *parts = case.split("--- ")
        cases[name.strip()] = {label: code for label, _, code in (part.partition("\n") for part in parts)}
    return cases


CASES = read_cases()


def code_of(case: dict[str, str]) -> str:
    """A module with the code of a case."""
    parts = USUAL | {label: code.rstrip() for label, code in case.items()}
    own_turn = parts["own turn"].format_map(parts) if "own turn" not in case else parts["own turn"]
    loop = parts["loop"] if "loop" in case else parts["loop"].replace("{own turn}", indent(own_turn, " " * 4))
    methods = {"loop": loop, "method": parts["method"], "expert": parts["expert"]}
    texts = {label: indent(text, " " * 8) for label, text in methods.items()}
    return TEMPLATE.format(free=indent(parts["free"], " " * 4), **texts)


def load(path: Path) -> Any:
    """The class of the model in a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MoE


@pytest.mark.parametrize("name", CASES)
def test_a_loop_is_refused_where_data_decide(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "case.py"
    path.write_text(code_of(CASES[name]))
    decides = [f"{path}:{at}: " for at, line in enumerate(path.read_text().splitlines(), 1) if line.endswith(MARK)]
    looked_at, refused = [], []

    def refuse(graph: torch.fx.Graph, frame: FrameType) -> None:
        looked_at.append(graph)
        try:
            refuse_chosen_experts(graph, frame)
        except UntracedReadError as error:
            refused.append(str(error))
            raise

    # Graphs run as they were captured.
    monkeypatch.setattr(backend, "refuse_chosen_experts", refuse)
    monkeypatch.setattr(backend, "lower", lambda captured, *args, **options: captured)
    torch.manual_seed(0)
    model = hecate.compile(nn.Sequential(load(path)()), hecate.Config(backend="aot_eager"))
    with torch.no_grad():
        model(torch.randn(2, 4, 4))
    assert len(looked_at) > 2 or refused, "the loop was traced"
    assert bool(refused) == bool(decides)
    for message in refused:
        assert "in a loop" in message and any(line in message for line in decides), message
