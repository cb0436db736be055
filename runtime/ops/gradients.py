"""Averaging the gradients of replicated parameters over ranks.

A parameter is read through :func:`replicate`, an identity whose backward is an all-reduce inside the graph.

| operator | shapes | backward |
|---|---|---|
| ``average_gradients`` | any shapes ``->`` the same, the mean over ranks, one all-reduce for all of them | none |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hecate.private import backward_number, foreach_copy_, parameters_of
from hecate.runtime.comm import collectives
from hecate.runtime.comm.queue import Job
from hecate.runtime.comm.world import World
from hecate.runtime.ops.registration import define_collective, name_results
from hecate.runtime.placement.topology import Topology
from hecate.runtime.state.registry import Registry

# Bytes of the vectors that compiled kernels read on a GPU.
_ALIGNMENT = 16


@dataclass
class Switches:
    """Settings of one model that change while it trains."""

    enabled: bool = True  # off between the micro-batches of an accumulation
    owed: bool = False  # some were left unaveraged in ``param.grad``; the next all-reduce takes them along
    layers_in_python: bool = False  # layers that no graph can have use parameters, those that their data want


@dataclass
class GradientSync:
    """How gradients are averaged over ``world``, with settings that all syncs of one model share."""

    world: World
    dtype: torch.dtype | None = None  # in which gradients travel; None for that of :meth:`travels_as`
    hooked: bool = False  # users' hooks are given gradients on some rank, so what is owed is averaged beside them
    in_graph: bool = True  # averaged where graphs make them; if not, all together when the backward ends
    # Alone in graphs, if it is there; Python around it uses parameters, and not the same ones on every rank.
    text_model: weakref.ref[nn.Module] | None = None
    topology: Topology | None = None  # which ranks share a node; None for all
    switches: Switches = field(default_factory=Switches)

    def among(self, world: World, topology: Topology | None = None) -> GradientSync:
        """Return the same for other ranks of the model."""
        return self if world is self.world else replace(self, world=world, topology=topology)

    @property
    def in_python(self) -> bool:
        """True if parameters are used around the graphs, too."""
        return self.text_model is not None or self.switches.layers_in_python

    def travels_as(self, own: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of ``own`` are all-reduced, which rounds their sum after each rank."""
        return self.dtype or torch.promote_types(own, torch.float32)

    def average(self, buffer: Tensor) -> None:
        """Overwrite ``buffer`` ``[n]`` with its mean over ranks."""
        narrow = buffer.dtype == torch.float16
        if narrow:
            # The sum may be more than float16 holds, where the mean is not.
            buffer.div_(self.world.size)
        if self.topology is None:
            collectives.all_reduce(buffer, self.world)
        else:
            collectives.all_reduce_by_nodes(buffer, self.topology, self.world)
        if not narrow:
            buffer.div_(self.world.size)


@dataclass(frozen=True, kw_only=True)
class GradientSyncs:
    """How the gradients of one model are averaged, by what its ranks have of a parameter."""

    whole: GradientSync  # over everyone
    split: GradientSync  # of DTensors, over the ranks with the same part
    shards: GradientSync  # over twins
    split_along: DeviceMesh | None = None  # the mesh of all DTensors

    def of(self, parameter: Tensor, name: str) -> GradientSync:
        """Return that of a parameter which is no shard.

        Raises RuntimeError for a DTensor on another mesh than those that the model was compiled with.
        """
        if not isinstance(parameter, DTensor):
            return self.whole
        if parameter.device_mesh != self.split_along:
            raise RuntimeError(
                f"hecate: {name} is a DTensor on {parameter.device_mesh} now, unknown to hecate.compile. Split "
                "parameters by tensor parallelism before hecate.compile"
            )
        return self.split


@dataclass(eq=False)
class ReplicatedParameter:
    """The record of a parameter that every rank of ``sync`` has, whole or the same part of it."""

    id: int  # the number in the graph
    owner: weakref.ref[nn.Module]  # the module; weak, because a record must not keep a model alive
    key: str
    sync: GradientSync
    name: str = ""  # qualified parameter name in the model; of a tied parameter, the first
    # What it is averaged together with: that of a layer's experts. None for whatever is ready at the same time.
    layer: int | None = None
    # The parameters that have its gradient afterwards, if it is dealt out to others.
    holders: Callable[[], Sequence[Tensor]] | None = None
    averaged: bool = False  # the gradient that arrives next has been through :func:`_average_gradients`
    took_owed: int | None = None  # the number of the backward in which ``param.grad``, left local before, went along

    @property
    def exists(self) -> bool:
        module = self.owner()
        return module is not None and parameters_of(module).get(self.key) is not None

    @property
    def parameter(self) -> Tensor:
        # Looked up each time: ``load_state_dict(assign=True)`` makes another object.
        module = self.owner()
        parameter = parameters_of(module).get(self.key) if module is not None else None
        if parameter is None:
            raise RuntimeError(f"hecate: the replicated parameter {self.key} no longer exists, but has a gradient")
        return parameter

    @property
    def gradient(self) -> Tensor | None:
        """What this rank has of the gradient."""
        gradient = self.parameter.grad
        return collectives.part_of(gradient) if gradient is not None else None

    def take_averaged(self) -> bool:
        """Tell whether the gradient that just arrived went through the all-reduce; the next one starts anew.

        What was left local, and went along in this backward, is cleared. It stays where a backward for other inputs
        made a mean that nobody gets.
        """
        averaged, self.averaged = self.averaged, False
        took, self.took_owed = self.took_owed == backward_number(), None
        if averaged and took and (owed := self.gradient) is not None:
            owed.zero_()
        return averaged


REPLICATED: Registry[ReplicatedParameter] = Registry("replicated parameter")


def add_replicated(
    owner: nn.Module,
    key: str,
    sync: GradientSync,
    *,
    name: str = "",
    layer: int | None = None,
    holders: Callable[[], Sequence[Tensor]] | None = None,
) -> ReplicatedParameter:
    """Register the parameter ``owner._parameters[key]``; the record's number goes into the graph."""
    return REPLICATED.add(
        lambda id: ReplicatedParameter(id, weakref.ref(owner), key, sync, name or key, layer, holders)
    )


def _average_gradients(grads: Sequence[Tensor], ids: Sequence[int]) -> Job:
    """Average one bucket over ranks in a single all-reduce; with synchronization off gradients pass through."""
    records = [REPLICATED[id] for id in ids]
    sync = records[0].sync
    for record in records:
        record.averaged = True
    if not sync.switches.enabled:
        local = [grad.clone() for grad in grads]
        return Job(sync.world.queue, lambda: local)
    own_dtype = grads[0].dtype
    dtype = sync.travels_as(own_dtype)
    # What was dealt out is averaged when the backward ends, and what went along in this one does so once.
    now = backward_number()
    owing = [
        record for record in records if sync.switches.owed and record.holders is None and record.took_owed != now
    ]
    if sync.hooked:
        for record in owing:
            # Buckets must be of one length on all ranks, and another rank may have some.
            if record.parameter.grad is None:
                record.parameter.grad = torch.zeros_like(record.parameter)
    # Averaging is idempotent, so gradients in ``param.grad`` that were averaged earlier stay right.
    owed = [record.gradient if record in owing else None for record in records]
    # Hooks were given these micro-batch by micro-batch, and must not be given them again.
    beside = [gradient for gradient in owed if gradient is not None] if sync.hooked else []
    buffer, parts = _room_for([*grads, *beside], dtype)
    parts, parts_beside = parts[: len(grads)], parts[len(grads) :]
    means = parts
    if dtype != own_dtype:
        means = [torch.empty_like(grad, memory_format=torch.contiguous_format) for grad in grads]
    foreach_copy_(parts, list(grads))
    if beside:
        foreach_copy_(parts_beside, beside)
    else:
        for part, gradient in zip(parts, owed, strict=True):
            if gradient is not None:
                part += gradient
        for record in owing:
            record.took_owed = now

    def run() -> list[Tensor]:
        sync.average(buffer)
        if beside:
            foreach_copy_(beside, parts_beside)
        if means is not parts:
            foreach_copy_(means, parts)
        return means

    return Job(sync.world.queue, run)


def _room_for(grads: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return one buffer, and a part of it in the shape of each gradient."""
    # Inductor takes the parts for tensors of their own and reads whole vectors, so each part is aligned to one.
    step = _ALIGNMENT // dtype.itemsize
    lengths = [-(-grad.numel() // step) * step for grad in grads]
    padded = sum(lengths) > sum(grad.numel() for grad in grads)
    # Padding travels too, and must hold numbers.
    buffer = (torch.zeros if padded else torch.empty)(sum(lengths), dtype=dtype, device=grads[0].device)
    parts = [part[: grad.numel()].view(grad.shape) for part, grad in zip(buffer.split(lengths), grads, strict=True)]
    return buffer, parts


define_collective(
    "average_gradients(Tensor[] grads, int[] ids) -> Tensor[]",
    _average_gradients,
    lambda grads, ids: [torch.empty_like(grad, memory_format=torch.contiguous_format) for grad in grads],
    role="reduce",
    carries="bucket",
    ring_rounds=2,
    wait_needs_arguments=True,
    results="mean_grad",
    whole="mean_grads",
    records=REPLICATED,
)


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: tuple[int, ...], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.ids = ids
        # A parameter that gets no gradient has None in one process too, and no optimizer touches it.
        ctx.set_materialize_grads(False)
        # Views: AOTAutograd makes what a graph returns of them anew from the parameter, with its gradient.
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        there = {id: grad.contiguous() for id, grad in zip(ctx.ids, grads, strict=True) if grad is not None}
        if not there:
            return None, *grads
        averaged = torch.ops.hecate.average_gradients(list(there.values()), list(there))
        found = dict(zip(there, averaged, strict=True))
        return None, *map(found.get, ctx.ids)


@torch.compiler.allow_in_graph
def replicate(parameter: Tensor, id: int) -> Tensor:
    """Return the parameter as a view whose gradient is averaged over ranks."""
    return _Replicate.apply((id,), parameter)[0]


@torch.compiler.allow_in_graph
def replicate_bucket(parameters: list[Tensor], ids: list[int]) -> tuple[Tensor, ...]:
    """Apply :func:`replicate` to parameters of one dtype: one all-reduce when all their gradients are there."""
    return _Replicate.apply(tuple(ids), *parameters)


name_results(replicate, "whole", records=REPLICATED)
name_results(replicate_bucket, "whole", whole="wholes", records=REPLICATED)
