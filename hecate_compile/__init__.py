"""Hecate: train Mixture-of-Experts models on many ranks without stragglers.

model = hecate.compile(model)
"""

from hecate.api import compile, explain, save_timeline, set_requires_gradient_sync, stats
from hecate.config import Config
from hecate.reports.explanation import Explanation
from hecate.reports.record_routing import record
from hecate.reports.stats import LayerStats, Stats
from hecate.runtime.comm.agreement import DisagreementError
from hecate.runtime.placement.planner import Rates
from hecate.runtime.placement.policy import Policy
from hecate.runtime.placement.topology import Topology
from hecate.training.clip_grad_norm import clip_grad_norm_
from hecate.wrap.find_experts import NoExpertsError
from hecate.wrap.parameter_reads import UntracedReadError

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
