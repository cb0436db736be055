"""Launches of kernels: where they run, and how they are declared, tuned and launched.

``HECATE_KERNELS=0`` uses references everywhere. ``HECATE_AUTOTUNE=0`` uses the first configuration of each kernel,
for runs that must repeat bit by bit: the last bits of a grouped product depend on it. Both are read once.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as missing:
    # A broken Triton must raise: it would otherwise look like a slow GPU.
    if missing.name != "triton":
        raise
    triton = None
    # Kernels name the type of their constants when they are defined, also without Triton.
    tl = SimpleNamespace(constexpr=int)

# Triton decides by this variable when a kernel is defined.
_YES = ("1", "true", "on", "yes", "y")
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET", "").lower() in _YES
_ALLOWED = os.environ.get("HECATE_KERNELS", "1") != "0"
_TUNES = os.environ.get("HECATE_AUTOTUNE", "1") != "0"

# A kernel remembers the arguments of its running launch, and collectives may have a thread of their own.
_ONE_AT_A_TIME = Lock()

# Trials of an earlier process are read from Triton's cache on the disk, where its release can do that.
_KEPT = {"cache_results": True} if triton and "cache_results" in signature(triton.autotune).parameters else {}

_log = logging.getLogger("hecate")

# Triton's own part of a configuration; the rest are constants of the kernel.
_OF_TRITON = ("num_warps", "num_stages")


def runs_on(device: torch.device) -> bool:
    """Tell whether kernels run on tensors of ``device``: on CUDA, and under the interpreter on the CPU."""
    if triton is None or not _ALLOWED:
        return False
    return device.type == "cuda" or (INTERPRETED and device.type == "cpu")


def on_amd() -> bool:
    """Tell whether "cuda" is ROCm: torch gives AMD's GPUs that name, too, and capabilities of their own."""
    return torch.version.hip is not None


def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the capability of an NVIDIA GPU, such as (9, 0); None for any other device."""
    return None if device.type != "cuda" or on_amd() else torch.cuda.get_device_capability(device)


def tuned(
    configs: Sequence[Mapping[str, int]],
    key: Sequence[str],
    *,
    varying: Sequence[str] = (),
    unaligned: Sequence[str] = (),
    restore: Sequence[str] = (),
    suits: Callable[[Mapping[str, Any]], bool] | None = None,
) -> Callable[[Any], Any]:
    """Declare a kernel with the configurations that it may have.

    The first call with new values of ``key`` times all that compile, for which it waits for the device. The
    interpreter takes the first.

    Args:
        configs: constants of the kernel, with ``num_warps`` and ``num_stages`` beside them.
        key: arguments for whose values, and for the dtypes of all tensors, it holds. None that change each step;
            :func:`rows_class` stands for a number of rows.
        varying: numbers that change each step: the kernel is not compiled again for them.
        unaligned: tensors that begin anywhere in memory, as parts of others do: nor is it for those.
        restore: tensors that the kernel changes in place; each trial is undone.
        suits: whether a configuration is worth a trial, from its numbers and the arguments by name.
    """

    def declare(kernel: Any) -> Any:
        if triton is None:
            return kernel
        chosen = list(configs) if _TUNES and not INTERPRETED else list(configs[:1])
        return triton.autotune(
            configs=[_config(config) for config in chosen],
            key=list(key),
            restore_value=list(restore) if restore and len(chosen) > 1 else None,
            prune_configs_by=None if suits is None else {"early_config_prune": _only(suits)},
            do_bench=_milliseconds,
            **_KEPT,
        )(triton.jit(do_not_specialize=list(varying), **_beginning_anywhere(unaligned))(kernel))

    return declare


def rows_class(rows: int) -> int:
    """Return the class of ``rows``, for which one configuration is fastest: that for 64 is not for 65,536."""
    # A class spans a factor of four, since small changes matter little, and ends between powers of two, near
    # which numbers of rows mostly are.
    return (rows + rows // 2).bit_length() // 2


def _beginning_anywhere(names: Sequence[str]) -> dict[str, Any]:
    # Without it Triton compiles another kernel where a tensor does not begin at 16 bytes.
    option = "do_not_specialize_on_alignment"
    return {option: list(names)} if option in signature(triton.jit).parameters else {}


def jit(function: Any) -> Any:
    """Declare a function that kernels call."""
    return function if triton is None else triton.jit(function)


def _milliseconds(run: Callable[[], object], quantiles: Sequence[float]) -> Sequence[float]:
    """Time a trial in Triton's own way; configurations that do not compile, where it may fail, take infinite time."""
    from triton.compiler import CompilationError
    from triton.runtime import driver

    try:
        times: Sequence[float] = driver.active.get_benchmarker()(run, quantiles=quantiles)
        return times
    except (CompilationError, RuntimeError) as error:
        # Other errors, such as too little memory, are not known to be the configuration's.
        if not isinstance(error, CompilationError) and "PassManager" not in str(error):
            raise
        _log.warning("hecate: a configuration of a kernel does not compile and is left out: %s", error)
        return [float("inf")] * len(quantiles)


def _only(suits: Callable[[Mapping[str, Any]], bool]) -> Callable[..., list[Any]]:
    def prune(configs: Sequence[Any], arguments: Mapping[str, Any], **constants: Any) -> list[Any]:
        return [config for config in configs if suits({**arguments, **constants, **config.all_kwargs()})]

    return prune


def _config(config: Mapping[str, int]) -> Any:
    constants = {name: value for name, value in config.items() if name not in _OF_TRITON}
    return triton.Config(constants, **{name: config[name] for name in _OF_TRITON if name in config})


def launch(kernel: Any, grid: Callable[[Mapping[str, int]], int], *args: Any, **constants: Any) -> None:
    """Run ``kernel`` on the device of its first argument, a tensor, be that current or not.

    ``grid`` gives a configuration's number of programs, not 0.
    """
    with _ONE_AT_A_TIME, _made_current(args[0].device):
        case = _case(kernel, args, constants)
        numbers = _CHOSEN.get(case)
        if numbers is not None:
            kernel.fn[(grid(numbers),)](*args, **constants, **numbers)
            return
        kernel[lambda meta: (grid(meta),)](*args, **constants)
        if case:
            _CHOSEN[case] = kernel.best_config.all_kwargs()


# The constants of each case's configuration. Triton's tuner would look for them in every launch.
_CHOSEN: dict[tuple[Any, ...], dict[str, Any]] = {}


def _case(kernel: Any, args: Sequence[Any], constants: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return values of the kernel's ``key`` and dtypes of tensors; nothing for a kernel without configurations."""
    configs = getattr(kernel, "configs", ())
    if len(configs) < 2:
        return (kernel,) if configs else ()
    given = dict(zip(kernel.arg_names, args, strict=False))
    values = [given[name] if name in given else constants[name] for name in kernel.keys]
    return kernel, *values, *[arg.dtype for arg in args if isinstance(arg, torch.Tensor)]


_ALREADY: AbstractContextManager[Any] = nullcontext()


def _made_current(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _ALREADY
    return torch.cuda.device(device)
