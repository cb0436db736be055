"""Every private name of torch, transformers and accelerate that Hecate uses, and what it is used for.

No other file spells one (``tests/test_private.py`` looks). A release that renames something is mended here. Checked
with torch 2.11, 2.13 and 2.15, transformers 5.17 and 5.24, accelerate 1.10 and later. What Hecate replaces in other
libraries is listed in ``docs/patches.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

# What Dynamo and AOTAutograd offer to backends.
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list as compiled_entries
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame
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
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.utils import counters as dynamo_counters
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._logging import trace_structured

# The types of operators, and of values that are only traced.
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase as BatchNormBase
from torch.utils._dtype_abbrs import dtype_abbrs
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

optimize = torch._dynamo.optimize
reset_dynamo = torch._dynamo.reset
set_grad_enabled = torch._C._set_grad_enabled
builtin_linear = torch._C._nn.linear
grouped_mm = torch._grouped_mm
foreach_copy_ = torch._foreach_copy_
check = torch._check


# Imported when they are needed: they take seconds, and other backends and machines do without.


def inductor() -> Any:
    """Return the module that has Inductor's ``compile_fx`` and ``compile_fx_inner``."""
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


# Where Dynamo logs why it broke a graph, and what it measures.
GRAPH_BREAK_LOGS = ("torch._dynamo.symbolic_convert.__graph_breaks", "torch._dynamo.convert_frame.__graph_breaks")
METRICS_LOG = "torch._dynamo.metrics_context"
# How Dynamo's warning at its limit of graphs begins.
LIMIT_WARNING = "torch._dynamo hit config."
# Names that Dynamo gives attributes of tensors and modules.
DYNAMO_NOTES = "_dynamo_"

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
    """Return the buffers that a module has itself, by name."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's children by name, those that have several names under each of them."""
    return module._modules


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether a state dict has this buffer of the module."""
    return buffer not in module._non_persistent_buffers_set


def has_flat_weights(module: nn.Module) -> bool:
    """Return whether a module, as ``nn.LSTM``, keeps its parameters in one list besides."""
    return hasattr(module, "_flat_weights")


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return what calling the module calls instead of its forward and hooks, as ``module.compile()`` sets it."""
    found: Callable[..., Any] | None = module._compiled_call_impl
    return found


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    module._compiled_call_impl = call


def call_with_hooks(module: nn.Module) -> Callable[..., Any]:
    """Return what calling the module calls if it is not compiled: its hooks and its forward."""
    call: Callable[..., Any] = module._call_impl
    return call


HOOKS_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooks_of_all_modules(kind: str) -> dict[int, Callable[..., Any]]:
    """Return the hooks of one of these kinds that every module has."""
    found: dict[int, Callable[..., Any]] = getattr(torch.nn.modules.module, f"_global{kind}")
    return found


def gradient_hooks(tensor: Any) -> dict[int, Callable[..., Any]] | None:
    """Return the hooks of ``tensor.register_hook`` by their handles' numbers."""
    found: dict[int, Callable[..., Any]] | None = tensor._backward_hooks
    return found


def accumulation_hooks(tensor: Any) -> dict[int, Callable[..., Any]] | None:
    """Return the hooks of ``tensor.register_post_accumulate_grad_hook`` by their handles' numbers."""
    found: dict[int, Callable[..., Any]] | None = tensor._post_accumulate_grad_hooks
    return found


def set_hooks_of_tensor(tensor: Any, gradient: Any, accumulation: Any) -> None:
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = gradient, accumulation


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written in place."""
    return tensor._version


keep_versions = torch.autograd._unsafe_preserve_version_counter
swap_tensors = torch._C._swap_tensor_impl


# What torch.nn.utils.clip_grad and torch.amp.GradScaler call in themselves.
TOTAL_NORM, UNSCALE = "_get_total_norm", "_unscale_grads_"


# The backward that runs.


def in_backward() -> bool:
    """Return whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call back when the backward that runs ends."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


# Nodes of graphs.


def dynamo_source(node: Any) -> Any:
    """Return where an input of a captured graph came from; None if Dynamo did not note it."""
    return getattr(node, "_dynamo_source", None)


def schema_of(operator: Any) -> Any:
    """Return an operator's schema; None of what is no operator."""
    return getattr(operator, "_schema", None)


# Integrations: what transformers, accelerate and PEFT keep for themselves.
INIT_WEIGHTS = "_init_weights"
ATTENTION_IMPLEMENTATION = "_attn_implementation"
RECORDED_OUTPUTS = "_can_record_outputs"
INITIALIZED = "_is_hf_initialized"
TRAINER_LOAD, TRAINER_LOAD_BEST = "_load_from_checkpoint", "_load_best_model"
TRAINER_SAVE_OPTIMIZER, TRAINER_LOAD_OPTIMIZER = "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"
TRAINER_SAVE = "_save"


def prepared(accelerator: Any) -> tuple[list[Any], list[Any]]:
    """Return the models and the optimizers that an accelerator has prepared."""
    return accelerator._models, accelerator._optimizers


def set_prepared(accelerator: Any, models: list[Any], optimizers: list[Any]) -> None:
    accelerator._models, accelerator._optimizers = models, optimizers
