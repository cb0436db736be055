"""The functions that take a compiled model."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from hecate.compiled_model import CompiledModel, compiled_model_of
from hecate.reports.explanation import Explanation
from hecate.reports.kept_parameters import kept_parameters
from hecate.reports.stats import Stats, collect_stats
from hecate.reports.tables import rates_text
from hecate.reports.travel import write_timeline
from hecate.runtime.comm.agreement import meet
from hecate.runtime.comm.history import doing
from hecate.runtime.kernels.launch import runs_on
from hecate.runtime.kernels.operands import FLOATS
from hecate.training.captured_step import CapturedStep, CudaGraphs, Recorder


def explain(model: nn.Module) -> Explanation:
    """Report what was found, rewritten and skipped, and why; ``print`` the result. No communication.

    With NCCL, collectives have times in the first steps, and in the step after each call.

    Raises:
        ValueError: the model was not compiled.
    """
    state = compiled_model_of(model, "explain")
    state.world.queue.ask_for_times()
    nodes, rates = state.placer.topology.num_nodes, state.placer.rates
    named = state.policy_without_placement
    policy = f"policy {named}" if named else f"{state.placer.policy!r} on {nodes} node(s)"
    if state.world.size > 1:
        policy += f", {rates_text(rates)}, {state.placer.rates_from}"
    return Explanation(
        world=state.world,
        groups=state.mesh.groups,
        policy=policy,
        experts=state.experts,
        passed_over=state.passed_over,
        layers=state.layers,
        graphs=tuple(state.backend.graphs),
        spans=tuple(state.world.queue.spans),
        disabled=state.backend.disabled,
        loops=state.loops,
        parameters=kept_parameters(model),
        text_model=state.text_model,
        in_python=state.forward.whole_layers.found,
    )


def capture(
    model: nn.Module, forward: Callable[..., torch.Tensor], *inputs: torch.Tensor, warm_up: int = 3
) -> Callable[..., torch.Tensor]:
    """Capture a training step's forward and backward as CUDA graphs; call what this returns in their place.

    >>> step = hecate.capture(model, lambda ids: model(ids, labels=ids).loss, ids)  # doctest: +SKIP
    >>> for ids in batches:  # doctest: +SKIP
    ...     loss = step(ids)
    ...     optimizer.step()

    ``step`` copies its inputs to where the graphs read them, launches both, and returns the loss. The next call
    overwrites the loss and all gradients: they do not add up, and need not be cleared, except before a backward of
    the model itself. Placements change from step to step; the step is captured anew for a plan for which there is no
    room, for other owners and for other parameters. If rows had no room on some rank it raises ``ExchangeFailed``,
    and the step can be made again with another batch. The optimizer is not in the graphs. All ranks make all calls
    together. Not run on several GPUs yet (docs/gpu.md).

    Args:
        model: on a GPU; compiled with ``Config(transport="symmetric")`` where there are several ranks.
        forward: calls the model and returns a scalar loss. What else it does on the host is not repeated.
        inputs: tensors on the model's device, in the shapes and dtypes of all batches.
        warm_up: forwards and backwards before the first capture, in which kernels are compiled and tuned; one more
            runs before each capture. They update no parameter, but whatever a forward updates itself; policies learn
            from the routing, and gradients are cleared. Delete losses of earlier steps first: they keep autograd on
            another stream.

    Raises:
        ValueError: the model was not compiled, is not on a GPU, exchanges rows by collectives, or is in several
            groups of ranks; no kernel takes its dtype, or there are none; or an input is on another device.
        TypeError: ``forward`` returned something else than a scalar loss.
        RuntimeError: gradients are averaged on the host after a backward, because something outside of the compiled
            forward uses parameters.
    """
    state = compiled_model_of(model, "capture")
    device, alone = state.world.device, state.world.size == 1
    problem = ""
    if state.mesh.groups > 1:
        problem = "ranks are in several groups, which no step can be captured with yet"
    elif not alone and not state.forward.between.carrier.counts_stay:
        problem = (
            'with transport="collectives" the host says in each layer how many rows come, and is not there when a '
            'CUDA graph is replayed. Use hecate.Config(transport="symmetric")'
        )
    elif device.type != "cuda":
        problem = f"CUDA graphs need a model on a GPU, and this one is on {device}"
    elif not runs_on(device):
        problem = "without Triton, or with HECATE_KERNELS=0, the host reads numbers of the device in each layer"
    elif not alone and not state.world.queue.on_stream:
        problem = "ranks talk through the host over gloo, which no CUDA graph holds; each rank needs a GPU, for NCCL"
    elif "balance_bias" in state.forward.after:
        problem = "hecate.balance_bias counts rows on the host, which a captured step does without"
    elif wrong := [layer.name for layer in state.layers if layer.dtype not in FLOATS]:
        problem = f"no kernel takes the dtype of {wrong[0]}; expected one of {', '.join(map(str, FLOATS))}"
    if problem:
        raise ValueError(f"hecate.capture: {problem}")
    return captured_step(model, state, forward, inputs, warm_up=warm_up, recorder=CudaGraphs(device))


def captured_step(
    model: nn.Module,
    state: CompiledModel,
    forward: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    *,
    warm_up: int,
    recorder: Recorder,
) -> CapturedStep:
    """Capture a step as :func:`capture` does, with any ``recorder``."""
    return CapturedStep(
        model,
        state.forward,
        forward,
        inputs,
        layers=state.layers,
        placer=state.placer,
        world=state.world,
        gathers=2 if state.config.rematerialize else 1,
        warm_up=warm_up,
        recorder=recorder,
    )


def save_timeline(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write what this rank's collectives did in the last step, as a Chrome trace; open it in Perfetto.

    The trace has the last forward and its backward: when each collective ran, and when compute stood still for it.
    With NCCL the times are the GPU's, for whose last collective this call waits, and the step is the last one that
    has times: one of the first, or one after a call of this function or of :func:`explain`. No communication.

    Args:
        path: a .json file; give every rank another one.

    Raises:
        ValueError: the model was not compiled, or it has not run, or there is one rank and nothing travels.
    """
    state = compiled_model_of(model, "save_timeline")
    state.world.queue.ask_for_times()
    spans = [span for span in state.world.queue.spans if span.ready]
    if not spans:
        why = "there is one rank" if state.world.size == 1 else "run a forward first"
        raise ValueError(f"hecate.save_timeline: no collective has run: {why}")
    write_timeline(spans, path, state.world.rank)


def stats(model: nn.Module) -> Stats:
    """Return rows and bytes per layer and rank in the last forward and its backward. All ranks call it together.

    Layers that gather their experts are left out: they exchange no rows.

    Raises:
        ValueError: the model was not compiled.
    """
    state = compiled_model_of(model, "stats")
    state.forward.between.carrier.settle(whole=True)
    if state.world.group is not None:
        state.world.queue.drain()
        meet("hecate.stats", state.world.group)
    with doing("hecate.stats"):
        return collect_stats(tuple(dict.fromkeys(state.layers)), state.mesh)


def set_requires_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Switch the averaging of dense gradients off between the micro-batches of an accumulation, and on again.

    With it off, gradients of replicated parameters stay local in ``param.grad``; the next backward with it on
    averages the accumulated sum. Expert gradients always go to their owner, which is where they accumulate; and so
    do those of dense parameters with ``Config(dense="shard")``, to the rank that keeps the rows.

    Raises:
        ValueError: the model was not compiled.
    """
    switches = compiled_model_of(model, "set_requires_gradient_sync").sync.switches
    switches.enabled = enabled
    switches.owed = switches.owed or not enabled
