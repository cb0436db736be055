"""What surrounds the compiled forward."""

from __future__ import annotations

import logging
from functools import cache

import pytest

from hecate.training.forward import _dynamo_options


def _first() -> None: ...


def _second() -> None: ...


@cache
def _cached() -> None: ...


def test_torchs_log_says_nothing_about_sets_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 cannot sort what is to be ignored for its own records; all else of that log is shown."""
    log = logging.getLogger("torch._dynamo.metrics_context")
    shown: list[logging.LogRecord] = []
    # Not by a handler: torch keeps its log from others.
    monkeypatch.setattr(log, "callHandlers", shown.append)
    _dynamo_options(True)
    for values in ([_first, _second], [_cached, _first], [_first, _cached], [1, "one"]):
        try:
            sorted(values)
        except TypeError:
            log.exception("Unexpected exception logging compilation metrics")
    (record,) = shown
    assert record.exc_info and "'str'" in str(record.exc_info[1])
