"""A checkpoint of every format that Hecate has had is read, to the last bit and with what the planner remembers.

``tests/data/checkpoints`` has one of each. This adds the one of the present format, whose number is
``hecate.checkpoints.manifest.FORMAT``; those that are there are never made again::

    python -m tests.hecate_compile.checkpoints.test_formats
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import hecate
from hecate.checkpoints.manifest import FORMAT
from hecate.checkpoints.run_state import placement_state
from hecate.checkpoints.safety.plain_data import read_plain
from tests.support.models import VOCABULARY, PlainLanguageModel
from tests.support.parity import rank_and_size
from tests.support.ranks import ROOT, run_ranks

KEPT = ROOT / "tests" / "data" / "checkpoints"
FORMATS = range(1, FORMAT + 1)
STEP = "step-00000003"


def small(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return PlainLanguageModel(hidden=4, layers=1, experts=4)


def compiled(seed: int) -> nn.Module:
    """With a slow link between two ranks, so that experts are replicated and plans are worth remembering."""
    topology = hecate.Topology((0, 1))
    rates = hecate.Rates(flops=1e10, rank_bytes=1e9, node_bytes=1e7, hidden_seconds=1e-3)
    return hecate.compile(
        small(seed), hecate.Config(backend="aot_eager", dense="shard", topology=topology, rates=rates)
    )


def save_small(folder: str) -> None:
    """Three steps of training on one rank, and a checkpoint with all that one can have."""
    model = compiled(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rank, _ = rank_and_size()
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
        model(input_ids=ids, labels=ids)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    hecate.save(folder, model, optimizer, step=3, extra={"rank": rank, "tokens": torch.arange(3) + rank})


def load_small(folder: str) -> dict[str, Any]:
    """On one rank."""
    model = compiled(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    found = hecate.load(folder, model, optimizer)
    return {
        "extra": [found.step, found.extra["rank"], found.extra["tokens"].tolist(), list(found.skipped)],
        "placement": listed(placement_state(model)),
    }


def listed(value: Any) -> Any:
    """Plain data in which tuples and arrays are lists."""
    return json.loads(json.dumps(value, default=lambda array: array.tolist()))


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a step as torch's own functions read them, which know nothing of Hecate."""
    metadata = dcp.FileSystemReader(folder / STEP).read_metadata()
    state = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in metadata.state_dict_metadata.items()
    }
    dcp.load(state, checkpoint_id=folder / STEP, no_dist=True)
    return state


@pytest.mark.parametrize("number", FORMATS)
def test_one_process_reads_all_tensors(number: int) -> None:
    folder = KEPT / f"format{number}"
    model = small(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    found = hecate.load(folder, model, optimizer)
    assert (found.step, found.ranks, found.skipped) == (3, 2, ())
    assert [[one["rank"], one["tokens"].tolist()] for one in found.extras] == [[0, [0, 1, 2]], [1, [1, 2, 3]]]
    ours = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        ours |= {f"optimizer.state.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    expected = whole(folder)
    assert ours.keys() == expected.keys() and len(ours) > 20
    assert all(torch.equal(ours[name], value) for name, value in expected.items())
    assert optimizer.param_groups[0]["lr"] == 0.01 and any(value.any() for value in expected.values())


@pytest.mark.distributed
@pytest.mark.parametrize("number", FORMATS)
def test_as_many_ranks_remember_plans(number: int) -> None:
    folder = KEPT / f"format{number}"
    saved = listed(read_plain(folder / STEP / "run.json")["placement"])
    assert saved["layers"]["blocks.0"]["planned"] != [[0], [0], [1], [1]], "there are no replicas to remember"
    for rank, found in enumerate(run_ranks(load_small, 2, folder=str(folder), timeout=120)):
        assert found["extra"] == [3, rank, [rank, 1 + rank, 2 + rank], []]
        found["placement"]["conditions"].pop("memory")
        # What older files lack.
        assert found["placement"]["conditions"].pop("groups") == 1
        saved["conditions"].pop("memory", None)
        assert found["placement"] == saved


if __name__ == "__main__":
    target = KEPT / f"format{FORMAT}"
    if target.exists():
        sys.exit(f"{target} is there")
    run_ranks("tests.hecate_compile.checkpoints.test_formats:save_small", 2, folder=str(target))
    for name in (".lock", ".owner"):
        (target / name).unlink()
