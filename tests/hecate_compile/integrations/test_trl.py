"""TRL's trainers with their defaults on a compiled model, beside the same trainers with DistributedDataParallel."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hecate
from tests.support.adversaries import Moving
from tests.support.extent import ALL
from tests.support.models import build
from tests.support.parity import state_error
from tests.support.ranks import message_of, run_ranks

_HERE = "tests.hecate_compile.integrations.test_trl"
pytestmark = pytest.mark.distributed

OPTIONS: dict[str, Any] = {
    "max_steps": 2,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-3,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    # Numbers are compared.
    "bf16": False,
}
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
# What a run takes and where it is.
TIMES = ("runtime", "per_second", "total_flos", "step_time")

Wrap = Callable[[Any], Any]


def tokenizer() -> Any:
    """Return one with a token for each character."""
    import tokenizers
    import transformers

    characters = ["<pad>", "<end>", "<unknown>", "\n", *map(chr, range(32, 124))]
    model = tokenizers.models.WordLevel({one: n for n, one in enumerate(characters)}, unk_token="<unknown>")
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )


def texts() -> list[str]:
    """Return lines of Python's own documentation, all as long."""
    lines = [line.strip() for line in str(textwrap.TextWrapper.__doc__).splitlines()]
    return [line[:24] for line in lines if len(line) >= 24]


def model_of(folder: str, targets: dict[str, Any] | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
    if targets is None:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    found = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **targets))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                # As of an adapter that was trained before: its reference is not the base.
                parameter.normal_(std=0.1)
    return found


def compiled(model: Any) -> Any:
    return hecate.compile(model, hecate.Config(backend="aot_eager", policy=Moving(reshard_every=1)))


def unchanged(model: Any) -> Any:
    return model


def sft(folder: str, wrap: Wrap, **options: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(folder, per_device_train_batch_size=2, **OPTIONS)
    data = Dataset.from_dict({"text": texts()})
    return SFTTrainer(wrap(model_of(folder)), arguments, train_dataset=data, processing_class=tokenizer(), **options)


def dpo(folder: str, wrap: Wrap, targets: dict[str, Any] | None = None, *, reference: bool = False) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = zip(texts(), reversed(texts()), strict=True)
    data = [{"prompt": one[:6], "chosen": one[6:], "rejected": other[6:]} for one, other in pairs]
    return DPOTrainer(
        wrap(model_of(folder, targets)),
        wrap(model_of(folder, targets).merge_and_unload() if targets else model_of(folder)) if reference else None,
        DPOConfig(folder, per_device_train_batch_size=2, **OPTIONS),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
    )


def grpo(folder: str, wrap: Wrap) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def early_letters(completions: list[str], **_: Any) -> list[float]:
        return [-sum(map(ord, text)) / 100 for text in completions]

    # Each length of a text is one more graph.
    sizes: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 2}
    arguments = GRPOConfig(folder, **(OPTIONS | sizes | {"max_steps": 1}))
    data = Dataset.from_list([{"prompt": text[:8]} for text in texts()])
    return GRPOTrainer(
        wrap(model_of(folder)), early_letters, arguments, train_dataset=data, processing_class=tokenizer()
    )


TRAINERS: dict[str, Callable[[str, Wrap], Any]] = {
    "SFT": sft,
    "DPO": dpo,
    "DPO with a reference": lambda folder, wrap: dpo(folder, wrap, reference=True),
    "DPO, LoRA": lambda folder, wrap: dpo(folder, wrap, ATTENTION),
    "DPO, LoRA on experts": lambda folder, wrap: dpo(folder, wrap, EXPERTS, reference=True),
    "GRPO": grpo,
}
# Each compiles for half a minute or more.
KINDS = list(TRAINERS) if ALL else ["SFT", "DPO", "GRPO"]


def logs_of(trainer: Any) -> dict[str, list[float]]:
    logs: dict[str, list[float]] = {}
    for entry in trainer.state.log_history:
        for key, value in entry.items():
            if not any(part in key for part in TIMES):
                logs.setdefault(key, []).append(float(value))
    return logs


def train(folder: str, kinds: list[str]) -> dict[str, Any]:
    """On one rank: each trainer with DDP, and then on a compiled model."""
    found: dict[str, Any] = {}
    for kind in kinds:
        # A trainer seeds when it is made.
        plain = TRAINERS[kind](folder, unchanged)
        before = {name: value.clone() for name, value in plain.model.state_dict().items()}
        plain.train()
        ours = TRAINERS[kind](folder, compiled)
        ours.train()
        expected = plain.model.state_dict()
        found[kind] = {
            "expected": logs_of(plain),
            "found": logs_of(ours),
            "error": state_error(ours.model.state_dict(), expected),
            "moved": state_error(before, expected),
        }
    return found


def refuse(folder: str) -> dict[str, str]:
    """On one rank: what comes to adapters too late."""
    from peft import LoraConfig

    late = sft(folder, compiled, peft_config=LoraConfig(r=4, **ATTENTION))
    return {
        "around": message_of(late.train),
        "experts": message_of(lambda: sft(folder, compiled, peft_config=LoraConfig(r=4, **EXPERTS))),
        "second": message_of(lambda: dpo(folder, compiled, EXPERTS)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("trl")
    model: Any = build("qwen3_moe", layers=1)
    model.save_pretrained(found / "base")
    return str(found)


@pytest.fixture(scope="module")
def ranks(folder: str) -> list[dict[str, Any]]:
    return run_ranks(f"{_HERE}:train", 2, folder=folder, kinds=KINDS, timeout=500)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_data_parallel(ranks: list[dict[str, Any]], kind: str) -> None:
    for results in ranks:
        result = results[kind]
        assert result["expected"].keys() == result["found"].keys()
        for key, values in result["expected"].items():
            assert result["found"][key] == pytest.approx(values, rel=1e-4, abs=1e-5), key
        assert result["error"] < 1e-5 and result["moved"] > 1e-3, result
    assert ranks[0][kind]["expected"]["loss"], "rank 0 logs"


@pytest.mark.skipif(not ALL, reason="a minute of compiling: with HECATE_TESTS=all")
def test_adapters_that_come_too_late_are_refused_with_a_way_out(folder: str) -> None:
    for said in run_ranks(f"{_HERE}:refuse", 2, folder=folder, timeout=200):
        assert "contains a compiled model (base_model.model)" in said["around"]
        assert "PEFT would adapt model.layers.0.mlp.experts.gate_up_proj now" in said["experts"]
        assert "a second adapter 'ref' on the experts' gate_up_proj" in said["second"]
        assert all("get_peft_model before hecate.compile" in text for text in said.values()), said
        assert "pass ref_model=" in said["second"]
