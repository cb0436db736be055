"""The console that commands print on, and errors about the user's MODEL, said in a sentence without a traceback."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from hecate.private import (
    FailOnRecompileLimitHit,
    TorchRuntimeError,
    UncapturedHigherOrderOpError,
    Unsupported,
    UserError,
)
from hecate.runtime.attention.options import UnsupportedAttentionError
from hecate.simulator.capture import CaptureError
from hecate.wrap.find_experts import NoExpertsError
from hecate.wrap.untraced import UntracedReadError


def console(width: int = 120, *, stderr: bool = False) -> Console:
    """Return a console that prints text unchanged: brackets in paths and ranges of versions are no markup."""
    return Console(width=width, stderr=stderr, markup=False, emoji=False, highlight=False)


# Errors by which Hecate says something about a model, and torch about code that it cannot trace.
_ABOUT_THE_MODEL = (
    CaptureError,
    NoExpertsError,
    UntracedReadError,
    UnsupportedAttentionError,
    Unsupported,
    UserError,
    TorchRuntimeError,
    UncapturedHigherOrderOpError,
    FailOnRecompileLimitHit,
)


@contextmanager
def compiling() -> Iterator[None]:
    """Report errors about the model or its options in a block that compiles MODEL and does not run it.

    BadParameter is raised for an option of ``hecate.Config``, typer.Exit(1) for the model, and all else unchanged.
    """
    with warnings.catch_warnings():
        # Nothing is run, so no value is ever read.
        warnings.filterwarnings("ignore", message="hecate.compile: nothing initialized")
        # This warning is about transformers' code, and a user can do nothing about it.
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
        try:
            yield
        except Exception as error:
            said = str(error)
            if isinstance(error, (ValueError, TypeError)) and said.startswith("hecate.Config"):
                raise typer.BadParameter(said) from None
            if not isinstance(error, _ABOUT_THE_MODEL) and not said.startswith("hecate.compile:"):
                raise
            console(stderr=True).print(f"hecate cannot compile this model: {said}", soft_wrap=True)
            raise typer.Exit(1) from None
