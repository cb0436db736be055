"""Hecate: train Mixture-of-Experts models on many ranks without stragglers.

model = hecate.compile(model)
"""

from hecate.api import compile, explain, save_timeline, set_requires_gradient_sync, stats
from hecate.config import Config
from hecate.finder import NoExpertsError
from hecate.gradient_norm import clip_grad_norm_
from hecate.reads import UntracedReadError
from hecate.recording import record
from hecate.report import Explanation, LayerStats, Stats
from hecate.runtime.agreement import DisagreementError
from hecate.runtime.planner import Rates, Topology
from hecate.runtime.policies import Policy

__version__ = "0.1.0"

__all__ = [
    "Config",
    "DisagreementError",
    "Explanation",
    "LayerStats",
    "NoExpertsError",
    "Policy",
    "Rates",
    "Stats",
    "Topology",
    "UntracedReadError",
    "clip_grad_norm_",
    "compile",
    "explain",
    "record",
    "save_timeline",
    "set_requires_gradient_sync",
    "stats",
]
