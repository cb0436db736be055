"""Compile a model for a pretended GPU: ``python -m tests.support.cuda_code FOLDER FAMILY DTYPE RANKS LAYERS``.

Needs g++, for a device guard that does nothing, and a build of torch without CUDA.
"""
# The guard is loaded before torch, and torch is told of the device before it is used.
# ruff: noqa: E402

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def load_guard(folder: Path) -> None:
    """Register the pretended device, before torch is imported: it asks for its CUDA hooks once, at that time."""
    torch_folder, library = Path(sysconfig.get_paths()["purelib"], "torch"), folder / "guard.so"
    if not library.exists():
        # Processes that begin side by side each make it, and none sees a part of it.
        own, source = library.with_suffix(f".{os.getpid()}"), Path(__file__).parent / "guard.cpp"
        folders = [f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include"]
        command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", *folders, source, "-o", own]
        subprocess.run([*command, f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"], check=True)
        own.replace(library)
    for name in ("libgomp*", "libc10.so", "libtorch_cpu.so"):
        for path in torch_folder.glob(f"lib/{name}"):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


folder, case = Path(sys.argv[1]), sys.argv[2:]
family, dtype_name, ranks, layers = case[0], case[1], int(case[2]), int(case[3])
load_guard(folder)

import torch
import torch._dynamo.device_interface as interfaces
import torch._inductor.async_compile as async_compile
import torch._inductor.config as inductor
import torch._inductor.fx_passes.joint_graph as joint
import torch._inductor.fx_passes.post_grad as post
import torch._inductor.graph as lowered
import torch.cuda
import triton.runtime.driver
from torch._subclasses.fake_tensor import FakeTensorMode

H100 = SimpleNamespace(
    name="H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    gcnArchName="",
    is_integrated=False,
    memory_bus_width=5120,
    memory_clock_rate=2619000,
    clock_rate=1980000,
    uuid="x",
)


def get_device_capability(device: object = None) -> tuple[int, int]:
    return 9, 0


def pretend_device() -> None:
    """Tell torch, Inductor and Triton of one H100."""
    # Dynamo lets it run while it traces, since it is torch's.
    get_device_capability.__module__ = "torch.cuda"
    told: dict[str, Any] = dict(
        get_device_capability=get_device_capability,
        get_device_properties=lambda *device: H100,
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,
        synchronize=lambda *device: None,
        set_device=lambda *device: None,
        _exchange_device=lambda device: 0,
        _maybe_exchange_device=lambda device: 0,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda *device: torch.zeros(1),
        set_rng_state=lambda *state: None,
        is_bf16_supported=lambda *given, **options: True,
        is_current_stream_capturing=lambda: False,
    )
    for name, value in told.items():
        setattr(torch.cuda, name, value)
    for name in (
        "_cuda_getDevice",
        "_cuda_exchangeDevice",
        "_cuda_setDevice",
        "_cuda_maybeExchangeDevice",
        "_cuda_getCurrentRawStream",
    ):
        if not hasattr(torch._C, name):
            setattr(torch._C, name, lambda *device: 0)
    torch.version.cuda = "13.0"
    asked: dict[str, Any] = dict(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_compute_capability=lambda device=None: 90,
        get_device_properties=lambda device=None: H100,
        is_triton_capable=lambda device=None: True,
        raise_if_triton_unavailable=lambda device=None: None,
        is_bf16_supported=lambda *given, **options: True,
    )
    for name, value in asked.items():
        setattr(interfaces.CudaInterface, name, staticmethod(value))
    interfaces.CudaInterface.Worker.get_device_properties = staticmethod(lambda device=None: H100)
    interfaces.CudaInterface.Worker.current_device = staticmethod(lambda: 0)
    triton.runtime.driver._active = SimpleNamespace(
        get_current_target=lambda: __import__("triton").backends.compiler.GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )


def keep_code() -> list[str]:
    """Of each graph that Inductor lowers from now on; no kernel in it is compiled."""
    inductor.compile_threads, inductor.force_disable_caches, inductor.joint_graph_constant_folding = 1, True, False
    joint.lazy_init = post.lazy_init = lambda *given, **options: None
    async_compile.AsyncCompile.triton = lambda self, name, source, device_str="cuda": SimpleNamespace(run=None)
    codes: list[str] = []
    codegen = lowered.GraphLowering.codegen

    def kept(self: Any, *given: Any, **options: Any) -> Any:
        found = codegen(self, *given, **options)
        codes.append(found[0].value)
        return found

    lowered.GraphLowering.codegen = kept
    return codes


def described(code: str) -> dict[str, Any]:
    """The fields of ``tests.support.cuda_code.Code``."""
    kernels, calls = code.split("class Runner")[0], code.split("class Runner")[-1]
    launch = r"torch\.ops\.(hecate\.\w+)\.default\(|extern_kernels\.(\w+)\(|(triton_\w+)\.run\("
    steps = [next(filter(None, found)) for found in re.findall(launch, calls)]
    atomics = {}
    for name, source in re.findall(r"(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)'''", kernels, re.S):
        written = re.findall(r"tl\.atomic_add\((\w+)", source)
        if written:
            types = dict(re.findall(r"'(\w+)': '\*(\w+)'", source))
            atomics[name] = [types[pointer] for pointer in written]
    return dict(
        steps=steps,
        unaligned=re.findall(r"op: torch\.ops\.([\w.]+)\) is assumed to be not aligned", calls),
        atomics=atomics,
        host_reads=calls.count(".item()"),
    )


pretend_device()
codes = keep_code()

import hecate
import hecate.compilation as compilation
import hecate.found as in_models
import hecate.graph.backend as backend
from hecate.runtime.comm import collectives
from hecate.runtime.comm.queue import CollectiveQueue
from hecate.runtime.comm.world import World
from hecate.runtime.one_sided.exchanges import Exchanges
from hecate.runtime.placement.planner import Rates
from hecate.runtime.placement.topology import Topology
from hecate.simulator.capture import fake_ranks
from tests.support.models import build


def without_peers() -> None:
    """Ranks that are not there agree, and no stream is made for their collectives."""
    World.__post_init__ = lambda self: object.__setattr__(self, "queue", CollectiveQueue(self.device))
    compilation.agree = in_models.agree = backend.agree = collectives.broadcast = lambda *given, **options: None
    backend.fewest_tokens = lambda tokens, *given: tokens
    transport = SimpleNamespace(faults=torch.zeros(2, ranks, dtype=torch.int64, device="cpu"))
    Exchanges.between = classmethod(lambda cls, world: SimpleNamespace(world=world, transport=transport))


def on_device(model: torch.nn.Module) -> None:
    """Replace all values by fake ones on the device; a parameter that modules share stays one."""
    fake: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                empty = torch.empty(value.shape, dtype=value.dtype, device="cuda")
                module._parameters[name] = fake.setdefault(id(value), torch.nn.Parameter(empty))
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device="cuda")


without_peers()
options: dict[str, Any] = dict(
    topology=Topology.even(ranks, ranks), rates=Rates(flops=5e14, rank_bytes=3e11, node_bytes=4e11)
)
if "symmetric" in case:
    options["transport"] = "symmetric"
with fake_ranks(ranks), FakeTensorMode(allow_non_fake_inputs=True):
    with torch.utils._python_dispatch._disable_current_modes():
        model = build(family, dtype=getattr(torch, dtype_name), layers=layers)
    on_device(model)
    ids = torch.empty(4, 16, dtype=torch.int64, device="cuda")
    hecate.compile(model, hecate.Config(**options))
    given = {} if family in ("plain", "split") else dict(use_cache=False)
    stopped = ""
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        try:
            model(input_ids=ids, labels=ids, **given)
        except Exception as error:
            # What was compiled does not run: there is no device.
            stopped = f"{type(error).__name__}: {error}"
if len(codes) != 2:
    sys.exit(f"{len(codes)} graphs were lowered; {stopped}")
for part, code in zip(("forward", "backward"), codes, strict=True):
    (folder / f"{'-'.join(case)}.{part}.py").write_text(code)
(graph,) = hecate.explain(model).graphs
made = dict(
    forward=described(codes[0]),
    backward=described(codes[1]),
    layers=layers,
    rewritten={record.name: record.rewritten for record in graph.passes},
    graph_breaks=sum(torch._dynamo.utils.counters["graph_break"].values()),
)
(folder / f"{'-'.join(case)}.json").write_text(json.dumps(made, indent=1))
