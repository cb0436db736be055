"""What programs without Hecate leave and find: checkpoints of trainers, wrapped models, generation by rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hecate
from hecate.integrations.transformers_trainer import NOTE
from tests.hecate_compile.integrations.test_trainer import config, difference, trainer_of
from tests.support.models import batch, build
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.integrations.test_other_programs"
pytestmark = pytest.mark.distributed


def small(seed: int = 0) -> nn.Module:
    return build("qwen3_moe", layers=1, seed=seed)


def compiled(seed: int = 0) -> nn.Module:
    return hecate.compile(small(seed), config())


def counts_of(model: Any) -> list[int]:
    """What libraries say about the number of parameters."""
    import transformers.trainer

    next(model.parameters()).requires_grad_(False)
    counts = [model.num_parameters(), model.num_parameters(exclude_embeddings=True)]
    counts += [transformers.trainer.get_model_param_count(model, trainable_only=True)]
    next(model.parameters()).requires_grad_(True)
    return counts


def there_and_back(folder: str) -> dict[str, Any]:
    """On one rank: a checkpoint of DDP goes on under Hecate, and one of Hecate is not taken for a whole one."""
    plain = trainer_of(small(), f"{folder}/plain")
    plain.train()
    expected = plain.model.state_dict()
    found: dict[str, Any] = {}
    model = compiled(seed=1)
    again = trainer_of(model, f"{folder}/plain")
    again.train(resume_from_checkpoint=f"{folder}/plain/checkpoint-2")
    found["resumed"] = difference(model.state_dict(), expected)

    mine = trainer_of(compiled(), f"{folder}/ours")
    mine.train()
    found["ours"] = difference(mine.model.state_dict(), expected)
    state = torch.load(f"{folder}/ours/checkpoint-2/optimizer.pt", weights_only=True)
    found["note"] = state["hecate"]
    back = trainer_of(small(seed=2), f"{folder}/ours")
    found["back"] = message_of(lambda: back.train(resume_from_checkpoint=f"{folder}/ours/checkpoint-2"))
    # A rank that does not see the folder, and other groups of parameters.
    lonely = Path(folder, "lonely")
    if dist.get_rank() == 0:
        lonely.mkdir()
        for name in ("optimizer.pt", "scheduler.pt", "trainer_state.json", "config.json", "model.safetensors"):
            (lonely / name).write_bytes(Path(folder, "ours/checkpoint-2", name).read_bytes())
    dist.barrier()
    resumed = trainer_of(compiled(), f"{folder}/lonely-run")
    found["counts"] = [counts_of(model) for model in (resumed.model, small())]
    found["lonely"] = message_of(lambda: resumed.train(resume_from_checkpoint=str(lonely)))
    dist.barrier()
    if dist.get_rank() == 0:
        (lonely / "optimizer.pt").write_bytes(Path(folder, "plain/checkpoint-2/optimizer.pt").read_bytes())
    dist.barrier()
    other = trainer_of(compiled(), f"{folder}/lonely-run", weight_decay=0.0, optim="sgd")
    found["kind"] = message_of(lambda: other.train(resume_from_checkpoint=str(lonely)))
    return found


def test_checkpoints_of_other_trainers(tmp_path: Path) -> None:
    for found in run_ranks(f"{_HERE}:there_and_back", 2, folder=str(tmp_path)):
        assert found["counts"][0] == found["counts"][1]
        assert found["resumed"] < 1e-5 and found["ours"] < 1e-5
        assert found["note"] == NOTE
        assert found["back"].startswith("ValueError: loaded state dict has a different number of parameter groups")
        assert "is in the folder hecate beside it, and that is not there" in found["lonely"]


def adapted(folder: str) -> dict[str, Any]:
    """On one rank: adapters on attention, the best of three checkpoints, one of them resumed by weights alone."""
    from peft import LoraConfig, get_peft_model

    def make(seed: int = 1) -> nn.Module:
        model = small()
        torch.manual_seed(seed)
        return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))

    best: dict[str, Any] = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "metric_for_best_model": "eval_loss",
        "gradient_accumulation_steps": 1,
    }
    found: dict[str, Any] = {}
    plain = trainer_of(make(), f"{folder}/plain", **best)
    plain.train()
    ours = trainer_of(hecate.compile(make(), config()), f"{folder}/ours", **best)
    ours.train()
    found["best"] = difference(ours.model.state_dict(), plain.model.state_dict())
    found["moved"] = difference(plain.model.state_dict(), make().state_dict())
    step = next(Path(folder, "ours", "checkpoint-2", "hecate").glob("step-*"))
    metadata = torch.distributed.checkpoint.FileSystemReader(step).read_metadata().state_dict_metadata
    found["saved"] = [name for name in metadata if name.startswith("model.")]
    # An adapter that is not active is frozen, and no part of the base.
    two = make()
    two.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"]))
    hecate.compile(two, config())
    two.set_adapter("other")
    state = hecate.save(f"{folder}/two", two, step=1)
    names = torch.distributed.checkpoint.FileSystemReader(state).read_metadata().state_dict_metadata
    found["adapters"] = [any(part in name for name in names) for part in ("default", "other", "embed_tokens")]
    # Exactly as it was, optimizer and all.
    resumed = trainer_of(hecate.compile(make(), config()), f"{folder}/ours", **best)
    resumed.train(resume_from_checkpoint=f"{folder}/ours/checkpoint-2")
    found["resumed"] = difference(resumed.model.state_dict(), plain.model.state_dict())
    # Weights alone: from those of the second step, which are not those that the models have at the end.
    options = best | {"save_only_model": True, "load_best_model_at_end": False, "eval_strategy": "no"}
    for trained in (plain, ours):
        only = f"{trained.args.output_dir}-only"
        for checkpoint in (None, f"{only}/checkpoint-2"):
            trainer_of(trained.model, only, **options).train(resume_from_checkpoint=checkpoint)
    found["weights alone"] = difference(ours.model.state_dict(), plain.model.state_dict())
    return found


def test_adapters_in_a_trainer(tmp_path: Path) -> None:
    for found in run_ranks(f"{_HERE}:adapted", 2, folder=str(tmp_path)):
        assert found["moved"] > 1e-4
        assert found["best"] < 1e-5 and found["resumed"] < 1e-5 and found["weights alone"] < 1e-5
        assert found["saved"] and all("lora_" in name for name in found["saved"]), "no frozen base"
        assert found["adapters"] == [True, True, False]


def generate() -> dict[str, Any]:
    """On one rank: texts that end at other tokens on each rank, and then what else a program does."""
    dist.init_process_group("gloo")
    rank, reference = dist.get_rank(), small()
    model = compiled()
    prompt = torch.randint(1, 96, (2, 6), generator=torch.Generator().manual_seed(rank))
    whole = reference.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None)
    # Rank 1 ends with its third tokens, rank 0 with one that never comes.
    ends = whole[:, 8].tolist() if rank == 1 else min(set(range(1, 96)) - set(whole.flatten().tolist()))
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    found: dict[str, Any] = {"equal": [], "lengths": []}
    # Two texts, and two beams of one.
    for rows, more in ((prompt, {}), (prompt[:1], {"num_beams": 2})):
        mask = torch.ones_like(rows)
        text, expected = (one.generate(rows, attention_mask=mask, **options, **more) for one in (model, reference))
        found["equal"].append(torch.equal(text, expected))
        found["lengths"].append(text.shape[1])
        # The program's own collective, behind it.
        dist.all_reduce(torch.ones(1))
        found.setdefault("graphs", len(hecate.explain(model).graphs))
    ids = batch(0)
    mine = ids.chunk(2)[rank]
    loss = model(input_ids=mine, labels=mine).loss.detach().clone()
    dist.all_reduce(loss)
    found["loss"] = abs(float(loss) / 2 - float(reference(input_ids=ids, labels=ids).loss))
    wrapped = nn.parallel.DistributedDataParallel(model)
    found["module"] = message_of(lambda: wrapped.module)
    found["has"] = hasattr(wrapped, "module")
    wrapped(input_ids=mine, labels=mine).loss.backward()
    return found


def test_texts_may_end_at_different_tokens() -> None:
    ranks = run_ranks(f"{_HERE}:generate", 2, timeout=120)
    for found in ranks:
        assert found["equal"] == [True, True] and found["loss"] < 1e-5
        assert found["graphs"] <= 5, "not one for each length"
        assert "leaves such a model as it is" in found["module"] and not found["has"]
    assert ranks[0]["lengths"] != ranks[1]["lengths"]
