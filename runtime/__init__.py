"""What runs during a step: operators, transport, ownership, per-layer state.

Nothing here imports the passes or the wrapper.

Glossary, used in names and docstrings. Sizes:

- T: tokens of a rank.
- K: choices per token, the experts that it goes to.
- R: rows of a rank, T * K.
- H: hidden size.
- E: experts of a layer.
- W: ranks.
- S: slots, experts that a rank holds right now.

Who has what:

- rank: one process, with one device.
- node: a machine, ranks with fast links between them; in passes, a node of a graph.
- expert parameter: a tensor ``[E, ...]`` that holds a matrix or a bias of every expert of a layer.
- owner: the one rank that keeps an expert between steps and updates it.
- replica: a copy of an expert on a rank that does not own it, for one step.
- holder: a rank that has an expert in a step, as its owner or with a replica.
- slot: room for one expert on a rank; S counts those in use, own experts included, m in plans those for replicas.
- placement: the holders of every expert of a layer in one step.
- place: to decide who the holders are, before the step's gate has run.
- shard: what a rank keeps of a parameter: of an expert parameter its own experts, of a dense one its rows.
- full tensor: the whole parameter that ranks have shards of, ``[E, ...]`` or ``[d, ...]``; state dicts show it.
- replicated parameter: a dense parameter that every rank keeps whole. It has nothing to do with a replica.

Who computes what:

- rows: tokens, each counted once for every expert that it goes to; of a dense shard, indices of dimension 0.
- load: rows of each expert, of all ranks together, ``[E]``.
- quota: how many rows of an expert a holder computes; in ``Quotas``, of the rows of one rank.
- ticket: a rank's plan of one exchange: which row goes where, and which slot each row that arrives is for.

What travels:

- exchange: brings rows to holders, and results back; as a role, any collective that an MoE layer needs at once.
- gather: brings parameters to the ranks that will use them: replicas, all experts of a layer, or dense ones.
- reduce: averages gradients over ranks, and leaves the mean where the parameter is: at owners, shards or all ranks.
- stage: one of the two rounds in which replicas travel: between nodes, then inside them. Gradients go the way back.
- start and wait: the two halves of a collective in a graph. A start returns at once, its wait returns the result.
- in flight: a collective between its start and its wait.
- gap: where the link is free: from the last exchange of one MoE layer to the first of the next, and at both ends.
- hidden seconds: of one layer and step, the time in which experts and gradients travel behind other work.
- overlap degree (t): how many experts can cross one link, and their gradients back, in the hidden seconds.

What graphs name:

- record: what a number in a graph stands for: a layer, dense shard or replicated parameter. Collectives have one too.
- note: the text that a start carries: which collective, for what, and its predicted seconds.
- position: of a node in a graph, its index in the order of the nodes.
"""
