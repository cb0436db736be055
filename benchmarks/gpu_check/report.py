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


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were taken on."""
    gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if gpu else "none: a CPU stands for it",
        "capability": list(torch.cuda.get_device_capability(device)) if gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": launch.triton and launch.triton.__version__,
        "float32": grouped_mm.precision("tf32x3"),
    }


def text_of(report: dict[str, Any]) -> str:
    """The report as it is printed."""
    parts = ["\n".join(f"{key}: {value}" for key, value in report["machine"].items())]
    tables = training_table(report["training"]), table(report["kernels"]), _text_of_compared(report["compared"])
    parts += [shown for shown in tables if shown]
    return "\n\n".join(parts + [_text_of_tests(one) for one in report["tests"] or []])


def _text_of_compared(found: Sequence[dict[str, Any]]) -> str:
    """How many cases equal their references, as kernels are before they are tuned, and each that does not."""
    if not found:
        return ""
    wrong = [one for one in found if "error" in one or not one["equal"]]
    lines = [f"before tuning {len(found) - len(wrong)} of {len(found)} cases equal their references"]
    return "\n".join(lines + [f"  {_name(one)} {_equal(one)}" for one in wrong])


def _text_of_tests(one: dict[str, Any]) -> str:
    """Each test of a stage, also those that the time was too short for."""
    ends = {None: f"NO END within {one['seconds']:.0f} s", 5: "FAILED: no tests"}
    how = "passed" if all_passed(one) else ends.get(one["code"], "FAILED")
    lines = [f"pytest -m gpu {one['tests of']}: {how}"]
    lines += [f"  {ended or 'NOT ENDED':<9} {test}" for test, ended in one["tests"].items()]
    return "\n".join(lines + one["output"].strip().splitlines()[-1:])


def all_passed(one: Mapping[str, Any]) -> bool:
    """Whether a stage of tests is a success; a test that ends the process may do so as if all were well."""
    return one["code"] == 0 and None not in one["tests"].values()


def table(found: Sequence[dict[str, Any]]) -> str:
    """One line for each case; times are medians in milliseconds with quartiles."""
    if not found:
        return ""
    lines = [
        f"{'kernel':<16} {'dtype':<9} {'case':<14} {'equal':<38} {'ms':<24} {'rate':<14} {'of the GPU':<12} "
        f"{'reference / kernel':<19} torch / kernel"
    ]
    for one in found:
        if "samples" not in one:
            lines.append(f"{_name(one)} {_equal(one)}")
            continue
        medians = {name: statistics.median(samples) for name, samples in one["samples"].items()}
        low, middle, high = statistics.quantiles(one["samples"]["kernel"], n=4)
        ratios = {name: f"{median / medians['kernel']:.2f}" for name, median in medians.items()}
        lines.append(
            f"{_name(one)} {_equal(one):<38} {f'{middle:.3f} ({low:.3f}..{high:.3f})':<24} {_rate(one, middle):<14} "
            f"{_share(one, medians):<12} {ratios['reference']:<19} {ratios.get('torch', '')}".rstrip()
        )
    return "\n".join(lines)


def _name(one: Mapping[str, Any]) -> str:
    return f"{one['kernel']:<16} {one.get('dtype', ''):<9} {one.get('note', ''):<14}"


def _equal(one: Mapping[str, Any]) -> str:
    """Whether a case equals its reference, or why that is not known."""
    if "error" in one:
        return f"FAILED {one['error'].strip().splitlines()[-1]}"
    by_torch = f"torch {one['torch difference']:.1e}, " if "torch difference" in one else ""
    return f"{'yes' if one['equal'] else 'NO'} ({one['difference']:.1e}, {by_torch}of {one['limit']:.0e})"


def training_table(found: Sequence[Mapping[str, Any]]) -> str:
    """One line for each system: its step, beside plain torch.compile's in the same rounds."""
    if not found:
        return ""
    lines = [
        f"{'training step':<16} {'loss, gradients':<26} {'ms':<24} {'tokens/s':<10} {f'{RIVAL} / it':<24} "
        f"{'peak GB':<8} {'host waits':<11} first step, s"
    ]
    rival = next((one for one in found if one["system"] == RIVAL), {})
    for one in found:
        start, taken = f"{one['system']:<16}", steps_of(one)
        if len(taken) < 2:
            lines.append(f"{start} FAILED {one.get('error', 'too few steps').strip().splitlines()[-1]}")
            continue
        low, middle, high = (1e3 * s for s in statistics.quantiles(taken, n=4))
        equal = f"{'yes' if one['equal'] else 'NO'} ({one['loss']:.4f}, {one['gradient norm']:.4f})"
        rate, peak = one["tokens"] / statistics.median(taken), f"{one['peak'] / 1e9:.1f}" if "peak" in one else "-"
        waits = sum(one["waits"].values()) if "waits" in one else "-"
        lines.append(
            f"{start} {equal:<26} {f'{middle:.1f} ({low:.1f}..{high:.1f})':<24} {rate:<10.0f} "
            f"{_times(rival, one):<24} {peak:<8} {waits:<11} {one['first step']:.0f}"
        )
        if "error" in one:
            lines.append(f"{start} FAILED later {one['error'].strip().splitlines()[-1]}")
    return "\n".join(lines)


def steps_of(one: Mapping[str, Any]) -> list[float]:
    """Seconds of the steps in turns with other systems; if there are none, of those that it made alone."""
    in_turns = [seconds for seconds in one.get("seconds", []) if seconds is not None]
    return in_turns if len(in_turns) > 1 else one.get("seconds alone", [])


def _times(rival: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    """How many times as long the one takes as the other, round by round; else of the steps that each made alone."""
    rounds = zip(rival.get("seconds", []), one.get("seconds", []), strict=False)
    ratios = [its / mine for its, mine in rounds if its is not None and mine is not None]
    if len(ratios) > 1:
        low, middle, high = statistics.quantiles(ratios, n=4)
        return f"{middle:.2f} ({low:.2f}..{high:.2f})"
    alone = [each.get("seconds alone", []) for each in (rival, one)]
    return f"{statistics.median(alone[0]) / statistics.median(alone[1]):.2f} alone" if all(alone) else ""


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Steps of each system, and which part of the GPU's own rate each kernel reaches; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(12, 5), layout="constrained")
    steps, kernels = figure.subplots(1, 2)
    timed = [one for one in report["training"] if steps_of(one)]
    steps.boxplot([[1e3 * s for s in steps_of(one)] for one in timed])
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
