"""transformers.Trainer on a compiled model, beside the same trainer with DistributedDataParallel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hecate
from tests.support.adversaries import Moving
from tests.support.extent import OLD_TORCH
from tests.support.models import batch, build
from tests.support.parity import state_error
from tests.support.ranks import run_ranks

_HERE = "tests.hecate_compile.integrations.test_trainer"
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.3,
    "learning_rate": 1e-2,
    "optim": "adamw_torch",
    "adam_epsilon": 1e-3,
    "logging_steps": 1,
    "report_to": "none",
    "seed": 3,
    "use_cpu": True,
    "save_strategy": "steps",
    "save_steps": 2,
    "disable_tqdm": True,
    "lr_scheduler_type": "linear",
}


def trainer_of(model: nn.Module, folder: str, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for step in range(3) for row in batch(step).tolist()]
    arguments = TrainingArguments(folder, **(OPTIONS | {"max_steps": 4} | options))
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:6])


def logs_of(trainer: Any) -> dict[str, list[float]]:
    history = trainer.state.log_history
    return {key: [entry[key] for entry in history if key in entry] for key in ("loss", "grad_norm", "eval_loss")}


def train(folder: str) -> dict[str, Any]:
    """On one rank: DDP, a compiled model, and one that is saved in the middle and resumed."""
    from transformers import AutoModelForCausalLM

    if OLD_TORCH:
        # It cannot load to "cpu:0", which transformers' own code asks for; a GPU has such a name.
        torch.serialization.register_package(
            9, lambda storage: None, lambda storage, place: storage if place.startswith("cpu:") else None
        )
    found: dict[str, Any] = {}
    plain = trainer_of(build("qwen3_moe", layers=1), f"{folder}/plain")
    plain.train()
    plain.evaluate()
    found["plain"] = logs_of(plain)
    expected = plain.model.state_dict()

    model = hecate.compile(build("qwen3_moe", layers=1), config())
    trainer = trainer_of(model, f"{folder}/compiled")
    trainer.train()
    trainer.evaluate()
    trainer.save_model(f"{folder}/saved")
    found["compiled"] = logs_of(trainer)
    found["weights"] = difference(model.state_dict(), expected)

    resumed = hecate.compile(build("qwen3_moe", layers=1, seed=1), config())
    again = trainer_of(resumed, f"{folder}/compiled")
    again.train(resume_from_checkpoint=f"{folder}/compiled/checkpoint-2")
    found["resumed"] = difference(resumed.state_dict(), expected)
    again.state.best_model_checkpoint = f"{folder}/compiled/checkpoint-2"
    again._load_best_model()
    halfway = AutoModelForCausalLM.from_pretrained(f"{folder}/plain/checkpoint-2").state_dict()
    found["best"] = difference(resumed.state_dict(), halfway)

    other = trainer_of(
        hecate.compile(build("qwen3_moe", layers=1), config()),
        f"{folder}/bf16",
        save_strategy="no",
        bf16=True,
        gradient_checkpointing=True,
    )
    other.train()
    found["bf16"] = logs_of(other)["loss"]
    return found


def resume_alone(folder: str) -> float:
    """What two ranks saved, on one: as large a batch, and the same weights."""
    # It brings the Trainer's own classes, which the checkpoint names, before the model is compiled.
    import transformers.trainer  # noqa: F401

    model = hecate.compile(build("qwen3_moe", layers=1, seed=1), config())
    trainer = trainer_of(model, f"{folder}/alone", per_device_train_batch_size=4)
    trainer.train(resume_from_checkpoint=f"{folder}/compiled/checkpoint-2")
    expected = hecate.compile(build("qwen3_moe", layers=1, seed=2), config())
    hecate.load(f"{folder}/compiled/checkpoint-4/hecate", expected)
    return difference(model.state_dict(), expected.state_dict())


def config() -> hecate.Config:
    return hecate.Config(backend="aot_eager", policy=Moving(reshard_every=1))


def difference(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of the worst element, relative to the largest of its parameter."""
    assert state.keys() == expected.keys()
    return state_error(state, expected, relative=True)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("trainer")
    return run_ranks(f"{_HERE}:train", 2, folder=str(folder), timeout=400), folder


pytestmark = pytest.mark.distributed


def test_losses_norms_and_weights_are_those_of_data_parallel(ranks: Any) -> None:
    for result in ranks[0]:
        assert len(result["plain"]["loss"]) in (0, 4), "rank 0 logs"
        for key, values in result["plain"].items():
            assert result["compiled"][key] == pytest.approx(values, rel=1e-4), key
        assert result["weights"] < 1e-4


def test_what_was_saved_is_an_ordinary_checkpoint(ranks: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder = ranks[1]
    model = AutoModelForCausalLM.from_pretrained(folder / "saved")
    last = AutoModelForCausalLM.from_pretrained(folder / "compiled" / "checkpoint-4")
    plain = AutoModelForCausalLM.from_pretrained(folder / "plain" / "checkpoint-4")
    assert difference(model.state_dict(), last.state_dict()) == 0
    assert difference(model.state_dict(), plain.state_dict()) < 1e-4
    state = json.loads((folder / "compiled" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["global_step"] == 4


def test_training_resumes_where_it_was(ranks: Any) -> None:
    for result in ranks[0]:
        assert result["resumed"] < 1e-4
        assert result["best"] < 1e-4


def test_training_resumes_on_another_number_of_ranks(ranks: Any) -> None:
    (found,) = run_ranks(f"{_HERE}:resume_alone", 1, folder=str(ranks[1]))
    assert found < 1e-4


def test_bf16_and_checkpointing_train(ranks: Any) -> None:
    for result in ranks[0]:
        assert result["bf16"] == pytest.approx(result["plain"]["loss"], rel=3e-2)


def test_the_example(tmp_path: Path) -> None:
    # With one layer there is half as much to trace.
    given: dict[str, Any] = {"arguments": [str(tmp_path)], "changes": {"num_hidden_layers": 1}}
    said, _ = run_ranks("tests.examples.test_train:run_example", 2, example="trainer.py", **given)
    assert "eval_loss" in said
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "checkpoint-40").is_dir()
