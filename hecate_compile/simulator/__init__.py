"""Predict a training step on a cluster that is not there.

The model is compiled as rank 0 of as many ranks as wanted, on a process group that sends nothing, and every rank
walks through the real graphs after all passes. A policy makes rows and replicas of a trace.

| file | concern |
|---|---|
| ``cluster`` | a cluster, as a TOML file describes it |
| ``capture`` | be one of W ranks in one process, and compile for all without running |
| ``program`` | a graph as a list of compute, starts and waits, with sizes as functions of routing |
| ``replay`` | a trace through a policy, step by step: rows and experts between ranks; recorded ones, too |
| ``live_bytes`` | bytes of states and slots, and of all that every rank holds during a step, activations included |
| ``study`` | policies compared with each other |
| ``workloads`` | routing that is made up, or fitted to another number of ranks |
| ``step`` | one step on all ranks: seconds, bytes, and who waited |
"""

from hecate.simulator.capture import Capture, capture
from hecate.simulator.cluster import ClusterError, ClusterSpec
from hecate.simulator.live_bytes import LiveBytes, StepMemory
from hecate.simulator.replay import LayerStep, walk
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
