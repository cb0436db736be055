"""Numbers as people read them: three digits and a unit."""

from __future__ import annotations

from hecate.runtime.comm.measure_rates import NO_LINK
from hecate.runtime.placement.planner import Rates

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def with_unit(number: float, unit: str) -> str:
    """Write ``129.7 GFLOP/s``: numbers of at least a thousand get a prefix."""
    for size, prefix in _PREFIXES:
        # A number that would be rounded up to 1000 of a unit is written as one of the next.
        if abs(number) >= 0.9995 * size:
            return f"{_three_digits(number / size)} {prefix}{unit}"
    return f"{_three_digits(number)} {unit}"


def as_bytes(number: float) -> str:
    """Write bytes with a decimal prefix, as rates have them: ``9.1 MB``."""
    return with_unit(number, "B")


def as_time(seconds: float) -> str:
    """Write seconds, milliseconds or microseconds: ``12.3 ms``."""
    if not seconds:
        return "0 ms"
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= 0.9995 * size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def rates_text(rates: Rates) -> str:
    """Describe the speeds of a machine in words."""
    links = [
        f"{as_bytes(rate)}/s of a {what}"
        for what, rate in (("rank", rates.rank_bytes), ("node", rates.node_bytes))
        if rate < NO_LINK
    ]
    text = with_unit(rates.flops, "FLOP/s")
    text += f", links {' and '.join(links)}" if links else ""
    text += f", memory {as_bytes(rates.memory_bytes)}/s"
    return text + (f", {as_time(rates.hidden_seconds)} hidden in a layer" if rates.hidden_seconds else "")


def _three_digits(number: float) -> str:
    if number == int(number) and abs(number) < 1000:
        return str(int(number))
    return f"{number:.0f}" if abs(number) >= 99.95 else f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"
