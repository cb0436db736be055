"""Options of :func:`hecate.compile`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Backend = Literal["inductor", "aot_eager"]
Policy = Literal["static", "gather"]
Dense = Literal["replicate"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of :func:`hecate.compile`. All have a default that is right for training.

    Attributes:
        dense: how parameters outside the experts are kept. ``"replicate"``: whole on every rank,
            gradients averaged.
        backend: what compiles the rewritten graph. ``"aot_eager"`` compiles in seconds and runs the
            graph node by node: for debugging.
        disable_passes: names of passes to leave out, to find a fault. The program stays right.
        policy: ``"static"``: every expert is computed by its owner and tokens travel to it.
            ``"gather"``: every rank gathers all experts and computes its own tokens; nothing is exchanged.
        dump: folder for the graphs before and after every pass; ``HECATE_DUMP`` sets it too.
        mixed_precision: a ``torch.distributed.fsdp.MixedPrecisionPolicy``. ``reduce_dtype`` is for the gradients
            of parameters outside the experts; an expert's gradient is a sum that its owner computes.
        experts: patterns (``fnmatch``, as in ``named_modules()``) of modules that hold expert parameters,
            where the finder has to be told. They alone decide, and each must match one.
    """

    dense: Dense = "replicate"
    backend: Backend = "inductor"
    disable_passes: Sequence[str] = ()
    policy: Policy = "static"
    dump: str | os.PathLike[str] | None = None
    mixed_precision: Any = None
    experts: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("dense", Dense), ("backend", Backend), ("policy", Policy)):
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise ValueError(f"hecate.Config: {name}={value!r}, expected one of {get_args(allowed)}")
        for name in ("disable_passes", "experts"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise TypeError(f"hecate.Config: {name}={value!r} is a string, expected a tuple: ({value!r},)")
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
        if self.mixed_precision is not None and not all(hasattr(self.mixed_precision, f) for f in fields):
            raise TypeError(
                f"hecate.Config: mixed_precision is a {type(self.mixed_precision).__name__}, expected a "
                "torch.distributed.fsdp.MixedPrecisionPolicy"
            )
