"""The MoE blocks of docs/models.md as a module: hecate.compile and Dynamo look for the source of what they trace."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from torch import nn

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "models.md"


@cache
def code_of_page() -> ModuleType:
    """All blocks of Python on the page, one after another."""
    code = "\n\n".join(re.findall(r"```python\n(.*?)```", _PAGE.read_text(), flags=re.DOTALL))
    file = _ROOT / "build" / "docs" / "code_of_models_md.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    # Other ranks read and write it, too, and Dynamo reads it again later: it is whole at any time, and stays.
    draft = file.with_name(f"{os.getpid()}.draft")
    draft.write_text(code)
    os.replace(draft, file)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks_of_page() -> dict[str, type[nn.Module]]:
    """The ways to write MoE, by name; without what they share."""
    found = {name: kind for name, kind in vars(code_of_page()).items() if isinstance(kind, type)}
    return {n: k for n, k in found.items() if issubclass(k, nn.Module) and n not in ("MoE", "Expert")}
