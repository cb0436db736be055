"""Import the object that ``file.py:name`` on a command line stands for."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer


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
