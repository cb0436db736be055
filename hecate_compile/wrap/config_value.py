"""Values of a model's config that are equal for all its layers."""

from __future__ import annotations

from typing import Any


def config_value(config: object, name: str) -> Any:
    """Return ``config.name``; None where there is none, and where layers differ.

    A config of transformers raises a RuntimeError where layers have numbers of their own (from 5.24), and properties
    of other configs raise whatever they like.
    """
    try:
        return getattr(config, name, None)
    except Exception:
        return None
