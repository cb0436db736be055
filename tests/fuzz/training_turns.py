"""Turns in which a model trains, or is made to train in another way."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import torch
import torch.distributed as dist

import hecate
from tests.fuzz.pair import GROUPS, OPTIMIZERS, Pair
from tests.fuzz.refusals import REFUSALS
from tests.support.ranks import message_of

_CHECKPOINTS = {"use_reentrant": False}


class TrainingTurns(Pair):
    """Steps of all kinds; optimizers, freezing, hooks, checkpointed layers, buffers; faults in a step."""

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

    def another_optimizer(self) -> None:
        self.optimize(self.random.choice([*OPTIMIZERS]), self.random.choice([*GROUPS]))

    def another_rate(self) -> None:
        number, factor = self.random.randrange(len(self.optimizers[0].param_groups)), self.random.choice((0.5, 1.5))
        for optimizer in self.optimizers:
            optimizer.param_groups[number]["lr"] *= factor

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
        self.hooks_changed()

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
        self.hooks_changed()

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

    # --- faults ---

    def bad_token(self) -> None:
        self.buffers.before_forward(training=True)
        super().bad_token()
        # A plain model may fail before its first graph, the compiled one in the first of several.
        batch = self.batches()[self.rank]
        self.call_plain(input_ids=batch, labels=batch)

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
