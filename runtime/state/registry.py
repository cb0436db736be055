"""Records that graphs name by number, since a graph must not hold anything that changes between steps."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Numbers for records of one kind, ``what`` in messages; a record is forgotten when its model is collected.

    Numbers count up and none is given twice. So they are the same on all ranks, which compile the same models in the
    same order, whatever has been collected where.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._numbers = itertools.count()
        self._records: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, make: Callable[[int], T]) -> T:
        """Make a record from its number. The caller must keep it: the registry does not."""
        number = next(self._numbers)
        record = self._records[number] = make(number)
        return record

    def __getitem__(self, number: int) -> T:
        """Return the record with this number; LookupError if this process has none, or no longer."""
        try:
            return self._records[number]
        except KeyError:
            raise LookupError(
                f"hecate: a graph names {self._what} {number}, which this process does not have ({len(self)} are "
                "alive). The graph was compiled in another process, or its model is gone."
            ) from None

    def __len__(self) -> int:
        return len(self._records)
