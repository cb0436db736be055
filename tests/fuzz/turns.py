"""The turns of a life: what a user does with a model, each in a method of its name, beside one process."""

from __future__ import annotations

import contextlib
import copy
import gc
import tempfile
import weakref
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.wrap.shard import shard_of
from tests.fuzz.draw import Case, Drawn, build_model, draw_model
from tests.fuzz.dressed import Dress, build_dressed, build_reference
from tests.fuzz.graphs import PlainCompiled
from tests.fuzz.rank_buffers import RankBuffers
from tests.fuzz.refusals import REFUSALS
from tests.fuzz.run import TOLERANCE, Loop, prepare_reference
from tests.support.models import VOCABULARY
from tests.support.parity import error_of
from tests.support.ranks import message_of

# How often each is drawn. Those that make another graph cost seconds.
TURNS = {
    "step": 12,
    "accumulate": 3,
    "evaluate": 2,
    "infer": 1,
    "evaluate in bfloat16": 1,
    "without adapters": 1,
    "other lengths": 3,
    "one row": 1,
    "generate": 2,
    "freeze": 2,
    "thaw": 2,
    "hook on a module": 1,
    "hook on a parameter": 1,
    "take hooks off": 1,
    "change a buffer": 4,
    "checkpoint layers": 1,
    "begin an average": 1,
    "begin an average by name": 1,
    "look at the average": 1,
    "save": 2,
    "load": 2,
    "save and load": 1,
    "another optimizer": 2,
    "another rate": 1,
    "another model": 1,
    "a frozen copy": 1,
    "forget the copy": 1,
    "made anew": 1,
    "a trainer": 1,
    "two forwards": 1,
    "schedule": 1,
    "refused": 3,
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


class Turns(Loop):
    """A model and its reference, on this rank."""

    def __init__(self, drawn: Drawn, dress: Dress, clip: str | None, *, seed: str) -> None:
        self.dress, self.random = dress, Random(f"turns {seed}")
        self.shape, self.hooks, self.checkpoints = (2, 6), list[Any](), False
        # Averages kept in the optimizer's state, and those by name: of the model, and of the reference.
        self.averages, self.by_name = False, list[dict[str, torch.Tensor]]()
        self.differ, self.saved = 0.0, None
        self.frozen: tuple[nn.Module, nn.Module] | None = None
        self.plain: PlainCompiled | None = None
        # Made so far, of the model and of the plain one.
        self.graphs = 0, 0
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
        """Compare with a plain torch.compile from now on, turn by turn; one rank does."""
        self.graphs = 0, 0
        if self.rank == 0:
            self.plain = PlainCompiled(build_reference(self.drawn, self.dress, 3))

    def graphs_too_many(self) -> str:
        if self.plain is None:
            return ""
        before, now = self.graphs, (compiled_model_of(self.model, "explain").backend._number, self.plain.graphs)
        self.graphs, (ours, theirs) = now, (now[0] - before[0], now[1] - before[1])
        return f"{ours} more graphs, and {theirs} of a plain torch.compile" if ours > theirs else ""

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

    def losses(
        self, batches: list[torch.Tensor], *, averages: bool = True, copies: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's loss of the model, and the mean over ranks of the reference.

        Args:
            averages: the backward will average gradients.
            copies: a frozen copy pulls, if there is one.
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

    def step(self) -> None:
        for loss in self.losses(self.batches()):
            loss.backward()
        self.update()

    def update(self) -> None:
        super().update()
        self.follow()

    def accumulate(self) -> None:
        way, parts = self.random.choice(("options", "no_sync", "every")), self.random.choice((2, 3))
        for part in range(parts):
            averages = way == "every" or part == parts - 1
            if way == "options":
                hecate.set_requires_gradient_sync(self.model, averages)
            with self.model.no_sync() if way == "no_sync" and not averages else contextlib.nullcontext():
                for loss in self.losses(self.batches(), averages=averages):
                    loss.backward()
        self.update()

    def other_lengths(self) -> None:
        self.with_shape(self.random.choice(((2, 9), (3, 6))))

    def one_row(self) -> None:
        self.with_shape((1, 6))

    def with_shape(self, shape: tuple[int, int]) -> None:
        before, self.shape = self.shape, shape
        self.step()
        self.shape = before

    def a_trainer(self) -> None:
        """A step by transformers.Trainer, with the user's own optimizer and schedule."""
        if not hasattr(self.reference, "config") or self.dress.adapters is not None:
            return
        from transformers import Trainer, TrainingArguments

        batches = self.batches()
        rows = [{"input_ids": row, "labels": row} for batch in batches for row in batch.tolist()]
        options: dict[str, Any] = dict(max_steps=1, max_grad_norm=0.0, use_cpu=True, report_to="none")
        options |= dict(disable_tqdm=True, save_strategy="no", logging_strategy="no")
        options |= dict(per_device_train_batch_size=len(batches[0]), train_sampling_strategy="sequential")
        options |= dict(gradient_checkpointing=self.checkpoints, gradient_checkpointing_kwargs=_CHECKPOINTS)
        with tempfile.TemporaryDirectory() as folder:
            arguments, schedule = TrainingArguments(folder, **options), self.schedulers[0]
            Trainer(self.model, arguments, train_dataset=rows, optimizers=(self.optimizers[0], schedule)).train()
        for model in self.models[1:]:
            model.config.use_cache = self.model.config.use_cache
        mine = batches[self.rank]
        self.call_plain(input_ids=mine, labels=mine, num_items_in_batch=torch.tensor(mine.numel()))
        self.loss_of_all(batches, copies=False).backward()
        self.optimizers[1].step()
        self.schedulers[1].step()
        self.zero_grad(none=True)
        self.follow()

    # --- optimizers ---

    def another_optimizer(self) -> None:
        self.optimize(self.random.choice([*OPTIMIZERS]), self.random.choice([*GROUPS]))

    def another_rate(self) -> None:
        number, factor = self.random.randrange(len(self.optimizers[0].param_groups)), self.random.choice((0.5, 1.5))
        for optimizer in self.optimizers:
            optimizer.param_groups[number]["lr"] *= factor

    def optimize(self, name: str, groups: str) -> None:
        """Begin with another optimizer."""
        self.averages, self.saved = False, None
        kind, options = OPTIMIZERS[name]
        self.chosen = name, groups
        self.optimizers = [kind(GROUPS[groups](model, options["lr"]), **options) for model in self.both]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.8) for o in self.optimizers]

    # --- what a model is asked besides ---

    def look(self, mode: Any) -> None:
        batch = self.batches()[self.rank]
        for model in self.models:
            model.eval()
        self.buffers.before_forward(training=False)
        with mode:
            ours, theirs = (model(input_ids=batch)["logits"] for model in self.both)
            self.call_plain(input_ids=batch)
        for model in self.models:
            model.train()
        assert float((ours - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max()), "logits differ"

    def evaluate_in_bfloat16(self) -> None:
        """Cast, evaluate, and go back to the weights from before."""
        if self.drawn.attention is not None:
            return
        self.evaluate()
        before = [copy.deepcopy(model.state_dict()) for model in self.both]
        batch, found = self.batches()[self.rank], []
        for model, state in zip(self.both, before, strict=True):
            model.to(torch.bfloat16).eval()
            with torch.no_grad():
                found.append(model(input_ids=batch)["logits"].float())
            model.double().train()
            model.load_state_dict(state)
        # A token whose experts are nearly equal may get others.
        off = (found[0] - found[1]).abs().amax(-1) / found[1].abs().amax()
        assert float(off.median()) < 0.05, f"logits differ by {float(off.median()):.1e}"

    def without_adapters(self) -> None:
        if self.dress.adapters is None:
            return
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(model.disable_adapter())
            self.evaluate()

    def generate(self) -> None:
        # PEFT's model has the method, whatever it is around.
        base = self.model.get_base_model() if self.dress.adapters is not None else self.model
        if not hasattr(base, "generate") or self.drawn.attention is not None:
            return
        length = 4 + self.rank
        prompt = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
        options: Any = dict(input_ids=prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
        for model in self.models:
            model.eval()
        self.buffers.before_forward(training=False)
        ours, theirs = (model.generate(**options) for model in self.both)
        self.call_plain("generate", **options)
        for model in self.models:
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
                if name
                and any(True for _ in module.parameters())
                # There adapters are parameters of the experts themselves.
                and not (self.dress.adapters is not None and "experts" in name)
            ]
        )
        for model in self.models:
            model.get_submodule(name).requires_grad_(wanted)
            next(model.parameters()).requires_grad_(True)

    def hook_on_a_module(self) -> None:
        name = self.random.choice(
            [n for n, m in self.reference.named_modules() if "norm" in n and not [*m.children()]]
        )
        for model in self.models:
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

    def checkpoint_layers(self) -> None:
        """Switch the checkpointing of transformers' layers on, or off again."""
        if not hasattr(self.reference, "gradient_checkpointing_enable"):
            return
        self.checkpoints = not self.checkpoints
        for model in self.models:
            if self.checkpoints:
                model.gradient_checkpointing_enable(_CHECKPOINTS)
            else:
                model.gradient_checkpointing_disable()

    # --- buffers ---

    def change_a_buffer(self) -> None:
        """What a loop does with a bias between steps, on the first rank alone, on each by its own load, or alike."""
        names = [name for name, _ in self.reference.named_buffers() if name.endswith("bias")]
        if not names:
            return
        name, way = self.random.choice(names), self.random.choice(("first", "own", "alike"))
        where, _, key = name.rpartition(".")
        noise = [torch.randn(self.reference.get_buffer(name).shape, generator=self.generator) for _ in range(2)]
        replaces = self.random.random() < 0.5
        for rank in range(self.size):
            self.buffers.turn_to(rank)
            for model in self.both if rank == self.rank else [self.reference]:
                module: Any = model.get_submodule(where)
                if way == "own" and hasattr(module, "load"):
                    change = 0.01 * torch.sign(module.load.mean() - module.load)
                elif way == "first" and rank:
                    continue
                else:
                    change = 0.1 * noise[rank if way == "own" else 0].double()
                if replaces:
                    setattr(module, key, module.get_buffer(key) + change)
                else:
                    module.get_buffer(key).add_(change)
        self.buffers.turn_to(self.rank)

    # --- averages of weights ---

    def begin_an_average(self) -> None:
        self.averages = True
        self.follow()

    def begin_an_average_by_name(self) -> None:
        self.by_name = [{}, {}]
        self.follow()

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

    def look_at_the_average(self) -> None:
        """Evaluate with averages in the place of weights, and go back."""
        if not self.by_name:
            return
        before = [copy.deepcopy(model.state_dict()) for model in self.both]
        names = {name for name, _ in self.reference.named_buffers()}
        for model, averages in zip(self.both, self.by_name, strict=True):
            model.load_state_dict(averages, strict=False)
        self.evaluate()
        for model, state in zip(self.both, before, strict=True):
            model.load_state_dict({n: v for n, v in state.items() if n not in names}, strict=False)

    # --- checkpoints ---

    def save(self) -> None:
        folder: list[Any] = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folder)
        hecate.save(folder[0], self.model, self.optimizers[0], step=1)
        self.buffers.turn_to(0)
        weights = copy.deepcopy(self.reference.state_dict())
        self.buffers.turn_to(self.rank)
        if self.dress.adapters is not None:
            # A checkpoint of adapters is for the base that is under them, and has nothing of it that is frozen.
            for name, parameter in self.reference.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad and "lora_" not in name:
                    del weights[name]
        self.saved = Path(folder[0]), weights, copy.deepcopy(self.optimizers[1].state_dict())

    def load(self) -> None:
        if self.saved is None:
            return
        folder, weights, state = self.saved
        hecate.load(folder, self.model, self.optimizers[0])
        for rank in range(self.size):
            self.buffers.turn_to(rank)
            self.reference.load_state_dict(weights, strict=False)
        self.buffers.turn_to(self.rank)
        self.optimizers[1].load_state_dict(copy.deepcopy(state))

    def made_anew(self) -> None:
        """Save, let the model go, and go on with another one."""
        self.take_hooks_off()
        if self.checkpoints:
            self.checkpoint_layers()
        self.save()
        averages, before, base = self.averages, self.saved, self.model.state_dict()
        if self.plain is not None:
            self.count_graphs()
        gone = weakref.ref(self.model)
        self.model = self.optimizers[0] = self.schedulers[0] = None
        gc.collect()
        assert gone() is None, "the model is still there"
        self.model = hecate.compile(self.build(7), self.drawn.config())
        if self.dress.adapters is not None:
            self.model.load_state_dict(base)
        for model in self.both:
            model.requires_grad_(True)
        theirs = self.optimizers[1]
        self.optimize(*self.chosen)
        self.averages, self.saved = averages, before
        self.optimizers[1].load_state_dict(theirs.state_dict())
        self.load()

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

    def a_frozen_copy(self) -> None:
        """Keep what the model is now beside it, in another compiled one; steps stay near to it from then on."""
        copies = hecate.compile(self.build(5), self.drawn.config()), build_reference(self.drawn, self.dress, 6)
        copies[0].load_state_dict(self.model.state_dict())
        # Its first forward takes rank 0's buffers.
        self.buffers.turn_to(0)
        copies[1].load_state_dict(self.reference.state_dict())
        self.buffers.turn_to(self.rank)
        for model in copies:
            model.requires_grad_(False).eval()
        self.frozen = copies

    def forget_the_copy(self) -> None:
        self.frozen = None
        gc.collect()

    # --- faults ---

    def bad_token(self) -> None:
        self.buffers.before_forward(training=True)
        super().bad_token()

    def refused(self) -> None:
        """Something that Hecate refuses: on all ranks, by the same words; a step after it is right."""
        names = [name for name, refusal in REFUSALS.items() if refusal.applies(self)]
        name = self.random.choice(names)
        said = message_of(lambda: REFUSALS[name].attempt(self))
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, said)
        for text in everybody:
            assert REFUSALS[name].words in text, f"{name}: {everybody}"
        self.zero_grad(none=True)
        self.step()


_CHECKPOINTS = {"use_reentrant": False}
