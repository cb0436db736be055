"""What a model leaves behind when it is gone: nothing."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.models import PlainLanguageModel, batch
from tests.support.parity import run_step
from tests.support.ranks import run_ranks

COMPILES = 50


def compile_many() -> dict[str, Any]:
    """On one rank: a small model compiled again and again; every tenth one is trained for a step too."""
    import hecate
    from hecate.runtime.comm import queue
    from hecate.runtime.ops.dense import DENSE_SHARDS
    from hecate.runtime.ops.gradients import REPLICATED
    from hecate.runtime.state.layer import LAYERS

    def threads() -> int:
        return sum(thread.name == "hecate-collectives" for thread in threading.enumerate())

    def alive(expected: int = 0) -> dict[str, int]:
        gc.collect()
        # A thread that has been told to end needs a moment for it.
        until = time.monotonic() + 5
        while threads() > expected and time.monotonic() < until:
            time.sleep(0.01)
            gc.collect()
        return {
            "layers": len(LAYERS), "replicated": len(REPLICATED), "dense shards": len(DENSE_SHARDS),
            "pending": len(queue._pending), "groups": len(dist.distributed_c10d._world.pg_map),
            "threads": threads(),
        }  # fmt: skip

    models: list[weakref.ref[Any]] = []
    started, before = 0, {}
    for number in range(COMPILES):
        torch.manual_seed(0)
        model = PlainLanguageModel(hidden=8, layers=1, experts=2)
        config = hecate.Config(backend="aot_eager", dense="shard" if number % 2 else "replicate")
        hecate.compile(model, config)
        models.append(weakref.ref(model))
        if number % 10 == 0:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run_step(model, batch(0, rows=2))
            optimizer.step()
            started += threads() > 0
            del optimizer
        if number == 0:
            before = alive(expected=1)
        del model
        torch._dynamo.reset()
    return {"before": before, "after": alive(), "alive": sum(ref() is not None for ref in models), "started": started}


@pytest.mark.distributed
def test_fifty_compiles_leave_nothing_behind() -> None:
    for result in run_ranks("tests.hecate_compile.test_collected:compile_many", 2):
        assert result["before"]["layers"] == 1 and result["before"]["replicated"] > 0
        assert result["started"] == COMPILES // 10, "queues had threads"
        assert result["alive"] == 0
        groups = result["before"]["groups"]
        assert result["after"] == dict.fromkeys(result["after"], 0) | {"groups": groups}
