"""A training step of one MoE on one device: the model as it ships, torch.compile, hecate.compile, hecate.capture."""

from __future__ import annotations

import gc
import json
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_check.report import REFERENCE, RIVAL, write

WARM_UP, ROUNDS = 3, 20
# Part of the time after which no other system is set up: those that are there must also be timed.
SETUP = 0.8
# What the host calls to wait for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
# What the first loss and the norm of its gradients may differ by from those of the model as it ships.
LIMITS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 5e-2)}


@dataclass(frozen=True)
class Shape:
    """A Qwen3-MoE with 1.3 billion parameters, of which 0.2 billion compute a token."""

    layers: int = 8
    hidden: int = 1024
    inner: int = 768
    experts: int = 64
    choices: int = 8
    heads: int = 16
    key_heads: int = 4
    head_width: int = 64
    vocabulary: int = 32_768
    batch: int = 4
    length: int = 2048
    dtype: torch.dtype = torch.bfloat16


def build(shape: Shape, device: torch.device) -> nn.Module:
    """The same weights for each system."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=4 * shape.hidden,
        moe_intermediate_size=shape.inner, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads, head_dim=shape.head_width, num_experts=shape.experts,
        num_experts_per_tok=shape.choices, max_position_embeddings=shape.length, use_cache=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with device:
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=shape.dtype)
    return model.to(device).train()


class System:
    """A model with its optimizer, and what one forward and backward are."""

    # Whether gradients must be cleared in front of the next backward.
    adds_up = True

    def __init__(self, shape: Shape, device: torch.device, backend: str) -> None:
        self.model = build(shape, device)
        self.prepare(backend)
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
SYSTEMS: dict[str, type[System]] = {
    REFERENCE: System, "hecate": Hecate, RIVAL: Compiled, "hecate.capture": Captured,
}  # fmt: skip


def measure_training(
    to: Path,
    seconds: float,
    device: torch.device,
    shape: Shape = Shape(),
    backend: str = "inductor",
    rounds: int = ROUNDS,
) -> list[dict[str, Any]]:
    """Every system's first step, then rounds in which they alternate; ``to`` has what is measured already.

    A system that fails says why, and the others go on. Beside ``to`` are Chrome traces of a step of each.

    Args:
        seconds: after so many nothing more begins.
    """
    begun = time.monotonic()
    measured = _Measured(to, shape, device, backend)
    for name in SYSTEMS:
        measured.set_up(name, in_time=time.monotonic() - begun < SETUP * seconds)
    for name in list(measured.systems):
        measured.warm_up(name)
    for number in range(rounds):
        for name in list(measured.systems):
            if time.monotonic() - begun > seconds:
                return measured.save()
            measured.time_step(name, number)
    return measured.save()


class _Measured:
    """What is known of each system, and the systems that still run."""

    def __init__(self, to: Path, shape: Shape, device: torch.device, backend: str) -> None:
        self.to, self.shape, self.device, self.backend = to, shape, device, backend
        self.batches = [_batch(shape, device, number) for number in range(1 + WARM_UP)]
        self.systems: dict[str, System] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def save(self) -> list[dict[str, Any]]:
        rows = [{"system": name, **one} for name, one in self.found.items()]
        write(self.to, json.dumps(rows))
        return rows

    def set_up(self, name: str, *, in_time: bool) -> None:
        self.found[name] = {"tokens": self.shape.batch * self.shape.length, "seconds": []}
        if in_time:
            self._try(name, lambda: self._set_up(name))
        else:
            self.found[name]["error"] = "not begun: no time was left"
        self.save()

    def warm_up(self, name: str) -> None:
        """All systems are there now, and none is compiled in a step that is timed."""
        self._try(name, lambda: self.systems[name].step(self.batches[0]))

    def time_step(self, name: str, number: int) -> None:
        ids = self.batches[number % len(self.batches)]

        def timed() -> None:
            self.found[name]["seconds"].append(_timed(lambda: self.systems[name].step(ids), self.device))

        self._try(name, timed)
        self.save()

    def _try(self, name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:
            self.found[name]["error"] = traceback.format_exc()[-3000:]
            # Its model holds memory that the others need.
            self.systems.pop(name, None)
            gc.collect()

    def _set_up(self, name: str) -> None:
        """First step, numbers, memory, waits of the host."""
        mine, on_gpu = self.found[name], self.device.type == "cuda"
        before = torch.cuda.memory_allocated() if on_gpu else 0
        system = SYSTEMS[name](self.shape, self.device, self.backend)
        mine["parameters"] = sum(p.numel() for p in system.model.parameters())
        mine["first step"] = _timed(lambda: self._first_step(name, system), self.device)
        for ids in self.batches[1:]:
            system.step(ids)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        mine["waits"] = _waits(lambda: system.step(self.batches[0]), self._trace(name), self.device)
        if on_gpu:
            # Of systems before it only their states are there.
            mine["peak"] = torch.cuda.max_memory_allocated() - before
        self.systems[name] = system

    def _first_step(self, name: str, system: System) -> None:
        """A step, and whether its numbers are those of the model as it ships."""
        mine, reference = self.found[name], self.found[REFERENCE]
        mine["loss"] = float(system.forward_backward(self.batches[0]))
        norms = [p.grad.float().norm() for p in system.model.parameters() if p.grad is not None]
        mine["gradient norm"] = float(torch.stack(norms).norm())
        mine["equal"] = "gradient norm" in reference and all(
            abs(mine[number] - reference[number]) <= limit * abs(reference[number])
            for number, limit in zip(("loss", "gradient norm"), LIMITS[self.shape.dtype], strict=True)
        )
        system.update()

    def _trace(self, name: str) -> Path:
        return self.to.parent / f"gpu_check.{re.sub(r'[^a-z]+', '-', name)}.trace.json.gz"


def _batch(shape: Shape, device: torch.device, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, shape.vocabulary, (shape.batch, shape.length), generator=generator).to(device)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device is done."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def _waits(step: Callable[[], object], trace: Path, device: torch.device) -> dict[str, int]:
    """How often the host waits for the device in a step, by what it calls; ``trace`` gets the profiler's events."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function("whole step"):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    events = profiler.events() or []
    whole = next(event.time_range for event in events if event.name == "whole step")
    # The profiler waits itself when it ends.
    inside = (event.name for event in events if whole.start <= event.time_range.start < whole.end)
    return dict(Counter(name for name in inside if name in WAITS))
