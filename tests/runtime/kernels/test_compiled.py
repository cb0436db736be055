"""Kernels compile for GPUs, as far as machine code. Triton brings what that takes, so no GPU is needed."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from benchmarks.gpu_check.case import Sizes
from benchmarks.gpu_check.cases import KERNELS, cases_of
from hecate.runtime.attention import s2_attention
from hecate.runtime.attention.pattern import Pattern
from hecate.runtime.kernels import launch
from hecate.runtime.ops import ticket
from hecate.runtime.ops.ticket import join_on_device
from tests.runtime.kernels.device import kernel_modules
from tests.support.extent import ALL

pytestmark = pytest.mark.skipif(launch.triton is None, reason="needs Triton, which is for Linux")

# Sizes of which 16 bytes hold a part, as those of models are.
SIZES = Sizes(tokens=32, choices=2, hidden=128, inner=64, owned=3, replicas=2)
CAPABILITIES = (80, 90, 100) if ALL else (90,)
MODULES = [module for module in kernel_modules() if hasattr(module, "tuned")]
PRODUCTS = ("grouped_mm", "weight_grads")
# What is fastest depends on how many rows there are.
BY_ROWS = (*PRODUCTS, "gather_rows", "scatter_rows", "put_rows", "take_rows")
# Blocks and widths of attention, and bytes for which a program's threads may have no registers.
BLOCKS = [
    (64, 64, torch.float32, 32),
    (128, 128, torch.bfloat16, 64),
    (64, 64, torch.bfloat16, 0),
    (64, 128, torch.float32, 800),
    (128, 64, torch.bfloat16, 256),
    (64, 256, torch.bfloat16, 512),
    (64, 32, torch.float32, 32),
    (128, 256, torch.float32, 8192),
]
# Whole numbers, one for each row or for each rank.
INDICES = (
    "expand_segments",
    "post_words",
    "split_rows",
    "wait_words",
    "balance_rows",
    "ticket_segments",
    "device_dispatch",
)
# How words are written to other GPUs, which may have no atomics there, and read.
WORDS = {"post_words": "st.release.sys.global.b64", "wait_words": "acquire"}
# Attention has no configurations to try; see below.
NAMES = [name for name in KERNELS if not name.startswith("s2_")]
# What a program may have for itself on capability 9.0, the most on any GPU; others have at least 99 KiB.
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


class NoGpu:
    """What Triton asks of the driver before it compiles. Each capability is a device of its own."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_compiles(name: str, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In each dtype; with each configuration that is tried if HECATE_TESTS=all. Rows and tiles move by 16 bytes.

    Rows of links in each in any case: the tuner ends with the first that does not compile, as one of theirs did not.
    """
    every = ALL or name in ("put_rows", "take_rows")
    found: list[tuple[torch.dtype, Any]] = []

    def compile_only(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        # As the tuner calls it.
        kernel.nargs = dict(zip(kernel.arg_names, args, strict=False))
        for config in kernel.prune_configs(constants)[: None if every else 1]:
            made = kernel.fn.warmup(*args, grid=(1,), **constants, **config.all_kwargs())
            found.append((args[0].dtype, made))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("triton.runtime.driver._active", NoGpu(capability))
    for module in MODULES:
        monkeypatch.setattr(module, "launch", compile_only)
        if hasattr(module, "runs_on"):
            monkeypatch.setattr(module, "runs_on", lambda _: True)
    monkeypatch.setattr("hecate.runtime.kernels.grouped_mm.runs_on", lambda _: True)
    for case in cases_of(name, SIZES, torch.device("cpu")):
        case.ours()
    assert {dtype for dtype, _ in found} >= ({torch.float32} if name == "sum_replicas" else set(dtypes_of(name)))
    for dtype, made in found:
        text = made.asm["ptx"]
        assert made.asm["cubin"]
        if name in WORDS:
            assert WORDS[name] in text and "atom." not in text
        if name in PRODUCTS:
            assert "cp.async.cg.shared.global" in text, "16 bytes, while the tile before is multiplied"
            assert dtype is torch.float32 or "mma" in text, "tensor cores"
        elif name not in INDICES:
            assert name == "clear_rows" or "ld.global.v4.b32" in text
            assert "st.global.v4.b32" in text
        assert made.metadata.shared <= SHARED[capability]


class Launch(NamedTuple):
    """Of a launch, that by which Triton finds a compiled kernel, and the tuner a configuration."""

    kernel: tuple[Any, ...]
    tuned_by: tuple[Any, ...]


def launched(run: Callable[[], object]) -> list[Launch]:
    found: list[Launch] = []

    def take_notes(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        parameters = {one.name: one for one in kernel.fn.params}
        given = dict(zip(kernel.arg_names, args, strict=False)) | constants
        numbers = {
            key: value
            for key, value in given.items()
            if not isinstance(value, torch.Tensor) and not parameters[key].do_not_specialize
        }
        aligned = {
            key: value.data_ptr() % 16 == 0
            for key, value in given.items()
            if isinstance(value, torch.Tensor) and not parameters[key].do_not_specialize_on_alignment
        }
        assert set(kernel.keys) <= set(numbers) | {"tuned_for"}
        name, dtypes = kernel.base_fn.__name__, [value.dtype for value in args if isinstance(value, torch.Tensor)]
        found.append(
            Launch(
                (name, *dtypes, *numbers.items(), *aligned.items()), (name, *dtypes, *(given[k] for k in kernel.keys))
            )
        )

    with pytest.MonkeyPatch.context() as patch:
        for module in (*MODULES, ticket):
            if hasattr(module, "launch"):
                patch.setattr(module, "launch", take_notes)
            if hasattr(module, "runs_on"):
                patch.setattr(module, "runs_on", lambda _: True)
        run()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_changes_from_step_to_step_makes_no_other_kernel(name: str) -> None:
    """Another number of rows, of replicas or of segments: nothing is tuned or compiled anew."""

    def run(sizes: Sizes) -> None:
        for case in cases_of(name, sizes, torch.device("cpu")):
            case.ours()

    one = launched(lambda: run(Sizes(tokens=32, choices=2, hidden=128, inner=64, owned=3, replicas=2)))
    # With two more, and not with four more, the last offset begins at 16 bytes no longer.
    for replicas in (150, 151, 152):
        sizes = Sizes(tokens=37, choices=2, hidden=128, inner=64, owned=3, replicas=replicas)
        assert one and one == launched(lambda sizes=sizes: run(sizes))  # type: ignore[misc]


@pytest.mark.parametrize("name", BY_ROWS)
def test_how_many_rows_there_are_decides_which_configurations_are_tried(name: str) -> None:
    """Few rows in a first call must not decide for all steps. Again no kernel is compiled anew."""

    def run(tokens: int) -> list[Launch]:
        sizes = Sizes(tokens=tokens, choices=2, hidden=16, inner=16, owned=3, replicas=2)
        return launched(lambda: [case.ours() for case in cases_of(name, sizes, torch.device("cpu"))])

    few, many, about_as_many = run(32), run(32_768), run(30_000)
    of_many = [one.tuned_by for one in many]
    assert few and [one.kernel for one in few] == [one.kernel for one in many]
    assert of_many == [one.tuned_by for one in about_as_many]
    assert not set(of_many) & {one.tuned_by for one in few}


def test_parts_of_a_table_make_no_other_kernel() -> None:
    """Starts and ends of segments travel as one tensor, and begin in it where those before them end."""

    def join(*lengths: int) -> list[Launch]:
        ranges = [(np.arange(length), np.arange(1, length + 1)) for length in lengths]
        return launched(lambda: join_on_device(ranges, torch.device("cpu")))

    one = join(4, 2)
    assert len(one) == 2 and one == join(3, 5) == join(5, 1)


# What another release spills beyond that, with the bytes that were seen: other compilers use other registers.
TRITON = importlib.metadata.version("triton").rpartition(".")[0]
OTHERS = {"3.6": {(128, torch.bfloat16): 44}, "3.9": {(64, torch.bfloat16): 4, (128, torch.bfloat16): 336}}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("block", "width", "dtype", "spilled"), BLOCKS if ALL else BLOCKS[:2])
def test_attention_compiles_and_fits(
    block: int,
    width: int,
    dtype: torch.dtype,
    spilled: int,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = compiled_attention(block, width, dtype, NoGpu(capability), monkeypatch)
    assert set(found) == {"s2_forward", "s2_backward_keys", "s2_backward_queries"}
    for name, made in found.items():
        assert made.asm["cubin"] and made.metadata.shared <= SHARED[capability], (name, made.metadata.shared)
        if capability == 90:
            assert spills_of(made.asm["ptx"], tmp_path) <= spilled + OTHERS.get(TRITON, {}).get((block, dtype), 0), (
                name
            )


def compiled_attention(
    block: int, width: int, dtype: torch.dtype, driver: object, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    from hecate.runtime.attention import s2_backward, s2_forward

    found: dict[str, Any] = {}

    def compile_only(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        found[kernel.__name__] = kernel.warmup(*args, grid=(1,), **constants)

    monkeypatch.setattr("triton.runtime.driver._active", driver)
    for module in (s2_forward, s2_backward):
        monkeypatch.setattr(module, "launch", compile_only)
    pattern = Pattern(block=block, local=2, stride=2, offset=0, patterns=2)
    q, k = torch.zeros(1, 4, 8, width, dtype=dtype), torch.zeros(1, 2, 8, width, dtype=dtype)
    out, lse = s2_forward.forward(q, k, k, pattern, 1.0)
    s2_backward.backward(q, q, k, k, out, lse, pattern, 1.0)
    return found


def spills_of(ptx: str, folder: Path) -> int:
    """Bytes for which a thread has no registers, as Triton's own assembler counts them for capability 9.0."""
    from triton.backends.nvidia.compiler import get_ptxas

    (folder / "kernel.ptx").write_text(ptx)
    command = [get_ptxas(90).path, "-v", "-arch=sm_90a", str(folder / "kernel.ptx"), "-o", str(folder / "cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(found) for found in re.findall(r"(\d+) bytes spill stores", said))


def test_attention_runs_in_its_kernels_but_for_wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s2_attention, "runs_on", lambda _: True)
    q: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), shape=(1, 4, 8, 256), dtype=torch.float32)
    assert s2_attention._fits_kernel(q, q)
    q.shape = (1, 4, 8, 264)
    with pytest.warns(UserWarning, match="heads wider than 256 do not fit"):
        s2_attention._warn_of_dense(q, q)
    assert not s2_attention._fits_kernel(q, q)


def dtypes_of(name: str) -> tuple[torch.dtype, ...]:
    # Rows come back in the dtype that travels.
    return (torch.bfloat16, torch.float16) if name == "scatter_rows" else tuple(KERNELS[name][1])
