"""What ``file.py:name`` on a command line stands for."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import typer


def load_name(name: str, what: str, kind: str) -> Any:
    """What ``file.py:name`` says; a module on the path, ``package.module:name``, works too.

    Args:
        what: what it is for, for messages: "model".
        kind: what is expected behind the colon: "function".

    Raises:
        typer.BadParameter: there is no such file, module or name in it.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    sys.path[:0] = [os.getcwd(), str(path.parent)]
    if path.is_file():
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise typer.BadParameter(f"{what} {name!r}: {path} is not a Python file")
        # Dataclasses look their module up.
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    elif not file or path.suffix == ".py" or not all(part.isidentifier() for part in file.split(".")):
        raise typer.BadParameter(f"{what} {name!r}: expected file.py:{kind}")
    else:
        try:
            module = importlib.import_module(file)
        except ImportError as error:
            raise typer.BadParameter(f"{what} {name!r}: {error}; expected file.py:{kind}") from None
    if not hasattr(module, attribute):
        raise typer.BadParameter(f"{what} {name!r}: {file} has no {attribute}")
    return getattr(module, attribute)
