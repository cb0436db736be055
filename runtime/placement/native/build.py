"""Compile the sources of this folder once on a machine, and load them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

# No fused multiply-add: seconds are those of the Python functions to the last bit.
_OPTIONS = ("-O2", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC")
_ALLOWED = os.environ.get("HECATE_NATIVE", "1") != "0"


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled planner; None without a C++ compiler, or if ``HECATE_NATIVE=0`` was set at the start."""
    if not _ALLOWED:
        return None
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        return None
    try:
        return _loaded(compiler)
    except (OSError, subprocess.SubprocessError, RuntimeError, ValueError) as error:
        said = getattr(error, "stderr", None) or error
        warnings.warn(f"hecate: the planner runs as Python, because compiling it failed: {said}", stacklevel=2)
        return None


def _loaded(compiler: str) -> ctypes.CDLL:
    file = _built(compiler)
    try:
        return ctypes.CDLL(str(file))
    except OSError:
        # A machine that went down may have left a part of it.
        file.unlink(missing_ok=True)
        return ctypes.CDLL(str(_built(compiler)))


def _built(compiler: str) -> Path:
    """Return the library's file, compiled if it is not there yet."""
    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".h", ".cpp"))
    key = hashlib.sha256(repr((compiler, _OPTIONS, os.uname().machine)).encode())
    for path in sources:
        key.update(path.read_bytes())
    file = _folder() / f"planner-{key.hexdigest()[:16]}.so"
    if file.exists():
        _check_own(file)
        return file
    # Ranks may compile at the same time: each renames a whole file to the same name.
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        code = [str(path) for path in sources if path.suffix == ".cpp"]
        subprocess.run(
            [compiler, *_OPTIONS, *code, "-o", str(made)], check=True, capture_output=True, text=True, timeout=120
        )
        made.replace(file)
    return file


def _folder() -> Path:
    """Return a folder that no other user may write to, since code is loaded from it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hecate"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_own(folder)
    return folder


def _check_own(path: Path) -> None:
    """Raise PermissionError for a link, or what others own or may write to."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{path} is a link, or others may write to it")
