"""Assertions about tensors whose messages are put together when they are needed: they are traced like others.

Dynamo takes ``assert x.isfinite().all(), "a text"`` into a graph, as ``torch._assert_async``, and breaks the graph at
``assert x.isfinite().all(), f"{name} is not finite"``. The graph's assertion says which line failed. At ``assert not
x.isnan().any()`` Dynamo breaks the graph whatever is said.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import takewhile
from types import FrameType
from typing import Any

from hecate.private import ASSERTION, ConstantVariable, TensorVariable, symbolic_convert

# Whether what is compiled here is of a compiled model.
_here = ContextVar("traced_assertions", default=False)
# How an assertion that failed begins, until Python 3.13. Behind it others have an instruction of several meanings.
_BEGINNING = "LOAD_ASSERTION_ERROR"
# The module that calls the model, and packages that run between it and this.
_CALLS, _OF_DYNAMO = "hecate.graph.traces", ("torch", "hecate", "contextlib", "functools")


@contextmanager
def traced_assertions() -> Iterator[None]:
    """Let Dynamo take assertions with any message into the frames that this thread compiles meanwhile."""
    _replace()
    token = _here.set(True)
    try:
        yield
    finally:
        _here.reset(token)


def _replace() -> None:
    """Replace Dynamo's function that looks for assertions, once for the process, if it has the one that is known."""
    as_it_was = getattr(symbolic_convert, ASSERTION, None)
    if as_it_was is None or as_it_was.__module__ == __name__:
        return

    def is_assertion(translator: Any, truth: Any, push: bool) -> bool:
        if as_it_was(translator, truth, push):
            return True
        # Popped from the stack before; whatever is no tensor takes its branch, or breaks the graph, as ever.
        value = sys._getframe(1).f_locals.get("value")
        # The jump of `assert not x` is one where x is false, which the graph's assertion would take for a failure.
        if not _here.get() or truth is not operator.truth or push or not isinstance(value, TensorVariable):
            return False
        if not _is_in_front_of_a_raise(translator) or _may_be_caught(translator):
            return False
        # Without the file: ranks compare their graphs, and may have the code in different folders.
        where = f"line {translator.lineno} of {translator.f_globals.get('__name__')}"
        text = f"the assertion in {translator.f_code.co_name} failed, {where}"
        translator.push(ConstantVariable.create(text))
        return True

    setattr(symbolic_convert, ASSERTION, is_assertion)


def _is_in_front_of_a_raise(translator: Any) -> bool:
    """Return whether an error is made behind the current jump, of AssertionError alone, and raised."""
    following = translator.instructions[translator.instruction_pointer :]
    made = list(takewhile(lambda each: each.opname != "RAISE_VARARGS", following))
    if not made or made[0].opname != _BEGINNING:
        return False
    return not any(each.target is not None or each.opname.startswith("STORE") for each in made)


def _may_be_caught(translator: Any) -> bool:
    """Return whether this code, or what calls it, is in a ``try`` or a ``with``: a graph's error is another one."""
    while translator is not None:
        if translator.current_instruction.exn_tab_entry is not None:
            return True
        translator = getattr(translator, "parent", None)
    # Behind a graph break what calls it runs.
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != _CALLS:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _OF_DYNAMO and frame.f_code.co_exceptiontable:
            return True
        frame = frame.f_back
    return False
