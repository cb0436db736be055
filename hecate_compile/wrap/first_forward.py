"""What ranks tell each other while they trace their first forward, beside the graphs that they compare."""

from __future__ import annotations

import sys

from hecate.runtime.comm.agreement import DisagreementError, agree
from hecate.runtime.comm.world import World
from hecate.wrap.graph_breaks import places_around

_ADVICE = (
    "Every rank must run the same model code: look for branches on local data. "
    'Config(policy="replicate") trains any model: every rank keeps all experts, and nothing has to be traced.'
)


def agree_on_next(what: str, world: World) -> None:
    """Compare what ranks do next; another one may be about to compare a graph. A collective.

    Raises:
        DisagreementError: on all ranks, with the lines of the model that run here.
    """
    try:
        agree([what], what, _ADVICE, world)
    except DisagreementError as error:
        error.places = places_around(sys._getframe())
        raise
