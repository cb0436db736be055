"""``hecate doctor``: whether this machine can train, and what to do if not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.table import Table

from hecate.commands.console import console
from hecate.commands.launch import run_ranks
from hecate.runtime.placement import native

State = Literal["good", "look", "bad"]


@dataclass(frozen=True)
class Check:
    """A line of ``hecate doctor``, with advice where not all is good; "bad": training does not work without it."""

    name: str
    state: State
    found: str
    advice: str = ""


def all_checks() -> Iterator[Check]:
    """Run all checks but the self-test."""
    for check in (_versions, _optional, _backends, _gpus, _compiler, _cores, _memory, _control_groups, _network):
        yield from check()


def self_test(timeout: float) -> Check:
    """Train one step of a small model on two ranks that torchrun starts, against one process."""
    # Ranks of the self-test compute on the CPU, with one core each.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    code, said = run_ranks("hecate.commands.self_test", (), ranks=2, timeout=timeout, environment=environment)
    if code is None:
        advice = "Ranks cannot reach each other, or the machine is busy: look at the line 'network', and try "
        return Check("two ranks", "bad", f"no end after {timeout:g} s", f"{advice}--timeout with more seconds.")
    if code:
        lines = [line for line in said.splitlines() if re.search(r"Error|off by", line)] or said.splitlines()[-1:]
        advice = "torchrun --nproc-per-node 2 -m hecate.commands.self_test shows all of it."
        return Check("two ranks", "bad", (lines or ["no output"])[0].strip()[:300], advice)
    return Check("two ranks", "good", "one step equals that of one process")


def _judged(name: str, good: bool, found: str, advice: str, otherwise: State = "look") -> Check:
    """Return a check with ``advice`` where ``good`` is False."""
    return Check(name, "good", found) if good else Check(name, otherwise, found, advice)


def _versions() -> Iterator[Check]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield _judged("Python", sys.version_info >= (3, 11), python, "Use Python 3.11 or newer.", "bad")
    for name, wanted in _requirements().items():
        version = _version_of(name)
        if version is None:
            yield Check(name, "bad", "not installed", f"pip install '{name}{wanted}'")
            continue
        # Another version may well work; it was not tested.
        advice = f"Hecate is tested with {name}{wanted}: pip install '{name}{wanted}'"
        yield _judged(name, wanted.contains(version, prereleases=True), version, advice)


def _requirements() -> dict[str, SpecifierSet]:
    """Return the packages and versions that Hecate's own package asks for, without extras."""
    try:
        lines = importlib.metadata.requires("hecate-compile") or []
    except importlib.metadata.PackageNotFoundError:
        lines = ["torch", "numpy", "packaging", "rich", "safetensors", "typer"]
    found = map(Requirement, lines)
    return {one.name: one.specifier for one in found if one.marker is None or one.marker.evaluate({"extra": ""})}


_OPTIONAL = (
    ("transformers", "hecate explain of its configs, Trainer, the examples", "'hecate-compile[examples]'"),
    ("tensorboard", "hecate.monitor(..., tensorboard=True)", "tensorboard"),
    ("matplotlib", "hecate report, plots of the benchmarks", "'hecate-compile[report]'"),
)


def _optional() -> Iterator[Check]:
    for name, what, package in _OPTIONAL:
        if importlib.util.find_spec(name) is None:
            yield Check(name, "look", "not installed", f"For {what}: pip install {package}")
        else:
            yield Check(name, "good", _version_of(name) or "there, version not known")


def _version_of(name: str) -> str | None:
    """Return the version of a module's package; None if that has another name, as tensorboard's tb-nightly has."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends() -> Iterator[Check]:
    if not dist.is_available():
        advice = "Install an official build of torch; without it there is one rank only."
        yield Check("torch.distributed", "bad", "not in this torch", advice)
        return
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    found = ", ".join(name for name in there if there[name]) or "none"
    advice = "Hecate talks over gloo: install an official build of torch."
    yield _judged("backends", there["gloo"], found, advice, "bad")
    if torch.cuda.is_available() and not there["nccl"]:
        advice = "Several GPUs need it: install torch with CUDA from pytorch.org."
        yield Check("NCCL", "bad", "not in this torch", advice)


def _gpus() -> Iterator[Check]:
    if not torch.cuda.is_available():
        advice = "Training runs on the CPU. If there is one: nvidia-smi must show it, and torch must be a CUDA build "
        advice += f"(this one: {torch.version.cuda or 'CPU'})."
        yield Check("GPU", "look", "none that torch sees", advice)
        return
    for number in range(torch.cuda.device_count()):
        try:
            free, total = torch.cuda.mem_get_info(number)
            name = torch.cuda.get_device_name(number)
            yield Check(f"GPU {number}", "good", f"{name}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free")
        except RuntimeError as error:
            advice = "Another process may hold it; or driver and torch do not fit: nvidia-smi says which CUDA the "
            yield Check(f"GPU {number}", "bad", str(error).splitlines()[0], f"{advice}driver has.")


def _compiler() -> Iterator[Check]:
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["g++", "clang++", "c++"]
    path = next((found for name in names if (found := shutil.which(name))), None)
    advice = "Inductor needs one on CPUs: apt install g++, or set CXX. Without it: "
    advice += 'hecate.Config(backend="aot_eager"), which is slower.'
    yield _judged("C++ compiler", path is not None, path or f"none of {', '.join(names)}", advice, "bad")
    advice = (
        "Plans take four to thirty times as long as Python, and are the same: a C++ compiler, and no HECATE_NATIVE=0."
    )
    compiled = native.library() is not None
    yield _judged("planner", compiled, "compiled" if compiled else "Python", advice)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    found = str(header.parent) if header.exists() else f"no {header}"
    advice = "Inductor may need them on CPUs: apt install python3-dev, or a Python of uv or conda, which has them."
    yield _judged("Python headers", header.exists(), found, advice)


def _cores() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    good = torch.cuda.is_available() or cores == 1 or threads is not None
    advice = "torchrun sets OMP_NUM_THREADS=1; set it to cores divided by ranks for CPU training."
    yield _judged("cores", good, f"{cores} core(s), OMP_NUM_THREADS {threads or 'not set'}", advice)


def _memory() -> Iterator[Check]:
    free = free_memory()
    if free is None:
        return
    advice = "Each rank takes about half a gigabyte before it has a model."
    yield _judged("memory", free > 2e9, f"{free / 1e9:.1f} GB free", advice)
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        advice = "NCCL and data loaders use it: docker run --shm-size=1g, or --ipc=host."
        yield _judged("/dev/shm", size >= 2**28, f"{size / 1e6:.0f} MB", advice)


def _control_groups() -> Iterator[Check]:
    """Check limits, which concern everyone, and rights to make control groups, which the emulator needs."""
    limit = _read("/sys/fs/cgroup/memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    quota = (_read("/sys/fs/cgroup/cpu.max") or "max").split()[0]
    limited = [f"CPU quota {quota} us"] if quota.isdecimal() else []
    # Version 1 says "no limit" with a number near the largest.
    if limit.isdecimal() and int(limit) < 2**60:
        limited.append(f"memory limit {int(limit) / 1e9:.1f} GB")
    advice = "This container has less than the machine; start it with more if ranks are killed or slow."
    yield _judged("limits", not limited, ", ".join(limited) or "none", advice)
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    writable = os.access("/sys/fs/cgroup", os.W_OK)
    found = f"{'root' if root else 'not root'}, /sys/fs/cgroup {'can' if writable else 'cannot'} be written"
    advice = "Only python -m benchmarks.emulator needs both; training does not."
    yield _judged("cgroups", root and writable, found, advice)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _network() -> Iterator[Check]:
    name = socket.gethostname()
    try:
        yield Check("network", "good", f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        advice = f"gloo looks it up: add '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME to lo (one "
        advice += "machine) or the name of the network card."
        yield Check("network", "look", f"the host's own name, {name}, has no address", advice)


def free_memory() -> int | None:
    """Return the bytes that programs can still have, without any GPU's; None where that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


_SIGNS: dict[State, tuple[str, str]] = {"good": ("ok", "green"), "look": ("look", "yellow"), "bad": ("NO", "red")}


def doctor(
    test: Annotated[bool, typer.Option("--self-test/--no-self-test", help="a step on two ranks, a minute")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="seconds for the self-test")] = 180,
) -> None:
    """Look whether this machine has what training needs.

    Without torch, or another package that Hecate imports, no command starts: it says what to install instead.

    Ends with code 0; 1 if something needed is missing.

    Example: hecate doctor --no-self-test
    """
    checks = list(all_checks())
    if test:
        checks.append(self_test(timeout))
    _print(checks)
    if any(check.state == "bad" for check in checks):
        raise typer.Exit(1)


def _print(checks: list[Check]) -> None:
    screen = console()
    table = Table("", "", "found", show_edge=False, box=None)
    for check in checks:
        sign, colour = _SIGNS[check.state]
        table.add_row(sign, check.name, check.found, style=colour if check.state != "good" else None)
    screen.print(table)
    for state in ("bad", "look"):
        sign, colour = _SIGNS[state]
        for check in (one for one in checks if one.state == state):
            screen.print(f"{sign} {check.name}: {check.advice}", style=colour)
    missing = sum(check.state == "bad" for check in checks)
    screen.print(f"{missing} needed and missing" if missing else "everything that is needed is there")
