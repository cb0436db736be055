"""What models from the transformers library need before Dynamo sees them. Nothing here imports transformers."""

from __future__ import annotations

import sys

from torch import nn

_RECORDED = ("output_router_logits", "output_hidden_states", "output_attentions")


def prepare(model: nn.Module) -> None:
    """Install the output recorders of transformers models now, where their config asks for recorded outputs.

    They are installed under a lock in the first forward otherwise, and a lock is a graph break.
    """
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    try:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError:  # an older release, without recorders
        return
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and any(getattr(module.config, key, False) for key in _RECORDED):
            maybe_install_capturing_hooks(module)
