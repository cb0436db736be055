"""``hecate.compile`` and the functions that take a compiled model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hecate.checks import (
    check_attention,
    check_no_optimizer,
    check_usable,
    describe_model,
    warn_float16,
)
from hecate.compiled_model import CompiledModel, compiled_model_of
from hecate.config import Config
from hecate.graph.backend import Backend
from hecate.graph.traces import Traces
from hecate.integrations import (
    accelerate_state,
    model_averaging,
    transformers_generate,
    transformers_models,
    transformers_trainer,
)
from hecate.integrations.data_parallel import leave_unwrapped, no_sync
from hecate.private import set_compiled_call
from hecate.reports.explanation import Explanation
from hecate.reports.kept_parameters import kept_parameters
from hecate.reports.stats import Stats, collect_stats
from hecate.reports.timeline import write_timeline
from hecate.reports.units import rates_text
from hecate.runtime.comm.agreement import agree
from hecate.runtime.comm.measure_rates import measure_rates
from hecate.runtime.comm.waiting import doing, meet
from hecate.runtime.comm.world import find_topology, find_world, local_device
from hecate.runtime.kernels.launch import runs_on
from hecate.runtime.kernels.operands import FLOATS
from hecate.runtime.ops.gradients import GradientSync
from hecate.runtime.state.overlap_window import HiddenTime, can_measure
from hecate.runtime.state.placer import Placer
from hecate.runtime.state.step_mode import CurrentStep
from hecate.training.additions import Additions
from hecate.training.buffers import Buffers
from hecate.training.captured_step import CapturedStep, CudaGraphs, Recorder
from hecate.training.clip_grad_norm import watch_clipping
from hecate.training.drift import DriftCheck
from hecate.training.forward import CompiledForward
from hecate.training.grad_scaler import watch_scalers
from hecate.training.move_owners import OwnerMover
from hecate.training.optimizer_state import watch_optimizers
from hecate.training.outside_gradients import OutsideGradients
from hecate.training.same_batches import SameBatches
from hecate.wrap.attention_config import AttentionConfig
from hecate.wrap.carry_over import check_carried, describe_hooks
from hecate.wrap.changes import Changes
from hecate.wrap.choose_carrier import choose_carrier
from hecate.wrap.expert_shards import is_expert_shard, size_up
from hecate.wrap.find_experts import ExpertsModule, NoExpertsError, PassedOver, counts_experts, find_experts
from hecate.wrap.loops import ChangedLoops, make_loops_traceable
from hecate.wrap.lora_experts import adopt_adapters
from hecate.wrap.parameter_reads import install_reads
from hecate.wrap.shard import shard_of
from hecate.wrap.shard_model import shard_model

Model = TypeVar("Model", bound=nn.Module)


def compile(model: Model, config: Config | None = None, *, mesh: DeviceMesh | None = None) -> Model:
    """Shard the experts of an MoE model over all ranks and compile its training step, in place.

    Build the optimizer afterwards, from ``model.parameters()``. Under torchrun all ranks call this together;
    in a single process it just works.

    Args:
        model: any ``nn.Module`` with expert parameters ``[E, ...]``, or equal experts in a list; on the meta device
            it is made real shard by shard. With ``Config(attention=...)`` it may have none.
        config: see :class:`Config`.
        mesh: a one-dimensional ``DeviceMesh``; by default all ranks.

    Returns:
        The same object.

    Under torchrun it starts ``torch.distributed`` if nobody has. Rank 0's weights win. The first call of the model
    compiles; it raises :class:`UntracedReadError` if torch.compile cannot trace the experts.

    Raises:
        NoExpertsError: nothing that looks like experts was found.
        UnsupportedAttentionError: a layer cannot have the attention that ``Config(attention=...)`` asks for; the
            first call of the model raises it too.
        DisagreementError: ranks hold different models or use different options.
        RuntimeError: the model is compiled or wrapped already, or an optimizer holds its parameters; or with
            ``Config(transport="symmetric")`` ranks cannot share memory.
        ValueError: a wrong option, mesh or device.
        TypeError: not an ``nn.Module``, or not a :class:`Config`.
    """
    config = config if config is not None else Config()
    if not isinstance(config, Config):
        raise TypeError(f"hecate.compile: config is a {type(config).__name__}, expected a hecate.Config")
    with doing("hecate.compile"):
        return _compile(model, config, mesh)


def _compile(model: Model, config: Config, mesh: DeviceMesh | None) -> Model:
    precision = config.mixed_precision
    param_dtype = precision.param_dtype if precision else None

    # Step 1: everything that can be wrong, before anything changes.
    check_usable(model, config)
    known = check_attention(model, config)
    experts, passed_over = _find_experts(model, config)
    if not experts and config.room_percent:
        raise ValueError(
            f'hecate.compile: transport="{config.transport}" carries rows to experts, and none were found'
        )
    if not experts and config.dense == "replicate":
        # Nothing is exchanged inside a graph, so ranks need not run the same one.
        config = replace(config, policy="replicate")
    check_no_optimizer(model)
    world = find_world(mesh, _device_of(model, mesh))
    shard_dense = config.dense == "shard" and world.size > 1
    agree(
        [*describe_model(model, config), *describe_hooks(model, experts, dense=shard_dense)],
        "the model or its options",
        "Build the same model with the same hecate.Config on every rank.",
        world,
    )
    check_carried(model, experts, dense=shard_dense)
    warn_float16(model, world)
    # Loops over experts take every turn, or this refuses them.
    loops = ChangedLoops()
    if make_loops_traceable.__name__ not in config.disable_passes:
        loops = make_loops_traceable(model, experts, ranks=world.size)
    experts = adopt_adapters(model, experts)

    # Step 2: every rank keeps its own experts, and perhaps its own rows of all else, with rank 0's values.
    topology = find_topology(config.topology, world)
    agree([repr(topology)], "which ranks share a node", "Give Config(topology=hecate.Topology(...)).", world)
    carrier = choose_carrier(config, topology, world)
    step = CurrentStep()
    placer = Placer(config.make_policy(), topology, world, step)
    reduce_dtype = (precision.reduce_dtype or param_dtype if precision else None) or config.wire_dtype
    sync = GradientSync(world, dtype=reduce_dtype, in_graph=config.policy != "replicate", topology=topology)
    layers = shard_model(model, experts, world, placer, sync, carrier, shard_dense=shard_dense)

    # Step 3: reading a parameter becomes a gather or an averaged identity.
    replicated = install_reads(model, sync, step, param_dtype)
    size_up(experts, layers, param_dtype, rematerialize=config.rematerialize)
    for layer in layers:
        layer.wire_dtype = config.wire_dtype
    if config.rates is not None:
        placer.set_rates(config.rates, because="given in hecate.Config")
    elif world.size > 1:
        dtype = layers[0].dtype if layers else param_dtype or next(model.parameters()).dtype
        placer.set_rates(measure_rates(dtype, topology, world), because="measured in hecate.compile")

    # Step 4: torch.compile with our passes.
    transformers_models.prepare(model)
    if world.size > 1 or any(e.vectors for e in experts):
        watch_optimizers()
    if world.size > 1:
        watch_clipping()
        watch_scalers()
        leave_unwrapped()
        model_averaging.refuse_shards()
        transformers_generate.adopt()
    transformers_trainer.adopt()
    accelerate_state.adopt()
    backend = Backend(
        config=config,
        world=world,
        placer=placer,
        layers=layers,
        step=step,
        dense_parameters=_count_dense(model),
        key_heads=known.key_heads,
        sparse_layers=_sparse_layers(config, known),
        source_diff=loops.diff,
    )
    # What runs outside of graphs has full attention, and nobody would notice.
    changes = Changes()
    traces = Traces(model, backend, changes, fullgraph=config.attention is not None)

    # Step 5: what happens around a step.
    owner_mover = OwnerMover(experts, layers, placer, world)
    measures = config.rates is None and can_measure(placer, world)
    shards = tuple(shard for p in model.parameters() if (shard := shard_of(p)) is not None)
    outside_gradients = OutsideGradients(sync)
    for record in replicated:
        outside_gradients.watch(record)
    buffers = Buffers(model, sync, enabled=config.broadcast_buffers)
    additions = Additions(
        model,
        replicated,
        sync=sync,
        step=step,
        param_dtype=param_dtype,
        added=outside_gradients.watch,
        changed=buffers.find,
        changes=changes,
    )
    drift = DriftCheck(
        lambda: additions.records, sync, every=config.compare_every, in_forwards=config.policy != "replicate"
    )
    forward = CompiledForward(
        traces,
        model=model,
        world=world,
        records=(*layers, *shards),
        experts=experts,
        step=step,
        owner_mover=owner_mover,
        hidden_time=HiddenTime(placer, world) if measures else None,
        precision=precision,
        additions=additions,
        outside_gradients=outside_gradients,
        drift=drift,
        same_batches=SameBatches(world, enabled=config.policy != "replicate"),
        check_compiled=backend.check_sparse if config.attention is not None else None,
        one_graph=config.attention is not None,
        buffers=buffers,
        carrier=carrier,
    )
    set_compiled_call(model, forward)
    CompiledModel(
        config=config,
        world=world,
        experts=tuple(experts),
        passed_over=tuple(passed_over),
        layers=tuple(layers),
        sync=sync,
        backend=backend,
        placer=placer,
        owner_mover=owner_mover,
        forward=forward,
        loops=loops.places,
    ).attach(model)
    # As wrappers for data parallelism have it; accelerate looks for it.
    model.__dict__["no_sync"] = no_sync(sync)
    return model


def _find_experts(model: nn.Module, config: Config) -> tuple[list[ExpertsModule], list[PassedOver]]:
    """As the policy wants it; with sparse attention a model may have none."""
    if config.policy == "replicate":
        return [], []
    try:
        return find_experts(model, config.experts)
    except NoExpertsError as error:
        described = getattr(model, "config", None)
        # Something that may well be experts is not to be trained as if it were none without a word.
        if config.attention is None or config.experts is not None or error.passed_over or counts_experts(described):
            raise
        return [], []


def _sparse_layers(config: Config, known: AttentionConfig) -> int | None:
    """How many layers must become sparse, where the model's config says it."""
    if config.attention is None or known.layers is None or not known.all_attend:
        return None
    return len(config.attention.sparse_layers(known.layers))


def explain(model: nn.Module) -> Explanation:
    """What was found, rewritten and skipped, and why. ``print`` the result. No communication.

    With NCCL collectives have times in the first steps, and in the step behind each call.

    Raises:
        ValueError: the model was not compiled.
    """
    state = compiled_model_of(model, "explain")
    state.world.queue.ask_for_times()
    nodes, rates = state.placer.topology.num_nodes, state.placer.rates
    named = state.policy_without_placement
    policy = f"policy {named}" if named else f"{state.placer.policy!r} on {nodes} node(s)"
    if state.world.size > 1:
        policy += f", {rates_text(rates)}, {state.placer.rates_from}"
    return Explanation(
        world=state.world,
        policy=policy,
        experts=state.experts,
        passed_over=state.passed_over,
        layers=state.layers,
        graphs=tuple(state.backend.graphs),
        spans=tuple(state.world.queue.spans),
        disabled=state.backend.disabled,
        loops=state.loops,
        parameters=kept_parameters(model),
    )


def capture(
    model: nn.Module, forward: Callable[..., torch.Tensor], *inputs: torch.Tensor, warm_up: int = 3
) -> Callable[..., torch.Tensor]:
    """A training step's forward and backward as CUDA graphs; call what is returned in their place.

    >>> step = hecate.capture(model, lambda ids: model(ids, labels=ids).loss, ids)  # doctest: +SKIP
    >>> for ids in batches:  # doctest: +SKIP
    ...     loss = step(ids)
    ...     optimizer.step()

    ``step`` copies its inputs to where the graphs read them, launches both, and returns the loss. The next call
    writes over that, and over all gradients: nothing adds up, and nothing is to be cleared, but in front of a
    backward of the model itself. Placements change from
    step to step; a plan for which there is no room, other owners and other parameters are captured anew. If rows had
    no room on some rank it raises ``ExchangeFailed``, and the step can be made again with another batch. The
    optimizer is not in the graphs. All ranks make all calls together. Not run on a GPU yet (docs/gpu.md).

    Args:
        model: on a GPU; compiled with ``Config(transport="symmetric")`` where there are several ranks.
        forward: calls the model and returns a scalar loss. What else it does on the host is not repeated.
        inputs: tensors on the model's device, in the shapes and dtypes of all batches.
        warm_up: forwards and backwards in front, in which kernels are compiled and tuned, as in one in front of each
            capture. No parameter is updated; what a forward updates itself is, policies learn from the routing, and
            gradients are cleared. Delete losses of earlier steps first: they keep autograd on another stream.

    Raises:
        ValueError: the model was not compiled, is not on a GPU, or exchanges rows by collectives; no kernel takes its
            dtype, or there are none; or an input is on another device.
        TypeError: ``forward`` returned something else than a scalar loss.
        RuntimeError: gradients are averaged on the host behind a backward, because something outside of the compiled
            forward uses parameters.
    """
    state = compiled_model_of(model, "capture")
    device, alone = state.world.device, state.world.size == 1
    problem = ""
    if not alone and not state.forward.carrier.counts_stay:
        problem = (
            'with transport="collectives" the host says in each layer how many rows come, and is not there when a '
            'CUDA graph is replayed. Use hecate.Config(transport="symmetric")'
        )
    elif device.type != "cuda":
        problem = f"CUDA graphs need a model on a GPU, and this one is on {device}"
    elif not runs_on(device):
        problem = "without Triton, or with HECATE_KERNELS=0, the host reads numbers of the device in each layer"
    elif not alone and not state.world.queue.on_stream:
        problem = "ranks talk through the host over gloo, which no CUDA graph holds; each rank needs a GPU, for NCCL"
    elif wrong := [layer.name for layer in state.layers if layer.dtype not in FLOATS]:
        problem = f"no kernel takes the dtype of {wrong[0]}; expected one of {', '.join(map(str, FLOATS))}"
    if problem:
        raise ValueError(f"hecate.capture: {problem}")
    return captured_step(model, state, forward, inputs, warm_up=warm_up, recorder=CudaGraphs(device))


def captured_step(
    model: nn.Module,
    state: CompiledModel,
    forward: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    *,
    warm_up: int,
    recorder: Recorder,
) -> CapturedStep:
    """:func:`capture` with anything that records and replays."""
    return CapturedStep(
        model,
        state.forward,
        forward,
        inputs,
        layers=state.layers,
        placer=state.placer,
        world=state.world,
        gathers=2 if state.config.rematerialize else 1,
        warm_up=warm_up,
        recorder=recorder,
    )


def save_timeline(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write what this rank's collectives did in the last step, as a Chrome trace; open it in Perfetto.

    Of the last forward and its backward: when each collective ran, and when the compute stood still for it. With NCCL
    these are times of the GPU, for whose last collective this waits, and of the last step that has any: one of the
    first, or behind a call of this or of :func:`explain`. No communication.

    Args:
        path: a .json file; give every rank another one.

    Raises:
        ValueError: the model was not compiled, or it has not run, or there is one rank and nothing travels.
    """
    state = compiled_model_of(model, "save_timeline")
    state.world.queue.ask_for_times()
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
    state = compiled_model_of(model, "stats")
    state.forward.carrier.settle(whole=True)
    if state.world.group is not None:
        state.world.queue.drain()
        meet("hecate.stats", state.world.group)
    with doing("hecate.stats"):
        return collect_stats(tuple(dict.fromkeys(state.layers)), state.world)


def set_requires_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Switch the averaging of dense gradients off between the micro-batches of an accumulation, and on again.

    With it off, gradients of replicated parameters stay local in ``param.grad``; the next backward with it on
    averages the accumulated sum. Expert gradients always go to their owner, which is where they accumulate; and so
    do those of dense parameters with ``Config(dense="shard")``, to the rank that keeps the rows.

    Raises:
        ValueError: the model was not compiled.
    """
    sync = compiled_model_of(model, "set_requires_gradient_sync").sync
    sync.enabled = enabled
    sync.owed = sync.owed or not enabled


def _device_of(model: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    """Where the model is; for one on the meta device, where it should be."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}
    if len(devices) > 1:
        raise ValueError(
            f"hecate.compile: the model is spread over {sorted(map(str, devices))}. Move it to one device per rank."
        )
    if devices:
        return devices.pop()
    if mesh is None or mesh.device_type == "cuda":
        return local_device()
    return torch.device(mesh.device_type)


def _count_dense(model: nn.Module) -> int:
    """Elements of the matrices outside the experts in numbered blocks, whole: what computes between MoE layers."""
    count = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and not is_expert_shard(shard_of(parameter)) and re.search(r"(^|\.)\d+\.", name):
            shard = shard_of(parameter)
            count += (shard.full_shape if shard is not None else parameter.shape).numel()
    return count
