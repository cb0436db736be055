"""A training step of one MoE on one device: the model as it ships, torch.compile, hecate.compile, hecate.capture."""

from __future__ import annotations

import gc
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_check.place import SPOILED, Place, Shape
from benchmarks.gpu_check.report import REFERENCE, RIVAL
from benchmarks.gpu_check.results import NO_TIME, Results
from benchmarks.results_folder import results_folder

# Steps that are not timed, that each system makes alone, and in turns with the others before and after the late one.
WARM_UP, ALONE, FIRST_ROUNDS, ROUNDS = 3, 6, 8, 20
# Part of the time after which no other system is set up: those that are there must also be timed.
SETUP = 0.8
LATE = "hecate.capture"
# What the host calls to wait for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
# What the first loss and the norm of its gradients may differ by from those of the model as it ships.
LIMITS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 5e-2)}


def build(shape: Shape, device: torch.device) -> nn.Module:
    """The same weights for each system."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=4 * shape.hidden,
        moe_intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_width,
        num_experts=shape.experts,
        num_experts_per_tok=shape.choices,
        max_position_embeddings=shape.length,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with device:
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=shape.dtype)
    return model.to(device).train()


class System:
    """A model with its optimizer, and what one forward and backward are."""

    # Whether gradients must be cleared in front of the next backward.
    adds_up = True

    def __init__(self, place: Place) -> None:
        self.model = build(place.shape, place.device)
        self.prepare(place.backend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def prepare(self, backend: str) -> None: ...

    def forward_backward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        if self.adds_up:
            self.optimizer.zero_grad()

    def step(self, ids: Tensor) -> None:
        self.forward_backward(ids)
        self.update()


class Compiled(System):
    def prepare(self, backend: str) -> None:
        self.model.compile(backend=backend)


class Hecate(System):
    def prepare(self, backend: str) -> None:
        import hecate

        hecate.compile(self.model, hecate.Config(backend=backend))


class Captured(Hecate):
    """Forward and backward as two CUDA graphs."""

    adds_up = False
    captured: Callable[..., Tensor] | None = None

    def forward_backward(self, ids: Tensor) -> Tensor:
        import hecate

        if self.captured is None:

            def forward(ids: Tensor) -> Tensor:
                loss: Tensor = self.model(input_ids=ids, labels=ids)["loss"]
                return loss

            self.captured = hecate.capture(self.model, forward, ids)
        return self.captured(ids)


# The first hecate.compile makes Dynamo compile again what was compiled before it, so the rival comes behind.
SYSTEMS: dict[str, type[System]] = {REFERENCE: System, "hecate": Hecate, RIVAL: Compiled, LATE: Captured}


def measure_training(
    names: Sequence[str],
    results: Results,
    until: float,
    place: Place,
    *,
    rounds: int = ROUNDS,
    limited: Callable[[float], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Each system's first step, some steps alone, then rounds in which all that are there alternate.

    What takes longest to set up, and is least sure to end, begins when the others have had rounds. A system that
    fails says why, and the others go on. Beside the results are Chrome traces of a step of each.

    Args:
        names: those that have no row in ``results``, which an earlier process may have written.
        until: when nothing more begins, of ``time.monotonic()``.
        limited: what ends a set-up that takes longer than so many seconds.
    """
    measured = _Measured(results, place, until)
    seconds = measured.left()
    for group, count in (
        ([name for name in names if name != LATE], min(FIRST_ROUNDS, rounds)),
        ([name for name in names if name == LATE], rounds),
    ):
        for name in group:
            left = measured.left()
            limit = left if name == names[-1] else left / 2
            measured.set_up(name, limited(limit), in_time=left > (1 - SETUP) * seconds)
        measured.take_turns(count)
    measured.count_waits()


class _Measured:
    """What is known of each system, and the systems that still run."""

    def __init__(self, results: Results, place: Place, until: float) -> None:
        self.results, self.place, self.until = results, place, until
        self.batches = [_batch(place, number) for number in range(1 + WARM_UP)]
        self.systems: dict[str, System] = {}
        # Behind those of an earlier process, with whose steps none of this one is compared.
        self.round = max((len(row.get("seconds", [])) for row in results.rows), default=0)

    def left(self) -> float:
        return self.until - time.monotonic()

    def row(self, name: str) -> dict[str, Any]:
        return next((row for row in self.results.rows if row.get("system") == name), {})

    def set_up(self, name: str, limit: AbstractContextManager[Any], *, in_time: bool) -> None:
        shape = self.place.shape
        row = {"system": name, "tokens": shape.batch * shape.length, "seconds": [], "seconds alone": []}
        if not in_time:
            self.results.add(row | {"error": NO_TIME})
            return
        self.results.begin(row)
        with limit:
            self._try(name, lambda: self._set_up(name))
        self.results.end(row)

    def take_turns(self, count: int) -> None:
        # All of them are there now, and none is compiled in a step that is timed.
        for name in list(self.systems):
            self._try(name, lambda name=name: self.systems[name].step(self.batches[0]))
        for _ in range(count):
            for name in list(self.systems):
                if self.left() <= 0:
                    return
                self._try(name, lambda name=name: self._take_turn(name))
            self.round += 1

    def count_waits(self) -> None:
        """At last: once the profiler has seen a CUDA graph, launches take longer for as long as the process runs."""
        for name in list(self.systems):
            if self.left() > 0:
                self._try(name, lambda name=name: self._count_waits(name))

    def _count_waits(self, name: str) -> None:
        step = self.systems[name].step
        self.row(name)["waits"] = _waits(lambda: step(self.batches[0]), self._trace(name), self.place)
        self.results.save()

    def _take_turn(self, name: str) -> None:
        system, ids = self.systems[name], self.batches[self.round % len(self.batches)]
        row, taken = self.row(name), self.place.seconds(lambda: system.step(ids))
        # Rounds that it was not there for are empty.
        row["seconds"] += [None] * (self.round - len(row["seconds"])) + [taken]
        self.results.save()

    def _try(self, name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:
            self.row(name)["error"] = traceback.format_exc()[-3000:]
            self.results.save()
            # Its model holds memory that the others need.
            self.systems.pop(name, None)
            gc.collect()
            if self.place.is_spoiled():
                sys.exit(SPOILED)

    def _set_up(self, name: str) -> None:
        """First step, numbers, steps alone, memory."""
        mine, on_gpu = self.row(name), self.place.is_gpu
        before = torch.cuda.memory_allocated() if on_gpu else 0
        system = SYSTEMS[name](self.place)
        mine["parameters"] = sum(p.numel() for p in system.model.parameters())
        mine["first step"] = self.place.seconds(lambda: self._first_step(name, system))
        for ids in self.batches[1:]:
            system.step(ids)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        for number in range(ALONE):
            ids = self.batches[number % len(self.batches)]
            mine["seconds alone"].append(self.place.seconds(lambda ids=ids: system.step(ids)))
            self.results.save()
        if on_gpu:
            # Of systems before it only their states are there.
            mine["peak"] = torch.cuda.max_memory_allocated() - before
        self.systems[name] = system

    def _first_step(self, name: str, system: System) -> None:
        """A step, and whether its numbers are those of the model as it ships."""
        mine, reference = self.row(name), self.row(REFERENCE)
        mine["loss"] = float(system.forward_backward(self.batches[0]))
        norms = [p.grad.float().norm() for p in system.model.parameters() if p.grad is not None]
        mine["gradient norm"] = float(torch.stack(norms).norm())
        mine["equal"] = "gradient norm" in reference and all(
            abs(mine[number] - reference[number]) <= limit * abs(reference[number])
            for number, limit in zip(("loss", "gradient norm"), LIMITS[self.place.shape.dtype], strict=True)
        )
        system.update()

    def _trace(self, name: str) -> Path:
        folder = results_folder() if self.results.to is None else self.results.to.parent
        return folder / f"gpu_check.{re.sub(r'[^a-z]+', '-', name)}.trace.json.gz"


def _batch(place: Place, number: int) -> Tensor:
    shape, generator = place.shape, torch.Generator().manual_seed(number)
    return torch.randint(0, shape.vocabulary, (shape.batch, shape.length), generator=generator).to(place.device)


def _waits(step: Callable[[], object], trace: Path, place: Place) -> dict[str, int]:
    """How often the host waits for the device in a step, by what it calls; ``trace`` gets the profiler's events."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if place.is_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    place.wait()
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function("whole step"):
            step()
        place.wait()
    profiler.export_chrome_trace(str(trace))
    events = profiler.events() or []
    whole = next(event.time_range for event in events if event.name == "whole step")
    # The profiler waits itself when it ends.
    inside = (event.name for event in events if whole.start <= event.time_range.start < whole.end)
    return dict(Counter(name for name in inside if name in WAITS))
