"""The code that Inductor makes of a model for a GPU, on a machine without one.

``made_for`` starts a process in which CUDA tensors are fake and torch is told of a device that is not there. The
whole compile runs: Dynamo, all passes, autograd, Inductor's code for CUDA. No kernel is compiled, and nothing runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Code:
    """What is known of a forward's or a backward's code.

    Attributes:
        steps: what it launches, in order: operators of Hecate with "hecate." in front, matmuls, and names of kernels.
        unaligned: values that kernels load number by number, since they may begin anywhere.
        atomics: kernels that add with atomics, and the dtypes of what they add to, as Triton spells them.
        host_reads: how often the host waits to read a number.
    """

    steps: list[str]
    unaligned: list[str]
    atomics: dict[str, list[str]]
    host_reads: int

    def between(self, start: str, wait: str) -> list[list[str]]:
        """What is launched between each ``hecate.start`` and the next ``hecate.wait``."""
        found, inside = [], None
        for step in self.steps:
            if step == f"hecate.{start}":
                inside = list[str]()
            elif step == f"hecate.{wait}" and inside is not None:
                found.append(inside)
                inside = None
            elif inside is not None:
                inside.append(step)
        return found


@dataclass(frozen=True, kw_only=True)
class Made:
    """What was made of a model.

    Attributes:
        rewritten: how often each pass rewrote something in the captured graph.
        graph_breaks: how often Dynamo stopped.
    """

    forward: Code
    backward: Code
    layers: int
    rewritten: dict[str, int]
    graph_breaks: int


def made_for(
    family: str,
    dtype: str,
    *,
    folder: Path,
    ranks: int = 2,
    layers: int = 1,
    options: Sequence[str] = (),
    seconds: float = 300,
) -> Made:
    """Compile a model of ``tests.support.models``.

    Args:
        dtype: of its parameters, "bfloat16".
        folder: where the library of the pretended device is, and is made if it is not, and where the code and what is
            known of it are written, in files with the name of the case.
        options: "symmetric" for the one-sided transport.
    """
    case = [family, dtype, str(ranks), str(layers), *options]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.cuda_code", str(folder), *case],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((folder / f"{'-'.join(case)}.json").read_text())
    parts = {name: Code(**found.pop(name)) for name in ("forward", "backward")}
    return Made(**parts, **found)
