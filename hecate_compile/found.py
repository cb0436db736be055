"""What hecate.compile finds in a model, and refuses, before anything changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hecate.checks import (
    check_attention,
    check_no_max_norm,
    check_no_optimizer,
    check_one_piece,
    check_usable,
    describe_model,
    device_of,
    mesh_of_splits,
    warn_float16,
)
from hecate.config import Config
from hecate.runtime.comm.agreement import agree
from hecate.runtime.comm.mesh import Mesh, find_mesh
from hecate.wrap.attention_config import AttentionConfig
from hecate.wrap.carry_over import check_carried, describe_hooks
from hecate.wrap.find_experts import ExpertsModule, NoExpertsError, PassedOver, counts_experts, find_experts
from hecate.wrap.loops import ChangedLoops, make_loops_traceable
from hecate.wrap.lora_experts import adopt_adapters
from hecate.wrap.text_model import find_text_model


@dataclass(frozen=True, kw_only=True)
class Found:
    """A model's experts and surroundings, found before its parameters change; options are adjusted to them."""

    config: Config
    mesh: Mesh
    experts: list[ExpertsModule]
    passed_over: list[PassedOver]
    attention: AttentionConfig
    loops: ChangedLoops
    text_model: nn.Module | None  # traced alone, if it is
    split_along: DeviceMesh | None  # between whose ranks parameters are split


def find_all(model: nn.Module, config: Config, mesh: DeviceMesh | None) -> Found:
    """Find out everything that can be wrong before anything changes, on all ranks together."""
    check_usable(model, config)
    attention = check_attention(model, config)
    experts, passed_over = _find_experts(model, config)
    if not experts and config.room_percent:
        raise ValueError(
            f'hecate.compile: transport="{config.transport}" carries rows to experts, and none were found'
        )
    if not experts and config.dense == "replicate":
        # Nothing is exchanged inside a graph, so ranks need not run the same one.
        config = replace(config, policy="replicate")
    check_no_optimizer(model)
    fewest = min((found.num_experts for found in experts), default=None)
    split = mesh_of_splits(model, experts)
    ranks = find_mesh(mesh, device_of(model, mesh), config.expert_group, experts=fewest, split=split)
    check_one_piece(model, ranks.everyone)
    shard_dense = config.dense == "shard" and ranks.group.size > 1
    agree(
        [*describe_model(model, config), *describe_hooks(model, experts, dense=shard_dense)],
        "the model or its options",
        "Build the same model with the same hecate.Config on every rank.",
        ranks.everyone,
    )
    check_carried(model, experts, dense=shard_dense)
    check_no_max_norm(model, ranks.everyone)
    warn_float16(model, ranks.everyone)
    # Loops over experts are changed to take every turn, or refused.
    loops = ChangedLoops()
    if make_loops_traceable.__name__ not in config.disable_passes:
        loops = make_loops_traceable(model, experts)
    return Found(
        config=config,
        mesh=ranks,
        experts=adopt_adapters(model, experts),
        passed_over=passed_over,
        attention=attention,
        loops=loops,
        # With sparse attention the model is one graph.
        text_model=find_text_model(model, experts) if experts and config.attention is None else None,
        split_along=split,
    )


def read_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype in which the forward reads parameters; None for their own."""
    dtype: torch.dtype | None = config.mixed_precision.param_dtype if config.mixed_precision else None
    return dtype


def _find_experts(model: nn.Module, config: Config) -> tuple[list[ExpertsModule], list[PassedOver]]:
    """Find the experts, if the policy wants any; with sparse attention a model may have none."""
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
