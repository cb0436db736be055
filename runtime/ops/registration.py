"""Registration of operators, and of collectives that a graph may start in one place and wait for in another.

A collective ``f(args) -> out`` comes as three operators:

- ``f(args)``, at once;
- ``f_start(args, after, note) -> token`` and ``f_wait(token, args, beside) -> out``.

A start copies the tensors that it sends, so its arguments may be reused at once; the wait takes them again for their
shapes. Data flow is all that Inductor respects (docs/decisions.md), so both halves take tensors that they do not
read: ``after`` holds the token of the collective before, which fixes the order, and ``beside`` the values to compute
before the wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hecate.private import OpOverload
from hecate.runtime.comm import queue
from hecate.runtime.comm.collective import Carries, Collective, Role, add_collective
from hecate.runtime.state.registry import Registry

_lib = torch.library.Library("hecate", "FRAGMENT")
# Operators talk to the host, to other ranks and to records of layers: a captured CUDA graph would skip all that.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe)


@dataclass(frozen=True, kw_only=True)
class Results:
    """Names of an operator's results, for people who read graphs."""

    names: tuple[str, ...]  # of its results; where there are more, they begin again
    # Of each, the glossary's letter for dimension 0 where only data decide it, else "".
    letters: tuple[str, ...]
    whole: str  # several results before they are taken apart; "" of a single one
    # Where the dense parameters are that it returns one result for each of.
    records: Registry[Any] | None


# Names of results by operator, or by function of Hecate that Dynamo leaves in its graphs.
RESULTS: dict[object, Results] = {}


def name_results(target: object, text: str, *, whole: str = "", records: Registry[Any] | None = None) -> None:
    """Register names of the results of ``target``, such as ``"placement, slots[K]"``."""
    names, letters = zip(*re.findall(r"(\w+)(?:\[(.+?)\])?", text), strict=True)
    RESULTS[target] = Results(names=names, letters=letters, whole=whole, records=records)


# Operators that decide something for one step; computed again, they would decide for another.
PLANS: set[OpOverload] = set()


def define(
    schema: str,
    kernel: Any,
    fake: Any,
    *,
    plans: bool = False,
    results: str = "",
    whole: str = "",
    records: Registry[Any] | None = None,
) -> OpOverload:
    """Register an operator with one kernel for all devices.

    ``plans`` says that its result is a decision about this step, which must be saved wherever a layer is computed
    again; ``results``, ``whole`` and ``records`` are names for people, see :func:`name_results`.
    """
    name = schema.split("(")[0]
    # ``torch.library.custom_op`` has several Python layers per call, and the host side of these operators is on the
    # critical path.
    _lib.define(schema, tags=_TAGS)
    _lib.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hecate::{name}", fake, lib=_lib)
    operator: OpOverload = getattr(torch.ops.hecate, name).default
    if plans:
        PLANS.add(operator)
    if results:
        name_results(operator, results, whole=whole, records=records)
    return operator


def differentiate(name: str, backward: Any, setup: Any) -> None:
    """Register the autograd formula of an operator, as ``torch.library.register_autograd`` does."""
    torch.library.register_autograd(f"hecate::{name}", backward, setup_context=setup, lib=_lib)


def begin(prepare: Callable[..., queue.Job], args: Sequence[Any], note: str) -> int:
    """Start a collective, and return its number for :func:`queue.wait`."""
    return queue.start(prepare(*args), note)


def define_collective(
    schema: str,
    prepare: Callable[..., queue.Job],
    fake: Any,
    *,
    role: Role,
    carries: Carries,
    results: str = "",
    whole: str = "",
    records: Registry[Any] | None = None,
    **described: Any,
) -> Collective:
    """Register a collective and its halves.

    ``prepare`` packs the tensors to send and returns the rest as a job, which must not touch the arguments. ``role``,
    ``carries`` and ``described`` are attributes of :class:`Collective`, the rest is as in :func:`define`.
    """
    name, rest = schema.split("(", 1)
    arguments, result = rest.rsplit(") -> ", 1)

    def at_once(*args: Any) -> Any:
        return queue.run(prepare(*args))

    def start(*given: Any) -> Tensor:
        *args, _, note = given
        # A graph keeps the token on the host, whatever the default device is. ``torch.tensor`` would take three times
        # as long.
        return torch.from_numpy(np.array([begin(prepare, args, note)], dtype=np.int64))

    def wait(token: Tensor, *given: Any) -> Any:
        return queue.wait(int(token))

    def token(*args: Any) -> Tensor:
        return torch.empty(1, dtype=torch.int64, device="cpu")

    def waited(token: Tensor, *given: Any) -> Any:
        *args, _ = given
        return fake(*args)

    return add_collective(
        Collective(
            name=name,
            whole=define(schema, at_once, fake, results=results, whole=whole, records=records),
            start=define(f"{name}_start({arguments}, Tensor[] after, str note) -> Tensor", start, token),
            wait=define(f"{name}_wait(Tensor token, {arguments}, Tensor[] beside) -> {result}", wait, waited),
            role=role,
            carries=carries,
            **described,
        )
    )
