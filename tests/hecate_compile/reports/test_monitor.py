"""hecate.monitor: what is in the files after real steps, and what is refused."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hecate
from hecate.reports import monitor as monitor_module
from hecate.reports.run_data import load_run
from hecate.reports.run_files import RunHead, rank_path, read_rank
from hecate.reports.run_page import page_of
from hecate.reports.step_log import TensorBoardLog
from tests.hecate_compile.reports.made_run import make_run
from tests.support.models import batch, build
from tests.support.parity import run_step
from tests.support.ranks import message_of, run_ranks

EAGER = {"backend": "aot_eager"}


class Everywhere(hecate.Policy):
    """Expert 0 has a replica on every rank."""

    replicates = True

    def place(self, layer: Any) -> Any:
        from hecate.runtime.placement.placement import Placement

        replicas: list[set[int]] = [set() for _ in layer.owners.ranks]
        replicas[0] = set(range(layer.owners.world_size))
        return Placement.with_replicas(layer.owners, replicas)


def train(path: str) -> dict[str, Any]:
    """On one rank: three steps, an evaluation between them, what stats says of each."""
    model = hecate.compile(build("plain", experts=4), hecate.Config(policy=Everywhere(), **EAGER))
    seen = []
    fields = ("rows", "expert_rows", "bytes_sent", "expert_bytes_sent", "replicas")
    with hecate.monitor(model, path, timeline_every=2) as monitor:
        for step in range(3):
            loss = run_step(model, batch(step))
            monitor.log(loss=loss)
            stats = hecate.stats(model).layers
            seen.append({name: [getattr(layer, name) for layer in stats] for name in fields} | {"loss": float(loss)})
            if step == 1:
                with torch.no_grad():
                    model(input_ids=batch(9))
            # Behind an evaluation, it belongs to the step before it.
            monitor.log(step_squared=step**2)
    # Not a part of the run any more.
    run_step(model, batch(4))
    return {"seen": seen}


@pytest.mark.distributed
def test_a_run_holds_what_stats_showed(tmp_path: Path) -> None:
    ranks = run_ranks(train, 2, path=str(tmp_path / "x"))
    run = load_run(tmp_path / "x")
    assert run.notes == () and run.step.tolist() == [0, 1, 2]
    for step, seen in enumerate(ranks[0]["seen"]):
        assert run.rows[step].tolist() == seen["rows"]
        assert run.load[step].tolist() == seen["expert_rows"]
        assert run.row_bytes[step].tolist() == np.sum(seen["bytes_sent"], 0).tolist()
        assert run.expert_bytes[step].tolist() == np.sum(seen["expert_bytes_sent"], 0).tolist()
        assert run.replicas[step].tolist() == seen["replicas"] == [1, 1]
        assert run.holders[step, :, 0].tolist() == [2, 2]
        assert run.logged["loss"][step] == pytest.approx(np.mean([rank["seen"][step]["loss"] for rank in ranks]))
    assert run.logged["step_squared"].tolist() == [0, 1, 4]
    assert run.owners[2].tolist() == [[0] * 2 + [1] * 2] * 2
    assert (run.seconds > 0).all() and (run.travel > 0).all() and (run.exposed >= 0).all()
    assert (run.memory > 0).all()
    # Of every second step; of the last of them both ranks have all collectives.
    assert [line.step for line in run.timelines] == [2, 2]
    for line in run.timelines:
        assert {"exchange", "gather_counts", "sparse_all_gather"} <= set(line.names[:, 1])
        assert (line.times[:, 2] >= line.times[:, 1]).all() and (line.times >= 0).all()
    assert "Timeline of a step" in page_of(run, name="x")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return hecate.compile(build("plain", layers=1), hecate.Config(**EAGER))


def test_a_run_that_never_ends_can_be_read(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "CHUNK_SECONDS", 1e9)
    monkeypatch.setattr(monitor_module, "CHUNK_STEPS", 10)
    monitor = hecate.monitor(model, tmp_path)
    for step in range(15):
        run_step(model, batch(step))
    # As a killed process leaves it: nothing was closed.
    assert load_run(tmp_path).steps == 10, "all but what was not written yet"
    monitor.close()
    assert load_run(tmp_path).steps == 15


def test_one_rank(model: nn.Module, tmp_path: Path) -> None:
    monitor = hecate.monitor(model, tmp_path / "x", first_step=100)
    with pytest.raises(RuntimeError, match="no training forward has run"):
        monitor.log(loss=1.0)
    for step in range(2):
        loss = run_step(model, batch(step))
        monitor.log(loss=loss)
        # The user's own tensor may change before it is written.
        loss.mul_(0)
    monitor.close()
    monitor.close()
    with pytest.raises(RuntimeError, match="closed"):
        monitor.log(loss=1.0)
    run = load_run(tmp_path / "x")
    assert run.step.tolist() == [100, 101]
    assert (run.logged["loss"] > 0).all()
    assert (run.load.sum(2) == batch(0).numel() * 2).all() and (run.rows[..., 0] == batch(0).numel() * 2).all()
    assert run.timelines == () and np.isnan(run.hidden).all()
    page_of(run, name="x")
    # A second start goes on behind the first.
    with hecate.monitor(model, tmp_path / "x"):
        run_step(model, batch(3))
    assert load_run(tmp_path / "x").step.tolist() == [100, 101, 102]


def test_a_block_that_raises_keeps_its_steps(model: nn.Module, tmp_path: Path) -> None:
    # Another file may stand beside the starts.
    (tmp_path / "start000.tar.gz").write_text("")
    with pytest.raises(ZeroDivisionError), hecate.monitor(model, tmp_path):
        run_step(model, batch(0))
        raise ZeroDivisionError
    assert load_run(tmp_path).steps == 1
    with hecate.monitor(model, tmp_path):
        pass


def test_a_full_disk_ends_the_monitor_and_not_the_training(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any, arrays: Any) -> None:
        raise OSError("no space left on device")

    class Log:
        closed = 0

        def write(self, arrays: Any) -> None:
            pass

        def close(self) -> None:
            self.closed += 1
            raise OSError("no space left either")

    monkeypatch.setattr(monitor_module, "CHUNK_STEPS", 1)
    log = Log()
    with monkeypatch.context() as patch:
        patch.setattr(monitor_module.importlib.util, "find_spec", lambda name: name)
        patch.setattr(monitor_module, "TensorBoardLog", lambda *given: log)
        monitor = hecate.monitor(model, tmp_path, tensorboard=True)
    with monitor:
        run_step(model, batch(0))
        monitor.log(loss=1.0)
        run_step(model, batch(1))
        monkeypatch.setattr(monitor_module, "append_chunk", full)
        with pytest.warns(UserWarning, match="no space left"):
            run_step(model, batch(2))
        monitor.log(loss=2.0)
        run_step(model, batch(3))
        assert log.closed == 1
    assert load_run(tmp_path).logged["loss"].tolist() == [1.0]
    # At the end too, and the user's own error is the one that is raised.
    with (
        pytest.warns(UserWarning, match="no space left"),
        pytest.raises(ZeroDivisionError),
        hecate.monitor(model, tmp_path),
    ):
        run_step(model, batch(4))
        raise ZeroDivisionError
    with pytest.warns(UserWarning, match="no space left"), hecate.monitor(model, tmp_path):
        run_step(model, batch(5))


def test_what_is_no_number_is_refused_on_the_line_that_logs_it(model: nn.Module, tmp_path: Path) -> None:
    with hecate.monitor(model, tmp_path) as monitor:
        run_step(model, batch(0))
        wrongs: list[Any] = ["1.0", None, [1.0]]
        for wrong in (*wrongs, torch.zeros((), dtype=torch.complex64), torch.zeros((), device="meta")):
            with pytest.raises(TypeError, match=r"hecate\.monitor: loss"):
                monitor.log(accuracy=0.5, loss=wrong)
        numbers: dict[str, Any] = {"a": 1, "b": np.float32(2), "c": torch.tensor([3]), "d": True}
        monitor.log(**numbers)
    logged = load_run(tmp_path).logged
    assert {name: values.tolist() for name, values in logged.items()} == {"a": [1], "b": [2], "c": [3], "d": [1]}


def test_two_monitors_do_not_share_a_folder(model: nn.Module, tmp_path: Path) -> None:
    other = hecate.compile(build("plain", layers=1), hecate.Config(**EAGER))
    with hecate.monitor(model, tmp_path):
        with pytest.raises(OSError, match="another monitor writes into"):
            hecate.monitor(other, tmp_path)
        assert not (tmp_path / "start001").exists()
    with hecate.monitor(other, tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".monitor", "start000", "start001"]


def test_refusals(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="was not compiled"):
        hecate.monitor(build("plain", layers=1), tmp_path)
    for wrong in ({"timeline_every": 0}, {"first_step": -1}):
        with pytest.raises(ValueError, match="expected at least"):
            hecate.monitor(model, tmp_path, **wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="rank 0 cannot write"):
        hecate.monitor(model, tmp_path / "file")
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(ImportError, match="pip install tensorboard"):
            hecate.monitor(model, tmp_path / "x", tensorboard=True)
    assert not (tmp_path / "x").exists(), "what is refused leaves nothing behind"
    with hecate.monitor(model, tmp_path / "x") as monitor:
        with pytest.raises(ValueError, match="monitored already"):
            hecate.monitor(model, tmp_path / "y")
        run_step(model, batch(0))
        with pytest.raises(ValueError, match="3 elements"):
            monitor.log(loss=torch.zeros(3))


def test_whatever_fails_while_it_opens_is_told_to_all_and_leaves_nothing_open(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise KeyError("a bug")

    told: list[str] = []

    def gather(value: Any, world: Any) -> list[Any]:
        told.append(value["problem"])
        return [value]

    monkeypatch.setattr(monitor_module, "gather_json", gather)
    with monkeypatch.context() as patch:
        patch.setattr(monitor_module, "next_step", fail)
        with pytest.raises(OSError, match=r"rank 0 cannot write.*a bug"):
            hecate.monitor(model, tmp_path)
    assert told == ["KeyError: 'a bug'"], "before it raises"
    told.clear()
    with monkeypatch.context() as patch:
        patch.setattr(monitor_module.importlib.util, "find_spec", lambda name: name)
        patch.setattr(monitor_module, "TensorBoardLog", fail)
        with pytest.raises(OSError, match=r"rank 0 cannot write.*a bug"):
            hecate.monitor(model, tmp_path, tensorboard=True)
    assert told == ["", "KeyError: 'a bug'"]
    told.clear()
    with monkeypatch.context() as patch:
        patch.setattr(monitor_module.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match="pip install tensorboard"):
            hecate.monitor(model, tmp_path, tensorboard=True)
    assert len(told) == 1, "ranks without it hear of it too"
    with hecate.monitor(model, tmp_path):
        pass


def test_a_bug_of_the_monitor_is_not_called_a_full_disk(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(monitor_module, "append_chunk", fail)
    said = pytest.warns(UserWarning, match="rank 0: the monitor failed.*KeyError: 'a bug'")
    with said, hecate.monitor(model, tmp_path):
        run_step(model, batch(0))


def refuse(path: str, blocked: str) -> str:
    """On one rank: rank 1 finds a folder where its file belongs, or rank 0 a file where the run's folder belongs."""
    model = hecate.compile(build("plain", layers=1), hecate.Config(**EAGER))
    if blocked and torch.distributed.get_rank() == 1:
        open_file = Path.open

        def refuse_own(self: Path, *args: Any, **kwargs: Any) -> Any:
            if self.name == blocked:
                raise OSError(f"no room for {self.name}")
            return open_file(self, *args, **kwargs)

        # Never undone: the rank ends with this function.
        pytest.MonkeyPatch().setattr(Path, "open", refuse_own)
    return message_of(lambda: hecate.monitor(model, path))


@pytest.mark.distributed
def test_a_rank_that_cannot_write_stops_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for text in run_ranks(refuse, 2, path=str(tmp_path / "x"), blocked="rank1.steps"):
        assert "rank 1 cannot write" in text and "no room for rank1.steps" in text
    for text in run_ranks(refuse, 2, path=str(tmp_path / "file"), blocked=""):
        assert text.startswith(("FileExistsError", "NotADirectoryError", "OSError")) and "rank 0" in text


def test_scalars_are_those_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, list[float]] = {}

    class Writer:
        def __init__(self, folder: str) -> None:
            pass

        def add_scalar(self, tag: str, value: float, step: int, walltime: float) -> None:
            written.setdefault(tag, []).append(value)

        def flush(self) -> None:
            pass

    tensorboard = ModuleType("torch.utils.tensorboard")
    monkeypatch.setattr(tensorboard, "SummaryWriter", Writer, raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)

    def uneven(number: Any) -> Any:
        return np.arange(1, 9) * 100 + np.zeros((len(number), 2, 1))

    # Clocks are not exact, so more than all of the time may have been waited for.
    folder = make_run(tmp_path, steps=4, load_of=uneven, exposed_of=lambda number: 0.5 + 0.25 * number)
    TensorBoardLog(tmp_path, 2).write(read_rank(rank_path(folder, 0), RunHead.read(folder)).arrays)
    run = load_run(tmp_path)
    assert written["hecate/hidden"] == pytest.approx([0.5, 0.25, 0, 0]) == run.hidden.tolist()
    assert written["hecate/imbalance_of_owners"] == pytest.approx(run.before.mean(1)) and run.before[0, 0] > 1.3


# Optional, and with a dozen packages behind it; what is written is tested above with a stand-in.
@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard(model: nn.Module, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with hecate.monitor(model, tmp_path, tensorboard=True) as monitor:
        for step in range(2):
            monitor.log(loss=run_step(model, batch(step)))
    events = EventAccumulator(str(tmp_path / "start000" / "tensorboard"))
    events.Reload()
    assert {"loss", "hecate/step_seconds"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("loss")] == [0, 1]
