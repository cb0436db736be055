"""Options of :func:`hecate.compile`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from hecate.passes.base import Chunks, RowDispatch
from hecate.runtime.attention.options import S2Attention
from hecate.runtime.placement.hecate_policy import Hecate, Objective, Replicas
from hecate.runtime.placement.planner import Rates
from hecate.runtime.placement.policy import Policy, Static
from hecate.runtime.placement.topology import Topology

Backend = Literal["inductor", "aot_eager"]
PolicyName = Literal["hecate", "static", "gather", "replicate"]
Dense = Literal["replicate", "shard"]
RowTransport = Literal["collectives", "symmetric"]
DumpRanks = Literal["first", "all"]
ExpertGroup = int | Literal["auto"]
BalanceLoss = Literal["own", "global"]


# What stands for a number.
_WITHOUT_NUMBER = (
    ("prefetch_bytes", None),
    ("chunks", "auto"),
    ("replicas", "auto"),
    ("expert_group", None),
    ("expert_group", "auto"),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of :func:`hecate.compile`. All have a default that is right for training.

    Attributes:
        dense: how parameters outside the experts are kept. ``"replicate"``: whole on every rank,
            gradients averaged. ``"shard"``: each rank keeps, updates and has optimizer state for its share of
            the rows (dimension 0) of every parameter with at least two. Forward and backward gather each layer's
            rows in one all-gather, and the backward leaves each rank the mean gradient of its rows. A forward must
            not change such a parameter in place, and outside the forward ``model.some.weight`` is the shard.
        broadcast_buffers: before the first forward after each step every rank takes rank 0's buffers, as with
            ``DistributedDataParallel``. Off, they are each rank's own, and ``hecate.save`` writes rank 0's.
        backend: the compiler of the rewritten graph. ``"aot_eager"`` compiles in seconds and runs the
            graph node by node: for debugging.
        piecewise: Inductor compiles each different piece between Hecate's operators once, and no graph as a whole, so
            that layers that are alike are compiled together: a deep model compiles faster. A restart finds pieces in
            torch's caches, and traces the model again.
        disable_passes: names of passes to leave out, to find a fault. The program stays right.
        policy: ``"hecate"``: tokens travel to experts, and in each step hot experts are replicated where that is
            predicted to be faster. ``"static"``: every expert is computed by its owner. ``"gather"``: every rank
            gathers all experts and computes its own tokens; nothing is exchanged. ``"replicate"``: experts are not
            looked for, every rank keeps the whole model, and gradients are averaged when the backward ends: for
            models whose experts are not found or cannot be traced. Or a :class:`hecate.Policy` of your own.
        objective: how ``"hecate"`` chooses replicas. ``"time"``: by predicted step time. ``"paper"``: Algorithm 1
            of the paper, with as many experts as ``rates.hidden_seconds`` seconds can hide.
        replicas: most replicas that a rank holds besides its own experts, per layer. ``"auto"``: for each layer as
            few as are predicted to make a step almost as fast as all that ``replica_memory`` allows.
        replica_memory: most memory of all replicas with ``replicas="auto"``, in parts of what parameters, gradients
            and two moments of a rank's own experts take, on average: 0.25 for as many replicas as own experts, and
            for one where there are more ranks than experts.
        window: most steps whose mean is the load that ``"hecate"`` expects; with ``objective="time"`` fewer while
            routing moves by more than chance.
        reshard_every: optimizer steps after which ``"hecate"`` may change who owns what; 0 for never.
        calibrate: let ``"hecate"`` add replicas after the gate, on the critical path, where predicted to pay.
        chunks: parts into which the rows of a layer are cut, so that one part travels while another is computed;
            ``"auto"`` takes two where that is predicted to pay: with several nodes, or on GPUs.
        dispatch: how rows travel between nodes. ``"rows"``: every choice of a token is a row, straight to a holder of
            its expert. ``"nodes"``: a token's row crosses to each node once, and a rank there passes it on
            to the holders; results are summed there, and cross once. A layer in which that cannot be proven right
            stays with rows, and ``hecate.explain`` says why. ``"auto"``: nodes where that is predicted to pay
            and the policy makes no replicas, which keep rows in their node already.
        transport: the carrier of rows, counts of rows, and replicas. ``"collectives"``: torch.distributed; the host
            waits for the counts in each layer, and knows how many rows come. ``"symmetric"``: ranks of one machine
            write into each other's memory, and sizes are fixed, so that the host need not know. Rows are then split
            over holders so that ranks are even, in one part. One node, at most 128 ranks; not with ``chunks`` above
            1, ``dispatch="nodes"``, ``calibrate``, ``objective="paper"``, ``"gather"``, ``"replicate"`` or a policy
            that splits rows itself.
        capacity: with ``"symmetric"``, a rank's room for rows, as a multiple of the rows of its own tokens. A step
            with more is refused with an error, and nothing of it is applied. Where all ranks have equally many
            tokens, the number of ranks is always enough. Memory and compute of rows grow with it.
        rematerialize: drop replicas after a layer's forward and gather them again in its backward: less memory, half
            as much more traffic of experts and their gradients. The planner counts it.
        prefetch_bytes: most bytes of parameters, and of gradients, that travel during compute; None for twice the
            largest of a layer. 0 hides nothing.
        compare_every: training forwards after which ranks compare the parameters that each has whole, also after the
            first, 10 and 50, and at ``hecate.save``; 0 for never. Ranks that have come apart raise an error.
        expert_group: ranks of a group. Experts, and rows with ``dense="shard"``, are sharded in each group, and their
            gradients are averaged over groups as well, so that rows of tokens stay in a group: for many nodes. It
            must divide the number of ranks. None: all ranks are one group, or those along the second dimension of the
            mesh. ``"auto"``: as many as can be of at most 64 ranks, whole nodes or parts of one, and no more than
            there are experts.
        balance_loss: whose tokens a load-balancing loss is of. ``"own"``: each rank's, as with DDP. ``"global"``:
            those of all ranks, so that experts need not be balanced in each small batch. If the first forward for
            training has no such loss, it is refused; a loss of each sequence stays so.
        topology: which ranks share a node; by default what torchrun started on one machine (LOCAL_WORLD_SIZE).
        rates: speed of the machine, for predictions; by default measured in ``hecate.compile``, which takes a
            fraction of a second, and on CPUs in several nodes in the first steps. Give it to get the same placements
            in every run.
        dump: folder for the graphs, what each pass changed in them, and a page; ``HECATE_DUMP`` sets it too.
        dump_ranks: which ranks dump. ``"first"``: rank 0, for all ranks rewrite alike. ``"all"``, to compare them;
            ``HECATE_DUMP_RANKS=all`` sets it too.
        mixed_precision: a ``torch.distributed.fsdp.MixedPrecisionPolicy``. ``reduce_dtype`` is for the gradients
            of parameters outside the experts, which without it are averaged in ``param_dtype``, and without both in
            float32 at least; an expert's gradient is a sum that its owner computes.
        wire_dtype: ``torch.bfloat16`` or ``torch.float16`` to send rows, and gradients of parameters outside the
            experts, in that dtype; compute stays in their own. Half the bytes, and no longer the same numbers.
        experts: patterns (``fnmatch``, as in ``named_modules()``) of modules that hold expert parameters,
            where the finder has to be told. They alone decide, and each must match one.
        attention: a :class:`hecate.S2Attention` makes attention sparse, which changes what the model computes.
            With it a model may have no experts at all.
    """

    dense: Dense = "replicate"
    broadcast_buffers: bool = True
    backend: Backend = "inductor"
    piecewise: bool = False
    disable_passes: Sequence[str] = ()
    policy: PolicyName | Policy = "hecate"
    objective: Objective = "time"
    replicas: Replicas = "auto"
    replica_memory: float = 0.25
    window: int = 5
    reshard_every: int = 50
    calibrate: bool = False
    chunks: Chunks = "auto"
    dispatch: RowDispatch = "auto"
    transport: RowTransport = "collectives"
    capacity: float = 2.0
    rematerialize: bool = False
    prefetch_bytes: int | None = None
    compare_every: int = 200
    expert_group: ExpertGroup | None = None
    balance_loss: BalanceLoss = "own"
    topology: Topology | None = None
    rates: Rates | None = None
    dump: str | os.PathLike[str] | None = None
    dump_ranks: DumpRanks = "first"
    mixed_precision: Any = None
    wire_dtype: torch.dtype | None = None
    experts: Sequence[str] | None = None
    attention: S2Attention | None = None

    def __post_init__(self) -> None:
        choices = {
            "dense": Dense,
            "backend": Backend,
            "policy": PolicyName,
            "objective": Objective,
            "dispatch": RowDispatch,
            "dump_ranks": DumpRanks,
            "transport": RowTransport,
            "balance_loss": BalanceLoss,
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in get_args(allowed) and not (name == "policy" and isinstance(value, Policy)):
                raise ValueError(f"hecate.Config: {name}={value!r}, expected one of {get_args(allowed)}")
        beside = {
            'dense="shard"': self.dense == "shard",
            "experts": self.experts is not None,
            'balance_loss="global"': self.balance_loss == "global",
        }
        if self.policy == "replicate" and any(beside.values()):
            other = next(option for option, given in beside.items() if given)
            raise ValueError(
                f'hecate.Config: policy="replicate" keeps the whole model on every rank; leave {other} out'
            )
        if hasattr(self.policy, "own"):
            raise TypeError(f"hecate.Config: {type(self.policy).__name__}.own is now called choose_owners; rename it")
        least_of = {
            "replicas": 0,
            "window": 1,
            "reshard_every": 0,
            "chunks": 1,
            "prefetch_bytes": 0,
            "compare_every": 0,
            "expert_group": 1,
        }
        for name, least in least_of.items():
            value = getattr(self, name)
            if value in ("auto", None) and (name, value) in _WITHOUT_NUMBER:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                otherwise = ' or "auto"' if (name, "auto") in _WITHOUT_NUMBER else ""
                raise ValueError(
                    f"hecate.Config: {name}={value!r}, expected a whole number of at least {least}{otherwise}"
                )
        memory = self.replica_memory
        if not isinstance(memory, (int, float)) or isinstance(memory, bool) or not 0 <= memory < math.inf:
            raise ValueError(
                f"hecate.Config: replica_memory={memory!r}, expected a number of at least 0. With 0.25 replicas "
                "take a quarter of what a rank's own experts take with their gradients and moments"
            )
        capacity = self.capacity
        if not isinstance(capacity, (int, float)) or isinstance(capacity, bool) or not 1 <= capacity < math.inf:
            raise ValueError(
                f"hecate.Config: capacity={capacity!r}, expected a number of at least 1: for how many times its own "
                "rows a rank has room"
            )
        self._check_transport()
        if self.wire_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(
                f"hecate.Config: wire_dtype={self.wire_dtype!r}, expected torch.bfloat16, torch.float16 or None"
            )
        if self.piecewise is True and self.backend != "inductor":
            raise ValueError('hecate.Config: piecewise=True is a way of backend="inductor"; leave it out')
        for name in ("broadcast_buffers", "piecewise", "calibrate", "rematerialize"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"hecate.Config: {name}={getattr(self, name)!r}, expected True or False")
        for name, kind in (("topology", Topology), ("rates", Rates), ("attention", S2Attention)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(
                    f"hecate.Config: {name} is a {type(value).__name__}, expected a hecate.{kind.__name__}"
                )
        for name in ("disable_passes", "experts"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise TypeError(f"hecate.Config: {name}={value!r} is a string, expected a tuple: ({value!r},)")
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        if self.attention is not None and "shard_context" in self.disable_passes:
            raise ValueError(
                "hecate.Config: disable_passes names 'shard_context', which is what attention=S2Attention(...) asks "
                "for. Leave attention out for full attention, or disable 'skip_blocks' to look for a fault"
            )
        fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
        if self.mixed_precision is not None and not all(hasattr(self.mixed_precision, f) for f in fields):
            raise TypeError(
                f"hecate.Config: mixed_precision is a {type(self.mixed_precision).__name__}, expected a "
                "torch.distributed.fsdp.MixedPrecisionPolicy"
            )

    def _check_transport(self) -> None:
        """Refuse options with which the symmetric transport does not work."""
        if self.transport != "symmetric":
            return
        policy = self.policy
        known = isinstance(policy, Hecate) and policy.objective == "time"
        problem = ""
        if self.chunks not in ("auto", 1):
            problem = f"chunks={self.chunks}: rows travel in one part"
        elif self.dispatch == "nodes":
            problem = 'dispatch="nodes": all ranks are on one node'
        elif policy in ("gather", "replicate"):
            problem = f"policy={policy!r}: no rows travel"
        elif self.calibrate or (isinstance(policy, Policy) and policy.calibrates):
            problem = "a policy that calibrates: the host does not know the rows of the step that runs"
        elif (policy == "hecate" and self.objective == "paper") or (
            isinstance(policy, Policy) and type(policy).assign is not (Hecate.assign if known else Policy.assign)
        ):
            problem = "a policy that splits rows over holders itself: that is done on the device, evenly"
        if problem:
            raise ValueError(f'hecate.Config: transport="symmetric" does not go with {problem}')

    @property
    def room_percent(self) -> int:
        """A rank's room for rows, in percent of its own rows; 0 for any number."""
        return round(100 * self.capacity) if self.transport == "symmetric" else 0

    def make_policy(self) -> Policy:
        """Make the policy object of one model."""
        if isinstance(self.policy, Policy):
            return self.policy
        match self.policy:
            case "hecate":
                return Hecate(
                    objective=self.objective,
                    replicas=self.replicas,
                    window=self.window,
                    reshard_every=self.reshard_every,
                    calibrates=self.calibrate,
                    replica_memory=self.replica_memory,
                )
            case "static" | "gather" | "replicate":
                return Static()
