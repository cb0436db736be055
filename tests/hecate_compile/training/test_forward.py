"""What surrounds the compiled forward."""

from __future__ import annotations

import logging

import pytest

from hecate.training.forward import _dynamo_options


def _first() -> None: ...


def _second() -> None: ...


def test_torchs_log_says_nothing_about_sets_of_functions(caplog: pytest.LogCaptureFixture) -> None:
    """torch 2.11 cannot sort what is to be ignored for its own records; all else of that log is shown."""
    log = logging.getLogger("torch._dynamo.metrics_context")
    _dynamo_options(True)
    for numbers in ({_first, _second}, {1, "one"}):
        try:
            sorted(numbers)
        except TypeError:
            log.exception("Unexpected exception logging compilation metrics")
    assert len(caplog.records) == 1
    assert "'str'" in caplog.text and "function" not in caplog.text
