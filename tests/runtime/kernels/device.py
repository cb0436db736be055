"""What the cases of the kernels compute on."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

import pytest
import torch

from hecate.runtime import kernels, one_sided
from hecate.runtime.kernels.launch import INTERPRETED

HAS_KERNELS = INTERPRETED or torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# On a GPU the cases are among what ``pytest -m gpu`` runs.
MARKS: list[pytest.MarkDecorator] = [] if INTERPRETED else [pytest.mark.gpu]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def keep_truths() -> None:
    """Let the interpreter of Triton 3.9 repeat a truth as truths: it makes numbers of them, which are no mask."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_splat

    def create_splat(self: Any, shape: Any, one: TensorHandle) -> TensorHandle:
        made: TensorHandle = plain(self, shape, one)
        return TensorHandle(made.data.astype(one.data.dtype), made.dtype)

    InterpreterBuilder.create_splat = create_splat


if INTERPRETED:
    keep_truths()


def whole_numbers(*shape: int, most: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that no dtype rounds, nor sums of a few of them: results can be compared bit by bit.

    Args:
        most: their largest absolute value.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(DEVICE, dtype)


def index_of(*values: int) -> torch.Tensor:
    """An index on the device."""
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def kernel_modules() -> list[ModuleType]:
    """All that launch kernels, but those of attention, which are no one's to import where Triton is missing."""
    rooms = (kernels, one_sided)
    names = [f"{room.__name__}.{one.name}" for room in rooms for one in pkgutil.iter_modules(room.__path__)]
    wanted = [name for name in names if not name.rpartition(".")[2].startswith("launch")]
    return [module for name in wanted if hasattr(module := importlib.import_module(name), "launch")]
