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
from itertools import takewhile
from typing import Any

from hecate.private import ASSERTION, ConstantVariable, TensorVariable, assertion_opcode, symbolic_convert


@contextmanager
def traced_assertions() -> Iterator[None]:
    """Let Dynamo take assertions with any message into the frames that it compiles meanwhile."""
    as_it_was = getattr(symbolic_convert, ASSERTION, None)
    if as_it_was is None:
        yield
        return

    def is_assertion(translator: Any, truth: Any, push: bool) -> bool:
        if as_it_was(translator, truth, push):
            return True
        # Popped from the stack before; whatever is no tensor takes its branch, or breaks the graph, as ever.
        value = sys._getframe(1).f_locals.get("value")
        # The jump of `assert not x` is one where x is false, which the graph's assertion would take for a failure.
        if truth is not operator.truth or push or not isinstance(value, TensorVariable):
            return False
        if not _is_in_front_of_a_raise(translator):
            return False
        # Without the file: ranks compare their graphs, and may have the code in different folders.
        where = f"line {translator.lineno} of {translator.f_globals.get('__name__')}"
        text = f"the assertion in {translator.f_code.co_name} failed, {where}"
        translator.push(ConstantVariable.create(text))
        return True

    setattr(symbolic_convert, ASSERTION, is_assertion)
    try:
        yield
    finally:
        setattr(symbolic_convert, ASSERTION, as_it_was)


def _is_in_front_of_a_raise(translator: Any) -> bool:
    """Return whether an error is made behind the current jump, of AssertionError alone, and raised."""
    following = translator.instructions[translator.instruction_pointer :]
    made = list(takewhile(lambda each: each.opname != "RAISE_VARARGS", following))
    if not made or made[0].opname != assertion_opcode():
        return False
    return not any(each.target is not None or each.opname.startswith("STORE") for each in made)
