"""``hecate.compile`` and the functions that take a compiled model."""

from __future__ import annotations

import gc
import logging
import os
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hecate.config import Config
from hecate.graph.backend import Backend
from hecate.integrations import transformers_models
from hecate.passes import FINAL_PASSES, JOINT_PASSES, PASSES
from hecate.reports.explanation import Explanation, Stats, collect_stats
from hecate.reports.timeline import write_timeline
from hecate.runtime.comm.agreement import agree
from hecate.runtime.comm.measure_rates import measure_rates
from hecate.runtime.comm.world import World, find_topology, find_world
from hecate.runtime.ops.gradients import GradientSync
from hecate.runtime.state.layer import Layer
from hecate.runtime.state.overlap_window import HiddenTime, can_measure
from hecate.runtime.state.placer import Placer
from hecate.training.move_owners import Resharder
from hecate.wrap.dense_shards import DenseSharding, Places, dense_shard_of
from hecate.wrap.expert_shards import copy_from_rank0, has_meta, materialize, shard_experts, shard_of, size_up
from hecate.wrap.find_experts import ExpertsModule, Passed, find_experts
from hecate.wrap.parameter_reads import Forward, install_reads

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class _Compiled:
    """What is remembered about a compiled model."""

    config: Config
    world: World
    experts: tuple[ExpertsModule, ...]
    passed: tuple[Passed, ...]
    layers: tuple[Layer, ...]
    sync: GradientSync
    backend: Backend
    placer: Placer
    resharder: Resharder
    forward: Forward


_compiled: weakref.WeakKeyDictionary[nn.Module, _Compiled] = weakref.WeakKeyDictionary()


def compile(model: Model, config: Config | None = None, *, mesh: DeviceMesh | None = None) -> Model:
    """Shard the experts of an MoE model over all ranks and compile its training step, in place.

    Build the optimizer afterwards, from ``model.parameters()``. Under torchrun all ranks call this together;
    in a single process it just works.

    Args:
        model: any ``nn.Module`` with expert parameters ``[E, ...]``; on the meta device it is made real
            shard by shard.
        config: see :class:`Config`.
        mesh: a one-dimensional ``DeviceMesh``; by default all ranks.

    Returns:
        The same object.

    Under torchrun it starts ``torch.distributed`` if nobody has. Rank 0's weights win. The first call of the model
    compiles; it raises :class:`UntracedReadError` if torch.compile cannot trace the experts.

    Raises:
        NoExpertsError: nothing that looks like experts was found.
        DisagreementError: ranks hold different models or use different options.
        RuntimeError: the model is compiled or wrapped already, or an optimizer holds its parameters.
        ValueError: a wrong option, mesh or device.
        TypeError: not an ``nn.Module``, or not a :class:`Config`.
    """
    config = config if config is not None else Config()
    if not isinstance(config, Config):
        raise TypeError(f"hecate.compile: config is a {type(config).__name__}, expected a hecate.Config")

    # Step 1: everything that can be wrong, before anything changes.
    _check_usable(model, config)
    experts, passed = find_experts(model, config.experts)
    _check_no_optimizer(model)
    world = find_world(mesh, _device_of(model, mesh))
    agree(
        _describe_model(model, config),
        "the model or its options",
        "Build the same model with the same hecate.Config on every rank.",
        world,
    )
    _warn_float16(model, world)

    # Step 2: every rank keeps its own experts, and perhaps its own rows of all else, with rank 0's values.
    topology = find_topology(config.topology, world)
    agree([repr(topology)], "which ranks share a node", "Give Config(topology=hecate.Topology(...)).", world)
    placer = Placer(config.make_policy(), topology, world)
    policy = config.mixed_precision
    sync = GradientSync(world, dtype=(policy.reduce_dtype or policy.param_dtype) if policy else None)
    places = Places(model)
    dense = DenseSharding(experts, places, sync) if config.dense == "shard" and world.size > 1 else None
    if has_meta(model):
        layers = materialize(model, experts, world, placer, places, dense)
    else:
        layers = shard_experts(experts, world, placer)
        if dense is not None:
            dense.shard_all(model)
    copy_from_rank0(model, world)

    # Step 3: reading a parameter becomes a gather or an averaged identity.
    forward = Forward()
    install_reads(model, experts, layers, sync, forward, policy.param_dtype if policy else None)
    size_up(experts, layers, policy.param_dtype if policy else None)
    if config.rates is not None:
        placer.rates = config.rates
    elif world.size > 1:
        placer.rates = measure_rates(layers[0].dtype, topology, world)

    # Step 4: torch.compile with our passes.
    transformers_models.prepare(model)
    _refuse_ddp(model, world)
    backend = Backend(
        config=config, world=world, placer=placer, layers=layers, dense_parameters=_count_dense(model)
    )  # fmt: skip
    model.compile(backend=backend)
    compiled: Any = model._compiled_call_impl
    resharder = Resharder(experts, layers, placer, world)
    hidden = HiddenTime(placer, world) if config.rates is None and can_measure(placer, world) else None
    model._compiled_call_impl = _around_forward(
        compiled, experts, backend, forward, placer, resharder, hidden, policy
    )  # fmt: skip
    _compiled[model] = _Compiled(
        config=config, world=world, experts=tuple(experts), passed=tuple(passed), layers=tuple(layers),
        sync=sync, backend=backend, placer=placer, resharder=resharder,
        forward=forward,
    )  # fmt: skip
    return model


def explain(model: nn.Module) -> Explanation:
    """What was found, rewritten and skipped, and why. ``print`` the result. No communication.

    Raises:
        ValueError: the model was not compiled.
    """
    state = _state_of(model, "explain")
    nodes, rates = state.placer.topology.num_nodes, state.placer.rates
    policy = "policy gather" if state.config.policy == "gather" else f"{state.placer.policy!r} on {nodes} node(s)"
    if state.world.size > 1:
        policy += f", {rates}"
    return Explanation(
        world=state.world, policy=policy, experts=state.experts, passed=state.passed, layers=state.layers,
        graphs=tuple(state.backend.graphs), spans=tuple(state.world.queue.spans), disabled=state.backend.disabled,
    )  # fmt: skip


def save_timeline(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write what this rank's collectives did in the last step, as a Chrome trace; open it in Perfetto.

    Of the last forward and its backward: when each collective ran, and when the compute stood still for it. With NCCL
    the host only knows when it launched them; use torch.profiler there. No communication.

    Args:
        path: a .json file; give every rank another one.

    Raises:
        ValueError: the model was not compiled, or it has not run, or there is one rank and nothing travels.
    """
    state = _state_of(model, "save_timeline")
    spans = [span for span in state.world.queue.spans if span.ready]
    if not spans:
        why = "there is one rank" if state.world.size == 1 else "run a forward first"
        raise ValueError(f"hecate.save_timeline: no collective has run: {why}")
    write_timeline(spans, path, state.world.rank)


def stats(model: nn.Module) -> Stats:
    """Rows and bytes per layer and rank in the last forward (and its backward). All ranks call it together.

    Layers that gather their experts are not in it: they exchange no rows.

    Raises:
        ValueError: the model was not compiled.
    """
    state = _state_of(model, "stats")
    return collect_stats(state.layers, state.world)


def set_requires_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Switch the averaging of dense gradients off between the micro-batches of an accumulation, and on again.

    With it off, gradients of replicated parameters stay local in ``param.grad``; the next backward with it on
    averages the accumulated sum. Expert gradients always go to their owner, which is where they accumulate; and so
    do those of dense parameters with ``Config(dense="shard")``, to the rank that keeps the rows.

    Raises:
        ValueError: the model was not compiled.
    """
    sync = _state_of(model, "set_requires_gradient_sync").sync
    sync.enabled = enabled
    sync.owed = sync.owed or not enabled


# --- checks ---


def _state_of(model: nn.Module, function: str) -> _Compiled:
    try:
        return _compiled[model]
    except (KeyError, TypeError):
        raise ValueError(
            f"hecate.{function}: this {type(model).__name__} was not compiled with hecate.compile. "
            "Pass the object that hecate.compile returned, not a wrapper or a submodule of it."
        ) from None


def _check_usable(model: nn.Module, config: Config) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"hecate.compile: expected an nn.Module, got {type(model).__name__}")
    if model in _compiled:
        raise RuntimeError("hecate.compile: this model is compiled already; use it as it is")
    inner = [name for name, module in model.named_modules() if module in _compiled]
    if inner:
        raise RuntimeError(f"hecate.compile: {inner[0]} inside this model is compiled already")
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule) or model._compiled_call_impl is not None:
        raise RuntimeError("hecate.compile: the model went through torch.compile before; pass the plain model")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise RuntimeError(
            f"hecate.compile: the model is wrapped in {type(model).__name__}; pass the model inside, "
            "Hecate averages gradients itself"
        )
    names = [function.__name__ for function in (*PASSES, *JOINT_PASSES, *FINAL_PASSES)]
    unknown = [name for name in config.disable_passes if name not in names]
    if unknown:
        raise ValueError(f"hecate.Config: disable_passes names {unknown}; the passes are {names}")


def _refuse_ddp(model: nn.Module, world: World) -> None:
    """DDP around a compiled model would copy rank 0's experts over everybody else's.

    With every parameter on its ignore list it refuses by itself, whoever wraps the model.
    """
    if world.size > 1:
        root: Any = model
        root._ddp_params_and_buffers_to_ignore = [
            name for name, _ in (*model.named_parameters(), *model.named_buffers())
        ]


def _check_no_optimizer(model: nn.Module) -> None:
    """An optimizer built before would go on updating parameters that the model no longer has."""
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    for thing in gc.get_objects():
        # By type: isinstance would ask every proxy object in the process about its class.
        if not issubclass(type(thing), torch.optim.Optimizer):
            continue
        held = [own[id(p)] for group in getattr(thing, "param_groups", ()) for p in group["params"] if id(p) in own]
        if held:
            raise RuntimeError(
                f"hecate.compile: {type(thing).__name__} already holds parameters of this model "
                f"({held[0]} and {len(held) - 1} more), which compile replaces. Build the optimizer after "
                "hecate.compile; if it is left over from before, delete it."
            )


def _device_of(model: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    """Where the model is; for one on the meta device, where it should be."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}
    if len(devices) > 1:
        raise ValueError(
            f"hecate.compile: the model is spread over {sorted(map(str, devices))}. Move it to one device per rank."
        )
    if devices:
        return devices.pop()
    kind = mesh.device_type if mesh is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device(kind)


def _count_dense(model: nn.Module) -> int:
    """Elements of the matrices outside the experts in numbered blocks, whole: what computes between MoE layers."""
    count = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and shard_of(parameter) is None and re.search(r"(^|\.)\d+\.", name):
            whole = dense_shard_of(parameter)
            count += (whole.full_shape if whole is not None else parameter.shape).numel()
    return count


def _describe_model(model: nn.Module, config: Config) -> list[str]:
    lines = [f"model {type(model).__name__}"]
    lines += [f"option {name} = {value!r}" for name, value in vars(config).items() if name != "dump"]
    lines += [
        f"parameter {name} {list(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
        for name, p in model.named_parameters()
    ]
    lines += [f"buffer {name} {list(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    return lines


def _warn_float16(model: nn.Module, world: World) -> None:
    if world.rank == 0 and any(p.dtype == torch.float16 and p.requires_grad for p in model.parameters()):
        warnings.warn(
            "hecate.compile: trainable float16 parameters. It runs, but gradients below 6e-8 become zero and "
            "torch.amp.GradScaler cannot help: it decides on each rank alone whether to skip a step, and ranks "
            "hold different experts. Use bfloat16, or float32 with Config(mixed_precision=...).",
            stacklevel=3,
        )


# --- the call ---


def _dynamo_options() -> dict[str, Any]:
    """What Dynamo must do differently while it traces the model."""
    methods = ("debug", "info", "warning", "error", "warning_once", "info_once")
    return {
        # Shards have a data-dependent length although they are parameters; see sharding.
        "force_parameter_static_shapes": False,
        # Routing makes sizes that depend on data; without these every one of them is a graph break.
        "capture_dynamic_output_shape_ops": True,
        "capture_scalar_outputs": True,
        # So is a line in a log (the last two are what transformers adds); traced code does not log.
        "ignore_logger_methods": {
            *torch._dynamo.config.ignore_logger_methods,
            *(getattr(logging.Logger, name) for name in methods if hasattr(logging.Logger, name)),
        },
    }


def _around_forward(
    compiled: Callable[..., Any],
    experts: list[ExpertsModule],
    backend: Backend,
    forward: Forward,
    placer: Placer,
    resharder: Resharder,
    hidden: HiddenTime | None,
    policy: Any,
) -> Callable[..., Any]:
    options = _dynamo_options()
    compared: set[bool] = set()
    cast_inputs = bool(policy and policy.param_dtype and policy.cast_forward_inputs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if cast_inputs:
            args, kwargs = _cast((args, kwargs), policy.param_dtype)
        resharder.before_forward()
        if hidden is not None:
            hidden.before_forward()
        placer.learning = torch.is_grad_enabled()
        backend.world.queue.begin_step()
        forward.running = True
        mode = torch.is_grad_enabled()
        backend.comparing = mode not in compared
        try:
            with torch._dynamo.config.patch(options), _without_gradients(experts):
                out = compiled(*args, **kwargs)
        finally:
            forward.running = False
        compared.add(mode)
        if forward.after is not None:
            forward.after()
        return _cast(out, policy.output_dtype) if policy and policy.output_dtype else out

    return call


@contextmanager
def _without_gradients(experts: list[ExpertsModule]) -> Iterator[None]:
    """Hide the gradients of shards while Dynamo may trace.

    It makes a fake of ``.grad`` too, with a data-dependent length of its own, and then cannot tell that this
    equals the parameter's.
    """
    # Looked up anew: load_state_dict(assign=True) makes new parameters.
    shards = [p for e in experts for key in e.parameters if (p := e.module._parameters[key]) is not None]
    gradients = [shard.grad for shard in shards]
    for shard in shards:
        shard.grad = None
    try:
        yield
    finally:
        for shard, gradient in zip(shards, gradients, strict=True):
            shard.grad = gradient


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def one(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return torch.utils._pytree.tree_map(one, tree)
