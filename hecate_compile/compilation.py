"""``hecate.compile``, stage by stage."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hecate.checks import (
    warn_single_rows,
)
from hecate.compiled_model import CompiledModel
from hecate.config import Config
from hecate.found import Found, find_all, read_dtype
from hecate.graph.backend import Backend
from hecate.graph.traces import Traces
from hecate.integrations import (
    accelerate_state,
    peft_adapters,
    transformers_models,
    transformers_trainer,
    whole_counts,
)
from hecate.integrations.data_parallel import leave_unwrapped, no_sync, refuse_averages
from hecate.private import set_compiled_call
from hecate.runtime.comm.agreement import agree
from hecate.runtime.comm.history import doing
from hecate.runtime.comm.measure_rates import measure_rates
from hecate.runtime.comm.world import find_topology
from hecate.runtime.ops.gradients import GradientSync, GradientSyncs, ReplicatedParameter
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state.layer import Carrier, Layer
from hecate.runtime.state.overlap_window import HiddenTime, can_measure
from hecate.runtime.state.placer import Placer
from hecate.runtime.state.step_mode import CurrentStep
from hecate.training.between_forwards import Additions, BetweenForwards
from hecate.training.buffers import Buffers
from hecate.training.clip_grad_norm import watch_clipping, watch_scalers
from hecate.training.drift import DriftCheck, SameBatches
from hecate.training.forward import CompiledForward
from hecate.training.move_owners import OwnerMover
from hecate.training.optimizer_state import watch_optimizers
from hecate.training.outside_gradients import OutsideGradients
from hecate.wrap.changes import Changes
from hecate.wrap.expert_shards import count_dense, size_up
from hecate.wrap.parameter_reads import install_reads
from hecate.wrap.shard import shard_of
from hecate.wrap.shard_model import choose_carrier, shard_model
from hecate.wrap.text_model import towers_beside
from hecate.wrap.whole_layers import WholeLayers
from hecate.wrap.whole_runs import Gathering

Model = TypeVar("Model", bound=nn.Module)


def compile(model: Model, config: Config | None = None, *, mesh: DeviceMesh | None = None) -> Model:
    """Shard the experts of an MoE model over all ranks, or groups of them, and compile its training step, in place.

    Build the optimizer afterwards, from ``model.parameters()``. Under torchrun all ranks call this together;
    in a single process it just works.

    Args:
        model: any ``nn.Module`` with expert parameters ``[E, ...]``, or equal experts in a list; on the meta device
            it is made real shard by shard. With ``Config(attention=...)`` it may have none.
        config: see :class:`Config`.
        mesh: a ``DeviceMesh`` of one dimension, by default all ranks; or of two, groups and the ranks of each. Where
            parameters are DTensors (tensor parallelism), the dimensions along which the batch is split.

    Returns:
        The same object.

    Under torchrun it starts ``torch.distributed`` if nobody has. Rank 0's weights win. The first call of the model
    compiles; it raises :class:`UntracedReadError` if torch.compile cannot trace the experts.

    Raises:
        NoExpertsError: nothing that looks like experts was found.
        UnsupportedAttentionError: a layer cannot have the attention that ``Config(attention=...)`` asks for; the
            first call of the model raises it too.
        DisagreementError: ranks hold different models or use different options.
        RuntimeError: the model is compiled or wrapped already, or split as no rank can train it; or an optimizer
            holds its parameters; or with
            ``Config(transport="symmetric")`` ranks cannot share memory.
        ValueError: a wrong option, mesh or device.
        TypeError: not an ``nn.Module``, or not a :class:`Config`.
    """
    config = config if config is not None else Config()
    if not isinstance(config, Config):
        raise TypeError(f"hecate.compile: config is a {type(config).__name__}, expected a hecate.Config")
    with doing("hecate.compile"):
        return _compile(model, config, mesh)


@dataclass(frozen=True, kw_only=True)
class _Sharded:
    """The parts of a sharded model by which its ranks work together."""

    layers: list[Layer]
    nodes: Topology
    placer: Placer
    carrier: Carrier
    syncs: GradientSyncs
    step: CurrentStep
    replicated: tuple[ReplicatedParameter, ...]
    twins: tuple[ReplicatedParameter, ...]  # shards that other groups have, too


def _compile(model: Model, config: Config, mesh: DeviceMesh | None) -> Model:
    found = find_all(model, config, mesh)
    sharded = _shard(model, found)
    warn_single_rows(model, found.mesh.everyone)
    _set_rates(model, found, sharded)
    _adopt_libraries(model, found)
    changes = Changes()
    backend = Backend(
        config=found.config,
        world=found.mesh.everyone,
        nodes=sharded.nodes,
        placer=sharded.placer,
        layers=sharded.layers,
        step=sharded.step,
        dense_parameters=count_dense(model),
        key_heads=found.attention.key_heads,
        sparse_layers=found.attention.count_sparse(found.config.attention),
        source_diff=found.loops.diff,
        # Of a text model ranks compare what they meet in: images are in its graphs, and text is another one.
        compares_all=found.text_model is None,
    )
    # With sparse attention there is one graph alone: what runs outside would be dense, and nobody would notice.
    whole = found.config.attention is not None
    traces = Traces(model, backend, changes, fullgraph=whole, text_model=found.text_model)
    owner_mover = OwnerMover(found.experts, sharded.layers, sharded.placer, found.mesh)
    forward = _forward(model, found, sharded, traces, backend, changes, owner_mover)
    set_compiled_call(model, forward)
    CompiledModel(
        config=found.config,
        mesh=found.mesh,
        experts=tuple(found.experts),
        passed_over=tuple(found.passed_over),
        layers=tuple(sharded.layers),
        nodes=sharded.nodes,
        sync=sharded.syncs.whole,
        backend=backend,
        placer=sharded.placer,
        owner_mover=owner_mover,
        forward=forward,
        loops=found.loops.places,
        text_model=next((name for name, module in model.named_modules() if module is found.text_model), ""),
    ).attach(model)
    # Wrappers for data parallelism have a method of this name, which accelerate looks for.
    model.__dict__["no_sync"] = no_sync(sharded.syncs.whole)
    return model


def _shard(model: nn.Module, found: Found) -> _Sharded:
    """Keep this rank's own experts, and perhaps its own rows of all else, with rank 0's values."""
    config, everyone, group, experts = found.config, found.mesh.everyone, found.mesh.group, found.experts
    nodes = find_topology(config.topology, everyone)
    topology = nodes.among(found.mesh.ranks)
    agree(
        [repr(nodes), f"in a group: {topology}"],
        "which ranks share a node",
        "Give Config(topology=hecate.Topology(...)); groups must lie in nodes alike.",
        everyone,
    )
    carrier, step = choose_carrier(config, topology, group), CurrentStep()
    placer = Placer(config.make_policy(), topology, group, step)
    precision, param_dtype = config.mixed_precision, read_dtype(config)
    reduce_dtype = (precision.reduce_dtype or param_dtype if precision else None) or config.wire_dtype
    sync = GradientSync(
        everyone,
        dtype=reduce_dtype,
        in_graph=config.policy != "replicate",
        text_model=weakref.ref(found.text_model) if found.text_model is not None else None,
        topology=nodes,
    )
    shard_dense = config.dense == "shard" and group.size > 1
    towers = towers_beside(found.text_model, model) if found.text_model is not None else ()
    layers = shard_model(
        model,
        experts,
        found.mesh,
        placer,
        sync,
        carrier,
        left_out=found.loops.left_out,
        shard_dense=shard_dense,
        towers=towers,
    )
    syncs = GradientSyncs(
        whole=sync,
        split=sync.among(found.mesh.batch),
        shards=sync.among(found.mesh.twins),
        split_along=found.split_along,
    )
    replicated, twins = install_reads(model, syncs, step, param_dtype)
    size_up(experts, layers, param_dtype, rematerialize=config.rematerialize)
    for layer in layers:
        layer.wire_dtype = config.wire_dtype
    return _Sharded(
        layers=layers,
        nodes=nodes,
        placer=placer,
        carrier=carrier,
        syncs=syncs,
        step=step,
        replicated=replicated,
        twins=twins,
    )


def _set_rates(model: nn.Module, found: Found, sharded: _Sharded) -> None:
    config, placer, layers = found.config, sharded.placer, sharded.layers
    if config.rates is not None:
        placer.set_rates(config.rates, because="given in hecate.Config")
    elif found.mesh.everyone.size > 1:
        dtype = layers[0].dtype if layers else read_dtype(config) or next(model.parameters()).dtype
        # Over everyone, as groups use the links at the same time.
        rates = measure_rates(dtype, sharded.nodes, found.mesh.everyone)
        placer.set_rates(rates, because="measured in hecate.compile")


def _adopt_libraries(model: nn.Module, found: Found) -> None:
    """Make optimizers, clipping and other libraries work with shards; ``docs/patches.md`` lists what changes."""
    transformers_models.install_recorders(model)
    if found.mesh.everyone.size > 1:
        watch_optimizers()
        watch_clipping()
        watch_scalers()
        leave_unwrapped()
        refuse_averages()
        transformers_models.generate_together(model)
        whole_counts.adopt()
    peft_adapters.refuse_merges_of_parts(model)
    transformers_trainer.adopt()
    accelerate_state.adopt()


def _forward(
    model: nn.Module,
    found: Found,
    sharded: _Sharded,
    traces: Traces,
    backend: Backend,
    changes: Changes,
    owner_mover: OwnerMover,
) -> CompiledForward:
    """Return the callable that a call of the model runs."""
    config, everyone, placer, syncs = found.config, found.mesh.everyone, sharded.placer, sharded.syncs
    in_graphs, sparse = config.policy != "replicate", config.attention is not None
    each = {id(one): one for one in (syncs.whole, syncs.split, syncs.shards)}
    watches = {number: OutsideGradients(one) for number, one in each.items()}
    for record in (*sharded.replicated, *sharded.twins):
        watches[id(record.sync)].watch(record)
    outside_gradients = tuple(watches.values())
    buffers = Buffers(model, syncs.whole, enabled=config.broadcast_buffers)
    additions = Additions(
        model,
        sharded.replicated,
        syncs=syncs,
        step=sharded.step,
        param_dtype=read_dtype(config),
        added=lambda record: watches[id(record.sync)].watch(record),
        changed=buffers.find,
        changes=changes,
    )

    def averaged_by(sync: GradientSync) -> list[ReplicatedParameter]:
        return [record for record in (*additions.records, *sharded.twins) if record.sync is sync]

    shards = tuple(shard for p in model.parameters() if (shard := shard_of(p)) is not None)
    measures = config.rates is None and can_measure(placer, found.mesh.group)
    between = BetweenForwards(
        model=weakref.ref(model),
        world=everyone,
        has_shards=bool(sharded.layers or shards),
        experts=found.experts,
        carrier=sharded.carrier,
        buffers=buffers,
        additions=additions,
        drift=tuple(
            DriftCheck(
                partial(averaged_by, one),
                one.world,
                lambda: any(watch.stepped_apart for watch in outside_gradients),
                every=config.compare_every,
                in_forwards=in_graphs,
            )
            for one in each.values()
        ),
        owner_mover=owner_mover,
        hidden_time=HiddenTime(placer, found.mesh.group) if measures else None,
    )

    def began() -> None:
        for watch in outside_gradients:
            watch.backward_ran()

    gathering = Gathering(world=everyone, dtype=read_dtype(config), step=sharded.step, began=began)
    return CompiledForward(
        traces,
        between=between,
        records=(*sharded.layers, *shards, *sharded.twins),
        experts=found.experts,
        step=sharded.step,
        precision=config.mixed_precision,
        outside_gradients=outside_gradients,
        same_batches=SameBatches(everyone, enabled=in_graphs, copies=found.mesh.copies),
        whole_layers=WholeLayers(model, found.experts, syncs.whole, gathering),
        check_compiled=backend.check_compiled,
        one_graph=sparse,
    )
