"""What is printed and written."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hecate.runtime.kernels import grouped_mm, launch

# Of the systems whose training steps are timed: what numbers are compared with, and times.
REFERENCE, RIVAL = "transformers", "torch.compile"


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    return {
        "gpu": torch.cuda.get_device_name(0), "capability": list(torch.cuda.get_device_capability(0)),
        "torch": torch.__version__, "cuda": torch.version.cuda, "triton": launch.triton.__version__,
        "float32": grouped_mm.precision(),
    }  # fmt: skip


def text_of(report: dict[str, Any]) -> str:
    """The report as it is printed."""
    parts = ["\n".join(f"{key}: {value}" for key, value in report["machine"].items())]
    parts += [shown for shown in (training_table(report["training"]), table(report["kernels"])) if shown]
    return "\n\n".join(parts + [_text_of_tests(one) for one in report["tests"] or []])


def _text_of_tests(one: dict[str, Any]) -> str:
    """Each test of a file, also those that the time was too short for."""
    ends = {0: "passed", None: f"NO END within {one['seconds']:.0f} s", 5: "FAILED: no tests"}
    lines = [f"pytest -m gpu {one['file']}: {ends.get(one['code'], 'FAILED')}"]
    lines += [f"  {ended or 'NOT ENDED':<9} {test}" for test, ended in one["tests"].items()]
    return "\n".join(lines + one["output"].strip().splitlines()[-1:])


def table(found: Sequence[dict[str, Any]]) -> str:
    """One line for each case; times are medians in milliseconds with quartiles."""
    if not found:
        return ""
    lines = [
        f"{'kernel':<16} {'dtype':<9} {'case':<14} {'equal':<22} {'ms':<24} {'rate':<14} {'of the GPU':<12} "
        f"{'reference / kernel':<19} torch / kernel"
    ]
    for one in found:
        start = f"{one['kernel']:<16} {one.get('dtype', ''):<9} {one.get('note', ''):<14}"
        if "samples" not in one:
            lines.append(f"{start} FAILED {one['error'].strip().splitlines()[-1]}")
            continue
        medians = {name: statistics.median(samples) for name, samples in one["samples"].items()}
        low, middle, high = statistics.quantiles(one["samples"]["kernel"], n=4)
        equal = f"{'yes' if one['equal'] else 'NO'} ({one['difference']:.1e} of {one['limit']:.0e})"
        ratios = {name: f"{median / medians['kernel']:.2f}" for name, median in medians.items()}
        lines.append(
            f"{start} {equal:<22} {f'{middle:.3f} ({low:.3f}..{high:.3f})':<24} {_rate(one, middle):<14} "
            f"{_share(one, medians):<12} {ratios['reference']:<19} {ratios.get('torch', '')}".rstrip()
        )
    return "\n".join(lines)


def training_table(found: Sequence[Mapping[str, Any]]) -> str:
    """One line for each system: its step, beside plain torch.compile's in the same rounds."""
    if not found:
        return ""
    lines = [
        f"{'training step':<16} {'loss, gradients':<26} {'ms':<24} {'tokens/s':<10} {f'{RIVAL} / it':<24} "
        f"{'peak GB':<8} {'host waits':<11} first step, s"
    ]
    seconds = {one["system"]: one.get("seconds", []) for one in found}
    for one in found:
        taken, start = one.get("seconds", []), f"{one['system']:<16}"
        if len(taken) < 2:
            lines.append(f"{start} FAILED {one.get('error', 'too few steps').strip().splitlines()[-1]}")
            continue
        low, middle, high = (1e3 * s for s in statistics.quantiles(taken, n=4))
        equal = f"{'yes' if one['equal'] else 'NO'} ({one['loss']:.4f}, {one['gradient norm']:.4f})"
        rate, peak = one["tokens"] / statistics.median(taken), f"{one['peak'] / 1e9:.1f}" if "peak" in one else "-"
        lines.append(
            f"{start} {equal:<26} {f'{middle:.1f} ({low:.1f}..{high:.1f})':<24} {rate:<10.0f} "
            f"{_times(seconds.get(RIVAL, []), taken):<24} {peak:<8} {sum(one['waits'].values()):<11} "
            f"{one['first step']:.0f}"
        )
        if "error" in one:
            lines.append(f"{start} FAILED later {one['error'].strip().splitlines()[-1]}")
    return "\n".join(lines)


def _times(seconds: Sequence[float], taken: Sequence[float]) -> str:
    """How many times as long the one takes as the other, round by round."""
    ratios = [one / other for one, other in zip(seconds, taken, strict=False)]
    if len(ratios) < 2:
        return ""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Steps of each system, and which part of the GPU's own rate each kernel reaches; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(12, 5), layout="constrained")
    steps, kernels = figure.subplots(1, 2)
    timed = [one for one in report["training"] if one.get("seconds")]
    steps.boxplot([[1e3 * s for s in one["seconds"]] for one in timed])
    steps.set_xticks(range(1, len(timed) + 1), [one["system"] for one in timed])
    steps.set_ylabel("training step, ms")
    steps.set_ylim(bottom=0)
    shares = {}
    for one in report["kernels"]:
        if "bound" in one.get("samples", {}):
            median = {name: statistics.median(samples) for name, samples in one["samples"].items()}
            shares[f"{one['kernel']} {one['dtype']} {one['note']}".strip()] = median["bound"] / median["kernel"]
    kernels.barh(list(shares), list(shares.values()))
    kernels.axvline(1.0, color="black", linewidth=0.8)
    kernels.tick_params(axis="y", labelsize=6)
    kernels.set_xlabel("of the GPU's own copy or dense product")
    figure.savefig(path)


def _rate(one: dict[str, Any], milliseconds: float) -> str:
    if one.get("flops"):
        return f"{one['flops'] / milliseconds / 1e9:.1f} TFLOP/s"
    return f"{one['bytes'] / milliseconds / 1e6:.0f} GB/s" if one.get("bytes") else ""


def _share(one: dict[str, Any], medians: dict[str, float]) -> str:
    """Which part of the GPU's own rate that is; where a time was promised, whether it was kept."""
    if "bound" not in medians:
        return ""
    if most := one.get("most_ms"):
        return f"{'OVER' if medians['kernel'] > most else 'under'} {most} ms"
    return f"{medians['bound'] / medians['kernel']:.0%} of {'mm' if one.get('flops') else 'copy'}"


def write(path: Path, text: str) -> None:
    """In one piece: whoever is ended meanwhile leaves what was there."""
    beside = path.with_suffix(path.suffix + ".new")
    beside.write_text(text)
    beside.replace(path)
