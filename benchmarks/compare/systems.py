"""What takes part in the comparison."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hecate
from benchmarks.compare import routing, shapes
from benchmarks.compare.moves import Moves, moments_seconds
from benchmarks.compare.shipped import BESIDE, EXTERNAL, local_bytes, local_part
from benchmarks.compare.variants import BOUNDS, IN_NODES, VARIANTS
from benchmarks.compare.waits import seconds_waited
from benchmarks.emulator.throttle import unthrottled
from benchmarks.policies import FasterMoE, FlexMoE, Laer, PostGate, SmartMoE
from hecate.compiled_model import compiled_model_of
from hecate.runtime.comm import collectives
from hecate.runtime.comm.queue import Span
from hecate.runtime.placement.hecate_policy import Hecate
from hecate.runtime.placement.owners import Owners
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Rates
from hecate.runtime.placement.policy import Policy, Static
from hecate.runtime.state.layer_plan import LayerPlan

Ints = NDArray[np.int64]
# Most replicas on a rank, the same for all who reserve room for them.
REPLICAS = 2


def policies(shape: shapes.Shape) -> dict[str, Policy]:
    """Systems on Hecate's engine. Only the policy differs, and of variants the options."""
    # LAER's layout, a rank's share of the experts and two more, lies beside what the rank owns.
    more = REPLICAS + shape.experts // shapes.WORLD_SIZE
    found: dict[str, Policy] = {
        "static EP": Static(),
        "hecate": Hecate(objective="time", replicas=REPLICAS),
        "hecate (auto)": Hecate(objective="time", replicas="auto"),
        "hecate (calibrate)": Hecate(objective="time", replicas=REPLICAS, calibrates=True),
        "hecate (LAER's memory)": Hecate(objective="time", replicas=more),
        "hecate (paper)": Hecate(objective="paper", replicas=REPLICAS, reshard_every=100),
        "FasterMoE": FasterMoE(),
        "SmartMoE": SmartMoE(),
        "FlexMoE": FlexMoE(replicas=REPLICAS),
        "LAER": Laer(replicas=REPLICAS),
        "post-gate": PostGate(replicas=REPLICAS),
    }
    return found | {name: found[variant.of] for name, variant in VARIANTS.items()}


def options(name: str) -> Mapping[str, Any]:
    """What a system on Hecate's engine says to ``hecate.Config``, beside its policy."""
    # Rows travel each by itself, unless a system is here to show otherwise.
    return {"dispatch": "rows"} | dict(VARIANTS[name].options if name in VARIANTS else {})


class System:
    """A model, its optimizer, and how to bring it to any step of a trace.

    Args:
        beside: bytes that it holds at its peak beside parameters, gradients and optimizer states.

    Attributes:
        replayed: where the choices of each layer's tokens are written.
    """

    def __init__(self, model: nn.Module, shape: shapes.Shape, *, learns: bool = True, beside: int = 0) -> None:
        self.model, self.replayed, self.beside = model, routing.prepare(model, shape.tokens), beside
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4 * learns)

    def step(self, ids: torch.Tensor) -> None:
        """Forward, backward and update."""
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def catch_up(self, counts: Ints, step: int) -> None:
        """See the trace ``[step, layer, rank, expert]`` up to ``step``, not included."""

    def begin(self) -> None:
        """Forget all steps: a new workload begins."""

    def moves(self) -> dict[str, float]:
        """Seconds of moves between steps, for each step of the workload so far; see :class:`Moves`."""
        return Moves().per_step()

    def check(self) -> None:
        """Once compiled: whether the system is what its name says.

        Raises:
            RuntimeError: it is not, with the reason.
        """

    def learn(self, rates: Rates) -> None:
        """Hear how fast the machine is."""

    def spans(self) -> list[Span]:
        """The collectives of the last step, on this rank."""
        return []

    def saw(self) -> dict[str, Any]:
        """What the last step did, on this rank."""
        return {}

    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state of this rank, and what it holds beside them."""
        total = self.beside
        for parameter in self.model.parameters():
            states = [v for v in self.optimizer.state.get(parameter, {}).values() if isinstance(v, torch.Tensor)]
            # The gradient is as large as the parameter.
            total += sum(local_bytes(tensor) for tensor in (parameter, parameter, *states))
        return total


class Engine:
    """A model that Hecate compiled. Policies that keep owners as they are share one, if their graphs are the same."""

    def __init__(self, shape: shapes.Shape, policy: Policy, rates: Rates, given: Mapping[str, Any]) -> None:
        config = hecate.Config(
            backend="aot_eager", policy=copy.deepcopy(policy), replicas=REPLICAS, rates=rates, **given
        )
        self.model = hecate.compile(shapes.build(shape), config)
        state = compiled_model_of(self.model, "the benchmark")
        self.placer, self.layers, self.owner_mover = state.placer, state.layers, state.owner_mover

    @staticmethod
    def key(name: str, policy: Policy) -> tuple[Any, ...]:
        """Equal for policies that may share."""
        given = tuple(sorted((option, repr(value)) for option, value in options(name).items()))
        return policy.replicates, policy.calibrates, name if policy.reshard_every else "", given


class Planning:
    """The CPU time of a policy's calls, in this thread.

    Args:
        policy: its calls are timed from now on.

    Attributes:
        seconds: since :meth:`begin`, ``before`` a step's gate, where planning can hide, and ``after`` it.
    """

    def __init__(self, policy: Policy) -> None:
        self.begin()
        for name, when in (("place", "before"), ("calibrate", "after"), ("assign", "after")):
            setattr(policy, name, self._timed(getattr(policy, name), when))

    def begin(self) -> None:
        self.seconds, self._inside = {"before": 0.0, "after": 0.0}, False

    def _timed(self, call: Callable[..., Any], when: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            if self._inside:
                # A policy may ask itself.
                return call(*args)
            self._inside, begun = True, time.thread_time()
            try:
                return call(*args)
            finally:
                self.seconds[when] += time.thread_time() - begun
                self._inside = False

        return timed


class EngineSystem(System):
    """A policy on Hecate's engine.

    Before a step the policy is walked through the steps of the trace that it has not seen, as the engine does it but
    without computing: place and observe, and own after every ``reshard_every`` steps. There experts move to their new
    owners with their optimizer state, and that is timed.
    """

    def __init__(self, engine: Engine, shape: shapes.Shape, policy: Policy, *, learns: bool = True) -> None:
        super().__init__(engine.model, shape, learns=learns)
        self.engine, self.fresh, self.every = engine, policy, policy.reshard_every
        self.keeps_states = isinstance(policy, FlexMoE)
        self.begin()

    def begin(self) -> None:
        engine = self.engine
        self.policy, self.seen, self.moved = copy.deepcopy(self.fresh), 0, Moves()
        self.planning = Planning(self.policy)
        # Experts move between timed steps, and not in them; the optimizer has noted their owners by then.
        self.policy.reshard_every = 0 if self.optimizer.state else self.every
        self.plans = [LayerPlan(loads=deque(maxlen=self.policy.window)) for _ in engine.layers]
        self.owners = [Owners.contiguous(layer.num_experts, layer.world.size) for layer in engine.layers]
        self.placed = [Placement.owned(owners) for owners in self.owners]

    def step(self, ids: torch.Tensor) -> None:
        self.planning.begin()
        super().step(ids)

    def catch_up(self, counts: Ints, step: int) -> None:
        layers = self.engine.layers
        self._take_over()
        for index in range(self.seen, step + 1):
            if self.every and index and index % self.every == 0:
                self._change_owners()
            with unthrottled():
                for number, layer in enumerate(layers):
                    layer.placer.plan_ahead()
                    self._note_replicas(number)
                    if index < step:
                        layer.placer.plan.planned = None
                        layer.placer.observe(counts[index, number])
        # A step may be asked for again.
        for layer in layers:
            layer.placer.plan_ahead()
        self.seen = self.moved.steps = step + 1
        self.owners = [layer.owners for layer in layers]

    def _take_over(self) -> None:
        """The model is this system's again: its policy, its plans, and experts with the owners it left them with."""
        engine = self.engine
        engine.placer.policy = self.policy
        for layer, plan in zip(engine.layers, self.plans, strict=True):
            layer.placer.plan = plan
        planned = [plan.planned for plan in self.plans]
        # Others, and an earlier workload, moved them; no system would, so it is not timed.
        self._move(self.owners)
        for plan, placement in zip(self.plans, planned, strict=True):
            plan.planned = placement

    def _move(self, owners: list[Owners]) -> None:
        self.engine.owner_mover.move(list(zip(self.engine.layers, owners, strict=True)))
        # A step without gradients only moves the optimizer's state to where its experts are.
        self.optimizer.zero_grad()
        self.optimizer.step()

    def _change_owners(self) -> None:
        """As between two steps of training. From barrier to barrier; the time of choosing is Hecate's only.

        The searches of other policies are this benchmark's, and theirs might be faster.
        """
        layers = self.engine.layers
        dist.barrier()
        begun = time.perf_counter()
        # A policy asks how long owners will stay. In timed steps it is 0, so that the engine moves none there.
        self.policy.reshard_every, engines = self.every, self.policy.reshard_every
        timed = isinstance(self.policy, Hecate)
        with nullcontext() if timed else unthrottled():
            new = self.policy.choose_owners([layer.placer.view for layer in layers])
        self.policy.reshard_every = engines
        if not timed:
            dist.barrier()
            begun = time.perf_counter()
        for layer in layers:
            layer.placer.plan.forget()
        self._move(new)
        dist.barrier()
        self.moved.owners += time.perf_counter() - begun

    def _note_replicas(self, number: int) -> None:
        if self.keeps_states:
            placer = self.engine.layers[number].placer
            planned = placer.plan.planned
            assert planned is not None
            self.moved.moments += moments_seconds(self.placed[number], planned, placer.view.costs)
            self.placed[number] = planned

    def moves(self) -> dict[str, float]:
        return self.moved.per_step()

    def check(self) -> None:
        _refuse_skips(self.model)

    def learn(self, rates: Rates) -> None:
        self.engine.placer.set_rates(rates, because="given to the benchmark")

    def spans(self) -> list[Span]:
        return list(self.engine.layers[0].world.queue.spans)

    def saw(self) -> dict[str, Any]:
        layers = self.engine.layers
        return _seen(self.spans(), layers) | {
            "planning": dict(self.planning.seconds),
            "replicas": [layer.replicas for layer in layers],
            "held": [self._held(layer) for layer in layers],
            "routed": [layer.counts.sum(0).tolist() for layer in layers],
        }

    def _held(self, layer: Any) -> int:
        """Bytes of a layer's replicas on this rank."""
        placement = layer.placer.plan.current
        if placement is None or not self.policy.replicates:
            return 0
        held = sum(layer.world.rank in ranks for ranks in placement.holders)
        return (held - placement.owners.counts[layer.world.rank]) * layer.sizes.expert_bytes


class InNodes(System):
    """Static EP in which the ranks of a node have all experts among them, and every node has the same.

    No row leaves its node. Gradients are averaged over nodes behind the backward, in one sum for all parameters, and
    each rank sends those of the experts that it owns. Every expert is on as many ranks as there are nodes, with its
    optimizer state.
    """

    def __init__(self, shape: shapes.Shape, rates: Rates) -> None:
        mesh = init_device_mesh("cpu", (shapes.NODES, shapes.RANKS_PER_NODE), mesh_dim_names=("nodes", "ranks"))
        config = hecate.Config(backend="aot_eager", policy=Static(), dispatch="rows", rates=rates)
        super().__init__(hecate.compile(shapes.build(shape), config, mesh=mesh["ranks"]), shape)
        self.layers, self.across = compiled_model_of(self.model, "the benchmark").layers, mesh.get_group("nodes")

    def step(self, ids: torch.Tensor) -> None:
        self.model(input_ids=ids, labels=ids).loss.backward()
        gradients = [local_part(p.grad) for p in self.model.parameters() if p.grad is not None]
        together = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(together, group=self.across)
        together /= shapes.NODES
        for gradient, mean in zip(gradients, together.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self) -> None:
        _refuse_skips(self.model)

    def spans(self) -> list[Span]:
        return list(self.layers[0].world.queue.spans)

    def saw(self) -> dict[str, Any]:
        return _seen(self.spans(), self.layers)


def _seen(spans: Sequence[Span], layers: Sequence[Any]) -> dict[str, Any]:
    """Collectives, waits and rows of a step on Hecate's engine."""
    drawn = [(s.part, s.operator, s.begun, s.ended, s.waited, s.ready) for s in spans]
    return {"spans": drawn, "waits": seconds_waited(drawn), "rows": [layer.rows for layer in layers]}


def _refuse_skips(model: nn.Module) -> None:
    skipped = hecate.explain(model).skipped
    if skipped:
        raise RuntimeError(f"compare: a system is not what its name says: {skipped[0].reason}")


class Alone:
    """One rank's compute and nothing that travels: its number of experts, evenly used, with ``times`` its rows.

    Tells the simulator how long the operators of such a model take on an emulated rank.

    Args:
        compiled: it runs on the engine. One that does not is the same work in all versions of it.
    """

    def __init__(self, shape: shapes.Shape, ids: torch.Tensor, times: int, *, compiled: bool = True) -> None:
        self.model = shapes.build(alone(shape, times))
        if compiled:
            rank = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("others", "alone"))["alone"]
            self.model = hecate.compile(self.model, hecate.Config(backend="aot_eager"), mesh=rank)
        routing.prepare(self.model, shape.tokens)
        self.optimizer, self.ids = torch.optim.AdamW(self.model.parameters(), lr=1e-4), ids

    def step(self) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad()
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()


def alone(shape: shapes.Shape, times: int = 1) -> shapes.Shape:
    """The shape with as many experts as one rank owns, and ``times`` as many rows."""
    return replace(shape, experts=shape.experts // shapes.WORLD_SIZE, top_k=shape.top_k * times)


@contextmanager
def free_links() -> Iterator[None]:
    """Inside the block what a collective would bring is zeros and takes no time. Counts of rows still travel."""

    def all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], world: Any) -> torch.Tensor:
        return rows.new_zeros((sum(receive), *rows.shape[1:]))

    def all_reduce(tensor: torch.Tensor, world: Any, op: Any = None) -> None:
        """What is there stays."""

    with (
        mock.patch.object(collectives, "all_to_all", all_to_all),
        mock.patch.object(collectives, "all_reduce", all_reduce),
    ):
        yield


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the table: a system, or a bound that another system's model plays.

    Attributes:
        balanced: it gets even routing, whatever the workload.
        free: its links take no time.
    """

    system: System
    balanced: bool = False
    free: bool = False


def make_entries(names: list[str], shape: shapes.Shape, rates: Rates) -> dict[str, Entry]:
    """The lines of a table. All ranks together.

    Args:
        rates: what every policy is told about the machine, until it learns more.
    """
    engines: dict[Any, Engine] = {}
    entries = {}
    for name in names:
        if name in EXTERNAL:
            model = shapes.build(shape)
            beside = BESIDE[name](model)
            entries[name] = Entry(system=System(EXTERNAL[name](model), shape, beside=beside))
            continue
        if name == IN_NODES:
            entries[name] = Entry(system=InNodes(shape, rates))
            continue
        played, free = BOUNDS.get(name, name), name == "bound: free links"
        policy = policies(shape)[played]
        key = Engine.key(played, policy)
        if key not in engines:
            engines[key] = Engine(shape, policy, rates, options(played))
        # Gradients that came over free links are wrong, so nothing is learned from them.
        system = EngineSystem(engines[key], shape, policy, learns=not free)
        entries[name] = Entry(system=system, balanced=name == "bound: balanced routing", free=free)
    return entries
