"""How much is run: options in pairs, or with HECATE_TESTS=all every combination of them."""

from __future__ import annotations

import os
from importlib import metadata

from packaging.version import Version

ALL = os.environ.get("HECATE_TESTS") == "all"


def _is_before(package: str, version: str) -> bool:
    try:
        return Version(metadata.version(package)) < Version(version)
    except metadata.PackageNotFoundError:
        return False


# The other end of the declared range (make test TORCH=2.11.0).
OLD_TRANSFORMERS, OLD_TORCH = _is_before("transformers", "5.24"), _is_before("torch", "2.12")
