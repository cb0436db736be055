"""The object that ``file.py:name`` on a command line stands for, and a model, batches and config that it returns."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from torch import nn

from hecate.config import Config


def load_name(name: str, what: str, kind: str) -> Any:
    """Import ``file.py:name`` or ``package.module:name``; BadParameter if that fails.

    Messages name ``what`` it is for ("model"), and the ``kind`` that is expected ("function").
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    sys.path[:0] = [os.getcwd(), str(path.parent)]
    if path.is_file():
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise typer.BadParameter(f"{what} {name!r}: {path} is not a Python file")
        # Dataclasses look their module up in sys.modules.
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        with users_code(f"{what} {name!r}", file):
            spec.loader.exec_module(module)
    elif path.suffix == ".py":
        raise typer.BadParameter(f"{what} {name!r}: there is no file {file}; expected file.py:{kind}")
    elif not file or not all(part.isidentifier() for part in file.split(".")):
        raise typer.BadParameter(f"{what} {name!r}: expected file.py:{kind}")
    else:
        with users_code(f"{what} {name!r}", file, hint=f"; expected file.py:{kind}"):
            module = importlib.import_module(file)
    if not hasattr(module, attribute):
        raise typer.BadParameter(f"{what} {name!r}: {file} has no {attribute}")
    return getattr(module, attribute)


@contextmanager
def users_code(subject: str, file: str | None, hint: str = "") -> Iterator[None]:
    """Turn errors of the user's code into BadParameter, with the last line of ``file`` that they went through."""
    try:
        yield
    except (typer.BadParameter, typer.Exit, typer.Abort):
        raise
    except (Exception, SystemExit) as error:
        # A script without a main guard may end the process.
        said = str(error) or "no message"
        raise typer.BadParameter(f"{subject}: {_place(error, file)}{type(error).__name__}: {said}{hint}") from error


def _place(error: BaseException, file: str | None) -> str:
    """Return file and line, with a colon and a space after them; "" where the error has none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in frame.filename]
    # Python names files by absolute paths, the user perhaps by relative ones.
    own = Path(file).resolve() if file is not None else None
    theirs = [frame for frame in frames if Path(frame.filename).resolve() == own]
    if not (theirs or frames):
        return ""
    last = (theirs or frames)[-1]
    return f"{last.filename}:{last.lineno}: "


Batch = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model that is not compiled yet, at least one batch of one rank, and perhaps how to compile the model."""

    model: nn.Module
    batches: tuple[Batch, ...]
    config: Config | None = None

    @classmethod
    def of(cls, given: Any, name: str) -> Built:
        """Take what the function ``name`` returned; BadParameter if it is no model and batch."""
        wrong = typer.BadParameter(
            f"{name} must return a model and a batch: (nn.Module, dict of tensors); a list of batches, one for each "
            f"step, may be there instead of one, and a hecate.Config behind it. It returned {_kind(given)}"
        )
        if not isinstance(given, tuple) or len(given) not in (2, 3) or not isinstance(given[0], nn.Module):
            raise wrong
        batches = [given[1]] if isinstance(given[1], Mapping) else given[1]
        if not isinstance(batches, (list, tuple)) or not batches or not all(isinstance(b, Mapping) for b in batches):
            raise wrong
        config = given[2] if len(given) == 3 else None
        if config is not None and not isinstance(config, Config):
            raise wrong
        return cls(model=given[0], batches=tuple(batches), config=config)


def build(name: str, what: str = "model") -> Built:
    """Call ``file.py:function``; BadParameter if there is none, it fails, or it returns something else."""
    function = load_name(name, what, "function")
    if not callable(function):
        raise typer.BadParameter(f"{what} {name!r}: a {type(function).__name__}, expected a function")
    with users_code(f"{what} {name!r}", name.rpartition(":")[0]):
        given = function()
    return Built.of(given, name)


def _kind(given: Any) -> str:
    if isinstance(given, tuple):
        return f"({', '.join(type(one).__name__ for one in given)})"
    return type(given).__name__
