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

# Advice where a parameter is changed in place of which ranks have parts.
LOST_CHANGES = (
    "What it would change is a copy, which was gathered from all ranks. Change this rank's part of it between "
    "forwards, by dict(model.named_parameters()), or keep it whole on every rank, with "
    'Config(dense="replicate") for a dense one and Config(policy="replicate") for experts.'
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
