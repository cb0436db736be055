"""Make reads of parameter attributes in model code operators that gather or average.

The class of each module with parameters becomes a subclass with properties, so traced code reads

    expert parameter  ->  gather_experts(shard)      [E_r, ...] -> [E, ...]
    dense parameter   ->  replicate(parameter)       identity, backward averages the gradient
    or, sharded       ->  gather_dense([shard])[0]   [c, ...] -> [d, ...]

and is right before any pass runs. Where there are several groups of ranks, a shard is read through ``replicate``,
too, and its gradient is averaged over its twins. ``named_parameters()`` and the parameters themselves do not change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hecate.private import in_backward, parameters_of, skip_code
from hecate.runtime.ops.dense import DENSE_SHARDS, DenseShard
from hecate.runtime.ops.gradients import GradientSyncs, ReplicatedParameter, add_replicated, replicate
from hecate.runtime.state.layer import Layer, get_layer
from hecate.runtime.state.step_mode import CurrentStep
from hecate.wrap.changes import note_change
from hecate.wrap.expert_shards import ExpertShard, is_expert_shard
from hecate.wrap.first_forward import agree_on_next
from hecate.wrap.graph_breaks import called_by, hear_graph_breaks, python_around
from hecate.wrap.lora_experts import ADAPTERS_AFTERWARDS, adapter_of
from hecate.wrap.shard import cannot_be_copied, no_longer_the_shard, shard_of
from hecate.wrap.stack_experts import member_of
from hecate.wrap.swapped_class import swap_class
from hecate.wrap.twin_records import TwinRecords
from hecate.wrap.untraced import WITHOUT_TRACING, UntracedReadError, untraced_read
from hecate.wrap.whole_runs import any_entered, read_whole

# The class attribute that names the parameters which are read this way, and the module's records of whole ones.
_READERS, _RECORDS = "_hecate_readers", "_hecate_replicated"

# The package that looks parameters up for their names, not to compute with them; so does ``print(model)``.
CHECKPOINTING = "torch.distributed.checkpoint"


def install_reads(
    model: nn.Module, syncs: GradientSyncs, step: CurrentStep, param_dtype: torch.dtype | None
) -> tuple[tuple[ReplicatedParameter, ...], tuple[ReplicatedParameter, ...]]:
    """Swap the classes of modules with parameters; one process without mixed precision keeps those of dense ones.

    Returns the records of whole parameters and those of shards that twins have, too. Graphs will name them, so they
    must live as long as the model. Frames that Dynamo left to Python read as the model does only while a forward
    runs, as ``step`` tells.
    """
    hear_graph_breaks()
    checked: set[int] = set()
    shared = TwinRecords(syncs.shards)
    for module in model.modules():
        readers: dict[str, Callable[[nn.Module], Any]] = {}
        if (member := member_of(module)) is not None:
            for key, stacked in member.keys.items():
                shard = shard_of(parameters_of(member.stack)[stacked])
                assert is_expert_shard(shard)
                read = _shard_reader(shard, step, {key: shared.number(member.stack, stacked, shard.layer.id)})
                one = shard.layer.world.size == 1
                readers[key] = _read_member(key, read, step, param_dtype, alone=one)
        for key, parameter in parameters_of(module).items():
            shard = shard_of(parameter)
            if is_expert_shard(shard):
                adapter = adapter_of(module, key)
                keys = (key,) if adapter is None else (key, adapter.down, adapter.up)
                numbers = {own: shared.number(module, own, shard.layer.id) for own in keys}
                readers[key] = _read_experts(key, _shard_reader(shard, step, numbers), param_dtype)
            elif isinstance(shard, DenseShard) and parameter is not None:
                if parameter.requires_grad and id(parameter) not in checked:
                    checked.add(id(parameter))
                    _require_average(parameter, shard)
                readers[key] = _read_dense_shard(key, shard.id, step, param_dtype, shared.number(module, key))
        if readers:
            _swap_class(module, readers)
    return install_replicated_reads(model, syncs, step, param_dtype), tuple(shared.records.values())


def install_replicated_reads(
    model: nn.Module, syncs: GradientSyncs, step: CurrentStep, param_dtype: torch.dtype | None
) -> tuple[ReplicatedParameter, ...]:
    """Swap classes for whole parameters that are not read this way yet; return their records, to be kept alive."""
    sync = syncs.whole
    if sync.world.size == 1 and param_dtype is None:
        return ()
    known, new = _records_in(model), []
    text_model = sync.text_model() if sync.text_model is not None else None
    # A tower that the user has compiled is in graphs, too, where ranks do not meet.
    traced = {*text_model.modules()} if text_model is not None else None
    for name, module in model.named_modules():
        readers: dict[str, Callable[[nn.Module], Any]] = {}
        for key, parameter in parameters_of(module).items():
            if parameter is None or shard_of(parameter) is not None:
                continue
            qualified = f"{name}.{key}".lstrip(".")
            records = module.__dict__.setdefault(_RECORDS, _Records())
            if key not in records and key in getattr(type(module), _READERS, ()):
                raise no_longer_the_shard(qualified)
            record, own = known.get(id(parameter)), syncs.of(parameter, qualified)
            if record is None:
                record = known[id(parameter)] = add_replicated(module, key, own, name=qualified)
                new.append(record)
            if records.get(key) is not record:
                records[key] = record
                number = record.id if sync.in_graph and (traced is None or module in traced) else None
                # Modules whose reads change nothing keep the class that Dynamo knows them by: one graph serves all.
                if number is not None or param_dtype is not None:
                    readers[key] = _read_dense(key, number, step, param_dtype, averages_in_python=traced is None)
        if readers:
            _swap_class(module, readers)
    return tuple(new)


class _Records(dict[str, ReplicatedParameter]):
    """A module's records of whole parameters, by their names in it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise cannot_be_copied("its parameters' gradients are averaged over ranks")


def _records_in(model: nn.Module) -> dict[int, ReplicatedParameter]:
    """Return the records that are in use, by the identity of the parameter that each has now."""
    records = (record for module in model.modules() for record in module.__dict__.get(_RECORDS, {}).values())
    return {id(record.parameter): record for record in records if record.exists}


def _require_average(parameter: nn.Parameter, shard: DenseShard) -> None:
    """Raise in the backward if a gradient arrives that no collective has seen: ranks would drift apart."""

    def check(parameter: torch.Tensor) -> None:
        # Torch also calls this for a parameter that is only read without gradients, and then there is none.
        if parameter.grad is not None and not shard.take_averaged():
            raise UntracedReadError(
                f"hecate: the gradient of {shard.name} was not averaged over ranks, because the parameter was used "
                "outside the compiled model's forward, where this rank has only its rows of it. Compute everything "
                "that needs gradients inside the forward of the model given to hecate.compile, or use "
                'Config(dense="replicate").'
            )

    parameter.register_post_accumulate_grad_hook(check)


def _swap_class(module: nn.Module, readers: dict[str, Callable[[nn.Module], Any]]) -> None:
    cls = type(module)
    everything = frozenset(readers) | getattr(cls, _READERS, frozenset())
    for read in readers.values():
        # Inlined into traced code, but never compiled as a frame of its own: in a frame that Dynamo skipped,
        # the read must run as plain Python and see that.
        skip_code(read.__code__)
    namespace: dict[str, Any] = {key: property(read) for key, read in readers.items()} | {_READERS: everything}

    def register_parameter(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # The inherited one asks hasattr(self, name) first, which would read the property.
        if name in everything:
            parameters_of(self)[name] = parameter
            note_change(self)
        else:
            super(swapped, self).register_parameter(name, parameter)

    namespace["register_parameter"] = register_parameter

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        raise cannot_be_copied(f"{cls.__name__} in it reads sharded parameters")

    namespace["__reduce_ex__"] = __reduce_ex__
    swapped: Any = swap_class(module, namespace)


def _shard_reader(record: ExpertShard, step: CurrentStep, numbers: Mapping[str, int | None]) -> Callable[..., Any]:
    """Return a function that readers call to read a shard, or one expert of it.

    ``numbers`` are those of the records of twins, by the key that is read.
    """
    # Dynamo keeps the class, and so its readers, for longer than the model: they know the layer's number alone.
    num_experts, layer_id, alone = record.layer.num_experts, record.layer.id, record.world.size == 1
    lines = record.lines

    def read(shard: Any, key: str, dtype: torch.dtype | None, expert: int | None = None) -> Any:
        if torch.compiler.is_compiling():
            number = numbers[key]
            if number is not None and shard.requires_grad and torch.is_grad_enabled():
                shard = replicate(shard, number)
            if dtype is not None:
                shard = shard.to(dtype)
            if lines > 1:
                shard = shard.view(-1, lines, *shard.shape[1:])
            whole = torch.ops.hecate.gather_experts(shard, num_experts, layer_id)
            if lines > 1:
                whole = whole.view(-1, *whole.shape[2:])
            return whole if expert is None else whole[expert]
        whole = read_whole(shard, expert)
        if whole is not None:
            return whole.to(dtype) if dtype is not None else whole
        if alone:
            shard = shard if expert is None else shard[expert]
            return shard.to(dtype) if dtype is not None and (step.running or in_backward()) else shard
        if called_by(CHECKPOINTING) or sys._getframe(2).f_code.co_name == "extra_repr":
            # An expert that another rank owns has no rows here.
            owned = get_layer(layer_id).owners.owned_by(get_layer(layer_id).world.rank)
            return shard if expert is None else shard[owned.index(expert)] if expert in owned else shard[:0]
        raise _untraced(key, get_layer(layer_id), shard, sys._getframe(2))

    skip_code(read.__code__)
    return read


def _read_experts(key: str, read_shard: Callable[..., Any], dtype: torch.dtype | None) -> Callable[[nn.Module], Any]:
    def read(module: nn.Module) -> Any:
        parameter = read_shard(parameters_of(module)[key], key, dtype)
        adapter = adapter_of(module, key)
        if adapter is None or not adapter.is_active:
            return parameter
        own = parameters_of(module)
        down, up = (read_shard(own[half], half, dtype or parameter.dtype) for half in (adapter.down, adapter.up))
        return adapter.add_to(parameter, down, up)

    return read


def _read_member(
    key: str, read_shard: Callable[..., Any], step: CurrentStep, dtype: torch.dtype | None, *, alone: bool
) -> Callable[[nn.Module], Any]:
    def read(module: nn.Module) -> Any:
        # On several ranks these tell each other what they have read (``whole_runs``).
        member = member_of(module)
        assert member is not None
        stack, own = member.stack, member.keys[key]
        # A backward records gradients only where a checkpoint runs its part of the forward again.
        if (
            alone
            and not torch.compiler.is_compiling()
            and torch.is_grad_enabled()
            and (step.running or in_backward())
        ):
            stack.note_read(own, [member.expert])
        return read_shard(parameters_of(stack)[own], key, dtype, member.expert)

    return read


def _read_dense(
    key: str, id: int | None, step: CurrentStep, dtype: torch.dtype | None, *, averages_in_python: bool
) -> Callable[[nn.Module], Any]:
    """Return the reader of a whole parameter; ``id`` is its record's if the gradient is averaged in the graph."""

    def read(module: nn.Module) -> Any:
        parameter: Any = parameters_of(module)[key]
        if parameter is None:
            return None
        traced = torch.compiler.is_compiling()
        # In a layer that runs as Python data may decide whether this is read.
        averages = averages_in_python and step.running and not any_entered()
        # Where no gradient is recorded code may change the parameter, but autograd no custom function's view of it.
        if parameter.requires_grad and id is not None and (traced or averages) and torch.is_grad_enabled():
            parameter = _averaged(parameter, id)
        # A layer in Python that is computed again in the backward must read what it has read in the forward.
        if dtype is not None and parameter.is_floating_point() and (traced or step.running or in_backward()):
            parameter = parameter.to(dtype)
        return parameter

    return read


def _averaged(parameter: torch.Tensor, id: int) -> torch.Tensor:
    """Return a parameter whose gradient is averaged; of one that is split along another mesh, this rank's part is."""
    if not isinstance(parameter, DTensor):
        return replicate(parameter, id)
    shape, stride, mesh, placements = parameter.shape, parameter.stride(), parameter.device_mesh, parameter.placements
    here = replicate(parameter.to_local(), id)
    return DTensor.from_local(here, mesh, placements, run_check=False, shape=shape, stride=stride)


# As readers are, which call it.
skip_code(_averaged.__code__)


def _read_dense_shard(
    key: str, id: int, step: CurrentStep, dtype: torch.dtype | None, twins: int | None
) -> Callable[[nn.Module], Any]:
    def read(module: nn.Module) -> Any:
        shard: Any = parameters_of(module)[key]
        traced = torch.compiler.is_compiling()
        whole = None if traced or shard is None else read_whole(shard)
        # Outside the forward other ranks may not read it, so nothing can be gathered. A backward records gradients
        # only where a checkpoint runs its part of the forward again.
        again = not traced and in_backward() and torch.is_grad_enabled()
        if whole is not None or shard is None or not (traced or step.running or again):
            return shard if whole is None else whole
        travels = dtype if shard.is_floating_point() else None
        if twins is not None and shard.requires_grad and torch.is_grad_enabled():
            shard = replicate(shard, twins)
        if traced:
            return torch.ops.hecate.gather_dense([shard], [id], travels)[0]
        return _gather_dense(shard, id, travels, step)

    return read


# Dynamo would look for frames to trace in what the operator calls.
@torch.compiler.disable
def _gather_dense(shard: torch.Tensor, id: int, dtype: torch.dtype | None, step: CurrentStep) -> torch.Tensor:
    record = DENSE_SHARDS[id]
    if step.is_first:
        agree_on_next(f"the read of {record.name} in Python", record.world.everyone)
    return torch.ops.hecate.gather_dense([shard], [id], dtype)[0]


# This is called where Dynamo looks for frames to trace, and must not become one.
@torch.compiler.disable
def _untraced(key: str, layer: Layer, shard: Any, reader: FrameType) -> UntracedReadError:
    record = shard_of(shard)
    name = record.name if record is not None else key
    mine = layer.owners.counts[layer.world.rank]
    if reader.f_globals.get("__name__", "").startswith("peft."):
        return UntracedReadError(
            f"hecate: PEFT would adapt {name} now, of which this rank holds only {mine} of {layer.num_experts} "
            f"experts.\n{python_around(reader)}\n{ADAPTERS_AFTERWARDS}"
        )
    return untraced_read(
        f"{name} was read by code that torch.compile did not trace, and this rank holds only "
        f"{mine} of its {layer.num_experts} experts.\n{python_around(reader)}",
        "If this came from the model's forward, Dynamo skipped the frame: a graph break inside a loop, or a "
        "disabled function. A branch on how many rows "
        "an expert has is a graph break (`if rows.numel() == 0: continue`): leave it out, zero rows cost nothing. "
        "Run with TORCH_LOGS=graph_breaks to see all breaks; for a transformers model, "
        f"model.set_experts_implementation('grouped_mm') gives experts that trace. {WITHOUT_TRACING}\n"
        "If you called a part of the model yourself, call the compiled model instead. To look at weights, use "
        "model.state_dict() on all ranks, or dict(model.named_parameters()) for this rank's shard.",
        layer=layer.name,
    )
