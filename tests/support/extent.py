"""How much is run: options in pairs, or with HECATE_TESTS=all every combination of them."""

from __future__ import annotations

import os

ALL = os.environ.get("HECATE_TESTS") == "all"
