"""Turns in which a model is asked for something, kept, put back, or has others beside it."""

from __future__ import annotations

import contextlib
import copy
import gc
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hecate
from tests.fuzz.draw import build_model, draw_model
from tests.fuzz.dressed import build_reference
from tests.fuzz.run import TOLERANCE, prepare_reference
from tests.fuzz.training_turns import TrainingTurns
from tests.support.models import VOCABULARY
from tests.support.parity import error_of


class OtherTurns(TrainingTurns):
    """Evaluation and generation; averages and checkpoints; a model made anew, and other models."""

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
        # Of weights that differ by as much as they may, logits differ by more.
        off = float((ours - theirs).abs().max()) / float(theirs.abs().max())
        assert off <= 100 * TOLERANCE, f"logits differ by {off:.1e}"

    def evaluate_in_bfloat16(self) -> None:
        """Cast, evaluate, and go back to the weights from before."""
        if self.drawn.attention is not None:
            return
        self.evaluate()
        before = [copy.deepcopy(model.state_dict()) for model in self.both]
        buffers = [{n: b.clone() for n, b in m.named_buffers(remove_duplicate=False)} for m in self.both]
        batch = self.batches()[self.rank]
        for model in self.models:
            model.to(torch.bfloat16).eval()
        with torch.no_grad():
            found = [model(input_ids=batch)["logits"].float() for model in self.both]
            self.call_plain(input_ids=batch)
        for model in self.models:
            model.double().train()
        for model, state, kept in zip(self.both, before, buffers, strict=True):
            model.load_state_dict(state)
            # Those that no state dict has, as the frequencies of rotary embeddings, stay rounded otherwise: another
            # model that is made anew would have better ones.
            for name, buffer in model.named_buffers(remove_duplicate=False):
                buffer.copy_(kept[name])
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
        if base is not self.model and self.drawn.options["policy"] == "replicate":
            # PEFT generates with the model inside, which is not compiled, and its grouped matmuls take no doubles.
            return
        length = 4 + self.rank
        prompt = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
        options: Any = dict(input_ids=prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
        for model in self.models:
            model.eval()
        self.buffers.before_forward(training=False)
        # PEFT generates with the model inside, of which a plain torch.compile around PEFT's knows nothing.
        with self.without_counting() if base is not self.model else contextlib.nullcontext():
            ours, theirs = (model.generate(**options) for model in self.both)
        self.call_plain("generate", **options)
        for model in self.models:
            model.train()
        assert torch.equal(ours, theirs), (ours, theirs)

    # --- averages of weights ---

    def begin_an_average(self) -> None:
        self.averages = True
        self.follow()

    def begin_an_average_by_name(self) -> None:
        self.by_name = [{}, {}]
        self.follow()

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
        self.saved = Path(folder[0]), weights, copy.deepcopy(self.optimizers[1].state_dict())

    def load(self) -> None:
        if self.saved is None:
            return
        folder, weights, state = self.saved
        try:
            hecate.load(folder, self.model, self.optimizers[0])
        except hecate.CheckpointError as error:
            # What was frozen then is not in it, and has been trained since.
            base = {name: p for name, p in self.reference.named_parameters() if "lora_" not in name}
            assert "the base here is another one" in str(error), error
            assert any(not torch.equal(p, weights[name]) for name, p in base.items()), "the base is the same"
            return
        for rank in range(self.size):
            self.buffers.turn_to(rank)
            self.reference.load_state_dict(weights)
        self.buffers.turn_to(self.rank)
        self.optimizers[1].load_state_dict(copy.deepcopy(state))

    def made_anew(self) -> None:
        """Save, let the model go, and go on with another one."""
        self.take_hooks_off()
        if self.checkpoints:
            self.checkpoint_layers()
        self.save()
        averages, before, base = self.averages, self.saved, self.model.state_dict()
        gone = weakref.ref(self.model)
        self.model = self.optimizers[0] = self.schedulers[0] = None
        gc.collect()
        assert gone() is None, "the model is still there"
        self.model = hecate.compile(self.build(7), self.drawn.config())
        self.buffers.of_a_new_model()
        if self.plain is not None:
            self.count_graphs()
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
