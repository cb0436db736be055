"""The error of code that was not traced, and read an expert parameter."""

from __future__ import annotations

from collections.abc import Sequence

from hecate.wrap.graph_breaks import Place

# The way out that every model has, for messages.
WITHOUT_TRACING = (
    'Config(policy="replicate") trains any model: every rank keeps all experts, and nothing has to be traced.'
)


class UntracedReadError(RuntimeError):
    """Code that was not traced read a sharded expert parameter, or trained a dense one unaveraged."""

    # What code is at fault, without a way out. It would be right if it ran as Python (``whole_layers``): where the
    # experts of ``layer`` are read, or ``places`` that cannot be traced.
    why = layer = ""
    places: Sequence[Place] = ()


def untraced_read(why: str, advice: str, *, layer: str = "", places: Sequence[Place] = ()) -> UntracedReadError:
    """Return an error about code that would be right if it ran as Python."""
    error = UntracedReadError(f"hecate: {why}\n{advice}")
    error.why, error.layer, error.places = why, layer, places
    return error
