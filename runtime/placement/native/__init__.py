"""Compiled twins of the planner's functions that every step calls.

==================  ===================================================================
``layer.h``         what the planner knows of a layer
``balance.h``       ``planner/balance.py``: rows of each expert on its holders
``cost.h``          ``planner/cost.py``: seconds of a step
``dispatch.cpp``    ``planner/dispatch.py`` and ``segments.py``: what one rank sends and receives
``recipes.h``       ``planner/recipes.py``: proposals of placements
``materialize.cpp`` ``planner/fastest.py`` and ``swap_owners``: which replicas, which owners
``build.py``        compiles them once on a machine
``calls.py``        calls them
==================  ===================================================================

They return the same numbers as the Python functions, which run where there is no C++ compiler, or with
``HECATE_NATIVE=0``, and which say what is done and why. Ranks of both kinds may be mixed.
"""

from hecate.runtime.placement.native.build import library
from hecate.runtime.placement.native.calls import (
    assign_fastest,
    choose,
    join_segments,
    predict,
    search,
    segments_of,
    swapped_owners,
)

__all__ = [
    "assign_fastest",
    "choose",
    "join_segments",
    "library",
    "predict",
    "search",
    "segments_of",
    "swapped_owners",
]
