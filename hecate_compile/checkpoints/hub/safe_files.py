"""The safetensors files of a folder, as transformers names them, read a tensor at a time; pickles are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hecate.checkpoints.safety.files import CorruptError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class SafeFiles:
    """The tensors of a folder; ``likes`` has shape and dtype of each, on the meta device, by name.

    Raise FileNotFoundError if there is no folder or no safetensors file; CorruptError if the index or a file is wrong
    or elsewhere; ValueError if the weights are quantized.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is no folder; huggingface_hub.snapshot_download(...) gives that of a model on the hub"
            )
        self._real = folder.resolve()
        self._check_not_quantized()
        self._open: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        self.likes: dict[str, torch.Tensor] = {}
        indexed = self._read_index()
        for file in [_SINGLE] if indexed is None else dict.fromkeys(indexed.values()):
            self._add(file)
        for name, file in (indexed or {}).items():
            if self._where.get(name) != file:
                raise CorruptError(f"{_INDEX} says that {name} is in {file}, and it is not")

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Return a tensor, or its lines ``start`` to ``stop``, on the CPU."""
        file = self._open[self._where[name]]
        tensor: torch.Tensor = file.get_tensor(name) if start is None else file.get_slice(name)[start:stop]
        return tensor

    def _read_index(self) -> dict[str, str] | None:
        """Return the file of each tensor; None if there is a single file."""
        if (self._real / _SINGLE).exists():
            return None
        path = self._real / _INDEX
        if not path.exists():
            raise FileNotFoundError(f"{self.folder} has no {_SINGLE} and no {_INDEX}{self._what_else()}")
        index = self._read_json(_INDEX)
        found = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
            raise CorruptError(f"{_INDEX} cannot be read: it does not say in which file each tensor is")
        return found

    def _read_json(self, name: str) -> Any:
        content = self._confined(name).read_bytes()
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"{name} cannot be read: {type(error).__name__}") from error

    def _check_not_quantized(self) -> None:
        if not (self._real / "config.json").exists():
            return
        config = self._read_json("config.json")
        if isinstance(config, dict) and config.get("quantization_config"):
            raise ValueError(
                f"the weights in {self.folder} are quantized. transformers' from_pretrained dequantizes many kinds "
                "(dequantize=True in the quantization config), and what save_pretrained then writes is loaded here"
            )

    def _what_else(self) -> str:
        pickles = sorted(path.name for pattern in _PICKLES for path in self._real.glob(pattern))
        if (self._real / "adapter_config.json").exists():
            return ", but adapters of PEFT"
        if pickles:
            return (
                f", but {pickles[0]}, a pickle, which may run anything when it is read. Where it is trusted, "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) makes safetensors of it"
            )
        return ""

    def _confined(self, name: str) -> Path:
        """Return the path of a plain file of the folder, and refuse a link that leads elsewhere."""
        if name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
            raise CorruptError(f"{_INDEX} names a file outside of the folder: {name[:255]!r}")
        path = self._real / name
        if not path.exists():
            raise CorruptError(f"{name} is missing")
        real = path.resolve()
        allowed = [self._real]
        if self._real.parent.name == "snapshots":
            # models--owner--name/snapshots/revision/model.safetensors is a link into models--owner--name/blobs.
            allowed.append(self._real.parent.parent / "blobs")
        if real.parent not in allowed:
            raise CorruptError(f"{name} is a link out of the folder, to {real}; put the file there itself")
        if not real.is_file():
            raise CorruptError(f"{name} is not a plain file")
        return real

    def _add(self, file: str) -> None:
        try:
            opened = safe_open(self._confined(file), framework="pt")
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                if name in self._where:
                    raise CorruptError(f"{name} is in {self._where[name]}, and in {file} again")
                self._where[name] = file
                part = opened.get_slice(name)
                shape = part.get_shape()
                empty = part[:0] if shape else opened.get_tensor(name)
                self.likes[name] = torch.empty(shape, dtype=empty.dtype, device="meta")
        except SafetensorError as error:
            raise CorruptError(f"{file} cannot be read: {error}") from error
        self._open[file] = opened
