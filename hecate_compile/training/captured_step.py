"""A training step's forward and backward as CUDA graphs, replayed with another placement in each step.

The host launches two graphs in place of some hundred kernels. Data that change from step to step lie at addresses
that stay: inputs, gradients, and the tables that say who holds which replicas
(:class:`~hecate.runtime.one_sided.replays.FollowedTables`). While the backward runs the host reads the counts of the
forward and plans the next placements. A plan that has no room in the tables, or other owners, is captured anew.

Several ranks need ``Config(transport="symmetric")``: else the host would have to say how many rows come. Tested on
one GPU (docs/gpu.md), and without one by a recorder that runs the same code again, while graphs still carry the first
placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hecate.runtime.comm.collectives import keeping_constants
from hecate.runtime.comm.watch import telling
from hecate.runtime.comm.world import World
from hecate.runtime.placement.placement import Placement
from hecate.runtime.state.layer import Layer
from hecate.runtime.state.placer import Placer
from hecate.runtime.state.step_mode import StepMode
from hecate.training.forward import CompiledForward

_TRAINING = StepMode(training=True, first=False)


class Recorder(Protocol):
    """A recorder of launches, which launches them again.

    Attributes:
        host_runs: in a replay the host's part runs again, too.
    """

    host_runs: bool

    def warm_up(self, run: Callable[[], None]) -> None:
        """Call ``run`` in the place where it would be recorded."""

    def record(self, *runs: Callable[[], None]) -> tuple[Callable[[], None], ...]:
        """Record each of ``runs``, which need not have happened when this returns, and return what replays them."""


class CudaGraphs:
    """Records CUDA graphs that share memory; they are replayed in the order in which they were recorded."""

    host_runs = False

    def __init__(self, device: torch.device) -> None:
        # All graphs share a stream: autograd adds gradients up on the one where it met a parameter first.
        self._stream = torch.cuda.Stream(device)

    def warm_up(self, run: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)

    def record(self, *runs: Callable[[], None]) -> tuple[Callable[[], None], ...]:
        # Memory of its own each time: results of earlier graphs may still be in use.
        pool, replays = torch.cuda.graph_pool_handle(), []
        previous = torch.cuda.current_stream(self._stream.device)
        for run in runs:
            graph = torch.cuda.CUDAGraph()
            broken: list[BaseException] = []
            try:
                # Relaxed: numbers for the host are copied to pinned memory, which may be allocated meanwhile.
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="relaxed"):
                    try:
                        run()
                    except BaseException as error:
                        broken.append(error)
                        raise
            except BaseException:
                # The end of a broken capture raises, too: that hides what broke it, and leaves its stream current.
                torch.cuda.set_stream(previous)
                if broken:
                    raise broken[0] from None
                raise
            replays.append(graph.replay)
        return tuple(replays)


@dataclass(eq=False)
class _Figures:
    """The fields that a recorded forward and backward left in a layer's record, to be restored in each replay."""

    counted: Tensor | None
    unread: list[tuple[int, Tensor]]
    arrived: Tensor | None

    @classmethod
    def of(cls, layer: Layer) -> _Figures:
        return cls(layer.counted, list(layer.unread), layer.arrived)

    def restore(self, layer: Layer) -> None:
        layer.counted, layer.unread, layer.arrived = self.counted, list(self.unread), self.arrived
        layer.bytes_sent = layer.node_bytes_sent = 0


def count_experts_sent(layer: Layer, placement: Placement, *, gathers: int) -> None:
    """Note replicas and bytes of experts of a step in a layer's record, with ``placement`` on one node.

    Args:
        gathers: how often replicas are gathered.
    """
    rank = layer.world.rank
    own = placement.owner_array == rank
    leaving = int((placement.matrix[own] > 0).sum() - own.sum())
    experts = gathers * leaving + len(placement.replicas_on(rank))
    layer.replicas, layer.expert_bytes_sent = placement.num_replicas, int(layer.sizes.expert_bytes * experts)


class CapturedStep:
    """A captured step, as :func:`hecate.capture` makes it. Making it is a collective, and so is each call.

    Args:
        model: the model whose step it is.
        compiled: the callable that ``model(...)`` runs.
        layers: the model's MoE layers.
        gathers: how often replicas are gathered in a step.
        forward: calls the model and returns a scalar loss.
        inputs: inputs of ``forward``, in the shapes of all steps.
        warm_up: forwards and backwards before the first capture.
        recorder: recorder of CUDA graphs.

    Raises:
        ValueError, TypeError, RuntimeError: as ``hecate.capture``.

    Attributes:
        captures: how often it was captured: again if a plan has no room, owners changed, or parameters are others.
    """

    def __init__(
        self,
        model: nn.Module,
        compiled: CompiledForward,
        forward: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        *,
        layers: Sequence[Layer],
        placer: Placer,
        world: World,
        gathers: int,
        warm_up: int,
        recorder: Recorder,
    ) -> None:
        self._model, self._compiled, self._forward, self._recorder = model, compiled, forward, recorder
        self._world, self._gathers = world, gathers
        self._check_devices(inputs)
        self._inputs = tuple(value.detach().clone() for value in inputs)
        self._loss: Tensor | None = None
        self._replays: tuple[Callable[[], None], ...] = ()
        self._follows = compiled.between.carrier.replays(placer)
        self._figures: list[_Figures] = []
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        # Kept, so that an equal address is equal memory: else ranks could come to different answers.
        self._tensors: list[Tensor] = []
        self._trained: list[bool] = []
        self._constants: list[Tensor] = []
        self.captures = 0
        for _ in range(max(1, warm_up)):
            recorder.warm_up(self._run_both)
        self._clear_gradients()
        compiled.between.carrier.settle(whole=True)
        self._check_averages()
        self._all_layers = tuple(dict.fromkeys(layers))
        # At one rank none is placed, nor are those that gather their experts.
        self._layers = tuple(layer for layer in self._all_layers if layer.placer.plan.current is not None)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run a forward and backward, and return the loss, detached."""
        with telling("in a captured step"):
            return self._step(inputs)

    def _step(self, inputs: tuple[Tensor, ...]) -> Tensor:
        self._check(inputs)
        compiled = self._compiled
        if not compiled.outside_gradients.synchronizes:
            raise RuntimeError(
                "hecate.capture: captured steps average all gradients, and hecate.set_requires_gradient_sync, or "
                "model.no_sync, is off. Micro-batches cannot be captured: nothing adds up"
            )
        # Step 1: the work between two steps, and the placements of this one.
        compiled.between(_TRAINING)
        placements = {layer: layer.placer.take() for layer in self._layers}
        for place, value in zip(self._inputs, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        if self._replays and self._follows.have_room(placements) and self._same_tensors():
            self._follows.write(placements)
        else:
            self._capture(placements)
        # Step 2: both graphs, and nothing to wait for between them.
        self._clear_gradients()
        replay_forward, replay_backward = self._replays
        with self._recording():
            replay_forward()
            forward_ends = self._mark()
            replay_backward()
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                parameter.grad = gradient
        # Step 3: while the backward runs, the host learns of the forward, and plans.
        if not self._recorder.host_runs:
            for layer, figures in zip(self._all_layers, self._figures, strict=True):
                figures.restore(layer)
            for layer, placement in placements.items():
                count_experts_sent(layer, placement, gathers=self._gathers)
            self._follows.tell_again(forward_ends)
        compiled.between.carrier.settle()
        for layer in self._layers:
            layer.placer.plan_ahead()
        if compiled.after is not None:
            compiled.after()
        assert self._loss is not None
        return self._loss.detach()

    # --- recording ---

    def _capture(self, placements: Mapping[Layer, Placement]) -> None:
        """Record forward and backward, with room for ``placements`` and more."""
        self._replays, self._gradients, self._figures = (), [], []
        self._follows.forget()
        self._follows.prepare(placements)
        recorded = False
        try:
            with self._recording():
                # Run once without recording: kernels are compiled and tuned for the sizes of this room.
                self._recorder.warm_up(self._run_both)
                self._check_averages()
                self._compiled.between.carrier.forget()
                self._clear_gradients()
                with keeping_constants() as self._constants:
                    self._replays = self._recorder.record(self._run_forward, self._run_backward)
            recorded = True
        finally:
            self._follows.recorded()
            # Replays run no jobs, and the jobs that ran here are of no step.
            self._world.queue.begin_step()
            self._world.queue.forget_spans()
            if not recorded:
                for layer in self._all_layers:
                    layer.counted, layer.unread, layer.arrived = None, [], None
        self._figures = [_Figures.of(layer) for layer in self._all_layers]
        self._gradients = [(p, p.grad) for p in self._model.parameters() if p.grad is not None]
        self._tensors = [tensor.detach() for tensor in self._state()]
        self._trained = [parameter.requires_grad for parameter in self._model.parameters()]
        self.captures += 1

    def _check_averages(self) -> None:
        if self._compiled.outside_gradients.averages:
            raise RuntimeError(
                "hecate.capture: gradients of some parameters are averaged on the host when a backward ends, which "
                "is in no CUDA graph: something outside of the compiled forward uses them, synchronization is off, "
                'or policy="replicate" is on'
            )

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Let host code in the block read and write the memory that graphs use."""
        self._compiled.recording = True
        try:
            with self._follows.recording():
                yield
        finally:
            self._compiled.recording = False

    def _state(self) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()

    def _same_tensors(self) -> bool:
        """Return whether graphs find all parameters and buffers, and train the same ones. All ranks answer alike."""
        now, trained = list(self._state()), [parameter.requires_grad for parameter in self._model.parameters()]
        return (
            len(now) == len(self._tensors)
            and all(a.data_ptr() == b.data_ptr() for a, b in zip(now, self._tensors, strict=True))
            and trained == self._trained
        )

    def _run_both(self) -> None:
        self._clear_gradients()
        self._run_forward()
        self._run_backward()

    def _run_forward(self) -> None:
        loss = self._forward(*self._inputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise TypeError(f"hecate.capture: forward returned {what}, expected a scalar loss with a gradient")
        self._loss = loss

    def _run_backward(self) -> None:
        assert self._loss is not None
        self._loss.backward()

    def _clear_gradients(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None

    def _mark(self) -> Any:
        """Return an event after all that has been launched; None where nothing is launched ahead."""
        if self._world.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    # --- what is given ---

    def _check_devices(self, inputs: Sequence[object]) -> None:
        device = self._world.device
        for place, value in enumerate(inputs):
            if not isinstance(value, Tensor) or value.device != device:
                what = f"on {value.device}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise ValueError(f"hecate.capture: input {place} is {what}, expected a tensor on {device}")

    def _check(self, inputs: Sequence[object]) -> None:
        """Refuse inputs of other dtypes or shapes than those that were captured."""
        self._check_devices(inputs)
        given = [_form(value) for value in inputs if isinstance(value, Tensor)]
        if given != (wanted := [_form(value) for value in self._inputs]):
            raise ValueError(
                f"hecate.capture: inputs {'; '.join(given)}, but captured were {'; '.join(wanted)}. CUDA graphs have "
                "fixed shapes: pad the batch, drop a last one that is shorter, or clear the gradients and call the "
                "model itself for it"
            )


def _form(value: Tensor) -> str:
    return f"{value.dtype} {list(value.shape)}"
