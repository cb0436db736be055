"""Guard of texts for people: an error in them must not end a compile on one rank while the others wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hecate.runtime.comm.warn import warn_alone


@contextmanager
def harmless(what: str, otherwise: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turn an error of the block into a warning.

    Args:
        what: the part that is missing then, for the warning.
        otherwise: called after an error.
    """
    try:
        yield
    except Exception as error:
        otherwise()
        warn_alone(f"hecate: no {what} from here on: {type(error).__name__}: {error}", stacklevel=3)
