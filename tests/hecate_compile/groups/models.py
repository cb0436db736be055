"""Models that tests of groups train, and how near they must come to one process."""

from __future__ import annotations

import torch
from torch import nn

from tests.hecate_compile.wrap.test_own_parameters import ChoosyMoE
from tests.hecate_compile.wrap.test_stack_experts import small
from tests.hecate_compile.wrap.untraced_models import RejectingModel
from tests.support.models import build

EXACT = 1e-5


def built(family: str, *, layers: int = 2) -> nn.Module:
    """The same weights in every process; "list" and "choosy" have experts in a list, "rejecting" is not traced."""
    torch.manual_seed(0)
    if family == "rejecting":
        return RejectingModel()
    kinds = {"list": {}, "choosy": {"kind": ChoosyMoE}}
    return small(**kinds[family], layers=layers) if family in kinds else build(family, layers=layers)
