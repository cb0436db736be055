"""The private names of torch, transformers and accelerate that Hecate uses; no other file spells one.

Checked with torch 2.11, 2.13 and 2.15, transformers 5.17 and 5.24, accelerate 1.10 and later. ``docs/patches.md``
lists what Hecate replaces in other libraries.
"""

from __future__ import annotations

import datetime
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, fx, nn

# Names that Dynamo and AOTAutograd offer to backends.
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list as compiled_entries
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, pgo, symbolic_convert
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.eval_frame import OptimizedModule, skip_code
from torch._dynamo.exc import (
    FailOnRecompileLimitHit,
    TorchDynamoException,
    TorchRuntimeError,
    UncapturedHigherOrderOpError,
    Unsupported,
    UserError,
)
from torch._dynamo.guards import CheckFunctionManager, DeletedGuardManagerWrapper
from torch._dynamo.utils import counters as dynamo_counters
from torch._dynamo.utils import get_metrics_context
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._logging import trace_structured

# The types of operators, and of values that are only traced.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Records of DCP, and helpers of its loading.
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.state_dict import _init_optim_state as init_optimizer_state
from torch.fx.experimental import symbolic_shapes
from torch.nn.modules.batchnorm import _NormBase as BatchNormBase
from torch.utils._dtype_abbrs import dtype_abbrs
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

optimize = torch._dynamo.optimize
reset_dynamo = torch._dynamo.reset
set_grad_enabled = torch._C._set_grad_enabled
builtin_linear = torch._C._nn.linear
grouped_mm = torch._grouped_mm
foreach_copy_ = torch._foreach_copy_
check = torch._check


# Imported when they are needed: they take seconds, and other backends and machines do without.


def inductor() -> Any:
    from torch._inductor import compile_fx

    return compile_fx


def inductor_graph() -> Any:
    """Return the module in which Inductor decides which inputs are aligned."""
    from torch._inductor import graph

    return graph


def symmetric_memory() -> Any:
    """Return torch's module of memory that other ranks' GPUs reach."""
    import torch.distributed._symmetric_memory as found

    return found


def why_traced() -> str:
    """Return, while Dynamo calls a backend, the guard by which its last graph does not fit; "" of a first one."""
    reason = getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason") or ""
    # In front of it stands the number of that graph among all that Dynamo has made.
    return " ".join(str(reason).partition("\nUser stack trace")[0].split()).partition(": ")[2]


def forget_guards(gone: Sequence[Any]) -> None:
    """Free the guards of graphs that are gone.

    Dynamo lets every class and module that a guard asks about tell its guards of its end, and these live for ever.
    """
    ids = set(map(id, gone))
    # Typeshed does not have the table of those that have not been called.
    finalizers: Any = weakref.finalize
    for finalizer, told in list(finalizers._registry.items()):
        guards = getattr(getattr(told.func, "func", None), "__self__", None)
        if isinstance(guards, CheckFunctionManager) and id(getattr(guards, "guard_manager", None)) in ids:
            finalizer.detach()


# Logs in which Dynamo says why it broke a graph, and what it measures.
GRAPH_BREAK_LOGS = ("torch._dynamo.symbolic_convert.__graph_breaks", "torch._dynamo.convert_frame.__graph_breaks")
METRICS_LOG = "torch._dynamo.metrics_context"
# The beginning of Dynamo's warning at its limit of graphs.
LIMIT_WARNING = "torch._dynamo hit config."
# Names that Dynamo gives attributes of tensors and modules.
DYNAMO_NOTES = "_dynamo_"
# Dynamo's function that looks whether a jump is that of an assertion, and puts its message on the stack.
ASSERTION = "_detect_and_normalize_assert_statement"


@dataclass
class LearnedByDynamo:
    """What Dynamo remembers of code that it has compiled, by which it compiles it otherwise the next time.

    It keeps one of each for all that a process compiles: of floats until something makes it begin again, of sizes for
    ever.
    """

    written_out: set[str] = field(default_factory=set)  # floats that must be written out in graphs
    sizes: Any = field(default_factory=lambda: defaultdict(pgo.CodeState))  # those that have changed, by code

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let Dynamo use this, and add to it, instead of what it keeps."""
        state = symbolic_convert.TensorifyState
        floats, state.force_specializations = state.force_specializations, self.written_out
        sizes, pgo._CODE_STATE = pgo._CODE_STATE, self.sizes
        try:
            yield
        finally:
            state.force_specializations, pgo._CODE_STATE = floats, sizes


def symbols_of_trace() -> Any:
    """Return what torch knows of the symbols in the graph that it compiles now, a ``ShapeEnv``."""
    mode = TracingContext.get().fake_mode
    assert mode is not None, "Dynamo traces with fake tensors"
    return mode.shape_env


def forget_symbols(environments: list[Any]) -> None:
    """Free what :func:`symbols_of_trace` returned for graphs that are gone, and empty the list of it.

    Garbage collection does not see that fake tensors and symbols in their shapes hold each other.
    """
    for environment in environments:
        environment.tracked_fakes = []
    environments.clear()
    # Caches of what was found out about any of them keep all.
    hints = sys.modules.get("torch.fx.experimental._size_hinting")
    of_hints = vars(hints) if hints is not None else {}
    for function in [*vars(symbolic_shapes.ShapeEnv).values(), *of_hints.values()]:
        if callable(getattr(function, "cache_clear", None)):
            function.cache_clear()


# Attention: the operators that torch.nn.functional.scaled_dot_product_attention becomes.
_aten = torch.ops.aten
flash_for_cpu = _aten._scaled_dot_product_flash_attention_for_cpu
flash_for_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
ATTENTION = (
    flash_for_cpu,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
)
ATTENTION_BACKWARD = (
    flash_for_cpu_backward,
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward,
)


# Modules and parameters: their slots themselves. Reading an attribute would call a property that stands for a shard,
# or find it in another place.


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters that a module has itself, by name; assigning to an entry replaces one."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's children by name, those that have several names under each of them."""
    return module._modules


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether a state dict has this buffer of the module."""
    return buffer not in module._non_persistent_buffers_set


def has_flat_weights(module: nn.Module) -> bool:
    """Return whether a module, such as ``nn.LSTM``, keeps its parameters in a list, too."""
    return hasattr(module, "_flat_weights")


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return what calling the module calls instead of its forward and hooks, as ``module.compile()`` sets it."""
    return cast(Callable[..., Any] | None, module._compiled_call_impl)


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    module._compiled_call_impl = call


def call_with_hooks(module: nn.Module) -> Callable[..., Any]:
    """Return what calling the module calls if it is not compiled: its hooks and its forward."""
    return cast(Callable[..., Any], module._call_impl)


HOOKS_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooks_of_all_modules(kind: str) -> dict[int, Callable[..., Any]]:
    return cast(dict[int, Callable[..., Any]], getattr(torch.nn.modules.module, f"_global{kind}"))


def flags_of_hooks(module: nn.Module | None, kind: str) -> list[dict[int, bool]]:
    """Return which hooks get keyword arguments, and which are always called; None is for hooks of all modules."""
    owner = vars(torch.nn.modules.module) if module is None else vars(module)
    kind = f"_global{kind}" if module is None else kind
    return [owner[name] for name in (f"{kind}_with_kwargs", f"{kind}_always_called") if name in owner]


def gradient_hooks(tensor: Any) -> dict[int, Callable[..., Any]] | None:
    """Return the hooks of ``tensor.register_hook`` by their handles' numbers."""
    return cast(dict[int, Callable[..., Any]] | None, getattr(tensor, "_backward_hooks", None))


def accumulation_hooks(tensor: Any) -> dict[int, Callable[..., Any]] | None:
    """Return the hooks of ``tensor.register_post_accumulate_grad_hook`` by their handles' numbers."""
    return cast(dict[int, Callable[..., Any]] | None, tensor._post_accumulate_grad_hooks)


def set_hooks_of_tensor(tensor: Any, gradient: Any, accumulation: Any) -> None:
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = gradient, accumulation


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place."""
    return tensor._version


keep_versions = torch.autograd._unsafe_preserve_version_counter
swap_tensors = torch._C._swap_tensor_impl


# Names in torch.nn.utils.clip_grad and torch.amp.GradScaler that their other functions call.
TOTAL_NORM, UNSCALE = "_get_total_norm", "_unscale_grads_"


# The backward that runs.


def backward_number() -> int:
    """Return a number of the backward that this thread runs; -1 outside of one."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return whether this thread runs a backward."""
    return backward_number() != -1


def saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the inner pair of hooks through which autograd saves tensors here, to pack and to unpack."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def when_backward_ends(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


# Groups of processes.

default_group = dist.distributed_c10d._get_default_group
default_store = dist.distributed_c10d._get_default_store


def group_named(name: str) -> dist.ProcessGroup:
    """Return a group by its name; raise RuntimeError if there is none."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return cast(dist.ProcessGroup, resolve(name))


def groups() -> dict[dist.ProcessGroup, tuple[str, Any]]:
    """Return the backend and the store of each group."""
    return dist.distributed_c10d._world.pg_map


def timeout_on(group: dist.ProcessGroup, device: str) -> datetime.timedelta | None:
    """Return how long ranks of a group wait for each other on a kind of device; a fake group does not say."""
    found: datetime.timedelta | None = getattr(group._get_backend(torch.device(device)).options, "_timeout", None)
    return found


def count_collectives(group: dist.ProcessGroup) -> int:
    """Return how many collectives a group has begun."""
    return cast(int, cast(Any, group)._get_sequence_number_for_group())


def fake_store() -> Any:
    """Return the store of a group of ranks that are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


# Nodes of graphs.

enter_autocast = torch.amp.autocast_mode._enter_autocast


def memory_of(tensor: Tensor) -> int:
    """Return a number for the memory of a tensor, which views of it share."""
    return tensor.untyped_storage()._cdata


def is_erased(node: fx.Node) -> bool:
    return node._erased


def names_in(graph: fx.Graph) -> Any:
    """Return the names that nodes of a graph have had, which new ones do not get."""
    return graph._graph_namespace._used_names


def rename(node: fx.Node, name: str) -> None:
    """Give a node a name, with a number after it if another one has it."""
    node._rename(name)


def dynamo_source(node: Any) -> Any:
    """Return where an input of a captured graph came from; None if Dynamo did not note it."""
    return getattr(node, "_dynamo_source", None)


def schema_of(operator: Any) -> Any:
    """Return an operator's schema; None for anything else."""
    return getattr(operator, "_schema", None)


# Integrations: what transformers, accelerate and PEFT keep for themselves.
INIT_WEIGHTS = "_init_weights"
ATTENTION_IMPLEMENTATION = "_attn_implementation"
RECORDED_OUTPUTS = "_can_record_outputs"
INITIALIZED = "_is_hf_initialized"
# Hooks by which transformers and PEFT let embeddings require gradients, for reentrant checkpoints of frozen models.
INPUT_GRADIENT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
TRAINER_LOAD, TRAINER_LOAD_BEST = "_load_from_checkpoint", "_load_best_model"
TRAINER_SAVE_OPTIMIZER, TRAINER_LOAD_OPTIMIZER = "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"
TRAINER_SAVE = "_save"


def prepared(accelerator: Any) -> tuple[list[Any], list[Any]]:
    return accelerator._models, accelerator._optimizers


def set_prepared(accelerator: Any, models: list[Any], optimizers: list[Any]) -> None:
    accelerator._models, accelerator._optimizers = models, optimizers


def weight_conversions(model: Any) -> list[Any] | None:
    """Return how transformers converts a model's weights between files and parameters; None for not at all."""
    return cast(list[Any] | None, getattr(model, "_weight_conversions", None))


def set_weight_conversions(model: Any, conversions: list[Any] | None) -> None:
    model._weight_conversions = conversions


def names_left_out_of_files(model: Any) -> tuple[str, ...]:
    """Return the names of tensors that transformers does not save."""
    return tuple(model._keys_to_ignore_on_save or ())


def dtypes_kept_apart(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return which parameters transformers keeps in another dtype, by name, where a model is loaded in ``dtype``."""
    return cast(dict[str, torch.dtype], model._get_dtype_plan(dtype))


def adjust_missing_and_unexpected(model: Any, report: Any) -> None:
    """Take out of a report of transformers what a model says may be missing or unexpected."""
    model._adjust_missing_and_unexpected_keys(report)


def is_transposed(wrapper: Any) -> bool:
    """Return whether PEFT's adapter takes a parameter's dimensions in the other order than it had guessed."""
    swapped: bool = wrapper._did_swap_in_out_features
    return not swapped
