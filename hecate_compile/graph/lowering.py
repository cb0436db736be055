"""Compile the rewritten graph: autograd, the passes on its forward and backward, Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.fx import Graph, GraphModule

import hecate.passes
import hecate.runtime
from hecate.graph.pieces import compile_in_pieces
from hecate.graph.steps import Boxed, Pieces
from hecate.passes import (
    EAGER_JOINT_PASSES,
    EAGER_PASSES,
    FINAL_PASSES,
    INDUCTOR_PASSES,
    JOINT_PASSES,
    Pass,
    PassContext,
)
from hecate.passes.base import PassRecord
from hecate.passes.dumps.folder import DumpFolder, graph_log
from hecate.passes.dumps.value_names import note_sources, source_of
from hecate.passes.final.collective_notes import notes_in, schedule_lines
from hecate.passes.fx import fake_mode_of
from hecate.passes.invariants import verify_final
from hecate.passes.runner import run_passes
from hecate.private import (
    CustomGraphPass,
    TracingContext,
    aot_autograd,
    boxed_nop,
    functorch_config,
    get_hash_for_files,
    inductor,
    inductor_graph,
    min_cut_rematerialization_partition,
    tracing,
)
from hecate.runtime.comm.queue import Span

Compiled = Callable[..., Any]


class NotRun(Exception):
    """A graph was compiled inside :func:`capturing`, which runs none."""


@dataclass(frozen=True)
class Captured:
    """A graph as it would run: after all passes, its nodes in the order of execution."""

    graph: GraphModule
    context: PassContext


_capture: ContextVar[list[Captured] | None] = ContextVar("_capture", default=None)


@contextmanager
def capturing() -> Iterator[list[Captured]]:
    """Compile graphs in the block and keep them, forward before backward; calling one raises :class:`NotRun`."""
    kept: list[Captured] = []
    token = _capture.set(kept)
    try:
        # Without this a backward is compiled when it is first called.
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            yield kept
    finally:
        _capture.reset(token)


def runs_nothing() -> bool:
    """Return whether this is inside :func:`capturing`."""
    return _capture.get() is not None


_NO_RATES = PassContext(world_size=1).rates


def lower(
    gm: GraphModule,
    inputs: list[Any],
    *,
    backend: str,
    piecewise: bool,
    context: PassContext,
    disabled: Sequence[str],
    dumps: DumpFolder | None,
    dumping: bool,
    number: int,
    records: dict[str, tuple[PassRecord, ...]],
    notes: dict[str, tuple[Span, ...]],
    pieces: dict[str, Pieces],
) -> Compiled:
    """Compile ``gm``, graph ``number`` of its model; at one rank there is nothing to hide, and nothing is scheduled.

    Fills, unless a part comes from a cache or compiles later: ``notes`` with its collectives in their order and as
    predicted, ``records`` with what each pass did, and ``pieces`` if it is ``piecewise``. ``dumps`` is this rank's
    folder; ``dumping`` says that some rank dumps.
    """
    sources = [source_of(node) for node in gm.graph.find_nodes(op="placeholder")]

    def run(gm: GraphModule, passes: Sequence[Pass], part: str) -> None:
        if not passes:
            return
        note_sources(gm, sources)
        log = graph_log(number, part, context.layer_names, dumps)
        here = replace(context, part=part)
        check = verify_final if part != "joint" else lambda gm: gm.graph.lint()
        records[part] = tuple(run_passes(gm, here, passes=passes, disabled=disabled, dump=log, check=check))
        if part != "joint" and context.world_size > 1:
            notes[part] = tuple(notes_in(gm.graph.nodes))
            if log:
                log.schedule(schedule_lines(notes[part]))

    final: tuple[Pass, ...] = FINAL_PASSES if context.world_size > 1 else ()
    kept = _capture.get()
    if kept is not None:
        return _aot_eager(gm, inputs, run, final, lambda gm, part: _keep(gm, replace(context, part=part), kept))
    if backend == "aot_eager":
        return _aot_eager(gm, inputs, run, final)
    if any(isinstance(value, Tensor) and value.is_cuda for value in inputs):
        final = (*final, *INDUCTOR_PASSES)
    # Rates and tokens are left out: they differ in every run, and no rank's order depends on them here.
    identity = repr(replace(context, rates=_NO_RATES, tokens=0, guesses={})) + repr((disabled, piecewise))
    patches: dict[str, Any] = {
        "joint_custom_post_pass": _Hook(lambda graph: run(graph, JOINT_PASSES, "joint"), identity),
    }
    if context.world_size > 1:
        # This moves operators by estimated memory, with late starts and early waits (docs/decisions.md).
        patches["reorder_for_peak_memory"] = False
    inner: Compiled = inductor().compile_fx_inner
    if piecewise:
        if getattr(functorch_config, "bundled_autograd_cache", False):
            raise ValueError(
                "hecate: torch's bundled_autograd_cache keeps graphs as a whole; Config(piecewise=True) makes none"
            )
        inner = _InPieces(lambda gm, part: run(gm, final, part), pieces)
    elif final:
        patches["post_grad_custom_post_pass"] = _Hook(lambda graph: run(graph, final, _part(graph)), identity)
    return _inductor(gm, inputs, inner, patches, dumping=dumping)


Run = Callable[[GraphModule, Sequence[Pass], str], None]


def _keep(gm: GraphModule, context: PassContext, kept: list[Captured]) -> Compiled:
    kept.append(Captured(gm, context))

    def refuse(*args: Any) -> Any:
        raise NotRun

    return refuse


def _aot_eager(
    gm: GraphModule,
    inputs: list[Any],
    run: Run,
    final: Sequence[Pass],
    finish: Callable[[GraphModule, str], Compiled] | None = None,
) -> Compiled:
    """Run the passes, and return graphs that run node by node; or end before ``EAGER_PASSES`` with ``finish``."""

    def compiler(part: str, first: Sequence[Pass] = ()) -> Compiled:
        def compile(gm: GraphModule, inputs: list[Any]) -> Any:
            if finish is not None:
                run(gm, final, part)
                return finish(gm, part)
            if part == "backward":
                _keep_saved_tensors()
            run(gm, (*first, *final, *EAGER_PASSES), part)
            return boxed_nop(gm, inputs)

        return compile

    def partition(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
        run(joint, (*JOINT_PASSES, *EAGER_JOINT_PASSES), "joint")
        parts: tuple[GraphModule, GraphModule] = min_cut_rematerialization_partition(joint, inputs, **options)
        return parts

    compiled: Compiled = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        # Without gradients there is no joint graph.
        inference_compiler=compiler("forward", EAGER_JOINT_PASSES),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )(gm, inputs)
    return compiled


def _keep_saved_tensors() -> None:
    """Keep torch from donating tensors that a forward saved to its backward."""
    # Torch notes donations for any backward compiled with the forward, and then refuses to run it twice. Node by
    # node, a backward has no use for them.
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _inductor(
    gm: GraphModule, inputs: list[Any], inner: Compiled, patches: dict[str, Any], *, dumping: bool
) -> Compiled:
    def compile_part(*args: Any, **options: Any) -> Any:
        with _aligned_on_host():
            return inner(*args, **options)

    # A graph from a cache went through the passes in another process, and would not be dumped. No rank takes one if
    # some rank dumps: all must know the order of their starts, or none.
    fresh: Any = nullcontext()
    if dumping:
        patches["fx_graph_cache"] = False
        fresh = functorch_config.patch(enable_autograd_cache=False)
    with fresh:
        compiled: Any = inductor().compile_fx(gm, inputs, inner_compile=compile_part, config_patches=patches)
    return cast(Compiled, compiled)


@dataclass(frozen=True)
class _InPieces:
    """What Inductor calls to compile a forward or a backward: ``passes``, and then each different piece."""

    passes: Callable[[GraphModule, str], None]
    pieces: dict[str, Pieces]

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], **options: Any) -> Compiled:
        part = _part(gm)
        self.passes(gm, part)

        def compile_piece(piece: GraphModule, inputs: list[Any], static: list[int]) -> Boxed:
            known = {key: options[key] for key in _OF_A_PIECE if key in options}
            found = fake_mode_of(gm.graph)
            # What torch notes of a graph's results, for the backward, is not a piece's.
            with tracing(TracingContext(found[1] if found is not None else None)):
                compiled: Boxed = inductor().compile_fx_inner(piece, inputs, static_input_idxs=static, **known)
            return compiled

        compiled = compile_in_pieces(gm, compile_piece, options.get("static_input_idxs") or ())
        self.pieces[part] = compiled.pieces
        return compiled


# Inductor's options for a graph that hold for each of its pieces.
_OF_A_PIECE = ("cudagraphs", "is_backward", "is_inference", "graph_id", "boxed_forward_device_index")


@contextmanager
def _aligned_on_host() -> Iterator[None]:
    """Make Inductor take graph inputs in the host's memory for aligned inside the block."""
    # By default it takes none of them for aligned, nor results of operators that get one: rows that travelled, as
    # their splits are on the host. Kernels of a GPU then load such rows number by number.
    graph = inductor_graph()
    asked = graph.should_assume_input_aligned
    graph.should_assume_input_aligned = lambda value: value.device.type == "cpu" or asked(value)
    try:
        yield
    finally:
        graph.should_assume_input_aligned = asked


def _part(gm: GraphModule) -> str:
    tangents = any(node.op == "placeholder" and node.name.startswith("tangents") for node in gm.graph.nodes)
    return "backward" if tangents else "forward"


class _Hook(CustomGraphPass):
    """Inductor's form of a pass. Its identity is part of the key of Inductor's cache."""

    def __init__(self, work: Callable[[GraphModule], None], identity: str) -> None:
        self._work, self._identity = work, identity

    def __call__(self, graph: Graph) -> None:
        assert graph.owning_module is not None
        self._work(graph.owning_module)

    def uuid(self) -> Any:
        return get_hash_for_files(_sources(), self._identity)


@cache
def _sources() -> tuple[str, ...]:
    """Return the files that make a graph: the passes, and the operators, whose fakes and formulas are compiled in."""
    folders = (Path(package.__path__[0]) for package in (hecate.passes, hecate.runtime))
    return tuple(str(path) for folder in folders for path in sorted(folder.rglob("*.py")))
