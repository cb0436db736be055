"""Routing traces: which rank sent how many rows to which expert, step by step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hecate.compiled_model import compiled_model_of
from hecate.runtime.comm import collectives
from hecate.runtime.comm.agreement import gather_json
from hecate.runtime.comm.history import doing
from hecate.runtime.comm.mesh import Mesh
from hecate.runtime.comm.world import World


@contextmanager
def record(model: nn.Module, path: str | os.PathLike[str]) -> Iterator[None]:
    """Record the routing of every training forward inside the ``with`` block; rank 0 writes it at the end.

        with hecate.record(model, "trace.npz"):
            train(model)

    All ranks enter and leave together; every rank knows all counts, so recording communicates nothing, but for the
    first ranks of groups, which tell rank 0. The trace stays in rank 0's memory until then: 4 bytes for each step,
    layer, rank and expert. If the block raises, the steps that were recorded so far are written. Forwards without
    gradients are left out.

    The file is a compressed numpy archive (``numpy.load``):

    ========== ==================================== ==========================================================
    ``counts`` uint32 ``[step, layer, rank, expert]`` rows that the rank routed to the expert in its own batch
    ``layers`` str ``[layer]``                       names of the experts modules
    ``owners`` int32 ``[layer, expert]``             who owned what at the first step
    ``sizes``  float64 ``[layer, 5]``                the fields of ``LayerSizes``, as plans used them
    ``rates``  float64 ``[5]``                       the fields of :class:`hecate.Rates`, as plans used them
    ``nodes``  int32 ``[rank]``                      node of each rank
    ``groups`` int32                                 of ranks that follow one another; owners are numbers in a group
    ========== ==================================== ==========================================================

    Raises:
        ValueError: the model was not compiled; it is recorded already; its layers have different numbers of experts.
        OSError: rank 0 cannot write ``path``; at once, and on all ranks.
        RuntimeError: in the first forward, if a layer gathers its experts, so that nobody counts its rows.
    """
    state = compiled_model_of(model, "record")
    layers = tuple(dict.fromkeys(state.layers))
    experts = {layer.num_experts for layer in layers}
    if len(experts) != 1:
        raise ValueError(f"hecate.record: layers have different numbers of experts: {sorted(experts)}")
    if "record" in state.forward.after:
        raise ValueError("hecate.record: this model is being recorded already")
    target = Path(path)
    _try_to_write(target, state.world)
    steps: list[np.ndarray[Any, Any]] = []
    owners = np.asarray([layer.owners.ranks for layer in layers], dtype=np.int32)

    def after() -> None:
        if not torch.is_grad_enabled():
            return
        counts = []
        for layer in layers:
            if layer.counts is None:
                raise RuntimeError(f"hecate.record: {layer.name} gathers its experts, so its rows are not counted")
            counts.append(layer.counts.cpu())
        of_ranks = _of_all_groups(torch.stack(counts), state.mesh)
        if state.world.rank == 0:
            steps.append(of_ranks.numpy().astype(np.uint32))

    state.forward.after["record"] = after
    try:
        yield
    finally:
        del state.forward.after["record"]
        if state.world.rank == 0:
            shape = (0, len(layers), state.world.size, experts.pop())
            with target.open("wb") as file:
                np.savez_compressed(
                    file,
                    counts=np.stack(steps) if steps else np.zeros(shape, dtype=np.uint32),
                    layers=np.asarray([layer.name for layer in layers]),
                    owners=owners,
                    sizes=np.asarray([astuple(layer.sizes) for layer in layers], dtype=np.float64),
                    rates=np.asarray(astuple(state.placer.rates), dtype=np.float64),
                    nodes=np.asarray(state.nodes.node_of, dtype=np.int32),
                    groups=np.int32(state.mesh.groups),
                )


def _of_all_groups(counts: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return the counts ``[L, W, E]`` of all ranks, from those of each group's; a collective of groups."""
    if mesh.twins.group is None:
        return counts
    mesh.twins.queue.drain()
    with doing("hecate.record"):
        found = collectives.all_gather_even(counts.to(mesh.twins.control_device), mesh.twins).cpu()
    return found.transpose(0, 1).flatten(1, 2)


def _try_to_write(target: Path, world: World) -> None:
    """Raise on all ranks if rank 0 cannot open the file: before the trace is recorded, not after that."""
    problem = ""
    if world.rank == 0:
        try:
            target.open("ab").close()
        except OSError as error:
            problem = str(error)
    with doing("hecate.record"):
        problem = gather_json(problem, world)[0]
    if problem:
        raise OSError(f"hecate.record: rank 0 cannot write {target}. {problem}")
