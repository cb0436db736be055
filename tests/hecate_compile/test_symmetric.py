"""Rows that travel one-sided, with a fixed number of places: a compiled model on real ranks that share memory."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hecate.runtime.comm import heartbeat
from hecate.runtime.one_sided import windows
from tests.hecate_compile.test_parity import measure
from tests.support.adversaries import Anything
from tests.support.extent import ALL
from tests.support.models import FAMILIES, batch, build
from tests.support.parity import rank_and_size, run_step
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.test_symmetric"
pytestmark = pytest.mark.distributed


def options(**more: Any) -> dict[str, Any]:
    """With room for whatever comes: all ranks have as many tokens."""
    return {"backend": "aot_eager", "transport": "symmetric", "capacity": rank_and_size()[1], **more}


def measure_all(families: list[str]) -> dict[str, dict[str, Any]]:
    """On one rank."""
    # Ranks know how many they are when they have begun.
    dist.init_process_group("gloo")
    # What lies between two layers is the same for any number of ranks.
    layers = 1 if dist.get_world_size() == 3 and not ALL else 2
    found = {family: measure(family, layers=layers, policy="anything", **options()) for family in families}
    few: dict[str, Any]
    if dist.get_world_size() == 3:
        # One of them owns none, and has a bias to look up for all the rows that it has room for.
        few = dict(layers=1, steps=1, changes={"experts": 2}, policy="static")
        found["fewer experts than ranks"] = measure("plain", **few, **options())
    if dist.get_world_size() == 2:
        found["default policy"] = measure("qwen3_moe", steps=4, layers=1, **options(reshard_every=2))
        if ALL:
            found["rows in bf16"] = measure("qwen3_moe", layers=1, wire_dtype=torch.bfloat16, **options())
            found["again"] = measure("gpt_oss", rematerialize=True, policy="anything", **options())
            found["sharded"] = measure("mixtral", dense="shard", policy="anything", **options())
            found["owners move"] = measure("olmoe", policy=Anything(reshard_every=1), **options())
        few = dict(layers=1, changes={"experts": 4}, policy="static")
        found["all to one"] = measure("plain", one_hot=True, **few, **options())
    return found


@pytest.mark.parametrize(
    ("size", "families"),
    # Three ranks have links that two have not; the protocol is tested for any number without compiling.
    [(2, FAMILIES if ALL else ("plain",)), (3, FAMILIES if ALL else ("qwen3_moe",))],
)
def test_equals_one_process(size: int, families: tuple[str, ...]) -> None:
    for ranks in run_ranks(f"{_HERE}:measure_all", size, families=list(families)):
        for name, result in ranks.items():
            exact = name != "rows in bf16"
            assert result["loss"] < (1e-5 if exact else 1e-2), name
            assert result["gradient"] < (1e-5 if exact else 5e-2), (name, result["worst"])
            assert exact or result["gradient"] > 1e-5, "they are rounded"
            assert (result["graphs"], result["breaks"], result["skipped"]) == (1, 0, []), name
            assert result["rewritten"]["exchange_rows"] > 0
            if name in families:
                assert min(result["replicas"]) > 0, name


def from_rank_0(make: Callable[[], str]) -> str:
    """What ``make`` returns on rank 0, on all ranks."""
    texts = [make() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(texts)
    return texts[0]


def train(backend: str) -> dict[str, Any]:
    """On one rank: a step that has no room, what it leaves, and the same step with a batch that fits."""
    import hecate

    dist.init_process_group("gloo")
    model = build("plain", layers=1)
    with torch.no_grad():
        chosen = model.blocks[0].router(model.norms[0](model.embedding.weight)).topk(2).indices
    one = int((chosen < 4).all(1).nonzero()[0])
    hecate.compile(model, hecate.Config(**options(capacity=1.3, policy="static", backend=backend)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # All tokens the same, one of those whose two experts are rank 0's, and as many of each.
    narrow, wide = torch.full((12, 16), one), torch.arange(192).view(12, 16) % 96
    found: dict[str, Any] = {"errors": [], "unchanged": []}
    for ids in (wide, narrow, wide, narrow):
        optimizer.zero_grad()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        loss = run_step(model, ids)
        error = message_of(optimizer.step)
        after = model.state_dict()
        found["errors"].append([bool(loss.isnan()), error])
        found["unchanged"].append(all(torch.equal(before[name], after[name]) for name in before))
    mine = narrow.chunk(rank_and_size()[1])[0]
    with torch.no_grad():
        found["evaluation"] = message_of(lambda: model(mine, mine))
    run_step(model, narrow)
    found["statistics"] = message_of(lambda: hecate.stats(model))
    run_step(model, narrow)
    found["next forward"] = message_of(lambda: model(wide, wide))
    # A scaler finds NaN, and would ask for no step of the optimizer.
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(run_step(model, narrow))
    found["scaler"] = message_of(lambda: scaler.step(optimizer))
    # What is loaded has nothing to do with the step before.
    folder = from_rank_0(lambda: tempfile.mkdtemp(prefix="hecate-symmetric-"))
    optimizer.zero_grad()
    run_step(model, wide)
    hecate.save(folder, model, step=1)
    run_step(model, narrow)
    found["save"] = message_of(lambda: hecate.save(folder, model, step=2))
    run_step(model, narrow)
    hecate.load(folder, model)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    optimizer.zero_grad()
    run_step(model, wide)
    found["rows"] = list(hecate.stats(model).layers[0].rows)
    found["sent"] = list(hecate.stats(model).layers[0].bytes_sent)
    return found


@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if ALL else [])])
def test_a_step_without_room_is_refused(backend: str) -> None:
    everyone = run_ranks(f"{_HERE}:train", 2, backend=backend)
    for found in everyone:
        nan, errors = zip(*found["errors"], strict=True)
        assert nan == (False, True, False, True)
        assert errors[0] == errors[2] == "no error" and found["unchanged"] == [False, True, False, True]
        said = (found[place] for place in ("evaluation", "statistics", "next forward", "scaler", "save"))
        for error in (errors[1], errors[3], *said):
            assert "ExchangeFailed: hecate: rows of blocks.0, step" in error
            assert "has room for 249, 1.3 times the 192" in error and "Config(capacity=" in error
        assert sum(found["rows"]) == 2 * 192 and min(found["sent"]) > 0
    assert everyone[0] == everyone[1], "all ranks say the same"


def gone() -> dict[str, Any]:
    """On one rank: the last one does not come to the second step."""
    import hecate

    # The reason is looked for in five heartbeats.
    heartbeat.EVERY = 0.2
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    model = build("plain", layers=1, experts=4)
    hecate.compile(model, hecate.Config(**options(policy="static", compare_every=0)))
    run_step(model, batch(0))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        # A collective would end with the timeout, too.
        while not store.check(["said"]):
            time.sleep(0.1)
        return {"said": "no error", "seconds": 0.0}
    begin = time.monotonic()
    said = message_of(lambda: run_step(model, batch(1)))
    store.set("said", "yes")
    return {"said": said, "seconds": time.monotonic() - begin}


def test_a_rank_that_does_not_come_is_named() -> None:
    first, _ = run_ranks(f"{_HERE}:gone", 2, timeout=120)
    assert "waited in vain for ranks [1]" in first["said"]
    # The group's timeout is 6 s; pauses are longer on a busy machine.
    assert 1 < first["seconds"] < 60


def refused() -> dict[str, str]:
    """On one rank."""
    import hecate

    two = {"topology": hecate.Topology((0, 1))}
    nodes = message_of(lambda: hecate.compile(build("plain"), hecate.Config(transport="symmetric", **two)))

    def make_file(path: Path, size: int) -> None:
        if rank_and_size()[0] == 1:
            raise RuntimeError("no room")

    windows._make_file = make_file
    model = build("plain")
    memory = message_of(lambda: hecate.compile(model, hecate.Config(transport="symmetric")))
    after = message_of(lambda: hecate.compile(model, hecate.Config()))
    return {"nodes": nodes, "memory": memory, "after": after}


def test_ranks_that_cannot_share_memory_are_refused() -> None:
    """In front of all else: the model can be compiled for another transport."""
    for found in run_ranks(f"{_HERE}:refused", 2):
        assert "needs ranks on one node, and there are 2 nodes" in found["nodes"]
        assert 'cannot share memory, use transport="collectives". Rank 1: no room' in found["memory"]
        assert found["after"] == "no error"
