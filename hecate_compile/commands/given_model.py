"""The argument MODEL: a function of the user's that returns a model and a batch, or a config of transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from hecate.commands.built import Built, build
from hecate.commands.doctor import free_memory
from hecate.private import INIT_WEIGHTS, parameters_of
from hecate.wrap.attention_config import config_value
from hecate.wrap.find_experts import ExpertsModule, NoExpertsError, find_experts

HELP = "file.py:function that returns a model and a batch, or a config of transformers: folder, hub name or type"
ROWS, LENGTH = 1, 128
# Kinds of models that can have experts and train on input_ids and labels; the first that takes a config is taken.
_KINDS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM")


def given_model(
    name: str, *, layers: int | None = None, rows: int | None = None, length: int | None = None, ranks: int
) -> tuple[Built, str]:
    """Make the model, one of transformers on the meta device, and note what was left out, if anything was.

    ``layers``, ``rows`` (sequences) and ``length`` (tokens) are for transformers; without ``layers`` there are few.
    Raises BadParameter if it is no model and batch.
    """
    if ":" in name:
        made = build(name)
        options = {"--layers": layers, "--batch": rows, "--length": length}
        unused = [option for option, value in options.items() if value is not None]
        note = f"{' and '.join(unused)} not used: {name} brings its own model and batch" if unused else ""
        return made, note
    if Path(name).suffix == ".py":
        raise typer.BadParameter(f"model {name!r}: expected {name}:function, which returns a model and a batch")
    return _from_config(name, layers, rows or ROWS, length or LENGTH, ranks)


def _from_config(name: str, layers: int | None, rows: int, length: int, ranks: int) -> tuple[Built, str]:
    try:
        import transformers  # noqa: F401  whether it is there
    except ImportError:
        raise typer.BadParameter(
            f"model {name!r} is a config of transformers, which is not installed: pip install transformers, or give "
            "file.py:function"
        ) from None
    config = _config(name)
    total = int(config_value(_text_of(config), "num_hidden_layers") or 0)
    model, kept = _few_layers(name, config, layers, total)
    _check_memory(model, ranks)
    for module in model.modules():
        if hasattr(module, INIT_WEIGHTS):
            # Nothing is run, so no value is ever read.
            module.__dict__[INIT_WEIGHTS] = lambda module: None
    length = min(length, int(config_value(_text_of(config), "max_position_embeddings") or length))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    note = f"{kept} of {total} layers; --layers takes more" if kept < total else ""
    return Built(model=model, batches=({"input_ids": ids, "labels": ids},)), note


def _few_layers(name: str, config: Any, layers: int | None, total: int) -> tuple[nn.Module, int]:
    """Return the model with ``layers`` layers, or with as few as it takes to have experts, and their number."""
    if layers is not None:
        kept = min(total, layers)
        return _on_meta(name, _with_layers(config, kept, total)), kept
    # Dense layers often come first, and configs have many names for how many these are.
    kept = min(total, int(config_value(_text_of(config), "first_k_dense_replace") or 0) + 2)
    while True:
        model = _on_meta(name, _with_layers(config, kept, total))
        if kept == total or _experts_of(model):
            return model, kept
        kept += 1


def _experts_of(model: nn.Module) -> list[ExpertsModule]:
    """Return the experts that ranks would share. On the meta device lists of modules are none of them."""
    try:
        return find_experts(model)[0]
    except NoExpertsError:
        return []


def _on_meta(name: str, config: Any) -> nn.Module:
    import transformers

    config.use_cache = False
    why: Exception | None = None
    for kind in _KINDS:
        try:
            with torch.device("meta"):
                model: nn.Module = getattr(transformers, kind).from_config(config)
                return model
        except (ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
            # For a config that no kind knows, the first error says most.
            why = why or error
    raise typer.BadParameter(f"model {name!r}: transformers makes no language model of it: {why}") from None


def _config(name: str) -> Any:
    from transformers import AutoConfig

    if not Path(name).exists() and "/" not in name:
        try:
            return AutoConfig.for_model(name)
        except (ValueError, KeyError):
            # No type of model; it may be a name on the hub.
            pass
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise typer.BadParameter(
            f"no model {name!r}: it is no type that transformers knows (qwen3_moe), no folder with a config.json, "
            f"and the hub does not give it: {first}"
        ) from None


def _text_of(config: Any) -> Any:
    """Return the part of a config that is about text, if it is about images too."""
    return getattr(config, "text_config", None) or config


def _with_layers(config: Any, kept: int, total: int) -> Any:
    config = copy.deepcopy(config)
    if kept < total:
        text = _text_of(config)
        text.num_hidden_layers = kept
        for key, value in text.to_dict().items():
            # The list has one entry for each layer.
            if "layer" in key and isinstance(value, list) and len(value) == total:
                setattr(text, key, value[:kept])
    return config


def _check_memory(model: nn.Module, ranks: int) -> None:
    """Refuse a model for which there is no memory: rank 0 holds its experts, all else, and one whole module."""
    largest = max(_bytes_of(module.parameters(recurse=False)) for module in model.modules())
    experts = _bytes_of(parameters_of(e.store)[key] for e in _experts_of(model) for key in e.parameters)
    needed = _bytes_of(model.parameters()) - experts + experts / ranks + 2 * largest
    # The model is made on the device where it would train.
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else free_memory()
    if free is not None and needed > free:
        raise typer.BadParameter(
            f"this needs about {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free: more --ranks or "
            "fewer --layers need less"
        )


def _bytes_of(parameters: Iterable[nn.Parameter | None]) -> int:
    """Return the bytes of parameters; one that is shared counts once."""
    return sum(p.numel() * p.element_size() for p in {id(p): p for p in parameters if p is not None}.values())
