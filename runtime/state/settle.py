"""What the host learns late: carriers whose numbers stay on the device tell it before an optimizer steps."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Protocol


class ExchangeFailed(RuntimeError):
    """Ranks did not come in time or are in different exchanges, or there were more rows than there is room for."""


class Settles(Protocol):
    """Something that has numbers for the host; see ``Carrier.settle``."""

    def settle(self) -> None:
        """Tell them. All ranks together."""


# In the order in which models were compiled, which is the same on all ranks.
_SETTLING: weakref.WeakValueDictionary[int, Settles] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def settle_before_optimizers(one: Settles) -> None:
    """Let :func:`settle_all` call the ``settle`` of this one as long as it lives."""
    _SETTLING[next(_numbers)] = one


def settle_all() -> None:
    """:meth:`Carrier.settle` of every model: an optimizer does not say whose parameters it has."""
    for number in sorted(_SETTLING):
        one = _SETTLING.get(number)
        if one is None:
            continue
        try:
            one.settle()
        except ExchangeFailed as error:
            # A model that is gone lives on as garbage, on some ranks and not on others: nobody is told of it.
            alive = weakref.ref(one)
            del one
            error.__traceback__ = None
            gc.collect()
            if alive() is not None:
                raise
