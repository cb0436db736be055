"""Folders that transformers reads and writes: out of shards, and into them, bit for bit."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

import hecate
from hecate.checkpoints.hub import export as exporting
from hecate.checkpoints.hub.layouts import PlainLayout
from hecate.checkpoints.hub.read_plan import SafeFiles
from hecate.compiled_model import compiled_model_of
from hecate.runtime.placement.owners import Owners
from tests.hecate_compile.checkpoints.model_kinds import KINDS, State, is_pretrained, model_of, on_meta, same
from tests.support.adversaries import Moving
from tests.support.models import batch, build
from tests.support.ranks import message_of, run_ranks

_LIMIT = 10_000
pytestmark = pytest.mark.distributed


def read(folder: Path) -> State:
    """All tensors in the files of a folder."""
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


class Alive:
    """Counts the bytes of tensors that a function returned and that are still there.

    Attributes:
        most: at any time.
        total: of all.
    """

    def __init__(self) -> None:
        self.now = self.most = self.total = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            tensor = function(*args, **kwargs)
            if tensor is not None:
                self.now += tensor.nbytes
                self.total += tensor.nbytes
                self.most = max(self.most, self.now)
                weakref.finalize(tensor, self._gone, tensor.nbytes)
            return tensor

        return counted

    def _gone(self, size: int) -> None:
        self.now -= size


# --- on two ranks ---


def load_and_export(folder: str) -> dict[str, Any]:
    """On one rank: each kind is loaded into shards, and written again."""
    found: dict[str, Any] = {}
    for number, kind in enumerate(KINDS):
        place = Path(folder, kind)
        loaded, sent = Alive(), Alive()
        model = on_meta(kind) if is_pretrained(kind) else model_of(kind, seed=1)
        dense: Any = "shard" if number % 2 else "replicate"
        hecate.compile(model, hecate.Config(backend="aot_eager", dense=dense))
        move_experts(model, number)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SafeFiles, "read", loaded.around(SafeFiles.read))
            left = hecate.load_pretrained(model, place / "saved")
        mine = [t.nbytes for t in (*model.parameters(), *model.buffers())]
        expected = model_of(kind).state_dict()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exporting, "_to_first", sent.around(exporting._to_first))
            kept = keep_count(patch)
            hecate.export(model, place / "exported", max_shard_size=_LIMIT)
        hecate.export(model, place / "whole")
        found[kind] = {
            "same": same(model.state_dict(), expected),
            "left": list(left),
            "loaded": vars(loaded),
            "sent": vars(sent),
            "kept": max(kept, default=0),
            "mine": sum(mine),
            "largest": max(mine),
            "largest whole": max(t.nbytes for t in expected.values()),
            "tied": expected["head.weight"].nbytes if "head.weight" in expected else 0,
        }
    found["errors"] = errors_on_ranks(Path(folder))
    return found


def keep_count(patch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that wait for their file, whenever some come; by storage, which a part of it keeps alive."""
    take, kept = exporting._Writer.take, []

    def counted(writer: Any, whole: State) -> None:
        take(writer, whole)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in writer._pending.values()}
        kept.append(sum(storages.values()))

    patch.setattr(exporting._Writer, "take", counted)
    return kept


def move_experts(model: nn.Module, number: int) -> None:
    """To owners in no order, the first kind aside; of the second, rank 0 has none."""
    compiled = compiled_model_of(model, "test")
    for layer in compiled.layers:
        ranks = [layer.owners.ranks, (1,) * layer.owners.num_experts, (1, 0, 1, 1) * (layer.owners.num_experts // 4)]
        assert compiled.owner_mover.move([(layer, Owners(tuple(ranks[min(number, 2)]), 2))]) is not (number == 0)


def errors_on_ranks(folder: Path) -> dict[str, str]:
    """What one rank alone runs into."""
    model = hecate.compile(model_of("plain", seed=1), hecate.Config(backend="aot_eager"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rank = int(os.environ["RANK"])
    found = {}
    own = folder / f"own{rank}"
    shutil.copytree(folder / "plain" / "saved", own)
    found["elsewhere"] = message_of(lambda: hecate.load_pretrained(model, own if rank == 0 else own / "none"))
    if rank == 1:
        save_file({"head.weight": torch.zeros(2)}, own / "model.safetensors")
    found["differs"] = message_of(lambda: hecate.load_pretrained(model, own))
    # Rank 0 notices while the others are on their way.
    save = exporting.save_file
    with pytest.MonkeyPatch.context() as patch:

        def full(tensors: State, path: Path, **kwargs: Any) -> None:
            if "00002" in path.name:
                raise OSError("no space left")
            save(tensors, path, **kwargs)

        patch.setattr(exporting, "save_file", full)
        found["full"] = message_of(lambda: hecate.export(model, folder / "full", max_shard_size=_LIMIT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainLayout, "convert", _fail_on_data)
        found["converts"] = message_of(lambda: hecate.export(model, folder / "full"))
    found["unchanged"] = str(same(model.state_dict(), before))
    return found


def _fail_on_data(self: Any, tensors: State) -> State:
    if any(not tensor.is_meta for tensor in tensors.values()):
        raise ArithmeticError("cannot convert")
    return tensors


def train(folder: str) -> dict[str, Any]:
    """On one rank: a trained model, whose experts have moved, is exported, and loaded into."""
    config = hecate.Config(backend="aot_eager", policy=Moving(reshard_every=1), dense="shard")
    model = hecate.compile(build("qwen3_moe", layers=1), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        mine = batch(step, rows=4).chunk(2)[int(os.environ["RANK"])]
        model(input_ids=mine, labels=mine)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    hecate.export(model, Path(folder, "trained"), max_shard_size=_LIMIT)
    # As many rows as in a step, and their labels: no other graph is compiled.
    ids = batch(9, rows=2)
    logits = model(input_ids=ids, labels=ids)["logits"].detach()
    found = {"logits": logits.tolist(), "moved": not compiled_model_of(model, "test").layers[0].owners.in_order}
    other: Any = build("qwen3_moe", seed=7, layers=1)
    if int(os.environ["RANK"]) == 0:
        other.save_pretrained(Path(folder, "other"), max_shard_size=_LIMIT)
    torch.distributed.barrier()
    hecate.load_pretrained(model, Path(folder, "other"))
    found["loaded"] = same(model.state_dict(), other.state_dict())
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each kind as its own library saves it: transformers, or huggingface_hub for a state dict."""
    folder = tmp_path_factory.mktemp("export")
    for kind in KINDS:
        place = folder / kind / "saved"
        model: Any = model_of(kind)
        if is_pretrained(kind):
            model.save_pretrained(place, max_shard_size=_LIMIT)
        else:
            place.mkdir(parents=True)
            state = {name: t.clone() for name, t in model.state_dict().items()}
            save_torch_state_dict(state, place, max_shard_size=_LIMIT)
    return folder


@pytest.fixture(scope="module")
def ranks(saved: Path) -> tuple[list[dict[str, Any]], Path]:
    return run_ranks(load_and_export, 2, folder=str(saved), timeout=120), saved


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_library_saved_is_in_the_shards_bit_for_bit(ranks: Any, kind: str) -> None:
    for found in ranks[0]:
        assert found[kind]["same"] and found[kind]["left"] == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exported_is_what_the_library_saves(ranks: Any, kind: str) -> None:
    folder = ranks[1] / kind
    files = sorted(path.name for path in (folder / "exported").glob("model-*"))
    assert len(files) > 1 and files[0].endswith(f"of-{len(files):05d}.safetensors")
    assert same(read(folder / "exported"), read(folder / "saved"))
    index = json.loads((folder / "exported" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_parameters"] == sum(p.numel() for p in model_of(kind).parameters())
    for file in files:
        tensors = load_file(folder / "exported" / file)
        assert tensors.keys() == {name for name, where in index["weight_map"].items() if where == file}
        assert sum(t.nbytes for t in tensors.values()) <= _LIMIT or len(tensors) == 1
    assert not [path.name for path in folder.iterdir() if ".tmp-" in path.name]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if is_pretrained(kind)])
def test_transformers_reads_it_as_its_own(ranks: Any, kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    original: Any = model_of(kind)
    original.save_pretrained(tmp_path)
    whole = ranks[1] / kind / "whole"
    for path in tmp_path.iterdir():
        assert filecmp.cmp(path, whole / path.name, shallow=False), path.name
    loaded = AutoModelForCausalLM.from_pretrained(ranks[1] / kind / "exported").eval()
    assert same(loaded.state_dict(), original.state_dict())
    with torch.no_grad():
        ours, theirs = (m(input_ids=batch(0, rows=2)).logits for m in (loaded, original.eval()))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_holds_more_than_it_must(ranks: Any, kind: str) -> None:
    first, second = (found[kind] for found in ranks[0])
    for found in (first, second):
        # Only what it keeps, and a tied one by each of its names.
        assert 0 < found["loaded"]["most"] <= found["largest"]
        assert found["loaded"]["total"] <= found["mine"] + found["tied"]
    assert second["sent"]["total"] == 0, "what is whole goes to rank 0 alone"
    # One tensor on its way, and what waits for its file: less than a file, and that tensor.
    assert 0 < first["sent"]["most"] <= _LIMIT + first["largest whole"] < first["sent"]["total"]
    assert 0 < first["kept"] <= _LIMIT + first["largest whole"] and second["kept"] == 0


def test_what_one_rank_runs_into_all_hear(ranks: Any) -> None:
    for found in ranks[0]:
        errors = found["errors"]
        assert "rank 1: FileNotFoundError" in errors["elsewhere"]
        assert "ranks 0 and 1 see different files" in errors["differs"]
        assert errors["full"].startswith("CheckpointError") and "rank 0: OSError: no space left" in errors["full"]
        assert "rank 0: ArithmeticError: cannot convert" in errors["converts"]
        assert errors["unchanged"] == "True"
    assert not [path for path in ranks[1].iterdir() if path.name.startswith("full")]


def test_a_trained_model_computes_the_same_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    results = run_ranks(train, 2, folder=str(tmp_path), timeout=120)
    assert results[0]["moved"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert len(list((tmp_path / "trained").glob("*.safetensors"))) > 2
    with torch.no_grad():
        theirs = loaded(input_ids=batch(9, rows=2)).logits
        untrained = build("qwen3_moe", layers=1)(input_ids=batch(9, rows=2)).logits
    for found in results:
        ours = torch.tensor(found["logits"])
        assert (ours - theirs).abs().max() < 1e-5 < (ours - untrained).abs().max()
        assert found["loaded"], "into a model whose experts have moved"
