"""A model on ranks as a line of a table."""

from __future__ import annotations

from typing import Any

from tests.support.ranks import RanksFailed, run_ranks

TOLERANCE = 1e-5
HEAD = ("family", "MoE layers", "experts", "exchange rows", "loss", "gradients", "graphs", "s", "")


def measure(name: str, *, policy: str, tolerance: float = TOLERANCE, **options: Any) -> dict[str, Any]:
    """Return the result of a model, or that with ``policy="replicate"`` and why it was ``refused``.

    ``options`` are those of :func:`benchmarks.families.case.run`, and ``ranks``.
    """
    result = _run(name, policy=policy, **options)
    if result.get("error", "").partition(":")[0].endswith(("NoExpertsError", "UntracedReadError")):
        refused = result["error"]
        result = _run(name, policy="replicate", **options) | {"refused": refused}
    if "error" not in result and is_wrong(result, tolerance):
        # Sums that cancel are inexact in float32. What is wrong is so in float64, too.
        exact = _run(name, policy=policy, dtype="float64", **options)
        result |= exact if "error" in exact else {"float64_error": exact["gradient_error"]}
    return result


def _run(name: str, ranks: int = 2, **options: Any) -> dict[str, Any]:
    try:
        first, *_ = run_ranks("benchmarks.families.case:run", ranks, timeout=600, name=name, **options)
    except RanksFailed as error:
        return dict(error=what_was_raised(str(error)), details=str(error)[-4000:])
    result: dict[str, Any] = first
    return result


def what_was_raised(text: str) -> str:
    """Return what a rank raised: the last line of the first traceback that starts with the name of an error."""
    part = text.partition("--- rank 0\n")[2].partition("\n--- ")[0]
    lines = [line for line in part.splitlines() if line and not line.startswith(" ") and ":" in line]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "Failed"))]
    return (named or lines or text.splitlines())[-1][:300]


def is_wrong(result: dict[str, Any], tolerance: float = TOLERANCE) -> bool:
    """Return whether a result is off by more than rounding, or an error."""
    gradient = result.get("float64_error", result.get("gradient_error"))
    # Not by a maximum: NaN is smaller than everything.
    return "error" in result or not (result["loss_error"] <= tolerance and gradient <= tolerance)


def cells_of(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    """Return a result as cells under :data:`HEAD`."""
    if "error" in result:
        return (name, "", "", "", "", "", "", "", result["error"])
    remark = "; ".join(result["reasons"])
    if "refused" in result:
        remark = f'refused, trained with `policy="replicate"`: {_short(result["refused"])}'
    if "float64_error" in result:
        remark += f"{result['worst']}: {result['float64_error']:.0e} in float64"
    if result["graphs"] > 1:
        remark += f"{'; ' if remark else ''}{result['graphs'] - 1} graph breaks or recompiles"
    return (
        name,
        str(result["layers"]),
        str(result["experts"]),
        str(result["rewritten"]),
        f"{result['loss_error']:.0e}",
        f"{result['gradient_error']:.0e}",
        str(result["graphs"]),
        f"{result['seconds']:.0f}",
        remark,
    )


def _short(error: str) -> str:
    """Without the name of the error and who says it."""
    return error.partition(": ")[2].removeprefix("hecate.compile: ").removeprefix("hecate: ").rstrip(".")


def table_line(cells: tuple[str, ...]) -> str:
    """Return a line of a table in Markdown."""
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
