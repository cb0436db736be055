"""The argument MODEL: a function of the user's that returns a model and a batch, or a config of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from hecate.commands.load_name import load_name

HELP = "file.py:function that returns a model and a batch, or a config of transformers: folder, hub name or type"


@dataclass(frozen=True, kw_only=True)
class GivenModel:
    """What MODEL stands for.

    Attributes:
        inputs: a batch of one rank.
        note: what was left out of it, in words.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    note: str = ""


def given_model(name: str, *, layers: int | None, rows: int, length: int, ranks: int) -> GivenModel:
    """Make the model; one of transformers on the meta device, without weights.

    Args:
        layers: of a config of transformers, how many; None for the dense ones that come first and two more.
        rows, length: sequences in a batch, and tokens of each.
        ranks: that will share its experts.

    Raises:
        typer.BadParameter: there is no such thing, or it is no model and batch.
    """
    if ":" in name:
        made = load_name(name, "model", "function")()
        if not isinstance(made, tuple) or len(made) < 2 or not isinstance(made[1], Mapping):
            raise typer.BadParameter(f"{name} must return a model and a batch: (nn.Module, dict of tensors)")
        return GivenModel(model=made[0], inputs=made[1])
    if Path(name).suffix == ".py":
        raise typer.BadParameter(f"model {name!r}: expected {name}:function, which returns a model and a batch")
    return _from_config(name, layers, rows, length, ranks)


def _from_config(name: str, layers: int | None, rows: int, length: int, ranks: int) -> GivenModel:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise typer.BadParameter(
            f"model {name!r} is a config of transformers, which is not installed: pip install transformers, or give "
            "file.py:function"
        ) from None
    config = _config(name)
    total = int(getattr(config, "num_hidden_layers", 0))
    kept = min(total, layers if layers is not None else int(getattr(config, "first_k_dense_replace", 0) or 0) + 2)
    if kept < total:
        _keep_layers(config, kept, total)
    config.use_cache = False
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, ImportError) as error:
        raise typer.BadParameter(f"model {name!r}: transformers makes no language model of it: {error}") from None
    _check_memory(model, ranks)
    for module in model.modules():
        if hasattr(module, "_init_weights"):
            # Nothing is run, so no value is ever read.
            module.__dict__["_init_weights"] = _leave_as_it_is
    length = min(length, int(getattr(config, "max_position_embeddings", length) or length))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    note = f"{kept} of {total} layers; --layers takes more" if kept < total else ""
    return GivenModel(model=model, inputs={"input_ids": ids, "labels": ids}, note=note)


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
    except (OSError, ValueError, KeyError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise typer.BadParameter(
            f"no model {name!r}: it is no type that transformers knows (qwen3_moe), no folder with a config.json, "
            f"and the hub does not give it: {first}"
        ) from None


def _keep_layers(config: Any, kept: int, total: int) -> None:
    config.num_hidden_layers = kept
    for key, value in config.to_dict().items():
        # One entry for each layer.
        if key.endswith("layer_types") and isinstance(value, list) and len(value) == total:
            setattr(config, key, value[:kept])


def _leave_as_it_is(module: nn.Module) -> None:
    pass


def _check_memory(model: nn.Module, ranks: int) -> None:
    """Rank 0 holds its experts, all else, and one module at a time whole."""
    own = [sum(p.numel() * p.element_size() for p in m.parameters(recurse=False)) for m in model.modules()]
    # Experts are fused, [E, ...]; all else has at most two dimensions.
    experts = sum(p.numel() * p.element_size() for p in model.parameters() if p.ndim == 3)
    needed = sum(own) - experts + experts / ranks + 2 * max(own)
    free = _free_memory()
    if free is not None and needed > free:
        raise typer.BadParameter(
            f"this needs about {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free: more --ranks or "
            "fewer --layers need less"
        )


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
