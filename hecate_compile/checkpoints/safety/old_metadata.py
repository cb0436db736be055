"""The index of a checkpoint of format 1, DCP's pickle, read as plain data; torch's unpickler lacks its opcodes."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from hecate.checkpoints.safety.files import CorruptError, FileRecord, open_plain, short
from hecate.checkpoints.safety.plain_data import DTYPES
from hecate.checkpoints.safety.tensor_index import metadata_of

OLD_INDEX = ".metadata"
_DCP = "torch.distributed.checkpoint"
_CLASSES = {f"{_DCP}.filesystem._StorageInfo"} | {
    f"{_DCP}.metadata.{name}Metadata" for name in ("", "ChunkStorage", "TensorStorage")
}
_CLASSES |= {f"{_DCP}.metadata.{name}" for name in ("MetadataIndex", "StorageMeta", "TensorProperties")}
_FUNCTIONS = {"torch.Size", f"{_DCP}.metadata._MEM_FORMAT_ENCODING", "torch.serialization._get_layout"}
# Opcodes that DCP's pickle never has: names that are looked up elsewhere, and a memo of any size that it asks for.
_FORBIDDEN = {"EXT1", "EXT2", "EXT4", "BINPUT", "LONG_BINPUT", "PUT"}


def read_old_metadata(folder: Path, files: Mapping[str, FileRecord]) -> Metadata:
    """Read the index of a checkpoint of format 1; raise CorruptError if it cannot be what was saved."""
    if OLD_INDEX not in files:
        raise CorruptError(f"{OLD_INDEX} is missing")
    with open_plain(folder / OLD_INDEX) as file:
        content = file.read()
    try:
        for opcode, _, _ in pickletools.genops(content):
            if opcode.name in _FORBIDDEN:
                raise CorruptError(f"it has the opcode {opcode.name}, which is no part of a checkpoint")
        return metadata_of(_index_of(_Unpickler(io.BytesIO(content)).load()), files)
    except Exception as error:
        # A pickle that was tampered with may lead to any error.
        raise CorruptError(f"{OLD_INDEX}: {error if isinstance(error, CorruptError) else short(error)}") from error


class _Fields:
    """An object in the pickle, reduced to its stored fields."""

    def __setstate__(self, fields: Any) -> None:
        self.fields = fields


class _Unpickler(pickle.Unpickler):
    """Makes objects without behaviour of the few classes that are known, and imports nothing."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # A class of its own for each pickle: a pickle may set attributes of what it names.
        self._fields = type("Fields", (_Fields,), {})

    def find_class(self, module: str, name: str) -> Any:
        found = f"{module}.{name}"
        if found in _CLASSES:
            return self._fields
        if found in _FUNCTIONS:
            return self._given
        if module == "torch" and name in DTYPES:
            return name
        raise CorruptError(f"it names {found[:160]}, which is no part of a checkpoint")

    def _given(self, value: Any) -> Any:
        return value


def _index_of(metadata: Any) -> dict[str, Any]:
    """Return the pickle's content in the form of later formats."""
    places = {(key.fields["fqn"], key.fields["offset"]): p for key, p in metadata.fields["storage_data"].items()}
    index = {}
    for name, tensor in metadata.fields["state_dict_metadata"].items():
        chunks = []
        for chunk in tensor.fields["chunks"]:
            offsets, sizes = chunk.fields["offsets"], chunk.fields["sizes"]
            place = places[name, offsets].fields
            chunks.append([offsets, sizes, place["relative_path"], place["offset"], place["length"]])
        dtype = tensor.fields["properties"].fields[0]
        index[name] = {"dtype": dtype, "size": tensor.fields["size"], "chunks": chunks}
    return index
