"""Prepare models of transformers for Dynamo. Nothing here imports transformers unless the user has."""

from __future__ import annotations

import sys

from torch import nn

from hecate.private import RECORDED_OUTPUTS


def prepare(model: nn.Module) -> None:
    """Install the output recorders of transformers models now, whether their config asks for recorded outputs or not.

    Otherwise they are installed in the first forward that asks, under a lock, which is a graph break. They do nothing
    unless somebody collects.
    """
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    try:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError:  # an older release, without recorders
        return
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and getattr(module, RECORDED_OUTPUTS, None):
            maybe_install_capturing_hooks(module)
