"""Where warnings are errors, ranks raise them together, or none does."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hecate
from hecate.runtime.comm.warn import warn_alone, warn_together
from tests.support.models import PlainLanguageModel, batch
from tests.support.parity import rank_and_size, run_step
from tests.support.ranks import message_of, run_ranks


class Noisy(torch.optim.SGD):
    """Draws random numbers, so nobody can try whether it is right on shards."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


def _model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    made = PlainLanguageModel(hidden=8, layers=1, experts=4).to(options.pop("dtype", torch.float32))
    return hecate.compile(made, hecate.Config(backend="aot_eager", **options))


def as_errors(folder: str) -> dict[str, str]:
    """What is raised by each warning, and whether all ranks go on together afterwards."""
    said = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="hecate")
        said["float16"] = message_of(lambda: _model(dtype=torch.float16))
        model = _model()
        run_step(model, batch(0))
        said["optimizer"] = message_of(Noisy(model.parameters(), lr=0.1).step)
        off = 0.5 * rank_and_size()[0]
        with torch.no_grad():
            model.get_parameter("norms.0.weight")[0] += off
        said["save"] = message_of(partial(hecate.save, Path(folder), model, step=1))
        with torch.no_grad():
            model.get_parameter("norms.0.weight")[0] -= off
        said["after"] = str(run_step(model, batch(1)).isfinite().item())
    return said


@pytest.mark.distributed
def test_all_ranks_raise_what_all_of_them_are_warned_of(tmp_path: Path) -> None:
    first, second = run_ranks(as_errors, 2, folder=str(tmp_path), timeout=120)
    assert {name: text.partition(":")[0] for name, text in first.items()} == {
        "float16": "UserWarning",
        "optimizer": "UserWarning",
        "save": "UserWarning",
        "after": "True",
    }
    assert first.keys() == second.keys()
    assert all(second[name].startswith("UserWarning: hecate") for name in ("float16", "optimizer", "save"))


def test_rank_0_alone_shows_it_and_names_the_caller() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rank in range(2):
            warn_together("hecate: of all", rank)
    assert [(str(w.message), w.filename) for w in caught] == [("hecate: of all", __file__)]


def test_what_one_rank_has_alone_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.warns(UserWarning, match="of one"):
        warn_alone("hecate: of one")
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "hecate"):
        warnings.simplefilter("error")
        warn_alone("hecate: of one")
    assert caplog.messages == ["hecate: of one"]
