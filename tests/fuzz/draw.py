"""What a drawn model and a drawn case are. Every rank draws the same from the same seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn

import hecate
from hecate.passes import FINAL_PASSES, JOINT_PASSES, PASSES, REQUIRED
from hecate.passes.attention.shard_context import shard_context
from tests.hecate_compile.wrap.test_stack_experts import DictMoE, ListMoE
from tests.support.adversaries import Anything
from tests.support.models import PlainLanguageModel, build
from tests.support.models_page import blocks_of_page

_TRANSFORMERS = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")
_PASSES = tuple(
    one.__name__
    for one in (*PASSES, *JOINT_PASSES, *FINAL_PASSES)
    if one.__name__ not in (shard_context.__name__, *REQUIRED)
)


@dataclass(frozen=True)
class Drawn:
    """A model to compile.

    Attributes:
        family: a key of ``tests.support.models``, a block of docs/models.md, or a list of experts.
        options: of :class:`hecate.Config`; a policy by its name, "anything" for one that does whatever is allowed.
    """

    family: str
    layers: int
    experts: int
    options: dict[str, Any]

    @property
    def attention(self) -> hecate.S2Attention | None:
        return self.options.get("attention")

    def config(self) -> hecate.Config:
        options = dict(self.options)
        if options["policy"] == "anything":
            options["policy"] = Anything(reshard_every=options.pop("reshard_every"))
        return hecate.Config(backend="aot_eager", **options)


@dataclass(frozen=True)
class Case:
    """One training loop on a compiled model.

    Attributes:
        optimizer: "sgd" or "adamw".
        clip: None, or how gradients are clipped: a key of ``tests.fuzz.run.CLIPS``.
        accumulate: micro-batches of a step.
        keep_zeros: ``zero_grad(set_to_none=False)``.
        ragged: ranks have batches of different shapes.
        actions: what happens, one after another.
    """

    optimizer: str
    clip: str | None
    accumulate: int
    keep_zeros: bool
    ragged: bool
    actions: tuple[str, ...]


ACTIONS = ("step", "evaluate", "infer", "save and load", "two forwards", "penalty", "schedule")
FAULTS = (
    "bad token",
    "not a number",
    "no backward",
    "wrong checkpoint",
    "wrong optimizer state",
    "one expert",
    "interrupted backward",
)


def draw_model(seed: int, number: int) -> Drawn:
    random = Random(f"model {seed} {number}")
    family = random.choice((*_TRANSFORMERS, "plain", "split", *blocks_of_page(), "ListMoE", "DictMoE"))
    policy = random.choice(("hecate", "hecate", "hecate", "anything", "anything", "static", "gather", "replicate"))
    options: dict[str, Any] = {"policy": policy}
    if policy == "anything":
        options["reshard_every"] = random.choice((0, 1, 2))
    if policy == "hecate":
        options |= {
            "reshard_every": random.choice((0, 1, 3)),
            "replicas": random.choice((0, 1, 2, 5)),
            "objective": random.choice(("time", "paper")),
            "window": random.choice((1, 5)),
            "calibrate": random.random() < 0.3,
        }
    if policy != "replicate":
        options["dense"] = random.choice(("replicate", "shard"))
    options |= {"rematerialize": random.random() < 0.3, "prefetch_bytes": random.choice((None, None, 0, 5000))}
    if random.random() < 0.3:
        options["disable_passes"] = tuple(random.sample(_PASSES, random.choice((1, 2, 5))))
    if family in _TRANSFORMERS and family != "gpt_oss" and random.random() < 0.5:
        options["attention"] = hecate.S2Attention(
            block=16, local=random.choice((1, 2)), offset=random.choice((0, 1)), dense_layers=()
        )
    return Drawn(family, random.choice((1, 1, 1, 2)), random.choice((2, 3, 5)), options)


def draw_case(seed: int, number: int, index: int) -> Case:
    random = Random(f"case {seed} {number} {index}")
    actions = [random.choice(("step", "step", *ACTIONS)) for _ in range(random.choice((1, 2, 3)))]
    for _ in range(random.choice((0, 1, 2))):
        actions.insert(random.randrange(len(actions) + 1), random.choice(FAULTS))
    return Case(
        optimizer=random.choice(("sgd", "adamw")),
        clip=random.choice((None, "hecate", "torch")),
        accumulate=random.choice((1, 1, 2, 3)),
        keep_zeros=random.random() < 0.2,
        ragged=random.random() < 0.3,
        actions=(*actions, "step"),
    )


def build_model(drawn: Drawn, seed: int) -> nn.Module:
    """In float64, where ranks and one process differ by rounding of 1e-16 alone, but for casts in a model's code."""
    family, size = drawn.family, dict(layers=drawn.layers)
    if family in _TRANSFORMERS:
        experts = max(drawn.experts, 4) if family == "deepseek_v3" else drawn.experts
        key = {"deepseek_v3": "n_routed_experts", "qwen3_moe": "num_experts", "olmoe": "num_experts"}
        given = {key.get(family, "num_local_experts"): experts - experts % 2 if family == "deepseek_v3" else experts}
        model = build(family, seed=seed, **size, **given)
        # The one that knows float64; compiled, the default does too.
        return model.double()
    torch.manual_seed(seed)
    if family in ("plain", "split"):
        return build(family, seed=seed, **size, experts=drawn.experts).double()
    kind = {"ListMoE": ListMoE, "DictMoE": DictMoE}.get(family) or blocks_of_page()[family]
    return PlainLanguageModel(kind, hidden=16, experts=drawn.experts, **size).double()
