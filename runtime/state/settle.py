"""Late news for the host: carriers whose numbers stay on the device tell them before an optimizer steps."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Protocol


class ExchangeFailed(RuntimeError):
    """Raised where ranks did not come in time, are in different exchanges, or lack room for the rows they got."""


class Settles(Protocol):
    """An object that has numbers for the host; see ``Carrier.settle``."""

    def settle(self) -> None:
        """Tell the host its numbers. A collective."""


# Objects in the order in which models were compiled, which is the same on all ranks.
_SETTLING: weakref.WeakValueDictionary[int, Settles] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def settle_before_optimizers(one: Settles) -> None:
    """Let :func:`settle_all` call this object's ``settle`` as long as it lives."""
    _SETTLING[next(_numbers)] = one


def settle_all() -> None:
    """Call :meth:`Carrier.settle` for every model: an optimizer does not say whose parameters it has."""
    for number in sorted(_SETTLING):
        one = _SETTLING.get(number)
        if one is None:
            continue
        try:
            one.settle()
        except ExchangeFailed as error:
            # A model that is gone lives on as garbage, on some ranks and not on others: only those that are alive are
            # called.
            alive = weakref.ref(one)
            del one
            error.__traceback__ = None
            gc.collect()
            if alive() is not None:
                raise
