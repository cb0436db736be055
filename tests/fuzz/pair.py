"""A model and the same in one process, and what is done with both: losses, optimizers, averages, graphs counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.wrap.shard import shard_of
from tests.fuzz.draw import Case, Drawn
from tests.fuzz.dressed import Dress, build_dressed, build_reference
from tests.fuzz.graphs import PlainCompiled
from tests.fuzz.rank_buffers import RankBuffers
from tests.fuzz.run import TOLERANCE, Loop
from tests.support.models import VOCABULARY
from tests.support.parity import error_of

# Large enough not to turn the rounding of a gradient that is nearly zero into a step.
_EPS = 1e-3
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, dict(lr=0.05, momentum=0.9, nesterov=True)),
    "adamw": (torch.optim.AdamW, dict(lr=0.01, eps=_EPS)),
    "amsgrad": (torch.optim.Adam, dict(lr=0.01, eps=_EPS, amsgrad=True)),
    "adagrad": (torch.optim.Adagrad, dict(lr=0.02, eps=_EPS)),
    "rmsprop": (torch.optim.RMSprop, dict(lr=0.005, eps=_EPS, centered=True)),
    "nadam": (torch.optim.NAdam, dict(lr=0.01, eps=_EPS)),
    "radam": (torch.optim.RAdam, dict(lr=0.01, eps=_EPS)),
    "adamax": (torch.optim.Adamax, dict(lr=0.01, eps=_EPS)),
    "adadelta": (torch.optim.Adadelta, dict(lr=0.5, eps=_EPS)),
}


def _by_dimension(model: nn.Module, rate: float) -> Any:
    """Only matrices decay."""
    everything = [*model.parameters()]
    return [
        {"params": [p for p in everything if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in everything if p.ndim < 2], "lr": rate / 2},
    ]


def _by_name(model: nn.Module, rate: float) -> Any:
    words = ("experts", "norm", "embed", "router", "")
    groups: dict[str, list[Any]] = {word: [] for word in words}
    for name, parameter in model.named_parameters():
        groups[next(word for word in words if word in name)].append((name, parameter))
    return [
        {"params": group, "lr": rate / (1 + number), "weight_decay": 0.05 * (number % 2)}
        for number, group in enumerate(groups.values())
        if group
    ]


GROUPS: dict[str, Any] = {
    "none": lambda model, rate: model.parameters(),
    "named": lambda model, rate: model.named_parameters(),
    "by dimension": _by_dimension,
    "by name": _by_name,
}


class Pair(Loop):
    """A model and its reference, on this rank, and what both have: optimizers, hooks, averages, a frozen copy."""

    def __init__(self, drawn: Drawn, dress: Dress, clip: str | None, *, seed: str) -> None:
        self.dress, self.random = dress, Random(f"turns {seed}")
        self.shape, self.hooks, self.checkpoints = (2, 6), list[Any](), False
        # Averages kept in the optimizer's state, and those by name: of the model, and of the reference.
        self.averages, self.by_name = False, list[dict[str, torch.Tensor]]()
        self.differ, self.saved = 0.0, None
        self.frozen: tuple[nn.Module, nn.Module] | None = None
        self.plain: PlainCompiled | None = None
        # When counting began, of the model and of the plain one.
        self.graphs = (0, 0)
        reference = build_reference(drawn, dress, 1)
        model = hecate.compile(build_dressed(drawn, dress, 2), drawn.config())
        case = Case("sgd", clip, 1, keep_zeros=False, ragged=False, actions=())
        super().__init__(drawn, case, model, reference, seed=seed)
        self.buffers = RankBuffers(reference, self.size, self.rank)

    def build(self, seed: int) -> nn.Module:
        return build_dressed(self.drawn, self.dress, seed)

    @property
    def both(self) -> tuple[Any, Any]:
        return self.model, self.reference

    @property
    def models(self) -> list[Any]:
        """Both, and the one whose graphs are counted."""
        return [*self.both, *([self.plain.model] if self.plain is not None else [])]

    def off(self) -> list[str]:
        """What differs, with by how much, relative to the largest element."""
        ours, theirs = (model.state_dict() for model in self.both)
        errors = {
            name: error_of(ours[name].double(), value.double(), relative=True) for name, value in theirs.items()
        }
        return [f"{name} differs by {error:.1e}" for name, error in errors.items() if not error <= TOLERANCE]

    # --- graphs ---

    def count_graphs(self) -> None:
        """Compare with a plain torch.compile from now on; one rank does.

        One that breaks into several graphs is no measure: of these some do not see what has changed, as other batches
        with as many tokens.
        """
        self.graphs = self.graphs_so_far(), 0
        if self.rank == 0:
            self.plain = PlainCompiled(build_reference(self.drawn, self.dress, 3))

    def graphs_so_far(self) -> int:
        return compiled_model_of(self.model, "explain").backend._number

    def hooks_changed(self) -> None:
        """Count graphs from the first on: for other hooks all of a compiled model are made anew."""
        if self.plain is not None:
            self.plain.compile()
            self.graphs = self.graphs_so_far(), 0

    @contextmanager
    def without_counting(self) -> Iterator[None]:
        """Leave the compiled model's graphs inside the block out of the comparison."""
        before = self.graphs_so_far()
        yield
        self.graphs = self.graphs[0] + self.graphs_so_far() - before, self.graphs[1]

    def graphs_too_many(self) -> str:
        """Return by how many, on all ranks."""
        found = [""]
        if self.plain is not None:
            before, now = self.graphs, (self.graphs_so_far(), self.plain.graphs)
            ours, theirs = now[0] - before[0], now[1] - before[1]
            too_many = ours > theirs and not self.plain.broke
            found = [f"{ours} more graphs, and {theirs} of a plain torch.compile" if too_many else ""]
        # No rank may end its life alone.
        dist.broadcast_object_list(found)
        return found[0]

    def call_plain(self, method: str = "__call__", **given: Any) -> None:
        if self.plain is not None:
            with self.plain.running(self.reference) as model:
                getattr(model, method)(**given)

    # --- steps ---

    def batches(self) -> list[torch.Tensor]:
        rows, length = self.shape
        if self.drawn.attention is not None:
            length += 50
        return [torch.randint(0, VOCABULARY, (rows, length), generator=self.generator) for _ in range(self.size)]

    def losses(self, batches: list[torch.Tensor], *, averages: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's loss of the model, and the mean over ranks of the reference.

        ``averages`` says that the backward will average gradients.
        """
        mine = batches[self.rank]
        own = self.loss(0, mine)
        self.call_plain(input_ids=mine, labels=mine)
        return own, self.loss_of_all(batches, averages=averages)

    def loss_of_all(self, batches: list[torch.Tensor], *, averages: bool = True, copies: bool = True) -> torch.Tensor:
        """The mean over ranks of the reference's loss; without ``copies`` a frozen copy does not pull."""
        self.buffers.before_forward(training=True, averages=averages)
        parts = []
        for rank, batch in enumerate(batches):
            self.buffers.turn_to(rank)
            parts.append(self.loss(1, batch, copies=copies))
        self.buffers.turn_to(self.rank)
        return sum(parts[1:], parts[0]) / self.size

    def loss(self, which: int, batch: torch.Tensor, *, copies: bool = True) -> torch.Tensor:
        out = self.both[which](input_ids=batch, labels=batch)
        if self.frozen is None or not copies:
            return out["loss"]
        with torch.no_grad():
            before = self.frozen[which](input_ids=batch)["logits"]
        return out["loss"] + 0.1 * (out["logits"] - before).square().mean()

    # --- optimizers, and averages of weights ---

    def optimize(self, name: str, groups: str) -> None:
        """Begin with another optimizer."""
        self.averages, self.saved = False, None
        kind, options = OPTIMIZERS[name]
        self.chosen = name, groups
        self.optimizers = [kind(GROUPS[groups](model, options["lr"]), **options) for model in self.both]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.8) for o in self.optimizers]

    def follow(self) -> None:
        """Let averages follow the weights, and compare them."""
        self.differ = 0.0
        if self.averages:
            self.average_in_state()
            # State follows experts that moved before its optimizer's step.
            self.differ = self.error_of_averages()
        if self.by_name:
            names = {name for name, _ in self.reference.named_buffers()}
            for model, averages in zip(self.both, self.by_name, strict=True):
                for name, value in model.state_dict().items():
                    if name not in names:
                        averages[name] = averages[name].lerp(value, 0.3) if name in averages else value.clone()
            ours, theirs = self.by_name
            self.differ = max(self.differ, *(error_of(ours[n], v, relative=True) for n, v in theirs.items()))

    def average_in_state(self) -> None:
        for model, optimizer in zip(self.both, self.optimizers, strict=True):
            for parameter in model.parameters():
                state = optimizer.state[parameter]
                # An optimizer begins with a state that is empty.
                if not state:
                    continue
                value = parameter.detach()
                state["average"] = value.clone() if "average" not in state else state["average"].lerp(value, 0.3)

    def error_of_averages(self) -> float:
        theirs, worst = dict(self.reference.named_parameters()), 0.0
        for name, parameter in self.model.named_parameters():
            mine = self.optimizers[0].state[parameter].get("average")
            if name not in theirs or mine is None or not mine.numel():
                continue
            whole, shard = self.optimizers[1].state[theirs[name]]["average"], shard_of(parameter)
            worst = max(worst, error_of(mine, whole if shard is None else shard.slice(whole), relative=True))
        return worst
