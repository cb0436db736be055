"""Predict a training step on a cluster that is not there.

The model is compiled as rank 0 of as many ranks as wanted, on a process group that sends nothing, and every rank
walks through the real graphs after all passes. A policy makes rows and replicas of a trace.

| file | concern |
|---|---|
| ``cluster`` | a cluster, as a TOML file describes it |
| ``fake_ranks`` | be one of W ranks in one process |
| ``capture`` | compile for W ranks without running |
| ``program`` | a graph as a list of compute, starts and waits, with sizes as functions of routing |
| ``routing`` | a trace through a policy: rows and experts between ranks, step by step |
| ``replay`` | a recorded trace through policies, without a graph |
| ``memory`` | bytes of states and slots |
| ``live_bytes`` | bytes of all that every rank holds during a step, activations included |
| ``study`` | policies compared with each other |
| ``workloads`` | routing that is made up, or fitted to another number of ranks |
| ``step`` | one step on all ranks: seconds, bytes, and who waited |
"""

from hecate.simulator.capture import Capture, capture
from hecate.simulator.cluster import ClusterError, ClusterSpec
from hecate.simulator.live_bytes import LiveBytes, StepMemory
from hecate.simulator.routing import LayerStep, walk
from hecate.simulator.step import Prediction, Simulator

__all__ = [
    "Capture",
    "ClusterError",
    "ClusterSpec",
    "LayerStep",
    "LiveBytes",
    "Prediction",
    "Simulator",
    "StepMemory",
    "capture",
    "walk",
]
