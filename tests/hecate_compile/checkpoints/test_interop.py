"""What Hecate saves is read by torch's own functions, FSDP2 included, and the reverse; and ranks fail together."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hecate
from hecate.checkpoints import save as saving
from tests.hecate_compile.wrap.test_stack_experts import small
from tests.support.parity import rank_and_size, state_error
from tests.support.ranks import message_of, run_ranks


def _compiled(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = hecate.compile(small(seed=seed, layers=1), hecate.Config(backend="aot_eager", dense="shard"))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))


def _fully_sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    model = small(seed=seed, layers=1)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything as torch's own functions gather it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    out = dict(weights)
    for name, values in state["state"].items():
        out |= {f"{name} {key}": value for key, value in values.items()}
    return out


def exchange(folder: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as torch_functions

    found: dict[str, Any] = {}
    model, optimizer = _compiled(0)
    rank, _ = rank_and_size()
    _stepped(model, optimizer)
    expected = _whole_of_ours(model, optimizer)

    def ours(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {
            "model": hecate.get_model_state_dict(model),
            "optimizer": hecate.get_optimizer_state_dict(model, optimizer),
        }

    # Hecate's tensors through torch's save, also in the background; FSDP2 reads them.
    dcp.save(ours(model, optimizer), checkpoint_id=f"{folder}/ours")
    group = dist.new_group(backend="gloo")
    dcp.async_save(ours(model, optimizer), checkpoint_id=f"{folder}/background", process_group=group).result()
    for name in ("ours", "background"):
        other, second = _fully_sharded(1)
        weights, state = torch_functions.get_state_dict(other, second)
        both = {"model": weights, "optimizer": state}
        dcp.load(both, checkpoint_id=f"{folder}/{name}")
        torch_functions.set_state_dict(
            other, second, model_state_dict=both["model"], optim_state_dict=both["optimizer"]
        )
        found[f"fsdp reads {name}"] = _difference(_whole(other, second), expected)
        found[f"rate of {name}"] = second.param_groups[0]["lr"]

    # FSDP2's through torch's save; Hecate reads them, in place.
    _stepped(other, second)
    weights, state = torch_functions.get_state_dict(other, second)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/theirs")
    again, third = _compiled(2)
    into = ours(again, third)
    dcp.load(into, checkpoint_id=f"{folder}/theirs")
    hecate.set_optimizer_state_dict(again, third, into["optimizer"])
    found["hecate reads fsdp"] = _difference(_whole_of_ours(again, third), _whole(other, second))

    # hecate.save, read by FSDP2 through hecate.load.
    hecate.save(f"{folder}/saved", model, optimizer, step=1, extra={"rank": rank})
    sharded, fourth = _fully_sharded(3)
    loaded = hecate.load(f"{folder}/saved", sharded, fourth)
    found["load into fsdp"] = _difference(_whole(sharded, fourth), expected)
    found["extra"] = [loaded.extra, list(loaded.extras)]
    found |= _failures(folder, model, optimizer, rank)
    return found


def _failures(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Any]:
    """One rank cannot write; one has another model; one has things in ``extra`` that are not plain."""
    write, check = saving.write_plain, saving._check_shared

    def full(value: Any, path: Path) -> None:
        if rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(value, path)

    def save(where: str = "saved") -> str:
        return message_of(lambda: hecate.save(f"{folder}/{where}", model, optimizer, step=2))

    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_plain", full)
        found["no space"] = save()
        background = hecate.async_save(f"{folder}/saved", model, optimizer, step=2)
        found["in background"] = message_of(lambda: background.result(60))
        found["later"] = save()
    found["another"] = save("saved" if rank == 0 else "elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "_check_shared", lambda draft: check(draft if rank == 0 else Path("/on/another/node")))
        found["not shared"] = save()
    other = small(seed=0, layers=1 if rank == 0 else 2)
    found["mismatch"] = message_of(lambda: hecate.load(f"{folder}/saved", other))
    found["folders"] = sorted(p.name for p in Path(folder, "saved").iterdir())
    return found


def _whole_of_ours(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The plain model's names."""
    from hecate.wrap.shard import shard_of

    out, wholes, parts = dict(model.state_dict()), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    state = hecate.get_optimizer_state_dict(model, optimizer)["state"]
    for name, tensors in sorted(state.items()):
        for key, value in tensors.items():
            total = torch.zeros(value.size())
            part = value.as_subclass(torch.Tensor)
            pieces = getattr(value, "pieces", None)
            if pieces is None:
                wholes[f"{name} {key}"] = part
                continue
            for piece in pieces:
                total[piece.offset : piece.offset + piece.rows] = part[piece.start : piece.start + piece.rows]
            parts[f"{name} {key}"] = total
    assert shard_of(next(model.parameters())) is not None
    # Of an expert in a list its owner alone has anything.
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (wholes, parts))
    for theirs, some in everybody:
        out |= theirs
        for name, part in some.items():
            out[name] = out[name] + part if name in out else part
    return out


def _difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    return state_error(ours, theirs)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(exchange, 2, folder=str(tmp_path_factory.mktemp("interop")))


@pytest.fixture(params=[0, 1])
def found(request: pytest.FixtureRequest, results: list[dict[str, Any]]) -> dict[str, Any]:
    return results[request.param]


pytestmark = pytest.mark.distributed


def test_fsdp_reads_ours_and_we_read_theirs(found: dict[str, Any]) -> None:
    for name in ("fsdp reads ours", "fsdp reads background", "hecate reads fsdp", "load into fsdp"):
        assert found[name] == 0, name
    assert found["rate of ours"] == found["rate of background"] == 0.1


def test_extra_is_of_each_rank(found: dict[str, Any]) -> None:
    own, all_of_them = found["extra"]
    assert all_of_them == [{"rank": 0}, {"rank": 1}] and own in all_of_them


def test_all_ranks_hear_of_the_one_that_failed(found: dict[str, Any]) -> None:
    for name in ("no space", "in background", "later"):
        assert found[name].startswith("CheckpointError: hecate") and "rank 1" in found[name], name
        assert "No space left" in found[name]
    assert "directory" in found["another"] and "elsewhere on rank 1" in found["another"]
    assert "rank 1" in found["not shared"] and "all ranks must share it" in found["not shared"]
    assert found["mismatch"].startswith("MismatchError") and "blocks.1" in found["mismatch"]
    assert found["folders"] == [".lock", ".owner", "step-00000001"], "nothing half is left"
