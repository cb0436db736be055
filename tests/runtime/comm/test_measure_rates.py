"""How fast a machine is said to be: of numbers like a model's, and without what launching takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hecate.runtime.comm import collectives, measure_rates
from hecate.runtime.comm.world import World
from hecate.runtime.placement.topology import Topology
from tests.support.threads import on_threads


class Gpu:
    """What of ``torch.cuda`` a measurement uses. The host launches, and the GPU does one thing after the other."""

    def __init__(self) -> None:
        self.host = self.busy_until = 0.0

    def run(self, *, launch: float, takes: float) -> None:
        self.host += launch
        self.busy_until = max(self.busy_until, self.host) + takes

    def synchronize(self) -> None:
        self.host = max(self.host, self.busy_until)

    def Event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.time = gpu, 0.0

    def record(self) -> None:
        self.time = max(self.gpu.busy_until, self.gpu.host)

    def synchronize(self) -> None:
        self.gpu.host = max(self.gpu.host, self.time)

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.time - self.time)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_launching_does_not_count_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, setting_up = Gpu(), iter([1.0])
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)

    def work() -> None:
        gpu.run(launch=40e-6, takes=140e-6 + next(setting_up, 0.0))

    found = measure_rates._median(work, torch.device(kind), launches=5)
    assert found == pytest.approx(140e-6, rel=1e-6)


class Seen(TorchDispatchMode):
    """Operands of all products and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.clone.default):
            self.operands.append(args[0])
        return function(*args, **(kwargs or {}))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Rows of all exchanges."""
    plain, found = collectives.all_to_all, []

    def noted(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        found.append(rows)
        return plain(rows, *others)

    monkeypatch.setattr(collectives, "all_to_all", noted)
    yield found


def test_numbers_are_like_those_of_a_model(sent: list[torch.Tensor]) -> None:
    def check(world: World) -> None:
        with Seen() as seen:
            before = torch.get_rng_state()
            rates = measure_rates.measure_rates(torch.bfloat16, Topology((0, 0, 1)), world)
            assert torch.equal(torch.get_rng_state(), before), "random numbers are the user's"
        assert {one.dtype for one in seen.operands} == {torch.bfloat16, torch.uint8}
        assert all(one.unique().numel() > 200 for one in seen.operands)
        assert 0 < rates.flops < 1e15 and 0 < rates.memory_bytes < 1e15
        assert 0 < rates.rank_bytes < measure_rates.NO_LINK and 0 < rates.node_bytes < measure_rates.NO_LINK

    on_threads(check)
    assert {len(rows) for rows in sent} == {0, 2**22} and all(rows.unique().numel() in (0, 256) for rows in sent)
