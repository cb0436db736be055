"""The forward of a compiled model: the compiled code, and all that happens around it, step by step."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from hecate.graph.lowering import NotRun, runs_nothing
from hecate.graph.numbers_in_graphs import CAPTURED
from hecate.graph.traces import Traces
from hecate.private import (
    METRICS_LOG,
    FailOnRecompileLimitHit,
    TorchDynamoException,
    Unsupported,
    dynamo_config,
    parameters_of,
    tree_leaves,
    tree_map,
)
from hecate.runtime.attention.options import UnsupportedAttentionError
from hecate.runtime.comm.agreement import DisagreementError
from hecate.runtime.comm.program import count_forward
from hecate.runtime.comm.watch import telling
from hecate.runtime.state.step_mode import CurrentStep, StepMode
from hecate.training.between_forwards import BetweenForwards
from hecate.training.drift import SameBatches
from hecate.training.outside_gradients import OutsideGradients
from hecate.training.tried_again import remember
from hecate.wrap.find_experts import ExpertsModule
from hecate.wrap.first_forward import agree_on_next
from hecate.wrap.untraced import WITHOUT_TRACING, UntracedReadError, untraced_read
from hecate.wrap.whole_layers import WholeLayers


class HeldRouting(Protocol):
    """What records or replays the routing of forwards."""

    def begin(self, args: Any, kwargs: Any) -> None:
        """Be ready for a forward with these inputs, perhaps once more for the same one."""

    def end(self) -> None:
        """Check that the forward's routing was held. Raises ValueError, naming the layers where it was not."""


class CompiledForward:
    """The callable that ``model(...)`` runs.

    What is in ``after``, by the names of those who put it there, is called at the end of every forward. With ``held``
    the choices of routers are recorded or replayed. While ``recording``, a forward is recorded, and the work between
    two forwards is up to the code that replays it.
    """

    def __init__(
        self,
        traces: Traces,
        *,
        between: BetweenForwards,
        records: Sequence[object],
        experts: Sequence[ExpertsModule],
        step: CurrentStep,
        precision: Any,
        outside_gradients: Sequence[OutsideGradients],
        same_batches: SameBatches,
        whole_layers: WholeLayers,
        check_compiled: Callable[..., bool],
        one_graph: bool = False,
    ) -> None:
        self._traces, self._experts, self._step = traces, experts, step
        self.between, self.outside_gradients, self._precision = between, outside_gradients, precision
        self.whole_layers = whole_layers
        self._same_batches, self._one_graph = same_batches, one_graph
        self._check_compiled: Callable[..., bool] | None = check_compiled
        self._records, self._dynamo = tuple(records), _dynamo_options(bool(experts))
        self.after: dict[str, Callable[[], None]] = {}
        self.held: HeldRouting | None = None
        self.recording = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        count_forward()
        with telling("in its forward"):
            return self._forward(args, kwargs)

    def of(self, part: nn.Module) -> CompiledForward:
        """Return what calling a module inside the model may call instead of its forward; it has its own graphs."""
        found = copy.copy(self)
        found._traces = self._traces.of(part)
        return found

    def _forward(self, args: Any, kwargs: Any) -> Any:
        training = torch.is_grad_enabled()
        holds = self.held is not None
        if not self.recording:
            self._traces.before_forward(holds_choices=holds)
        first = self._traces.is_first(training=training)
        mode = StepMode(training=training, first=first, holds_choices=holds)
        if not self.recording:
            self.between(mode)
            for watch in self.outside_gradients:
                watch.before_forward(mode)
            self._same_batches.before_forward(mode, args, kwargs)
        # Step 3: inputs as mixed precision wants them.
        args, kwargs = self._cast_inputs(args, kwargs)
        # Step 4: the model itself.
        out = self._traced(mode, args, kwargs)
        if self.held is not None:
            self.held.end()
        if self._check_compiled is not None and self._check_compiled(training=training):
            self._check_compiled = None
        self._traces.after_forward(training=training)
        if not training and not self.recording:
            # No optimizer will ask whether there was room for all rows.
            self.between.carrier.settle()
        self._keep_records(out)
        for watch in self.outside_gradients:
            watch.after_forward(out)
        # Step 5: recorders of routing, and the output's dtype.
        for after in () if self.recording else (*self.after.values(),):
            after()
        precision = self._precision
        return out if precision is None or precision.output_dtype is None else _cast(out, precision.output_dtype)

    def _traced(self, mode: StepMode, args: Any, kwargs: Any) -> Any:
        # All ranks trace in their first forward, and come to the same code.
        if not mode.first or self._one_graph or not self._experts:
            with self._running(mode, args, kwargs):
                return self._traces(*args, **kwargs)
        give_back = remember(self._traces.model, (args, kwargs))
        while True:
            try:
                with self._running(mode, args, kwargs):
                    out = self._traces(*args, **kwargs)
                self._tell("the end of the first forward")
                return out
            except UntracedReadError as error:
                # Other ranks may be about to compare a graph, or have come to the end.
                with suppress(DisagreementError):
                    self._tell(f"what cannot be traced in {error.layer or error.places}")
                found = self.whole_layers.begin(error.layer, error.places, error.why, meets=not runs_nothing())
                if not found:
                    raise
            except DisagreementError as error:
                # Others mean that ranks are in different collectives already.
                if error.places is None:
                    raise
                reason = str(error).removeprefix("hecate: ").splitlines()[0]
                if not self.whole_layers.begin("", error.places, reason):
                    raise
            if runs_nothing():
                raise NotRun
            self._traces.start_anew()
            give_back()

    def _tell(self, what: str) -> None:
        if self._traces.communicates and not runs_nothing():
            agree_on_next(what, self.between.world)

    @contextmanager
    def _running(self, mode: StepMode, args: Any, kwargs: Any) -> Iterator[None]:
        self.between.world.queue.begin_step()
        self._step.mode = mode
        if self.held is not None:
            self.held.begin(args, kwargs)
        try:
            with dynamo_config.patch(self._dynamo | self._traces.limits()), _without_gradients(self._experts):
                yield
        except GuardOnDataDependentSymNode as error:
            places = [(frame.filename, frame.lineno) for frame in getattr(error, "real_stack", None) or ()]
            raise untraced_read(*_data_dependent(error), places=places) from error
        except TorchDynamoException as error:
            # An error that a user can mend is raised itself, not as a fault of a compiler.
            refused = _refused(error)
            if refused is not None:
                raise refused from None
            if self._one_graph and isinstance(error, Unsupported):
                raise UnsupportedAttentionError(_outside_of_graph(error)) from error
            raise
        except FailOnRecompileLimitHit as error:
            if not self._one_graph:
                raise
            raise UnsupportedAttentionError(
                _too_many_graphs(self._traces.refused, "attention outside of graphs would be dense")
            ) from error
        except UntracedReadError as error:
            if self._traces.refused is None:
                raise
            consequence = "outside of graphs nothing can read the experts of other ranks"
            raise UntracedReadError(_too_many_graphs(self._traces.refused, consequence)) from error
        finally:
            self._step.mode = None

    def _keep_records(self, out: Any) -> None:
        # Graphs name records by number; a loss may outlive the model.
        for value in tree_leaves(out):
            node: Any = value.grad_fn if isinstance(value, torch.Tensor) else None
            if node is not None:
                node.metadata["hecate"] = self._records, self.between.additions.records

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        precision = self._precision
        if precision is None or precision.param_dtype is None or not precision.cast_forward_inputs:
            return args, kwargs
        return _cast(args, precision.param_dtype), _cast(kwargs, precision.param_dtype)


def _refused(error: BaseException) -> Exception | None:
    """Return the error of a pass, an operator or the backend, from wherever Dynamo put it; None for another error."""
    here: BaseException | None = error
    ours = (DisagreementError, UnsupportedAttentionError, UntracedReadError)
    while here is not None and not isinstance(here, ours):
        here = getattr(here, "inner_exception", None) or here.__cause__ or here.__context__
    return here


def _too_many_graphs(refused: str | None, consequence: str) -> str:
    return (
        f"hecate: torch.compile has made as many graphs of the model as it may, and {consequence}.\n  {refused}\n"
        "What is another number or object in each call is best given as a tensor, or kept out of the forward, hooks "
        "included; TORCH_LOGS=recompiles shows each reason. If there are that many ways of calling the model, "
        "raise torch._dynamo.config.recompile_limit at the top of the script."
    )


def _outside_of_graph(error: Unsupported) -> str:
    what = " ".join(str(error).split("\n\nfrom user code")[0].split())
    return (
        "hecate: with Config(attention=...) the whole model must be one graph, because attention outside of graphs "
        f"would be dense. torch.compile cannot trace all of it: {what}"
    )


def _data_dependent(error: GuardOnDataDependentSymNode) -> tuple[str, str]:
    """Return what is at fault, and advice."""
    stack = getattr(error, "real_stack", None)
    where = f"{stack[-1].filename}:{stack[-1].lineno}: {stack[-1].line}" if stack else "see the error above"
    return (
        "torch.compile cannot trace a layer with experts, because it would have to know a number that depends on "
        f"data: {str(error).splitlines()[0]}\n  {where}",
        "Often that is the length of torch.bincount(ids, minlength=E), which is unknown to it. "
        "(ids.reshape(-1, 1) == torch.arange(E, device=ids.device)).sum(0) counts the same and has E elements. "
        f"{WITHOUT_TRACING}",
    )


# An option of Dynamo that older releases of torch do not have.
_SIDE_EFFECTS = "skip_fwd_side_effects_in_bwd_under_checkpoint"


def _dynamo_options(sharded: bool) -> dict[str, Any]:
    """Return the options of Dynamo for tracing the model. Without ``sharded`` experts graph breaks are allowed."""
    methods = ("debug", "info", "warning", "error", "warning_once", "info_once")
    return {
        # Shards have a data-dependent length although they are parameters; see wrap/shard.py.
        "force_parameter_static_shapes": False,
        # The same for stacks of experts in a list, which Dynamo reaches by way of their linear layers.
        "force_nn_module_property_static_shapes": False,
        # Without it a checkpointed layer that appends to a list outside of it, such as the router logits that
        # transformers records, breaks the graph. Recomputing the layer does not append again.
        **({_SIDE_EFFECTS: True} if hasattr(dynamo_config, _SIDE_EFFECTS) else {}),
        # Routing makes sizes that depend on data; without these every one of them is a graph break.
        **(CAPTURED if sharded else {}),
        # A line in a log is a graph break, too (the last two methods are transformers'); traced code does not log.
        "ignore_logger_methods": {
            *dynamo_config.ignore_logger_methods,
            *(getattr(logging.Logger, name) for name in methods if hasattr(logging.Logger, name)),
        },
    }


# Functions of transformers are cached ones, which have a type of their own.
_FUNCTIONS_UNSORTED = re.compile(r"'<' not supported between instances of '(function|functools\._lru_cache_wrapper)'")


def _not_about_sets(record: logging.LogRecord) -> bool:
    """Return whether a line of torch's log is about something else than functions that cannot be sorted."""
    error = record.exc_info[1] if record.exc_info else None
    return not _FUNCTIONS_UNSORTED.search(f"{record.getMessage()} {error}")


# torch 2.11 cannot sort ignore_logger_methods for its record of the compilation, and says so each time.
logging.getLogger(METRICS_LOG).addFilter(_not_about_sets)


@contextmanager
def _without_gradients(experts: Sequence[ExpertsModule]) -> Iterator[None]:
    """Hide the gradients of shards while Dynamo may trace."""
    # Dynamo would make a fake of .grad, too, with a data-dependent length of its own, and then could not tell that
    # this equals the parameter's. Looked up anew: load_state_dict(assign=True) makes new parameters.
    found = (parameters_of(e.store)[key] for e in experts for key in e.parameters)
    shards = list({id(p): p for p in found if p is not None}.values())
    gradients = [shard.grad for shard in shards]
    for shard in shards:
        shard.grad = None
    try:
        yield
    finally:
        for shard, gradient in zip(shards, gradients, strict=True):
            shard.grad = gradient


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def one(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return tree_map(one, tree)
