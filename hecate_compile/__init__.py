"""Hecate: train Mixture-of-Experts models on many ranks without stragglers.

model = hecate.compile(model)
"""

from hecate.api import capture, explain, save_timeline, set_requires_gradient_sync, stats
from hecate.checkpoints.coordination import CheckpointError, MismatchError
from hecate.checkpoints.hub.export import export
from hecate.checkpoints.hub.load_pretrained import load_pretrained
from hecate.checkpoints.load import Loaded, NoCheckpointError, load
from hecate.checkpoints.optimizer_tensors import get_optimizer_state_dict, set_optimizer_state_dict
from hecate.checkpoints.save import async_save, save
from hecate.checkpoints.state_dicts import get_model_state_dict
from hecate.compilation import compile
from hecate.config import Config
from hecate.integrations.s2_cache import S2Cache
from hecate.reports.explanation import Explanation
from hecate.reports.monitor import Monitor, monitor
from hecate.reports.record_counts import record
from hecate.reports.run_files import RunError
from hecate.reports.stats import LayerStats, Stats
from hecate.routing.balance import BiasBalance, balance_bias
from hecate.routing.hold import record_routing, replay_routing
from hecate.routing.routing import Routing
from hecate.runtime.attention.options import S2Attention, UnsupportedAttentionError
from hecate.runtime.comm.agreement import DisagreementError
from hecate.runtime.placement.planner import Rates
from hecate.runtime.placement.policy import Policy
from hecate.runtime.placement.topology import Topology
from hecate.training.clip_grad_norm import clip_grad_norm_, get_total_norm
from hecate.wrap.find_experts import NoExpertsError
from hecate.wrap.untraced import UntracedReadError

__version__ = "0.1.0"

__all__ = [
    "BiasBalance",
    "CheckpointError",
    "Config",
    "DisagreementError",
    "Explanation",
    "LayerStats",
    "Loaded",
    "MismatchError",
    "Monitor",
    "NoCheckpointError",
    "NoExpertsError",
    "Policy",
    "Rates",
    "Routing",
    "RunError",
    "S2Attention",
    "S2Cache",
    "Stats",
    "Topology",
    "UnsupportedAttentionError",
    "UntracedReadError",
    "async_save",
    "balance_bias",
    "capture",
    "clip_grad_norm_",
    "compile",
    "explain",
    "export",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_total_norm",
    "load",
    "load_pretrained",
    "monitor",
    "record",
    "record_routing",
    "replay_routing",
    "save",
    "save_timeline",
    "set_optimizer_state_dict",
    "set_requires_gradient_sync",
    "stats",
]
