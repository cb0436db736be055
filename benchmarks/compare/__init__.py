"""Hecate beside its rivals on a cluster of one machine.

    python -m benchmarks.compare                      the paper's GPT-MoE-S, scaled, on cluster A: 30 to 40 minutes
    python -m benchmarks.compare --full               five shapes and links: about four hours
    python -m benchmarks.compare --full --continue    the launches that are missing, after a run that was cut off
    python -m benchmarks.compare --report             the tables and plots again, from the samples on disk

Eight ranks in two nodes, each rank with a share of a core, nodes with a shaped link (``benchmarks.emulator``).
All systems train the same model in the same processes and take turns step by step. A router that replays a trace
gives every one of them the same rows. Before a step a system's policy has seen all earlier steps of the trace.

| file | concern |
|---|---|
| ``cells`` | which systems meet on which shapes, links and workloads |
| ``shapes`` | the models and the links, with every ratio that they keep |
| ``workloads``, ``routing`` | traces, and from their counts to the experts of every token |
| ``systems`` | what takes part, and how it is built |
| ``moves``, ``waits`` | what moves between steps, and what compute waits for in one |
| ``calibrate``, ``machine`` | how fast the emulated ranks and links are |
| ``rank`` | what one rank runs in one launch |
| ``store`` | launches on disk |
| ``figures``, ``report``, ``plots`` | from raw samples to numbers, tables and pictures |
| ``predict`` | what ``hecate simulate`` says about the same steps |
| ``against`` | this code beside that of a former commit |
"""
