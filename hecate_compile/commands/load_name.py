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
    """Import the object ``file.py:name``; a module on the path, ``package.module:name``, works too.

    Args:
        what: purpose of the object, for messages: "model".
        kind: kind of name that is expected after the colon: "function".

    Raises:
        typer.BadParameter: there is no such file, module or name in it, or the file cannot be imported.
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
    """Report errors of the user's code in the block by file and line, without a traceback.

    Args:
        file: the user's own file; of all lines that the error went through, the last one in it is named.

    Raises:
        typer.BadParameter: instead of the error.
    """
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
