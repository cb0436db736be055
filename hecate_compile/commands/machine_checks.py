"""What a machine needs to train with Hecate, checked one by one, with what to do where something is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hecate.commands.free_memory import free_memory
from hecate.commands.launch import run_ranks

State = Literal["good", "look", "bad"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of ``hecate doctor``.

    Attributes:
        state: "bad": training does not work without it. "look": something works less well, or is not there.
        advice: what to do; empty where all is good.
    """

    name: str
    state: State
    found: str
    advice: str = ""


def all_checks() -> Iterator[Check]:
    """Everything but the self-test."""
    checks: tuple[Callable[[], Iterator[Check]], ...] = (
        _versions, _optional, _backends, _gpus, _compiler, _cores, _memory, _control_groups, _network,
    )  # fmt: skip
    for check in checks:
        yield from check()


def self_test(timeout: float) -> Check:
    """Train one step of a small model on two ranks that torchrun starts, against one process."""
    # Ranks of the self-test compute on the CPU, with one core each.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    code, said = run_ranks("hecate.commands.self_test", (), ranks=2, timeout=timeout, environment=environment)
    if code is None:
        return Check(
            name="two ranks", state="bad", found=f"no end after {timeout:g} s",
            advice="Ranks cannot reach each other, or the machine is busy: look at the line 'network', and try "
            "--timeout with more seconds.",
        )  # fmt: skip
    if code:
        lines = [line for line in said.splitlines() if re.search(r"Error|off by", line)] or said.splitlines()[-1:]
        return Check(
            name="two ranks", state="bad", found=(lines or ["no output"])[0].strip()[:300],
            advice="torchrun --nproc-per-node 2 -m hecate.commands.self_test shows all of it.",
        )  # fmt: skip
    return Check(name="two ranks", state="good", found="one step equals that of one process")


def _versions() -> Iterator[Check]:
    python = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Check(
        name="Python",
        state="good" if good else "bad",
        found=python,
        advice="" if good else "Use Python 3.11 or newer.",
    )
    for name, wanted in _requirements().items():
        version = _version_of(name)
        if version is None:
            yield Check(name=name, state="bad", found="not installed", advice=f"pip install '{name}{wanted}'")
            continue
        fits = wanted.contains(version, prereleases=True)
        # Another version may well work; it was not tested.
        yield Check(
            name=name, state="good" if fits else "look", found=version,
            advice="" if fits else f"Hecate is tested with {name}{wanted}: pip install '{name}{wanted}'",
        )  # fmt: skip


def _requirements() -> dict[str, SpecifierSet]:
    """What Hecate's own package asks for, without extras."""
    try:
        lines = importlib.metadata.requires("hecate-compile") or []
    except importlib.metadata.PackageNotFoundError:
        lines = ["torch", "numpy", "packaging", "rich", "safetensors", "typer"]
    found = map(Requirement, lines)
    return {one.name: one.specifier for one in found if one.marker is None or one.marker.evaluate({"extra": ""})}


def _optional() -> Iterator[Check]:
    for name, what, how in (
        (
            "transformers",
            "hecate explain of its configs, Trainer, the examples",
            "pip install 'hecate-compile[examples]'",
        ),
        ("tensorboard", "hecate.monitor(..., tensorboard=True)", "pip install tensorboard"),
        ("matplotlib", "hecate report, plots of the benchmarks", "pip install 'hecate-compile[report]'"),
    ):
        if importlib.util.find_spec(name) is None:
            yield Check(name=name, state="look", found="not installed", advice=f"For {what}: {how}")
        else:
            yield Check(name=name, state="good", found=_version_of(name) or "there, version not known")


def _version_of(name: str) -> str | None:
    """Of a module's package; None where that has another name, as tb-nightly brings tensorboard."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends() -> Iterator[Check]:
    if not dist.is_available():
        yield Check(
            name="torch.distributed", state="bad", found="not in this torch",
            advice="Install an official build of torch; without it there is one rank only.",
        )  # fmt: skip
        return
    found = [
        name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there
    ]
    good = "gloo" in found
    yield Check(
        name="backends", state="good" if good else "bad", found=", ".join(found) or "none",
        advice="" if good else "Hecate talks over gloo: install an official build of torch.",
    )  # fmt: skip
    if torch.cuda.is_available() and "nccl" not in found:
        yield Check(
            name="NCCL", state="bad", found="not in this torch",
            advice="Several GPUs need it: install torch with CUDA from pytorch.org.",
        )  # fmt: skip


def _gpus() -> Iterator[Check]:
    if not torch.cuda.is_available():
        yield Check(
            name="GPU", state="look", found="none that torch sees",
            advice="Training runs on the CPU. If there is one: nvidia-smi must show it, and torch must be a CUDA "
            f"build (this one: {torch.version.cuda or 'CPU'}).",
        )  # fmt: skip
        return
    for number in range(torch.cuda.device_count()):
        try:
            free, total = torch.cuda.mem_get_info(number)
            name = torch.cuda.get_device_name(number)
            yield Check(
                name=f"GPU {number}", state="good", found=f"{name}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
            )
        except RuntimeError as error:
            yield Check(
                name=f"GPU {number}", state="bad", found=str(error).splitlines()[0],
                advice="Another process may hold it; or driver and torch do not fit: nvidia-smi says which CUDA "
                "the driver has.",
            )  # fmt: skip


def _compiler() -> Iterator[Check]:
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["g++", "clang++", "c++"]
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        yield Check(
            name="C++ compiler", state="bad", found=f"none of {', '.join(names)}",
            advice="Inductor needs one on CPUs: apt install g++, or set CXX. Without it: "
            'hecate.Config(backend="aot_eager"), which is slower.',
        )  # fmt: skip
    else:
        yield Check(name="C++ compiler", state="good", found=path)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if header.exists():
        yield Check(name="Python headers", state="good", found=str(header.parent))
    else:
        yield Check(
            name="Python headers", state="look", found=f"no {header}",
            advice="Inductor may need them on CPUs: apt install python3-dev, or a Python of uv or conda, which has "
            "them.",
        )  # fmt: skip


def _cores() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    found = f"{cores} core(s), OMP_NUM_THREADS {threads or 'not set'}"
    many = torch.cuda.is_available() or cores == 1 or threads is not None
    yield Check(
        name="cores", state="good" if many else "look", found=found,
        advice="" if many else "torchrun sets OMP_NUM_THREADS=1; set it to cores divided by ranks for CPU training.",
    )  # fmt: skip


def _memory() -> Iterator[Check]:
    free = free_memory()
    if free is None:
        return
    good = free > 2e9
    yield Check(
        name="memory", state="good" if good else "look", found=f"{free / 1e9:.1f} GB free",
        advice="" if good else "Each rank takes about half a gigabyte before it has a model.",
    )  # fmt: skip
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        good = size >= 2**28
        yield Check(
            name="/dev/shm", state="good" if good else "look", found=f"{size / 1e6:.0f} MB",
            advice="" if good else "NCCL and data loaders use it: docker run --shm-size=1g, or --ipc=host.",
        )  # fmt: skip


def _control_groups() -> Iterator[Check]:
    """Only the emulator of the benchmarks makes groups; a limit concerns everyone."""
    limit = _read("/sys/fs/cgroup/memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    quota = (_read("/sys/fs/cgroup/cpu.max") or "max").split()[0]
    limited = [f"CPU quota {quota} us"] if quota.isdecimal() else []
    # Version 1 says "no limit" with a number near the largest.
    if limit.isdecimal() and int(limit) < 2**60:
        limited.append(f"memory limit {int(limit) / 1e9:.1f} GB")
    yield Check(
        name="limits", state="look" if limited else "good", found=", ".join(limited) or "none",
        advice="This container has less than the machine; start it with more if ranks are killed or slow."
        if limited else "",
    )  # fmt: skip
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    writable = os.access("/sys/fs/cgroup", os.W_OK)
    good = root and writable
    yield Check(
        name="cgroups", state="good" if good else "look",
        found=f"{'root' if root else 'not root'}, /sys/fs/cgroup {'can' if writable else 'cannot'} be written",
        advice="" if good else "Only python -m benchmarks.emulator needs both; training does not.",
    )  # fmt: skip


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _network() -> Iterator[Check]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield Check(
            name="network", state="look", found=f"the host's own name, {name}, has no address",
            advice=f"gloo looks it up: add '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME to lo (one "
            "machine) or the name of the network card.",
        )  # fmt: skip
        return
    yield Check(name="network", state="good", found=f"{name} is {address}")
