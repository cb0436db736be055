"""What was saved by any owners on any number of ranks is read by any others, bit for bit."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import hecate
from hecate.checkpoints.safety.files import record_files
from hecate.checkpoints.safety.tensor_index import INDEX, TensorReader, read_index, write_index
from hecate.checkpoints.save import Writer
from hecate.checkpoints.state_dicts import Site
from hecate.compiled_model import compiled_model_of
from hecate.runtime.comm.world import World
from hecate.runtime.ops.dense import add_dense_shard
from hecate.runtime.ops.gradients import GradientSync
from hecate.runtime.placement.owners import Owners
from hecate.wrap.expert_shards import ExpertShard, MemberShard
from hecate.wrap.shard import as_parameter
from tests.support.extent import ALL
from tests.support.layers import add_layer
from tests.support.models import build
from tests.support.ranks import run_ranks

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)


def _full(draw: random.Random, dtype: torch.dtype, experts: int) -> dict[str, torch.Tensor]:
    """What the model has, whole: fused experts, their biases, experts in a list, dense rows, a tensor for all."""
    generator = torch.Generator().manual_seed(draw.randrange(2**30))

    def bits(*shape: int) -> torch.Tensor:
        # Every pattern of bits, NaNs and infinities included.
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        return raw.view(dtype).squeeze(-1)

    return {
        "experts.up": bits(experts, 3, 2),
        "experts.bias": bits(experts, 2),
        "rows": bits(draw.randint(1, 9), 2),
        "norm": bits(4),
        **{f"list.{e}.weight": bits(2, 3) for e in range(experts)},
    }


def _as_rank(
    full: dict[str, torch.Tensor], owners: Owners, rank: int, *, empty: bool
) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The state dict of one rank, and what must live as long as it."""
    world = World(rank=rank, size=owners.world_size, group=None, device=torch.device("cpu"))
    layer = add_layer(name="experts", owners=owners, world=world)
    members = [name for name in full if name.startswith("list.")]
    dense = add_dense_shard("rows", full["rows"].shape, GradientSync(world, dtype=None, in_graph=True))
    shards: list[Any] = [
        ExpertShard("experts.up", layer, full["experts.up"].shape),
        ExpertShard("experts.bias", layer, full["experts.bias"].shape),
        *(MemberShard(name, layer, full[name].shape, expert=expert) for expert, name in enumerate(members)),
        dense,
    ]
    state, alive = {}, [layer, dense]
    for shard in shards:
        part = shard.slice(full[shard.name])
        if empty:
            part = torch.zeros_like(part)
        parameter = as_parameter(part, shard, requires_grad=False)
        alive.append(parameter)
        state[shard.name] = Site(shard.name, parameter).split(parameter)
    norm = nn.Parameter(torch.zeros_like(full["norm"]) if empty else full["norm"].clone(), requires_grad=False)
    state["norm"] = Site("norm", norm).split(norm)
    return state, alive


def _save(folder: Path, states: list[dict[str, torch.Tensor]]) -> None:
    """What ``torch.distributed.checkpoint.save`` does on as many ranks, one after the other."""
    planners = [DefaultSavePlanner() for _ in states]
    writers: list[Any] = [Writer(folder, sync_files=False) for _ in states]
    plans = []
    for rank, (planner, writer, state) in enumerate(zip(planners, writers, states, strict=True)):
        planner.set_up_planner({"model": state}, None, rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for planner, writer, plan in zip(planners, writers, plans, strict=True)
    ]
    metadata.storage_meta = None
    writers[0].storage_meta = lambda: None
    writers[0].finish(metadata, results)
    write_index(metadata, folder / INDEX)


def _load(folder: Path, states: list[dict[str, torch.Tensor]]) -> None:
    metadata = read_index(folder, record_files(folder, [path.name for path in folder.iterdir()]), format=2)
    for state in states:
        reader, planner = TensorReader(folder, metadata), DefaultLoadPlanner()
        planner.set_up_planner({"model": state}, metadata, False)
        reader.set_up_storage_reader(metadata, False)
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_any_owners_to_any_owners() -> None:
    wrong = []
    for case in range(500 if ALL else 60):
        draw = random.Random(case)
        experts, dtype = draw.randint(1, 9), draw.choice(_DTYPES)
        full = _full(draw, dtype, experts)
        with tempfile.TemporaryDirectory() as path:
            alive: list[Any] = []
            for empty in (False, True):
                size = draw.randint(1, 6)
                owners = Owners(tuple(draw.randrange(size) for _ in range(experts)), size)
                ranks = [_as_rank(full, owners, rank, empty=empty) for rank in range(size)]
                alive.append(ranks)
                (_load if empty else _save)(Path(path), [state for state, _ in ranks])
            for rank, (state, _) in enumerate(ranks):
                expected, kept = _as_rank(full, owners, rank, empty=False)
                wrong += [
                    (case, rank, name)
                    for name in expected
                    if _bits(_part(state[name])) != _bits(_part(expected[name]))
                ]
                alive.append(kept)
    assert not wrong


def _part(tensor: torch.Tensor) -> torch.Tensor:
    plain: Any = torch.Tensor
    return cast(torch.Tensor, tensor.as_subclass(plain))


def test_a_missing_or_doubled_expert_is_noticed(tmp_path: Path) -> None:
    """DCP alone saves and loads without a word when a single process misses experts."""
    draw = random.Random(0)
    full = _full(draw, torch.float32, 4)
    state, _alive = _as_rank(full, Owners((0, 0, 0, 1), 2), 0, empty=False)
    _save(tmp_path, [state])
    with pytest.raises(ValueError, match=r"experts.up has 18 of 24 elements"):
        _load(tmp_path, [state])


# --- through processes ---


def pass_on(folder: str, step: int) -> dict[str, Any]:
    """Load what the ranks before saved, if any; compare; give experts to others; save."""
    dense: Any = ("replicate", "shard")[step % 2]
    model = hecate.compile(build("plain", seed=step), hecate.Config(backend="aot_eager", dense=dense))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrong = 0
    if step:
        assert hecate.load(folder, model, optimizer).step == step - 1
        wrong = _wrong(model, optimizer)
    else:
        model.load_state_dict({n: _expected(n, v.shape, "") for n, v in build("plain").state_dict().items()})
        state = hecate.get_optimizer_state_dict(model, optimizer)
        for mine, expected in _moments(state):
            mine.copy_(expected)
        hecate.set_optimizer_state_dict(model, optimizer, state)
    compiled = compiled_model_of(model, "test")
    draw = random.Random(step)
    for layer in compiled.layers:
        owners = Owners(tuple(draw.randrange(compiled.world.size) for _ in range(8)), compiled.world.size)
        compiled.owner_mover.move([(layer, owners)])
    hecate.save(folder, model, optimizer, step=step, keep=1)
    return {"wrong": wrong, "ranks": compiled.world.size}


def _expected(name: str, shape: torch.Size, key: str) -> torch.Tensor:
    # The head is tied.
    draw = random.Random(f"{name.replace('head', 'embedding')} {key}")
    return torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(2**30)))


def _moments(state: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What this rank has of the optimizer's state, and what it must be."""
    for name, tensors in state["state"].items():
        for key, tensor in tensors.items():
            if key == "step":
                yield tensor, torch.full_like(tensor, 7)
                continue
            full, part = _expected(name, tensor.size(), key), _part(tensor)
            pieces = getattr(tensor, "pieces", None)
            if pieces is None:
                yield part, full
            for p in pieces or ():
                yield part[p.start : p.start + p.rows], full[p.offset : p.offset + p.rows]


def _wrong(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Tensors of this rank with a bit that is not as it was first saved."""
    pairs = [(value, _expected(name, value.shape, "")) for name, value in model.state_dict().items()]
    pairs += _moments(hecate.get_optimizer_state_dict(model, optimizer))
    return sum(not torch.equal(mine, expected) for mine, expected in pairs)


@pytest.mark.distributed
def test_through_processes(tmp_path: Path) -> None:
    """2, 3, 1, 4 ranks and so on; and a plain process at the end."""
    sizes = (2, 3, 1, 4, 2, 1, 3, 4, 1, 2, 3) if ALL else (2, 3, 1, 4)
    for step, size in enumerate(sizes):
        for found in run_ranks(pass_on, size, folder=str(tmp_path), step=step):
            assert found == {"wrong": 0, "ranks": size}
    model = build("plain")
    optimizer = torch.optim.AdamW(model.parameters())
    assert hecate.load(tmp_path, model, optimizer).step == len(sizes) - 1
    assert _wrong(model, optimizer) == 0
