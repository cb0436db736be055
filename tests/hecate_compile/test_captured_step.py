"""A step that is recorded once and replayed with other placements, without a GPU.

In place of a CUDA graph the same code runs again. Its graphs still carry the first placement, so what comes out is
right only if all that changes is read from tables; and that no number visits the host where kernels run is tested in
``tests/runtime/ops``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hecate.api import capture, captured_step
from hecate.compiled_model import compiled_model_of
from hecate.training.captured_step import CapturedStep, CudaGraphs, count_experts_sent
from tests.hecate_compile.test_one_gpu import skip_unless_nccl_takes_two, use_nccl
from tests.hecate_compile.test_symmetric import options
from tests.support.adversaries import Anything
from tests.support.extent import ALL
from tests.support.models import batch, build
from tests.support.parity import clear_gradients, compare, rank_and_size
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.test_captured_step"


def test_a_broken_capture_says_what_broke_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end raises another error, and leaves its own stream current."""

    @contextmanager
    def graph(*given: Any, **options: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("the capture was invalidated")

    def run() -> None:
        raise ValueError("an operator that cannot be captured")

    current: list[str] = []
    fakes = {
        "Stream": lambda device: SimpleNamespace(device=device),
        "graph_pool_handle": lambda: None,
        "current_stream": lambda device: "before",
        "set_stream": current.append,
        "CUDAGraph": lambda: None,
        "graph": graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    recorder = CudaGraphs(torch.device("cuda"))
    with pytest.raises(ValueError, match="an operator that cannot"):
        recorder.record(run)
    assert current == ["before"]
    with pytest.raises(RuntimeError, match="invalidated"):
        recorder.record(lambda: None)


class Again:
    """Runs the code once more."""

    host_runs = True

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def record(self, *runs: Callable[[], None]) -> tuple[Callable[[], None], ...]:
        for run in runs:
            run()
        return runs


def mine(ids: torch.Tensor) -> torch.Tensor:
    rank, size = rank_and_size()
    return ids.chunk(size)[rank]


def captured(model: Any, ids: torch.Tensor, warm_up: int = 1) -> CapturedStep:
    def forward(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids)["loss"]
        return loss

    return captured_step(
        model, compiled_model_of(model, "test"), forward, (mine(ids),), warm_up=warm_up, recorder=Again()
    )


def replay(rematerialize: bool) -> dict[str, Any]:
    """On one rank: random placements, other owners after three steps, and an evaluation in between."""
    import hecate

    dist.init_process_group("gloo")
    # The plain model has less to trace.
    family, changes = ("qwen3_moe", {}) if ALL else ("plain", {"experts": 5})
    reference, model = (build(family, layers=2, **changes) for _ in range(2))
    hecate.compile(model, hecate.Config(**options(policy=Anything(reshard_every=3), rematerialize=rematerialize)))
    # Owners change with the optimizer's steps; parameters stay.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = captured(model, batch(0))
    layer = compiled_model_of(model, "test").layers[0]
    found: dict[str, Any] = {"errors": [], "placements": [], "captures": [], "wrong": [], "figures": []}
    for number in range(6):
        ids = batch(number)
        clear_gradients(reference)
        loss = step(mine(ids))
        expected = reference(input_ids=ids, labels=ids)["loss"]
        expected.backward()
        error = compare(model, loss, reference, expected.detach())
        found["errors"].append(max(error.loss, error.gradient))
        found["placements"].append(layer.placer.plan.current.holders)
        found["captures"].append(step.captures)
        optimizer.step()
        if found["captures"][-1] > (found["captures"][-2] if number else 0):
            # What the host noted, of the placement that graphs carry, and what is noted where it does not run.
            noted = layer.replicas, layer.expert_bytes_sent
            count_experts_sent(layer, layer.placer.plan.current, gathers=2 if rematerialize else 1)
            found["figures"].append([noted, (layer.replicas, layer.expert_bytes_sent)])
        if number == 1:
            with torch.no_grad():
                loss = model(input_ids=mine(ids), labels=mine(ids))["loss"]
            found["evaluation"] = compare(model, loss, reference, expected.detach()).loss
    found["rows"] = list(hecate.stats(model).layers[0].rows)
    for wrong in (mine(batch(0))[:1], mine(batch(0)).float(), None):
        found["wrong"].append(message_of(lambda wrong=wrong: step(wrong)))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("rematerialize", [False, *([True] if ALL else [])])
def test_replays_follow_the_placements(rematerialize: bool) -> None:
    everyone = run_ranks(f"{_HERE}:replay", 2, rematerialize=rematerialize)
    for found in everyone:
        assert len(found["figures"]) > 1 and all(noted == counted for noted, counted in found["figures"])
        assert max(found["errors"]) < 1e-5 and found["evaluation"] < 1e-5
        assert len(set(map(str, found["placements"]))) > 3, "they change under the graphs"
        assert found["captures"][2] == 1 and found["captures"][-1] in (2, 3), "anew for other owners"
        shape, dtype, kind = found["wrong"]
        assert "inputs torch.int64 [1, " in shape and "fixed shapes" in shape
        assert "torch.float32" in dtype and "expected a tensor on cpu" in kind
    assert everyone[0]["captures"] == everyone[1]["captures"] and len(everyone[0]["rows"]) == 2


def refuse() -> dict[str, Any]:
    """On one rank: a step without room, and what goes on behind it."""
    import hecate

    dist.init_process_group("gloo")
    model = build("plain", layers=1)
    with torch.no_grad():
        chosen = model.blocks[0].router(model.norms[0](model.embedding.weight)).topk(2).indices
    one = int((chosen < 4).all(1).nonzero()[0])
    hecate.compile(model, hecate.Config(**options(capacity=1.3, policy="static")))
    narrow, wide = torch.full((12, 16), one), torch.arange(192).view(12, 16) % 96
    other = hecate.compile(build("plain", layers=1), hecate.Config(backend="aot_eager"))
    collectives = message_of(lambda: capture(other, lambda ids: ids, mine(wide)))
    step = captured(model, wide)
    said = [message_of(lambda ids=ids: step(mine(ids))) for ids in (wide, narrow, wide)]
    hecate.set_requires_gradient_sync(model, False)
    local = message_of(lambda: step(mine(wide)))
    return {"said": said, "captures": step.captures, "collectives": collectives, "local": local}


@pytest.mark.distributed
def test_a_step_without_room_raises_and_can_be_made_again() -> None:
    for found in run_ranks(f"{_HERE}:refuse", 2):
        first, second, third = found["said"]
        assert first == third == "no error" and found["captures"] == 1
        assert "ExchangeFailed: hecate: rows of blocks.0, step" in second and "Config(capacity=" in second
        assert 'Use hecate.Config(transport="symmetric")' in found["collectives"]
        assert "set_requires_gradient_sync" in found["local"]


def test_a_model_on_the_cpu_is_refused() -> None:
    import hecate

    model = hecate.compile(build("plain", layers=1), hecate.Config(backend="aot_eager"))
    with pytest.raises(ValueError, match="need a model on a GPU, and this one is on cpu"):
        capture(model, lambda ids: model(input_ids=ids, labels=ids)["loss"], batch(0))
    with pytest.raises(ValueError, match="was not compiled"):
        capture(torch.nn.Linear(2, 2), lambda ids: ids, batch(0))


def test_one_rank_needs_no_tables() -> None:
    """And is told what a forward must return."""
    import hecate

    reference, model = (build("plain", layers=1) for _ in range(2))
    hecate.compile(model, hecate.Config(backend="aot_eager"))
    step = captured(model, batch(0))
    for number in range(2):
        clear_gradients(reference)
        expected = reference(input_ids=batch(number), labels=batch(number))["loss"]
        expected.backward()
        error = compare(model, step(batch(number)), reference, expected.detach())
        assert max(error.loss, error.gradient) < 1e-5 and step.captures == 1
    frozen = [next(each.parameters()) for each in (model, reference)]
    for parameter in frozen:
        parameter.requires_grad = False
    clear_gradients(reference)
    expected = reference(input_ids=batch(2), labels=batch(2))["loss"]
    expected.backward()
    error = compare(model, step(batch(2)), reference, expected.detach())
    assert max(error.loss, error.gradient) < 1e-5 and step.captures == 2 and frozen[0].grad is None
    state = compiled_model_of(model, "test")
    with pytest.raises(TypeError, match="expected a scalar loss"):
        captured_step(model, state, lambda ids: ids.float(), (batch(0),), warm_up=1, recorder=Again())


# --- on a GPU ---

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def capture_on_cuda(**more: Any) -> dict[str, Any]:
    """Steps of CUDA graphs against one process, with an optimizer step behind each."""
    import hecate

    reference, model = (build("qwen3_moe", layers=2).to("cuda") for _ in range(2))
    hecate.compile(model, hecate.Config(**more))
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (reference, model)]
    first = mine(batch(0).to("cuda"))
    step = hecate.capture(model, lambda ids: model(input_ids=ids, labels=ids)["loss"], first)
    errors, placements, losses = [], set(), []
    layer = compiled_model_of(model, "test").layers[0]
    for number in range(6):
        ids = batch(number).to("cuda")
        if number == 4:
            # Another graph, while something of the first is still held.
            for each in (reference, model):
                next(each.parameters()).requires_grad = False
        clear_gradients(reference)
        expected = reference(input_ids=ids, labels=ids)["loss"]
        expected.backward()
        losses.append(step(mine(ids)))
        error = compare(model, losses[-1], reference, expected.detach())
        errors.append(max(error.loss, error.gradient))
        placements.add(str(layer.placer.plan.current))
        for optimizer in optimizers:
            optimizer.step()
    return {"errors": errors, "captures": step.captures, "placements": len(placements)}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_graphs_of_one_rank_equal_the_model(backend: str) -> None:
    found = capture_on_cuda(backend=backend)
    assert max(found["errors"]) < 1e-4 and found["captures"] == 2


def capture_on_shared_gpu() -> dict[str, Any]:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    use_nccl()
    return capture_on_cuda(**options(policy=Anything()))


@pytest.mark.gpu
@pytest.mark.distributed
@needs_gpu
def test_graphs_of_two_ranks_follow_placements() -> None:
    """On one GPU: NCCL, which averages dense gradients, must take both."""
    skip_unless_nccl_takes_two()
    for found in run_ranks(f"{_HERE}:capture_on_shared_gpu", 2, timeout=150):
        assert max(found["errors"]) < 1e-4 and found["captures"] < 5 and found["placements"] > 3, found
