"""Placements and owners that change while a model trains: the numbers, the graph and the collectives stay right."""

from __future__ import annotations

import copy
import hashlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.runtime.comm import collectives
from hecate.runtime.comm.world import World
from hecate.runtime.placement.hecate_policy import Hecate
from hecate.runtime.placement.placement import Placement
from hecate.runtime.placement.planner import Rates
from hecate.runtime.placement.policy import LayerView
from hecate.runtime.placement.topology import Topology
from hecate.wrap.shard import shard_of
from tests.support.adversaries import Anything, Moving
from tests.support.extent import ALL
from tests.support.fake_cuda import Cuda
from tests.support.models import batch, build
from tests.support.parity import compiled_on_free_links, rank_and_size, run_step, step_and_compare
from tests.support.ranks import run_ranks


def _moves(model: torch.nn.Module) -> list[int]:

    return compiled_model_of(model, "test").owner_mover.moves


def thirty_steps(
    nodes: list[int] | None, calibrates: bool, family: str = "gpt_oss", layers: int = 2, **options: Any
) -> dict[str, Any]:
    """AdamW, placements that change in every step, owners that change twice; one process starts each step from the
    same weights, so every step is compared by itself."""
    policy = Anything(reshard_every=10, calibrates=calibrates)
    topology = Topology(tuple(nodes)) if nodes else None
    chunks = 2 if calibrates else 1
    reference, model = (build(family, layers=layers) for _ in range(2))
    compiled_on_free_links(model, policy=policy, topology=topology, chunks=chunks, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    worst, replicas, owned = 0.0, set(), set()
    first = ("0.mlp.experts.down_proj", "0.w_out")
    for step in range(30):
        reference.load_state_dict(model.state_dict())
        difference = step_and_compare(model, reference, batch(step))
        worst = max(worst, difference.gradient, difference.loss)
        optimizer.step()
        replicas |= {layer.replicas for layer in hecate.stats(model).layers}
        owned |= {tuple(p.shape) for n, p in model.named_parameters() if n.endswith(first)}
    # A recompile would be another graph.
    (graph,) = hecate.explain(model).graphs
    return {
        "worst": worst,
        "replicas": len(replicas),
        "moves": _moves(model),
        "shapes": len(owned),
        "exchanged": sum(record.rewritten for record in graph.passes if record.name == "exchange_rows") == layers,
    }


def check_thirty_steps(results: list[Any]) -> None:
    for result in results:
        assert result["worst"] < 1e-5
        assert result["replicas"] > 3, "placements changed"
        assert len(result["moves"]) == 2 and min(result["moves"]) > 0
        assert result["exchanged"]
    assert max(result["shapes"] for result in results) > 1, "ranks owned other numbers of experts"


@pytest.mark.distributed
@pytest.mark.parametrize("calibrates", [False, True] if ALL else [True])
def test_thirty_steps_equal_one_process(calibrates: bool) -> None:
    check_thirty_steps(run_ranks(thirty_steps, 2, nodes=None, calibrates=calibrates))


@pytest.mark.skipif(not ALL, reason="four ranks of what two do above: with HECATE_TESTS=all")
@pytest.mark.distributed
def test_thirty_steps_on_two_nodes_equal_one_process() -> None:
    check_thirty_steps(run_ranks(thirty_steps, 4, nodes=[0, 0, 1, 1], calibrates=False, layers=1))


# Each has an expert parameter of its own: two layers have four of them, whose moves are agreed on together.
OPTIMIZERS: list[Any] = [
    lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=False),
    lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
]


def _train_beside(models: list[torch.nn.Module], optimizers: list[list[torch.optim.Optimizer]]) -> bool:
    """Train seven steps side by side; return whether losses are the same."""
    rank, size = rank_and_size()
    kept, same = [], True
    for step in range(7):
        mine, losses = batch(step).chunk(size)[rank], []
        for model, of_model in zip(models, optimizers, strict=True):
            loss = model(input_ids=mine, labels=mine)["loss"]
            loss.backward()
            losses.append(loss)
            for optimizer in of_model:
                optimizer.step()
                # Gradients of the step stay, as some loops have it; those of others are cleared.
                if step % 3:
                    optimizer.zero_grad()
            if not step % 3:
                model.zero_grad()
        # Losses that stay alive keep the gradient accumulators of their step alive.
        kept.append(losses)
        same &= torch.equal(*losses)
    return same


def resharding_is_invisible() -> dict[str, Any]:
    """The same training with owners that move every second step and with owners that stay; and what is saved after
    moves, loaded where experts are in their first places, and trained on."""
    policies = (Moving(reshard_every=2), "static")
    models = [compiled_on_free_links(build("qwen3_moe"), policy=policy) for policy in policies]
    optimizers = []
    for model in models:
        experts = [p for p in model.parameters() if shard_of(p)]
        dense = torch.optim.AdamW([p for p in model.parameters() if not shard_of(p)], lr=1e-2)
        optimizers.append([*(make([p]) for make, p in zip(OPTIMIZERS, experts, strict=True)), dense])
    hooked: list[int] = []
    shard = next(p for p in models[0].parameters() if shard_of(p))
    shard.register_post_accumulate_grad_hook(lambda p: hooked.append(len(p)))
    same = _train_beside(models, optimizers)
    found = {"same": same, "moves": list(_moves(models[0])), "hooked": len(hooked)}
    found["different"], found["tensors"] = _different(models, optimizers)

    def step(numbers: list[int], ids: torch.Tensor) -> None:
        for number in numbers:
            models[number].zero_grad()
            run_step(models[number], ids)
            for optimizer in optimizers[number]:
                optimizer.step()

    step([1], batch(8))
    found["apart"], _ = _different(models, optimizers)
    models[1].load_state_dict(models[0].state_dict())
    for saved, loads in zip(*optimizers, strict=True):
        loads.load_state_dict(copy.deepcopy(saved.state_dict()))
    step([0, 1], batch(9))
    found["resumed"], _ = _different(models, optimizers)
    return found


def _different(models: list[torch.nn.Module], optimizers: list[list[torch.optim.Optimizer]]) -> tuple[list[str], int]:
    """Names of what two models and their optimizers do not have in common, and how much they have."""
    one, other = (_full_state(model, of_model) for model, of_model in zip(models, optimizers, strict=True))
    different = [key for key in one if key not in other or not torch.equal(one[key], other[key])]
    return [*different, *(other.keys() - one.keys())], len(one)


def _full_state(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Every parameter and every tensor of its optimizer state, experts gathered into one."""
    full = {}
    for name, parameter in model.named_parameters():
        values = {"value": parameter.detach()}
        for optimizer in optimizers:
            values |= {k: v for k, v in optimizer.state.get(parameter, {}).items() if isinstance(v, torch.Tensor)}
        shard = shard_of(parameter)
        for key, value in values.items():
            if shard is not None and value.ndim:
                value = collectives.gather_shards(value, shard.layer.owners, shard.layer.world)
            full[f"{name} {key}"] = value
    return full


@pytest.mark.distributed
def test_resharding_is_bitwise_invisible() -> None:
    for result in run_ranks(resharding_is_invisible, 2):
        assert result["same"]
        assert result["different"] == []
        assert len(result["moves"]) == 3 and min(result["moves"]) > 0
        assert result["hooked"] == 7, "hooks on parameters survive"
        assert result["tensors"] > 50
        assert len(result["apart"]) > 50 and result["resumed"] == [], "state that is loaded finds its experts"


STEPS = 100 if ALL else 40
# Layers of the model of these steps. What lies between two of them is in the tests above.
LAYERS = 2 if ALL else 1


def many_steps() -> dict[str, Any]:
    """The default policy on a load that jumps between two experts, so that its prediction is always wrong."""
    reference, model = (build("gpt_oss", layers=LAYERS, num_experts_per_tok=1) for _ in range(2))
    compiled_on_free_links(model, window=1, reshard_every=0)
    calls = _log_collectives()
    worst, graphs = 0.0, set()
    for step in range(STEPS):
        for candidate in (model, reference):
            for name, parameter in candidate.named_parameters():
                if name.endswith("router.bias"):
                    parameter.data.zero_()
                    if step >= 20:
                        parameter.data[[1, 6][step % 2]] = 1e4
        if step % 20 < 3:
            difference = step_and_compare(model, reference, batch(step))
            worst = max(worst, difference.gradient, difference.loss)
        else:
            run_step(model, batch(step))
        graphs.add(len(hecate.explain(model).graphs))
    return {
        "worst": worst,
        "graphs": sorted(graphs),
        "calls": len(calls),
        "log": hashlib.sha256("\n".join(calls).encode()).hexdigest(),
    }


def _log_collectives() -> list[str]:
    """A line for every collective from now on: its name, dtype, and the width of its rows."""
    calls: list[str] = []

    def logged(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            calls.append(f"{name} {tensor.dtype} {list(tensor.shape[1:])}")
            return original(*args, **kwargs)

        setattr(module, name, call)

    for name in ("all_to_all_single", "all_reduce", "all_gather", "broadcast", "reduce_scatter_tensor"):
        logged(dist, name)
    logged(collectives, "exchange")
    original = collectives._all_gather
    collectives._all_gather = lambda *args, **kwargs: (calls.append("all_gather_single"), original(*args, **kwargs))[
        1
    ]
    return calls


@pytest.mark.distributed
@pytest.mark.slow
def test_steps_of_changing_placements() -> None:
    ranks = run_ranks(many_steps, 3)
    for result in ranks:
        assert result["worst"] < 1e-5
        assert result["graphs"] == [1]
        assert result["calls"] > STEPS * LAYERS * 5
    assert len({result["log"] for result in ranks}) == 1


def degenerate() -> dict[str, Any]:
    """No slots, too many of them, both objectives, after the gate. Fewer experts than ranks are in test_training."""
    # The plain model has less to trace.
    cases: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = {
        "no slots": (("plain", {"experts": 4}), {"replicas": 0}),
        "an expert per rank, and more slots than experts": (("plain", {"experts": 2}), {"replicas": 50}),
        "the paper's rule": (
            ("qwen3_moe", {}),
            {"objective": "paper", "rates": Rates(flops=1e9, rank_bytes=1e9, node_bytes=1e9, hidden_seconds=1e-4)},
        ),
        "calibrated, and a node per rank": (
            ("plain", {"experts": 4}),
            {"calibrate": True, "topology": Topology((0, 1))},
        ),
    }
    found = {}
    for name, ((family, changes), options) in cases.items():
        reference, model = (build(family, layers=1, **changes) for _ in range(2))
        compiled_on_free_links(model, **options)
        worst = max(step_and_compare(model, reference, batch(step)).gradient for step in range(3))
        found[name] = {"worst": worst, "replicas": [layer.replicas for layer in hecate.stats(model).layers]}
    return found


@pytest.mark.distributed
def test_degenerate_settings() -> None:
    for ranks in run_ranks(degenerate, 2):
        for name, result in ranks.items():
            assert result["worst"] < 1e-5, name
            if "no slots" in name or name == "the paper's rule":
                assert (max(result["replicas"]) == 0) == ("no slots" in name), name
            assert max(result["replicas"]) <= 8 * 2


def _compiled_with_jobs(model: torch.nn.Module, *, on_stream: bool, **options: Any) -> torch.nn.Module:
    """Collectives are jobs on a thread, or on a stream, which only takes notes: they run when they are launched."""

    def with_stream(world: World) -> None:
        object.__setattr__(world, "queue", Cuda().queue())

    with pytest.MonkeyPatch.context() as patch:
        if on_stream:
            patch.setattr(World, "__post_init__", with_stream)
        return compiled_on_free_links(model, **options)


class Selfish(Anything):
    """A wrong policy: it looks at its own rank from the third step on."""

    def place(self, layer: LayerView) -> Placement:
        self._calls = getattr(self, "_calls", 0) + 1
        wanted: list[set[int]] = [set() for _ in layer.owners.ranks]
        if self._calls > 5:
            wanted[3] = {rank_and_size()[0]}
        return Placement.with_replicas(layer.owners, wanted)


def disagree(on_stream: bool) -> str:
    model = _compiled_with_jobs(build("qwen3_moe"), on_stream=on_stream, policy=Selfish())
    try:
        for step in range(5):
            run_step(model, batch(step))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.distributed
@pytest.mark.parametrize("on_stream", [False, True])
def test_ranks_that_plan_differently_stop_with_the_layer_and_the_step(on_stream: bool) -> None:
    for message in run_ranks(disagree, 2, timeout=120, on_stream=on_stream):
        assert "ranks disagree on the placement of experts" in message
        assert "layer model.layers.1.mlp.experts, step 2" in message
        assert "expert 3 also on ranks [1]" in message


class Noting(Hecate):
    """Hecate, with notes of what it placed: number of the layer, holders, and whether a backward ran."""

    def place(self, layer: LayerView) -> Placement:
        placement = super().place(layer)
        notes = self.__dict__.setdefault("notes", [])
        notes.append((layer.id, placement.holders, torch._C._current_graph_task_id() != -1))
        return placement


def trained(*, on_stream: bool, checkpointed: list[int]) -> dict[str, Any]:
    """Steps, accumulation, forwards without a backward, of three layers of which some are computed again."""
    policy, model = Noting(replicas=2), build("qwen3_moe", layers=3).train()
    model.gradient_checkpointing_enable()
    for number, layer in enumerate(model.model.layers):
        layer.gradient_checkpointing = number in checkpointed
    model, losses = _compiled_with_jobs(model, on_stream=on_stream, policy=policy), []

    def forward(step: int) -> torch.Tensor:
        rank, size = rank_and_size()
        mine = batch(step).chunk(size)[rank]
        losses.append(model(input_ids=mine, labels=mine)["loss"])
        return losses[-1]

    forward(0).backward()
    first, second = forward(1), forward(2)
    second.backward()
    first.backward()
    with torch.no_grad():
        forward(3)
    forward(4)
    forward(5).backward()
    layers = compiled_model_of(model, "test").layers
    assert {layer.world.queue.on_stream for layer in layers} == {on_stream}
    numbers = [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]
    # Numbers of layers count on from model to model.
    notes = [(id - layers[0].id, holders, late) for id, holders, late in policy.__dict__["notes"]]
    return {
        "numbers": [hashlib.blake2b(n.detach().numpy().tobytes()).hexdigest() for n in numbers],
        "plans": [[str(holders) for id, holders, _ in notes if id == layer] for layer in range(3)],
        "late": [[late for id, _, late in notes if id == layer] for layer in range(3)],
    }


def train_on_thread_and_stream(checkpointed: list[int]) -> list[dict[str, Any]]:
    return [trained(on_stream=on_stream, checkpointed=checkpointed) for on_stream in (False, True)]


@pytest.mark.distributed
@pytest.mark.parametrize("checkpointed", [[], [0, 1, 2]] if ALL else [[0, 2]])
def test_plans_are_the_same_whether_jobs_run_on_a_thread_or_on_a_stream(checkpointed: list[int]) -> None:
    """Whose host is ahead in the backward plans there, but for the layer whose plan the others' exchanges compare."""
    ranks = run_ranks(train_on_thread_and_stream, 2, checkpointed=checkpointed)
    for thread, stream in ranks:
        assert thread["numbers"] == stream["numbers"]
        assert thread["plans"] == stream["plans"] == ranks[0][0]["plans"]
        assert len({holders for plans in stream["plans"] for holders in plans}) > 3, "placements changed"
        assert thread["late"] == [[False] * 7] * 3
        # What no backward plans: the first forward, one behind another, and those behind 3 and 4, which have none.
        late = [False, True, False, True, False, False, True]
        assert stream["late"] == [[False] * 7, late, late]


class Flat(torch.optim.SGD):
    """Keeps one flat vector of state per parameter, which has no line for each expert."""

    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["flat"] = torch.zeros(7)
        return out


def unmovable_state() -> dict[str, Any]:
    model = compiled_on_free_links(build("plain", layers=1, experts=4), policy=Moving(reshard_every=1))
    optimizer = Flat(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            run_step(model, batch(step))
            optimizer.step()
    return {"moves": _moves(model), "warnings": [str(w.message) for w in caught if "hecate" in str(w.message)]}


@pytest.mark.distributed
def test_state_that_cannot_move_keeps_experts_where_they_are() -> None:
    first, second = run_ranks(unmovable_state, 2)
    assert first["moves"] == second["moves"] == []
    assert second["warnings"] == []
    # Nor can it be saved, which is told after the first step.
    unsaved, message = first["warnings"]
    assert "flat" in unsaved and "hecate.save" in unsaved
    assert "Flat's 'flat'" in message and "stay with their owners" in message
