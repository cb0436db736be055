"""What programs do in groups of ranks besides: accumulation, norms, reports, adapters, the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hecate
from hecate.compiled_model import compiled_model_of
from hecate.reports.run_data import load_run
from hecate.runtime.placement.topology import Topology
from hecate.simulator.workloads import load_trace
from tests.hecate_compile.groups.models import EXACT, built
from tests.hecate_compile.integrations.test_peft import adapted
from tests.hecate_compile.integrations.test_trainer import difference, logs_of, trainer_of
from tests.hecate_compile.test_mixed_precision import mixed_precision
from tests.hecate_compile.wrap.test_own_parameters import leave_out
from tests.support.models import batch, build
from tests.support.parity import (
    clear_gradients,
    compare,
    compiled_on_free_links,
    run_step,
    state_error,
    step_and_compare,
)
from tests.support.ranks import message_of, run_ranks

pytestmark = pytest.mark.distributed

_HERE = "tests.hecate_compile.groups.test_programs"


def accumulated() -> dict[str, float]:
    """Two micro-batches, of which the first is not averaged; dense parameters whole and sharded, experts in lists.

    A loop leaves experts without rows out, which are others in each group.
    """
    errors = {}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("qwen3_moe", {"replicas": 2}),
        ("qwen3_moe", {"replicas": 2, "dense": "shard"}),
        ("list", {"replicas": 2}),
        ("choosy", {"policy": "gather"}),
        ("choosy", {"policy": "static", "expert_group": 1}),
    ]
    for family, options in kinds:
        reference, model = built(family, layers=1), built(family, layers=1)
        compiled_on_free_links(model, **({"expert_group": 2} | options))
        for turn in range(2):
            clear_gradients(model, reference)
            # So few tokens that groups leave different experts out.
            few = {"rows": 4, "length": 2} if family == "choosy" else {}
            with model.no_sync():
                first = run_step(model, batch(2 * turn, **few))
            run_step(model, batch(2 * turn + 1, **few))
            for step in (2 * turn, 2 * turn + 1):
                ids = batch(step, **few)
                loss = reference(input_ids=ids, labels=ids)["loss"]
                loss.backward()
                if step % 2 == 0:
                    expected = loss.detach()
            errors[f"{family} {options} {turn}"] = compare(model, first, reference, expected).gradient
    return errors


def clipped() -> list[float]:
    """The norm before clipping, of one process and by both functions, and whether all ranks have equal bits."""
    reference, model = build("qwen3_moe"), build("qwen3_moe")
    compiled_on_free_links(model, expert_group=2, replicas=2)
    step_and_compare(model, reference, batch(0))
    expected = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = hecate.clip_grad_norm_(model, 0.1)
    told: list[Any] = [None] * 4
    dist.all_gather_object(told, [float(total), float(norm)])
    return [expected, *told[0], float(all(one == told[0] for one in told))]


def used_again() -> float:
    """A head used outside of the forward, and experts' parameters in a penalty of the loop's own."""
    reference, model = build("qwen3_moe"), build("qwen3_moe")
    compiled_on_free_links(model, expert_group=2, policy="static")
    worst = 0.0
    for step in range(2):
        clear_gradients(model, reference)
        ids, rank = batch(step), dist.get_rank()
        mine = ids.chunk(4)[rank]
        loss = model(input_ids=mine, labels=mine)["loss"]
        # The mean over ranks of what each adds for its own experts is half of them, in each of two groups.
        own = sum((2 * p**2).sum() for name, p in model.named_parameters() if "experts" in name)
        (loss + own).backward()
        expected = reference(input_ids=ids, labels=ids)["loss"]
        whole = sum((2 * p**2).sum() for name, p in reference.named_parameters() if "experts" in name)
        (expected + whole).backward()
        worst = max(worst, compare(model, loss.detach(), reference, expected.detach()).gradient)
    return worst


def generated() -> bool:
    """Texts that end at another step on each rank."""
    reference, model = build("qwen3_moe", layers=1), build("qwen3_moe", layers=1)
    compiled_on_free_links(model, expert_group=2)
    rank = dist.get_rank()
    options = dict(max_new_tokens=2 + 2 * rank, do_sample=False, pad_token_id=0)
    ours, theirs = (m.eval().generate(batch(rank)[:1, : 4 + rank], **options) for m in (model, reference))
    return torch.equal(ours, theirs)


def drifted() -> str:
    """What is said in the forward after a rank has changed an expert that its twin has, too."""
    model = build("qwen3_moe", layers=1)
    compiled_on_free_links(model, expert_group=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_step(model, batch(0))
    optimizer.step()
    if dist.get_rank() == 3:
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if "experts" in name).add_(1)
    return message_of(lambda: run_step(model, batch(1)))


def told(folder: Path) -> dict[str, Any]:
    """Counts of all ranks in stats and in a trace, and the loads of all groups in a monitor's files."""
    model = build("qwen3_moe")
    compiled_on_free_links(model, expert_group=2, replicas=2)
    with hecate.record(model, folder / "trace.npz"), hecate.monitor(model, folder / "run") as monitor:
        for step in range(3):
            run_step(model, batch(step))
            monitor.log(loss=step)
    stats = hecate.stats(model)
    rows = batch(0).numel() * 2
    return {
        "ranks": [len(layer.rows) for layer in stats.layers],
        "rows": [[sum(layer.rows), sum(layer.expert_rows), rows] for layer in stats.layers],
        "replicas": [layer.replicas for layer in stats.layers],
    }


def given_a_mesh() -> dict[str, Any]:
    """Meshes of two dimensions, of one, and wrong ones."""
    reference = build("qwen3_moe", layers=1)
    model = hecate.compile(
        build("qwen3_moe", layers=1),
        hecate.Config(backend="aot_eager"),
        mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "expert")),
    )
    found: dict[str, Any] = {"error": step_and_compare(model, reference, batch(0)).gradient}
    found["captured"] = message_of(lambda: hecate.capture(model, lambda ids: model(ids).logits.sum(), batch(0)))
    mesh = compiled_model_of(model, "test").mesh
    found["mine"] = [list(mesh.ranks), list(mesh.twins.numbers or ())]
    one_row = hecate.compile(
        build("qwen3_moe", layers=1), hecate.Config(backend="aot_eager"), mesh=init_device_mesh("cpu", (1, 4))
    )
    found["one row"] = compiled_model_of(one_row, "test").mesh.groups
    between = hecate.compile(
        build("qwen3_moe", layers=1),
        hecate.Config(backend="aot_eager"),
        mesh=DeviceMesh("cpu", [[0, 2], [1, 3]]),
    )
    found["between"] = step_and_compare(between, reference, batch(0)).gradient
    found["rows"] = sum(hecate.stats(between).layers[0].expert_rows)
    wrong = (
        ({"expert_group": 3}, None),
        ({"expert_group": 4}, init_device_mesh("cpu", (2, 2))),
        ({}, init_device_mesh("cpu", (2, 2, 1))),
        ({}, DeviceMesh("cpu", [[0, 1], [3, 2]])),
        ({"expert_group": 2, "topology": Topology((0, 0, 0, 1))}, None),
        ({"expert_group": 2, "transport": "symmetric"}, None),
    )
    found["refused"] = [
        message_of(
            lambda options=options, mesh=mesh: hecate.compile(
                build("qwen3_moe", layers=1), hecate.Config(**options), mesh=mesh
            )
        )
        for options, mesh in wrong
    ]
    auto = hecate.compile(build("qwen3_moe", layers=1), hecate.Config(backend="aot_eager", expert_group="auto"))
    found["auto"] = compiled_model_of(auto, "test").mesh.groups
    return found


def with_adapters() -> dict[str, float]:
    """LoRA on attention and on fused experts, and of experts in a list; three steps with momentum."""
    found = {}
    for kind in ("qwen3_moe", "list"):
        model, reference = adapted(kind), adapted(kind)
        compiled_on_free_links(model, expert_group=2, replicas=2)
        both = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1, 0.9) for m in (model, reference)]
        for step in range(3):
            run_step(model, batch(step))
            reference(input_ids=batch(step), labels=batch(step))["loss"].backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        found[kind] = state_error(model.state_dict(), reference.state_dict())
    return found


def with_a_trainer(folder: str) -> dict[str, Any]:
    """Transformers' Trainer, against DDP: what it logs, and weights."""
    plain = trainer_of(build("qwen3_moe", layers=1), f"{folder}/plain")
    plain.train()
    plain.evaluate()
    model = build("qwen3_moe", layers=1)
    compiled_on_free_links(model, expert_group=2, dense="shard", replicas=2)
    trainer = trainer_of(model, f"{folder}/groups")
    trainer.train()
    trainer.evaluate()
    return {
        "logs": [logs_of(trainer), logs_of(plain)],
        "weights": difference(model.state_dict(), plain.model.state_dict()),
    }


def programs(folder: str) -> dict[str, Any]:
    return {
        "accumulated": accumulated(),
        "clipped": clipped(),
        "used again": used_again(),
        "generated": generated(),
        "drifted": drifted(),
        "told": told(Path(folder)),
        "mesh": given_a_mesh(),
        "adapters": with_adapters(),
        "mixed precision": mixed_precision(expert_group=2),
        "trainer": with_a_trainer(folder),
        "left out": leave_out(f"{folder}/left out", expert_group=2),
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("groups")
    return run_ranks(f"{_HERE}:programs", 4, timeout=600, folder=str(folder)), folder


def test_accumulated_gradients_of_shards_are_averaged_over_groups(ran: Any) -> None:
    assert max(ran[0][0]["accumulated"].values()) < EXACT, ran[0][0]["accumulated"]


def test_the_norm_is_that_of_one_process_on_all_ranks(ran: Any) -> None:
    expected, total, norm, alike = ran[0][0]["clipped"]
    assert total == norm == pytest.approx(expected, rel=1e-5) and alike


def test_gradients_of_shards_from_outside_of_the_forward_are_averaged_over_groups(ran: Any) -> None:
    assert ran[0][0]["used again"] < EXACT


def test_shards_that_have_drifted_are_told_on_all_ranks(ran: Any) -> None:
    said = [one["drifted"] for one in ran[0]]
    assert all(text.startswith("DisagreementError: hecate: after 1 training forwards") for text in said), said
    for rank in (1, 3):
        assert "mlp.experts" in said[rank] and "of rank 3 is off rank 1's" in said[rank]
    for rank in (0, 2):
        assert "their errors name them" in said[rank]


def test_texts_may_end_at_other_steps_in_each_group(ran: Any) -> None:
    assert all(one["generated"] for one in ran[0])


def test_reports_know_the_ranks_of_all_groups(ran: Any) -> None:
    found, folder = ran[0][0]["told"], ran[1]
    assert found["ranks"] == [4, 4]
    assert all(computed == routed == rows for computed, routed, rows in found["rows"])
    trace = np.load(folder / "trace.npz")
    assert trace["counts"].shape[:3] == (3, 2, 4) and (trace["counts"].sum((2, 3)) == found["rows"][0][2]).all()
    with pytest.raises(ValueError, match="2 groups of ranks"):
        load_trace(folder / "trace.npz")
    run = load_run(folder / "run")
    assert run.head.groups == 2 and run.load.sum(2).tolist() == [[found["rows"][0][2]] * 2] * 3
    assert (run.owner_rows.sum(2) == run.rows.sum(2)).all() and run.owner_rows.shape[2] == 4
    assert run.replicas[-1].tolist() == found["replicas"]


def test_experts_in_a_list_that_no_group_has_called_have_no_gradient(ran: Any) -> None:
    for found in (rank["left out"] for rank in ran[0]):
        for kind in found.values():
            assert kind["same"] and max(kind["off"]) < 1e-5, found


def test_adapters_train_in_groups(ran: Any) -> None:
    assert max(ran[0][0]["adapters"].values()) < EXACT


def test_mixed_precision_in_groups(ran: Any) -> None:
    for errors in ran[0][0]["mixed precision"].values():
        assert errors["loss"] < 2**-7 and errors["gradient"] < 5e-2, errors["worst"]


def test_the_trainer_logs_what_it_logs_with_data_parallel(ran: Any) -> None:
    found = ran[0][0]["trainer"]
    ours, theirs = found["logs"]
    for name in theirs:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
    assert found["weights"] < 1e-4


def test_a_mesh_of_two_dimensions_makes_groups_of_its_rows(ran: Any) -> None:
    found = [one["mesh"] for one in ran[0]]
    assert found[0]["error"] < EXACT
    assert [one["mine"] for one in found] == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]
    assert "ranks are in several groups" in found[0]["captured"]
    assert found[0]["one row"] == found[0]["auto"] == 1
    # Groups need not be of neighbours.
    assert found[0]["between"] < EXACT and found[0]["rows"] == 2 * batch(0).numel()
    uneven, other, many, descending, nodes, symmetric = found[0]["refused"]
    assert "the numbers of the mesh's ranks do not ascend" in descending
    assert "expert_group=3) does not divide the 4 ranks" in uneven
    assert "does not fit the mesh, whose second dimension has 2 ranks" in other
    assert "expected one, or two" in many
    assert 'transport="symmetric" needs all ranks in one group' in symmetric
    assert nodes.startswith("DisagreementError") and "groups must lie in nodes alike" in nodes
