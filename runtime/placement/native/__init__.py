"""Compiled twins of what the planner does between a gate and the exchange behind it, where every step waits.

==============  ============================================================
``layer.h``     a layer in one step, as the planner sees it
``balance.h``   ``planner/balance.py``: rows of each expert on its holders
``cost.h``      the part of ``planner/cost.py`` that compares such splits
``dispatch.cpp``  ``planner/dispatch.py``: what one rank sends and receives
``build.py``    compiles them once on a machine
``assign.py``   calls them
==============  ============================================================

They return the same numbers as the Python functions, which run where there is no C++ compiler, or with
``HECATE_NATIVE=0``. Ranks of both kinds may be mixed.
"""

from hecate.runtime.placement.native.assign import assign_fastest, join_segments

__all__ = ["assign_fastest", "join_segments"]
