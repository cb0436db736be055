"""The torch.compile backend: rewrite the captured graph, compare it across ranks, hand it on."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from hecate.checkpointing import keep_plans
from hecate.config import Config
from hecate.passes import PASSES, PassContext
from hecate.passes.fingerprint import fingerprint
from hecate.passes.runner import GraphDump, PassRecord, run_passes
from hecate.runtime.agreement import agree
from hecate.runtime.layer import Layer
from hecate.runtime.policies import Policy
from hecate.runtime.world import World

log = logging.getLogger("hecate")


@dataclass(frozen=True, kw_only=True)
class GraphRecord:
    """One compiled graph.

    Attributes:
        nodes: number of operators after the passes.
        passes: what each pass did, in order.
    """

    nodes: int
    passes: tuple[PassRecord, ...]


@dataclass
class Backend:
    """Called by Dynamo with every graph of the model.

    Attributes:
        graphs: what has been compiled so far.
        comparing: compare graphs across ranks. On during the first forward in each grad mode, because all ranks
            compile then; off otherwise, because a later recompile may happen on one rank alone.
    """

    config: Config
    world: World
    policy: Policy
    layers: Sequence[Layer]
    graphs: list[GraphRecord] = field(default_factory=list)
    comparing: bool = True
    _warned: set[str] = field(default_factory=set)

    @property
    def disabled(self) -> tuple[str, ...]:
        if self.config.policy == "gather":
            return (*self.config.disable_passes, "group_expert_loops", "exchange_rows")
        return tuple(self.config.disable_passes)

    @property
    def dump_folder(self) -> Path | None:
        """This rank's folder for graph dumps, or None."""
        folder = self.config.dump or os.environ.get("HECATE_DUMP")
        return Path(folder) / f"rank{self.world.rank}" if folder else None

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        number = len(self.graphs)
        folder = self.dump_folder
        context = PassContext(
            world_size=self.world.size,
            replicates=self.policy.replicates,
            calibrates=self.policy.calibrates,
            layer_names={layer.id: layer.name for layer in self.layers},
        )
        records = run_passes(
            gm,
            context,
            passes=PASSES,
            disabled=self.disabled,
            dump=GraphDump(folder, number) if folder else None,
        )
        keep_plans(gm)
        calls = sum(node.op.startswith("call") for node in gm.graph.nodes)
        self.graphs.append(GraphRecord(nodes=calls, passes=tuple(records)))
        self._warn_fallbacks(records)
        if self.comparing:
            agree(
                fingerprint(gm),
                f"graph {number}",
                "Every rank must run the same model code: look for branches on the rank or on local data. "
                "HECATE_DUMP=<folder> writes each rank's graph.",
                self.world,
            )
        return self._lower(gm, example_inputs)

    def _lower(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if self.config.backend == "aot_eager":
            from torch._dynamo.backends.debugging import aot_eager

            return aot_eager(gm, example_inputs)
        from torch._inductor.compile_fx import compile_fx

        # Inductor may choose an order by estimated memory, which may differ between ranks; collectives must not.
        patches = {"reorder_for_peak_memory": False} if self.world.size > 1 else {}
        compiled: Any = compile_fx(gm, example_inputs, config_patches=patches)
        return compiled

    def _warn_fallbacks(self, records: list[PassRecord]) -> None:
        """Once per module, with the first reason, on rank 0 only: all ranks rewrite alike."""
        for record in records:
            for skip in record.skipped:
                if not skip.fallback or skip.where in self._warned:
                    continue
                self._warned.add(skip.where)
                if self.world.rank == 0:
                    warnings.warn(
                        f"hecate: {skip.where} was not rewritten by {record.name} and gathers all its experts "
                        f"on every rank instead (right, but slow): {skip.reason}",
                        stacklevel=2,
                    )
