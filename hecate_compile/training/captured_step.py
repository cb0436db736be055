"""A training step's forward and backward as CUDA graphs, replayed with another placement in each step.

Inputs, gradients and the tables of replicas (:class:`~hecate.runtime.one_sided.carrier.FollowedTables`) lie at
addresses that stay. Several ranks need ``Config(transport="symmetric")``: else the host would have to say how many
rows come.
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
    """A recorder of launches, which launches them again."""

    # In a replay the host's part runs again, too.
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


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """A recorded forward and backward."""

    forward: Callable[[], None]
    backward: Callable[[], None]
    figures: list[tuple[Layer, Tensor | None, list[tuple[int, Tensor]], Tensor | None]]
    gradients: list[tuple[nn.Parameter, Tensor]]
    # Kept, so that an equal address is equal memory: else ranks could come to different answers.
    tensors: list[Tensor]
    trained: list[bool]

    def is_of(self, model: nn.Module) -> bool:
        """Return whether the model has the same tensors, and trains the same. All ranks answer alike."""
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        trained = [parameter.requires_grad for parameter in model.parameters()]
        return [
            tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())
        ] == addresses and trained == self.trained

    def restore_figures(self) -> None:
        for layer, counted, unread, arrived in self.figures:
            layer.counted, layer.unread, layer.arrived = counted, list(unread), arrived
            layer.bytes_sent = layer.node_bytes_sent = 0

    def restore_gradients(self) -> None:
        for parameter, gradient in self.gradients:
            if parameter.grad is None:
                parameter.grad = gradient


def count_experts_sent(layer: Layer, placement: Placement, *, gathers: int) -> None:
    """Note in a layer's record the replicas of a step on one node, and the bytes of experts that it sends."""
    rank = layer.world.rank
    own = placement.owner_array == rank
    leaving = int((placement.matrix[own] > 0).sum() - own.sum())
    experts = gathers * leaving + len(placement.replicas_on(rank))
    layer.replicas, layer.expert_bytes_sent = placement.num_replicas, int(layer.sizes.expert_bytes * experts)


class CapturedStep:
    """A captured step, as :func:`hecate.capture` makes it. Making it is a collective, and so is each call.

    ``captures`` is how often it was captured: again if a plan has no room, or owners or parameters are others.
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
        self._carrier, self._tables = compiled.between.carrier, compiled.between.carrier.replays(placer)
        self._check_devices(inputs)
        self._inputs = tuple(value.detach().clone() for value in inputs)
        self._loss: Tensor | None = None
        self._recorded: _Recorded | None = None
        self._constants: list[Tensor] = []
        self.captures = 0
        for _ in range(max(1, warm_up)):
            recorder.warm_up(self._run_both)
        self._clear_gradients()
        self._carrier.settle(whole=True)
        self._check_averages()
        self._all_layers = tuple(dict.fromkeys(layers))
        # At one rank none is placed, nor are those that gather their experts.
        self._layers = tuple(layer for layer in self._all_layers if layer.placer.plan.current is not None)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run a forward and backward, and return the loss, detached."""
        with telling("in a captured step"):
            self._check_inputs(inputs)
            if self._compiled.held is not None or "balance_bias" in self._compiled.after:
                raise ValueError(
                    "hecate: routing of a captured step is neither recorded nor replayed, nor are its biases "
                    "balanced; call the model"
                )
            self._check_synchronization()
            placements = self._begin(inputs)
            recorded = self._recorded_for(placements)
            forward_ends = self._replay(recorded)
            # While the backward runs, the host learns of the forward, and plans.
            self._learn(recorded, placements, forward_ends)
            for layer in self._layers:
                layer.placer.plan_ahead()
            for after in (*self._compiled.after.values(),):
                after()
            assert self._loss is not None
            return self._loss.detach()

    # --- the parts of a step ---

    def _begin(self, inputs: tuple[Tensor, ...]) -> dict[Layer, Placement]:
        self._compiled.between(_TRAINING)
        placements = {layer: layer.placer.take() for layer in self._layers}
        for place, value in zip(self._inputs, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        return placements

    def _recorded_for(self, placements: Mapping[Layer, Placement]) -> _Recorded:
        recorded = self._recorded
        if recorded is None or not self._tables.have_room(placements) or not recorded.is_of(self._model):
            return self._capture(placements)
        self._tables.write(placements)
        return recorded

    def _replay(self, recorded: _Recorded) -> Any:
        """Launch both graphs, with nothing to wait for between them; return an event at the end of the forward."""
        self._clear_gradients()
        with self._recording():
            recorded.forward()
            forward_ends = self._mark()
            recorded.backward()
        recorded.restore_gradients()
        return forward_ends

    def _learn(self, recorded: _Recorded, placements: Mapping[Layer, Placement], forward_ends: Any) -> None:
        """Note what the host would have noted, had it run the forward."""
        if not self._recorder.host_runs:
            recorded.restore_figures()
            for layer, placement in placements.items():
                count_experts_sent(layer, placement, gathers=self._gathers)
            self._tables.tell_again(forward_ends)
        self._carrier.settle()

    # --- recording ---

    def _capture(self, placements: Mapping[Layer, Placement]) -> _Recorded:
        """Record forward and backward, with room for ``placements`` and more."""
        self._recorded = None
        self._tables.forget()
        self._tables.prepare(placements)
        try:
            forward, backward = self._record()
        except BaseException:
            for layer in self._all_layers:
                layer.counted, layer.unread, layer.arrived = None, [], None
            raise
        self._recorded = _Recorded(
            forward=forward,
            backward=backward,
            figures=[(each, each.counted, list(each.unread), each.arrived) for each in self._all_layers],
            gradients=[(p, p.grad) for p in self._model.parameters() if p.grad is not None],
            tensors=[tensor.detach() for tensor in (*self._model.parameters(), *self._model.buffers())],
            trained=[parameter.requires_grad for parameter in self._model.parameters()],
        )
        self.captures += 1
        return self._recorded

    def _record(self) -> tuple[Callable[[], None], ...]:
        try:
            with self._recording():
                # Run once without recording: kernels are compiled and tuned for the sizes of this room.
                self._recorder.warm_up(self._run_both)
                self._check_averages()
                self._carrier.forget()
                self._clear_gradients()
                with keeping_constants() as self._constants:
                    return self._recorder.record(self._run_forward, self._run_backward)
        finally:
            self._tables.recorded()
            # Replays run no jobs, and the jobs that ran here are of no step.
            self._world.queue.begin_step()
            self._world.queue.forget_spans()

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Let host code in the block read and write the memory that graphs use."""
        self._compiled.recording = True
        try:
            with self._tables.recording():
                yield
        finally:
            self._compiled.recording = False

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

    # --- refusals ---

    def _check_inputs(self, inputs: Sequence[object]) -> None:
        self._check_devices(inputs)
        given = [_form(value) for value in inputs if isinstance(value, Tensor)]
        if given != (wanted := [_form(value) for value in self._inputs]):
            raise ValueError(
                f"hecate.capture: inputs {'; '.join(given)}, but captured were {'; '.join(wanted)}. CUDA graphs have "
                "fixed shapes: pad the batch, drop a last one that is shorter, or clear the gradients and call the "
                "model itself for it"
            )

    def _check_devices(self, inputs: Sequence[object]) -> None:
        device = self._world.device
        for place, value in enumerate(inputs):
            if not isinstance(value, Tensor) or value.device != device:
                what = f"on {value.device}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise ValueError(f"hecate.capture: input {place} is {what}, expected a tensor on {device}")

    def _check_synchronization(self) -> None:
        if not all(watch.synchronizes for watch in self._compiled.outside_gradients):
            raise RuntimeError(
                "hecate.capture: captured steps average all gradients, and hecate.set_requires_gradient_sync, or "
                "model.no_sync, is off. Micro-batches cannot be captured: nothing adds up"
            )

    def _check_averages(self) -> None:
        if any(watch.averages for watch in self._compiled.outside_gradients):
            raise RuntimeError(
                "hecate.capture: gradients of some parameters are averaged on the host when a backward ends, which "
                "is in no CUDA graph: something outside of the compiled forward uses them, synchronization is off, "
                'or policy="replicate" is on'
            )


def _form(value: Tensor) -> str:
    return f"{value.dtype} {list(value.shape)}"
