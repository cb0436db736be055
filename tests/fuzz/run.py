"""Drawn cases on one rank, beside one process that computes what all ranks do."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hecate
from tests.fuzz.draw import Case, Drawn, build_model, draw_case, draw_model
from tests.hecate_compile.test_sparse_attention import give_masks
from tests.support.models import VOCABULARY
from tests.support.parity import state_error

# Relative to the largest element of a tensor. Models that cast to float32 inside differ by its rounding.
TOLERANCE = 1e-5


def _clip_by_total(model: nn.Module) -> torch.Tensor:
    parameters = [*model.parameters()]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)
    return norm


def _clip_values(model: nn.Module) -> float:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.003)
    return 0.0


# Each returns the norm that it has found.
CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "hecate": lambda model: hecate.clip_grad_norm_(model, 0.1),
    "torch": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "largest": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=math.inf),
    "total": _clip_by_total,
    "values": _clip_values,
}


def run_models(seed: int, numbers: list[int], cases: list[int]) -> list[str]:
    """Problems, one line each; none if all is right."""
    warnings.simplefilter("ignore")
    return [problem for number in numbers for problem in _run_model(seed, number, cases)]


def _run_model(seed: int, number: int, cases: list[int]) -> list[str]:
    drawn = draw_model(seed, number)
    problems = []
    reference = build_model(drawn, seed)
    prepare_reference(reference, drawn)
    model = hecate.compile(build_model(drawn, seed), drawn.config())
    for index in cases:
        case = draw_case(seed, number, index)
        where = f"seed {seed}, model {number} {drawn}, case {index} {case}"
        try:
            error = Loop(drawn, case, model, reference, seed=f"{seed} {number} {index}").run()
        except Exception as failure:
            # The other rank may not be where this one is: nothing after this would mean anything.
            raise RuntimeError(where) from failure
        if not error <= TOLERANCE:
            problems.append(f"{where}: weights differ by {error:.1e}")
    return problems


def prepare_reference(reference: nn.Module, drawn: Drawn) -> None:
    """Make a plain model compute what the compiled one of the same draw does."""
    for part in reference.modules():
        if hasattr(part, "set_experts_implementation"):
            # The only one of transformers' that knows float64 without being compiled.
            part.set_experts_implementation("eager")
    if drawn.attention is not None:
        give_masks(reference, drawn.attention)


class Loop:
    """One case, from weights that both start with."""

    def __init__(self, drawn: Drawn, case: Case, model: nn.Module, reference: nn.Module, *, seed: str) -> None:
        self.drawn, self.case, self.model, self.reference = drawn, case, model, reference
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.generator = torch.Generator().manual_seed(abs(hash_of(seed)))
        start = self.build(hash_of(seed) % 1000)
        model.load_state_dict(start.state_dict())
        reference.load_state_dict(start.state_dict())
        self.zero_grad(none=True)
        kind: Any = dict(sgd=torch.optim.SGD, adamw=torch.optim.AdamW)[case.optimizer]
        options = dict(lr=0.05, momentum=0.9) if case.optimizer == "sgd" else dict(lr=0.01, eps=1e-3)
        self.optimizers = [kind(m.parameters(), **options) for m in (model, reference)]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in self.optimizers]

    def build(self, seed: int) -> nn.Module:
        return build_model(self.drawn, seed)

    def run(self) -> float:
        for action in self.case.actions:
            getattr(self, action.replace(" ", "_"))()
        return self.difference()

    # --- what both do ---

    def batches(self) -> list[torch.Tensor]:
        """One for each rank."""
        shapes = [(2, 6)] * self.size
        if self.case.ragged:
            shapes = [(2 + rank, 5 + 2 * rank) for rank in range(self.size)]
        if self.drawn.attention is not None:
            # So long that heads leave out blocks.
            shapes = [(rows, length + 50) for rows, length in shapes]
        return [torch.randint(0, VOCABULARY, shape, generator=self.generator) for shape in shapes]

    def losses(self, batches: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's of the model, and the mean over ranks of the reference."""
        mine = batches[self.rank]
        own = self.model(input_ids=mine, labels=mine)["loss"]
        return own, sum(self.reference(input_ids=b, labels=b)["loss"] for b in batches) / self.size

    def step(self) -> None:
        for part in range(self.case.accumulate):
            hecate.set_requires_gradient_sync(self.model, part == self.case.accumulate - 1)
            for loss in self.losses(self.batches()):
                loss.backward()
        self.update()

    def update(self) -> None:
        if self.case.clip is not None:
            ours = CLIPS[self.case.clip](self.model)
            theirs = CLIPS[self.case.clip.replace("hecate", "torch")](self.reference)
            assert abs(float(ours) - float(theirs)) <= TOLERANCE * float(theirs), (ours, theirs)
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad(none=not self.case.keep_zeros)

    def zero_grad(self, *, none: bool) -> None:
        for model in (self.model, self.reference):
            model.zero_grad(set_to_none=none)

    # --- actions ---

    def evaluate(self) -> None:
        self.look(torch.no_grad())

    def infer(self) -> None:
        self.look(torch.inference_mode())

    def look(self, mode: Any) -> None:
        batch = self.batches()[self.rank]
        for model in (self.model, self.reference):
            model.eval()
        with mode:
            ours, theirs = (m(input_ids=batch)["logits"] for m in (self.model, self.reference))
        for model in (self.model, self.reference):
            model.train()
        assert float((ours - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max()), "logits differ"

    def save_and_load(self) -> None:
        self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        optimizer = self.optimizers[0]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def two_forwards(self) -> None:
        first, second = self.losses(self.batches()), self.losses(self.batches())
        for one, other in zip(first, second, strict=True):
            (one + 2 * other).backward()
        self.update()

    def penalty(self) -> None:
        """What is computed with a parameter outside of the forward; of a shard, by each rank with its part."""
        name = next(n for n, p in self.reference.named_parameters() if p.ndim == 1 or "norm" in n)
        for model, loss in zip((self.model, self.reference), self.losses(self.batches()), strict=True):
            parameter = dict(model.named_parameters())[name]
            if self.drawn.options.get("dense") == "shard":
                loss.backward()
            else:
                (loss + parameter.square().sum()).backward()
        self.update()

    def schedule(self) -> None:
        self.step()
        for scheduler in self.schedulers:
            scheduler.step()

    # --- faults ---

    def bad_token(self) -> None:
        batch = self.batches()[self.rank] + VOCABULARY
        for model in (self.model, self.reference):
            try:
                model(input_ids=batch, labels=batch)
            except (IndexError, RuntimeError):
                continue
            raise AssertionError("a token that is not in the vocabulary went through")

    def not_a_number(self) -> None:
        for loss in self.losses(self.batches()):
            (loss * float("nan")).backward()
        self.zero_grad(none=True)

    def no_backward(self) -> None:
        self.losses(self.batches())

    def wrong_checkpoint(self) -> None:
        state = self.model.state_dict()
        name = next(n for n, v in state.items() if v.ndim >= 2)
        state[name] = torch.zeros(3, 5, 7, 9)
        for _ in range(2):
            try:
                self.model.load_state_dict(state)
            except RuntimeError as error:
                assert name in str(error)
            else:
                raise AssertionError("a wrong shape was loaded")
            state.pop(name, None)
        # What fitted was loaded, as torch does it; it is what was there.

    def wrong_optimizer_state(self) -> None:
        """Of the other rank; a step with it is refused on all of them."""
        self.step()
        mine = copy.deepcopy(self.optimizers[0].state_dict())
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, mine)
        try:
            self.optimizers[0].load_state_dict(everybody[(self.rank + 1) % self.size])
            self.losses(self.batches())[0].backward()
            before = [p.detach().clone() for p in self.model.parameters()]
            self.optimizers[0].step()
        except RuntimeError as error:
            assert "has the state of rank" in str(error), error
        else:
            # Without shards any rank's state is everybody's.
            assert self.drawn.options["policy"] == "replicate"
            with torch.no_grad():
                for parameter, value in zip(self.model.parameters(), before, strict=True):
                    parameter.copy_(value)
        self.optimizers[0].load_state_dict(mine)
        self.zero_grad(none=True)

    def one_expert(self) -> None:
        """All tokens go to the same experts; some ranks may have none."""
        names = [n for n, _ in self.reference.named_parameters() if "router" in n or n.endswith("gate.weight")]
        for model in (self.model, self.reference):
            state = model.state_dict()
            for name in names:
                if state[name].ndim == 2:
                    # Without ties, which anybody may break in another way.
                    order = torch.arange(len(state[name])).unsqueeze(1)
                    state[name] = state[name][:1] * (1 - order)
            model.load_state_dict(state)
        self.step()

    def interrupted_backward(self) -> None:
        """An error in a hook, after some of the backward."""

        def stop(grad: torch.Tensor) -> None:
            raise InterruptedError

        hooks = [next(iter(m.parameters())).register_hook(stop) for m in (self.model, self.reference)]
        for loss in self.losses(self.batches()):
            with contextlib.suppress(InterruptedError):
                loss.backward()
        for hook in hooks:
            hook.remove()
        self.zero_grad(none=True)

    def difference(self) -> float:
        return state_error(self.model.state_dict(), self.reference.state_dict(), relative=True)


def hash_of(text: str) -> int:
    """The same in every process."""
    return zlib.crc32(text.encode())
