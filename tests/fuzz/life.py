"""Drawn lives: what a user does with one model over thirty turns, beside one process that does the same.

Weights are compared after every turn, so a problem names the turn that made it.
"""

from __future__ import annotations

import copy
import gc
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hecate
from hecate.wrap.shard import shard_of
from tests.fuzz.draw import Case, Drawn, build_model, draw_model
from tests.fuzz.run import TOLERANCE, Loop, prepare_reference
from tests.support.models import VOCABULARY
from tests.support.parity import error_of

# How often each is drawn. Those that make another graph cost seconds.
TURNS = {
    "step": 12,
    "accumulate": 3,
    "evaluate": 2,
    "infer": 1,
    "other lengths": 3,
    "one row": 1,
    "generate": 2,
    "freeze": 2,
    "thaw": 2,
    "hook on a module": 1,
    "hook on a parameter": 1,
    "take hooks off": 1,
    "begin an average": 1,
    "save": 2,
    "load": 2,
    "save and load": 1,
    "another optimizer": 2,
    "another model": 1,
    "two forwards": 1,
    "schedule": 1,
    "not a number": 1,
    "no backward": 1,
    "bad token": 1,
}
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


@dataclass(frozen=True)
class DrawnLife:
    model: Drawn
    optimizer: str
    clip: str | None
    groups: bool
    turns: tuple[str, ...]


def draw_life(seed: int, number: int, turns: int = 30) -> DrawnLife:
    random = Random(f"life {seed} {number}")
    drawn = random.choices([*TURNS], [*TURNS.values()], k=turns)
    return DrawnLife(
        model=draw_model(seed, 10_000 + number),
        optimizer=random.choice([*OPTIMIZERS]),
        clip=random.choice((None, "hecate", "torch")),
        groups=random.random() < 0.5,
        turns=("step", *drawn, "step"),
    )


def run_lives(seed: int, numbers: list[int], turns: int) -> list[str]:
    """Problems, one text each; a life ends with its first."""
    problems = []
    for number in numbers:
        life = draw_life(seed, number, turns)
        where = f"life {number} of seed {seed}: {life}"
        try:
            problem = Life(life, seed=f"{seed} {number}").live()
        except Exception as failure:
            # The other rank may not be where this one is: nothing after this would mean anything.
            raise RuntimeError(where) from failure
        if problem:
            problems.append(f"{where}: {problem}")
    return problems


class Life(Loop):
    """One life, on this rank and in one process."""

    def __init__(self, life: DrawnLife, *, seed: str) -> None:
        self.life, self.random = life, Random(f"turns {seed}")
        reference = build_model(life.model, 1)
        prepare_reference(reference, life.model)
        model = hecate.compile(build_model(life.model, 2), life.model.config())
        case = Case("sgd", life.clip, 1, keep_zeros=False, ragged=False, actions=())
        self.shape, self.hooks, self.averages = (2, 6), list[Any](), False
        self.differ = 0.0
        self.saved: tuple[Any, ...] | None = None
        super().__init__(life.model, case, model, reference, seed=seed)
        self.optimize(life.optimizer)

    def live(self) -> str:
        """Return what went wrong, or nothing."""
        for number, turn in enumerate(self.life.turns):
            try:
                getattr(self, turn.replace(" ", "_"))()
            except Exception as error:
                raise RuntimeError(f"turn {number}, {turn}") from error
            differ = self.difference()
            if not max(differ, self.differ) <= TOLERANCE:
                return f"turn {number}, {turn}: weights differ by {differ:.1e}, averages by {self.differ:.1e}"
        return ""

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.model, self.reference

    # --- steps ---

    def batches(self) -> list[torch.Tensor]:
        rows, length = self.shape
        if self.drawn.attention is not None:
            length += 50
        return [torch.randint(0, VOCABULARY, (rows, length), generator=self.generator) for _ in range(self.size)]

    def update(self) -> None:
        super().update()
        if self.averages:
            self.average()
            # State follows experts that moved before its optimizer's step.
            self.differ = self.error_of_averages()

    def accumulate(self) -> None:
        object.__setattr__(self.case, "accumulate", self.random.choice((2, 3)))
        self.step()
        object.__setattr__(self.case, "accumulate", 1)

    def other_lengths(self) -> None:
        self.with_shape(self.random.choice(((2, 9), (3, 6))))

    def one_row(self) -> None:
        self.with_shape((1, 6))

    def with_shape(self, shape: tuple[int, int]) -> None:
        before, self.shape = self.shape, shape
        self.step()
        self.shape = before

    def another_optimizer(self) -> None:
        self.optimize(self.random.choice([*OPTIMIZERS]))

    def optimize(self, name: str) -> None:
        """Begin with another optimizer, perhaps with groups that only matrices decay in."""
        self.averages = False
        kind, options = OPTIMIZERS[name]
        self.optimizers = []
        for model in self.both:
            parameters: Any = model.parameters()
            if self.life.groups:
                everything = [*model.parameters()]
                parameters = [
                    {"params": [p for p in everything if p.ndim >= 2], "weight_decay": 0.1},
                    {"params": [p for p in everything if p.ndim < 2], "lr": options["lr"] / 2},
                ]
            self.optimizers.append(kind(parameters, **options))
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.8) for o in self.optimizers]
        self.saved = None

    # --- what a model is asked besides ---

    def generate(self) -> None:
        if not hasattr(self.model, "generate") or self.drawn.attention is not None:
            return
        length = 4 + self.rank
        prompt = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
        options: Any = dict(max_new_tokens=3, do_sample=False, pad_token_id=0)
        for model in self.both:
            model.eval()
        ours, theirs = (model.generate(prompt, **options) for model in self.both)
        for model in self.both:
            model.train()
        assert torch.equal(ours, theirs), (ours, theirs)

    def freeze(self) -> None:
        self.require_gradients(False)

    def thaw(self) -> None:
        self.require_gradients(True)

    def require_gradients(self, wanted: bool) -> None:
        """Freeze or thaw a part; all but the first parameter may be frozen at a time."""
        name = self.random.choice(
            [
                name
                for name, module in self.reference.named_modules()
                if name and any(True for _ in module.parameters())
            ]
        )
        for model in self.both:
            model.get_submodule(name).requires_grad_(wanted)
            next(model.parameters()).requires_grad_(True)

    def hook_on_a_module(self) -> None:
        name = self.random.choice(
            [n for n, m in self.reference.named_modules() if "norm" in n and not [*m.children()]]
        )
        for model in self.both:
            module = model.get_submodule(name)
            self.hooks.append(module.register_forward_hook(lambda module, inputs, output: output * 0.5))

    def hook_on_a_parameter(self) -> None:
        """Halve a gradient, which is the same before and after it is averaged."""
        ours, theirs = (dict(model.named_parameters()) for model in self.both)
        name = self.random.choice([name for name, p in theirs.items() if name in ours and p.requires_grad] or [""])
        for parameters in (ours, theirs):
            if name:
                self.hooks.append(parameters[name].register_hook(lambda gradient: gradient * 0.5))

    def take_hooks_off(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    # --- averages of weights ---

    def begin_an_average(self) -> None:
        self.averages = True
        self.average()

    def average(self) -> None:
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

    # --- checkpoints ---

    def save(self) -> None:
        folder: list[Any] = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folder)
        hecate.save(folder[0], self.model, self.optimizers[0], step=1)
        self.saved = (
            Path(folder[0]),
            *(copy.deepcopy(one.state_dict()) for one in (self.reference, self.optimizers[1])),
        )

    def load(self) -> None:
        if self.saved is None:
            return
        folder, weights, state = self.saved
        hecate.load(folder, self.model, self.optimizers[0])
        self.reference.load_state_dict(weights)
        self.optimizers[1].load_state_dict(copy.deepcopy(state))

    # --- other models ---

    def another_model(self) -> None:
        """Compile another, train it a step, and let it go."""
        drawn = draw_model(self.random.randrange(1000), 0)
        other = hecate.compile(build_model(drawn, 3), drawn.config())
        plain = build_model(drawn, 3)
        prepare_reference(plain, drawn)
        length = 56 if drawn.attention is not None else 6
        ids = torch.randint(0, VOCABULARY, (self.size, length), generator=self.generator)
        own = other(input_ids=ids[self.rank :][:1], labels=ids[self.rank :][:1])["loss"]
        own.backward()
        mean = own.detach().clone()
        dist.all_reduce(mean)
        parts = [plain(input_ids=row[None], labels=row[None])["loss"] for row in ids]
        error = error_of(mean / self.size, sum(parts) / self.size, relative=True)
        assert error <= TOLERANCE, f"the loss of {drawn} differs by {error:.1e}"
        del own, other
        gc.collect()
