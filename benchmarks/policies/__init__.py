"""Rivals as policies on Hecate's engine, so that only the idea differs and not the code around it.

| policy | idea | when | source |
|---|---|---|---|
| ``hecate.runtime.placement.policy.Static`` | owners compute their experts | never changes | GShard, Megatron |
| :class:`FasterMoE` | hot experts are broadcast to all ranks | after the gate | PPoPP 2022 |
| :class:`SmartMoE` | owners are permuted | every few steps | ATC 2023 |
| :class:`FlexMoE` | replicas that stay, one changed at a time | before the gate | SIGMOD 2023 |
| :class:`Laer` | a new layout of all experts | before the gate | LAER-MoE, ASPLOS 2026 |
| :class:`PostGate` | exact replication for the true load | after the gate | UltraEP, 2026 |

What the engine cannot show of them is said in each class.
"""

from benchmarks.policies.faster_moe import FasterMoE
from benchmarks.policies.flex_moe import FlexMoE
from benchmarks.policies.laer import Laer
from benchmarks.policies.post_gate import PostGate
from benchmarks.policies.smart_moe import SmartMoE

__all__ = ["FasterMoE", "FlexMoE", "Laer", "PostGate", "SmartMoE"]
