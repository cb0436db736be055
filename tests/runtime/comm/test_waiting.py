"""A rank that waits says so, in what, and what the others say of themselves."""

from __future__ import annotations

import io
import logging
import time

import pytest
import torch
import torch.distributed as dist

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.runtime.comm import waiting
from tests.support.models import PlainLanguageModel, batch
from tests.support.ranks import run_ranks


def come_late() -> list[str]:
    """On one rank: what is in the log when rank 1 sleeps, and when it waits for something else."""
    waiting.FIRST = 1.0
    model = hecate.compile(PlainLanguageModel(hidden=8, layers=1, experts=2), hecate.Config(backend="aot_eager"))
    with torch.no_grad():
        model(batch(0))
    found = []
    for busy in (False, True):
        dist.barrier()
        handler = logging.StreamHandler(io.StringIO())
        logging.getLogger("hecate").addHandler(handler)
        if dist.get_rank() == 1 and busy:
            group = compiled_model_of(model, "test").world.group
            assert group is not None
            with waiting.doing("hecate.record"), waiting.waiting(group):
                time.sleep(4.5)
        elif dist.get_rank() == 1:
            time.sleep(2.5)
        hecate.stats(model)
        logging.getLogger("hecate").removeHandler(handler)
        found.append(handler.stream.getvalue())
    return found


@pytest.mark.distributed
def test_who_waits_for_whom_in_what() -> None:
    first, second = run_ranks("tests.runtime.comm.test_waiting:come_late", 2, timeout=100)
    assert "rank 0 has waited for" in first[0] and "s in hecate.stats: rank 1 does not say that it waits" in first[0]
    assert second[0] == ""
    assert "in hecate.stats: rank 1 waits in hecate.record. All ranks must call it together." in first[1]
    assert "rank 1 has waited for" in second[1] and "in hecate.record: rank 0 waits in hecate.stats" in second[1]
