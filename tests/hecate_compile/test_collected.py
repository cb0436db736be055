"""What a model leaves behind when it is gone: nothing."""

from __future__ import annotations

import gc
import linecache
import resource
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.extent import ALL
from tests.support.models import PlainLanguageModel, PlainMoE, batch
from tests.support.parity import run_step
from tests.support.ranks import run_ranks

COMPILES = 50
# Of one that is compiled and let go; 0.2 and 60 were measured, such as texts of graphs, which torch keeps.
MEGABYTES_OF_A_MODEL = 1.0
OBJECTS_OF_A_MODEL = 200


def compile_many() -> dict[str, Any]:
    """On one rank: a small model compiled again and again; every twentieth one is trained for a step too."""
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
            "layers": len(LAYERS),
            "replicated": len(REPLICATED),
            "dense shards": len(DENSE_SHARDS),
            "pending": len(queue._pending),
            "groups": len(dist.distributed_c10d._world.pg_map),
            "threads": threads(),
        }

    models: list[weakref.ref[Any]] = []
    started, before = 0, {}
    for number in range(COMPILES):
        torch.manual_seed(0)
        model = PlainLanguageModel(hidden=8, layers=1, experts=2)
        config = hecate.Config(backend="aot_eager", dense="shard" if number % 2 else "replicate")
        hecate.compile(model, config)
        models.append(weakref.ref(model))
        if number % 20 == 0:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run_step(model, batch(0, rows=2))
            optimizer.step()
            started += threads() > 0
            del optimizer
        if number == 0:
            before = alive(expected=1)
        del model
    return {"before": before, "after": alive(), "alive": sum(ref() is not None for ref in models), "started": started}


def keep_the_loss(size: int) -> list[bool]:
    """On one rank: a backward when the model is gone, with every kind of parameter; the gradients are hooked out."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import hecate

    found = []
    # At one rank only mixed precision reads dense parameters through records.
    mixed = {"mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for options in [mixed] if size == 1 else [{}, {"dense": "shard"}]:
        model = PlainLanguageModel(hidden=8, layers=1, experts=2)
        hecate.compile(model, hecate.Config(backend="aot_eager", **options))
        seen: list[str] = []
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda grad, name=name, seen=seen: seen.append(name))
        expected = len(list(model.parameters()))
        loss = model(batch(0, rows=2), batch(0, rows=2))["loss"]
        gone = weakref.ref(model)
        del model, parameter
        gc.collect()
        loss.backward()
        found += [gone() is None, len(seen) == expected]
    return found


def train_and_drop(models: int) -> list[dict[str, float]]:
    """In one process: one small model after another is compiled, trained for a step and let go; what is left."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    import hecate
    from hecate.runtime.ops.gradients import REPLICATED
    from hecate.runtime.state.layer import LAYERS
    from tests.hecate_compile.graph.test_traces import graphs_alive
    from tests.hecate_compile.wrap.test_stack_experts import DictMoE

    # At one rank only mixed precision reads dense parameters through records.
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    found = []
    for number in range(models):
        began = time.process_time()
        # Experts in a dictionary are stacked, and their guarded loop is written anew.
        model = PlainLanguageModel(DictMoE if number % 2 else PlainMoE, hidden=8, layers=1, experts=2)
        hecate.compile(model, hecate.Config(backend="aot_eager", mixed_precision=mixed if number % 4 > 1 else None))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run_step(model, batch(number, rows=2))
        optimizer.step()
        del model, optimizer
        gc.collect()
        seconds = time.process_time() - began
        tensors = sum(type(thing) in (torch.Tensor, torch.nn.Parameter) for thing in gc.get_objects())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found.append(
            {
                "seconds": seconds,
                "objects": len(gc.get_objects()),
                "tensors": tensors,
                "graphs": graphs_alive(),
                "records": len(LAYERS) + len(REPLICATED),
                # Torch keeps the text of each graph.
                "sources": sum(not name.startswith("<eval_with_key>") for name in linecache.cache),
                "megabytes": pages * resource.getpagesize() / 2**20,
            }
        )
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("models", [100 if ALL else 12])
def test_a_process_that_lets_models_go_neither_grows_nor_slows(models: int) -> None:
    """Twenty in the first part are a warm-up; of twelve it is four."""
    (found,) = run_ranks(train_and_drop, 1, models=models, timeout=1200)
    warm, few = max(4, models // 5), max(4, models // 10)
    before, after = found[warm - 1], found[-1]
    for name in ("tensors", "graphs", "records", "sources"):
        assert after[name] <= before[name], (name, before, after)
    assert after["graphs"] == after["records"] == 0
    assert after["megabytes"] - before["megabytes"] < 20 + MEGABYTES_OF_A_MODEL * (models - warm), (before, after)
    assert after["objects"] - before["objects"] < OBJECTS_OF_A_MODEL * (models - warm), (before, after)
    first, last = (sorted(one["seconds"] for one in part) for part in (found[warm : warm + few], found[-few:]))
    assert last[few // 2] < 2 * first[few // 2], (first, last)


@pytest.mark.distributed
@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_can_be_differentiated_when_its_model_is_gone(size: int) -> None:
    for found in run_ranks("tests.hecate_compile.test_collected:keep_the_loss", size, size=size):
        assert found and all(found)


@pytest.mark.distributed
def test_fifty_compiles_leave_nothing_behind() -> None:
    for result in run_ranks("tests.hecate_compile.test_collected:compile_many", 2):
        assert result["before"]["layers"] == 1 and result["before"]["replicated"] > 0
        assert result["started"] == COMPILES // 20 + 1, "queues had threads"
        assert result["alive"] == 0
        groups = result["before"]["groups"]
        assert result["after"] == dict.fromkeys(result["after"], 0) | {"groups": groups}
