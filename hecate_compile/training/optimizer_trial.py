"""Find out by a trial whether an optimizer is right on shards: none says whether it needs more than a rank has.

Before the first step of an optimizer that is not torch's own, two twins of it take a few steps on small made-up
parameters, one with them whole, one with a part of those that are sharded. Elementwise optimizers give equal numbers.
Those that take norms, means or factors do not, nor those that send parameters: every rank tries its own part.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import re
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from hecate.private import tree_leaves
from hecate.runtime.comm import collectives
from hecate.runtime.comm.history import doing
from hecate.runtime.comm.warn import warn_together
from hecate.runtime.comm.world import World
from hecate.wrap.expert_shards import is_member_shard
from hecate.wrap.shard import shard_of

# Torch's own optimizers that treat each element alone. A class derived from one may not.
_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD SparseAdam"
ELEMENTWISE = {getattr(torch.optim, name) for name in _NAMES.split()}
# Optimizers that need whole parameters, which no trial shows: that begins after more steps, or for some numbers only.
_WHOLE = {"AdamP", "SGDP", "SOAP", "SWATS", "ScalableShampoo", "Shampoo"}
# Those that need all of them.
_ALL = {"DistributedShampoo", "LBFGS"}
# Most of the largest two dimensions of a made-up parameter, and of the others: some optimizers treat dimensions below
# 128 in another way, and quantize in blocks of up to 256, which halves must not cut.
_LARGE, _SMALL = 144, 16
# Factors of the gradient in each step: clipping by its own past shows when it grows.
_STEPS = (1.0, 4.0, 0.5, 9.0)


def refuse_unfit(optimizer: Optimizer, world: World, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on all ranks if ``optimizer`` is wrong on shards. A collective, if its class is not known.

    ``args`` and ``kwargs`` are those of its step.
    """
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        return
    names = {cls.__name__ for cls in kind.__mro__}
    if "ZeroRedundancyOptimizer" in names:
        raise RuntimeError(
            "hecate: ZeroRedundancyOptimizer copies each parameter from the rank that updates it to all others, over "
            "the experts that those own. Use the optimizer inside it, built from model.parameters(): each rank has "
            'state of its own experts alone, and with hecate.Config(dense="shard") of its own rows of all else.'
        )
    parts = [shard for group in optimizer.param_groups for p in group["params"] if (shard := shard_of(p)) is not None]
    if names & _ALL or (names & _WHOLE and not all(map(is_member_shard, parts))):
        raise RuntimeError(_needs_whole(kind))
    differs, problem = False, ""
    try:
        closure = any(callable(value) for value in (*args, *kwargs.values()))
        differs = _differs_on_shards(optimizer, world, closure)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    found = torch.tensor([differs, bool(problem)], dtype=torch.int64, device=world.control_device)
    world.queue.drain()
    with doing(f"the trial of {kind.__name__}"):
        collectives.all_reduce(found, world, dist.ReduceOp.MAX)
    differs_anywhere, unknown = found.tolist()
    if differs_anywhere:
        raise RuntimeError(_needs_whole(kind))
    if unknown:
        warn_together(
            f"hecate: whether {kind.__name__} is right on shards could not be tried on small parameters "
            f"({problem or 'another rank has the reason'}). Each rank has a part of every expert parameter: if its "
            "step takes a norm, a mean or a product of a parameter or of all gradients, or random numbers, ranks "
            "compute with different ones. Look for such in its step; AdamW, Adam, SGD and Lion have none.",
            world.everyone.rank,
            stacklevel=4,
        )


def _needs_whole(kind: type) -> str:
    return (
        f"hecate: {kind.__name__} needs whole parameters, to take norms, means or products of one or of all of them, "
        "and this rank holds a part of each; tried on small parameters, its numbers depend on how these are split. "
        "State in eight bits or fewer is in blocks of numbers, which ranks cut where parameters are small or odd. "
        "Use an optimizer that treats elements alone, such as AdamW, Adam, SGD or Lion, or leave sharded parameters "
        "to such a one."
    )


# --- made-up parameters ---


@dataclass(frozen=True)
class _MadeUp:
    """A small parameter that stands for all that are alike: its gradient is zero at ``target``, ``slope`` steep."""

    start: torch.Tensor
    target: torch.Tensor
    slope: torch.Tensor
    sharded: bool
    # One rank has it whole, and the others nothing of it.
    member: bool

    @classmethod
    def like(cls, parameter: nn.Parameter, generator: torch.Generator) -> _MadeUp:
        shard = shard_of(parameter)
        shape = list(shard.full_shape if shard is not None else parameter.shape)
        largest = sorted(range(len(shape)), key=lambda d: -shape[d])[:2]
        shape = [max(1, min(length, _LARGE if d in largest else _SMALL)) for d, length in enumerate(shape)]
        if shard is not None:
            shape[0] = max(2, shape[0] // 2 * 2)
        made: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
        start, target = (torch.randn(shape, generator=generator, **made) for _ in range(2))
        slope = torch.rand(shape, generator=generator, **made) + 0.5
        if shape:
            # Without this, parts would be alike and have the same norm.
            steps = torch.linspace(0.2, 5.0, shape[0], **made)
            slope *= steps.view(-1, *[1] * (len(shape) - 1))
        # The values are small, so that float32 has digits left for what a step adds.
        start, target, slope = (tensor.to(parameter.device) for tensor in (0.01 * start, 0.01 * target, slope))
        return cls(start, target, slope, sharded=shard is not None, member=is_member_shard(shard))

    def part(self, tensor: torch.Tensor, half: int | None) -> torch.Tensor:
        if half is None or not self.sharded:
            return tensor
        return tensor.chunk(2)[half] if not self.member else tensor[: 0 if half else None]


def _made_up(optimizer: Optimizer) -> tuple[dict[str, _MadeUp], dict[int, str]]:
    """Make a parameter for all with equal options and dimensions; return them by kind, and kinds by identity."""
    generator = torch.Generator("cpu").manual_seed(0)
    kinds: dict[str, _MadeUp] = {}
    kind_of: dict[int, str] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params" and not key.startswith("hecate_")}
        # Without digits: the layers of a model may have a group each, with a name or a rate of its own.
        text = re.sub(r"[\d.]+(e-?\d+)?", "", repr(options))
        for parameter in group["params"]:
            shard = shard_of(parameter)
            kind = f"{type(shard).__name__} {parameter.ndim} {text}"
            kind_of[id(parameter)] = kind
            if kind not in kinds:
                kinds[kind] = _MadeUp.like(parameter, generator)
    return kinds, kind_of


def _differs_on_shards(optimizer: Optimizer, world: World, closure: bool) -> bool:
    """Return whether a part's numbers differ from the whole's; ValueError if the optimizer draws random ones."""
    kinds, kind_of = _made_up(optimizer)

    def steps(half: int | None, seed: int) -> _Outcome:
        return _take_steps(optimizer, kinds, kind_of, half, closure=closure, seed=seed, device=world.device)

    half = 2 * world.rank // world.size
    whole, part = steps(None, 0), steps(half, 0)
    if _same(whole, part, kinds, half):
        return False
    # A part gets other random numbers than the whole, which proves nothing.
    if not _same(whole, steps(None, 1), kinds, None):
        raise ValueError("it draws random numbers")
    return True


@dataclass(frozen=True)
class _Outcome:
    """The result of a twin's steps: parameters by kind, and its groups' numbers, as an estimate of all gradients."""

    parameters: dict[str, torch.Tensor]
    numbers: dict[str, float]


def _take_steps(
    optimizer: Optimizer,
    kinds: dict[str, _MadeUp],
    kind_of: dict[int, str],
    half: int | None,
    *,
    closure: bool,
    seed: int,
    device: torch.device,
) -> _Outcome:
    parameters = {kind: nn.Parameter(made.part(made.start, half).clone()) for kind, made in kinds.items()}
    # The step of the type, without what schedulers and trainers have put around this optimizer's.
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    with _undisturbed(seed, device):
        twin = twin_of(optimizer, {id: parameters[kind] for id, kind in kind_of.items()})
        for factor in _STEPS:

            def gradients(factor: float = factor) -> torch.Tensor:
                for kind, made in kinds.items():
                    parameter = parameters[kind]
                    if not parameter.numel():
                        continue
                    steepness = factor * made.part(made.slope, half)
                    parameter.grad = steepness * (parameter.detach() - made.part(made.target, half))
                return torch.ones((), device=device)

            gradients()
            step(twin, gradients) if closure else step(twin)
    numbers = {
        f"{index} {key}": float(value)
        for index, group in enumerate(twin.param_groups)
        for key, value in group.items()
        if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }
    return _Outcome({kind: parameter.detach() for kind, parameter in parameters.items()}, numbers)


@contextmanager
def _undisturbed(seed: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers from ``seed`` in the block, compile and warn of nothing, and restore all generators."""
    host, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        if on_gpu is not None:
            torch.cuda.manual_seed(seed)
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_rng_state(host)
        random.setstate(python)
        np.random.set_state(numpy)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)


def _same(whole: _Outcome, part: _Outcome, kinds: dict[str, _MadeUp], half: int | None) -> bool:
    for kind, made in kinds.items():
        expected, found = made.part(whole.parameters[kind], half), part.parameters[kind]
        moved = float((whole.parameters[kind] - made.start).abs().max())
        rounding = 1e-6 * float(whole.parameters[kind].abs().max())
        if found.numel() and not float((expected - found).abs().max()) <= 1e-4 * moved + rounding:
            return False
    return all(
        math.isclose(number, part.numbers[key], rel_tol=1e-4)
        for key, number in whole.numbers.items()
        if key in part.numbers and math.isfinite(number)
    )


# Most numbers that an optimizer may hold besides parameters and their state, and have copied.
_MOST_NUMBERS = 2**22
_LARGE_TENSORS = "it holds large tensors beside its parameters"


def twin_of(optimizer: Optimizer, stand_ins: dict[int, nn.Parameter]) -> Optimizer:
    """Return a copy that shares nothing with ``optimizer`` and has ``stand_ins``, by identity of its own parameters.

    Raises ValueError if it holds more numbers besides its parameters and their state than are copied.
    """
    memo = _Memo(stand_ins)
    # Modules are not copied: a copy would be as large as the model, and the model itself is not to be changed.
    memo.update((id(o), _Absent(type(o).__name__)) for o in gc.get_objects() if issubclass(type(o), nn.Module))
    twin = _copy(optimizer, memo)
    seen: set[int] = set()
    for group in twin.param_groups:
        once = [p for p in {id(p): p for p in group["params"]}.values() if id(p) not in seen]
        seen.update(map(id, once))
        group["params"][:] = once
        if "lr" in group and group["lr"] is not None:
            # A warm-up begins with a rate of zero, with which nothing would move.
            group["lr"] = group["lr"].clamp(min=0.01) if torch.is_tensor(group["lr"]) else max(group["lr"], 0.01)
    twin.param_groups[:] = [group for group in twin.param_groups if group["params"]]
    return twin


class _Memo(dict[int, Any]):
    """The memo of ``copy.deepcopy``, which refuses more numbers than an optimizer may hold."""

    _numbers = 0

    def __setitem__(self, key: int, value: Any) -> None:
        self._numbers += value.numel() if isinstance(value, torch.Tensor) else 0
        if self._numbers > _MOST_NUMBERS:
            raise ValueError(_LARGE_TENSORS)
        super().__setitem__(key, value)


class _Absent:
    """A stand-in for a module, which an optimizer may hold as long as its step does without."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        raise ValueError(f"its step uses a {self._kind} that it holds")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def _copy(optimizer: Optimizer, memo: _Memo) -> Optimizer:
    twin = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = twin
    own = dict(vars(optimizer))
    # Trainers put these around an optimizer's methods, or leave them in it for one step.
    for key in ("step", "zero_grad", "grad_scale", "found_inf"):
        own.pop(key, None)
    twin_state: dict[Any, Any] = defaultdict(dict)
    memo[id(own["state"])] = twin_state
    for key, value in own.items():
        if key.startswith("_optimizer_"):
            memo[id(value)] = OrderedDict()
        elif isinstance(value, Optimizer) and id(value) not in memo:
            # An optimizer's own way to be copied forgets attributes that its class has added.
            _copy(value, memo)
    beside = (value for key, value in own.items() if key not in ("state", "param_groups"))
    held = (leaf for value in beside if id(value) not in memo for leaf in tree_leaves(value))
    if sum(leaf.numel() for leaf in held if isinstance(leaf, torch.Tensor) and id(leaf) not in memo) > _MOST_NUMBERS:
        raise ValueError(_LARGE_TENSORS)
    vars(twin).update(copy.deepcopy(own, memo))
    # State before the first step was made with the optimizer, or loaded.
    for key, value in own["state"].items():
        stand_in = memo.get(id(key))
        if stand_in is None:
            twin_state[key] = copy.deepcopy(value, memo)
            continue
        tensors = [part for part in value.values() if torch.is_tensor(part)]
        # Numbers, and plain state of the parameter's shape: subclasses of tensors may lack operators.
        if all(type(part) in (torch.Tensor, nn.Parameter) and part.shape in ((), key.shape) for part in tensors):
            twin_state[stand_in] = {name: _resized(part, key, stand_in, memo) for name, part in value.items()}
    return twin


def _resized(value: Any, parameter: nn.Parameter, stand_in: nn.Parameter, memo: _Memo) -> Any:
    """Return state of ``parameter`` as ``stand_in`` would have it, unless it was made element by element."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return copy.deepcopy(value, memo)
    like = stand_in if value.dtype == parameter.dtype else stand_in.to(value.dtype)
    return torch.full_like(like, value.flatten()[0].item() if value.numel() else 0, requires_grad=False)
