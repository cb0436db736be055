"""The operators that passes put into graphs, each with a fake, an autograd formula and a flop count.

Every file here registers its operators when it is
imported, and lists them at its top:

| file | operators |
|---|---|
| ``experts`` | experts come to ranks, and their gradients go back: all of a layer, or replicas |
| ``exchange`` | counts of rows, where rows go, and the rows themselves, there and back, also by nodes |
| ``grouped_mm`` | products on slots |
| ``choices`` | experts that a router chose, kept or given from outside |
| ``dense`` | dense parameters of which each rank keeps its rows |
| ``gradients`` | gradients of parameters that every rank has whole |
| ``by_collectives``, ``by_nodes`` | how rows and replicas travel by ``torch.distributed``, without operators |
| ``registration`` | how an operator or a collective is registered |
| ``sparse_collectives``, ``ticket``, ``node_ticket`` | how replicas and rows travel, without operators |

R', S, n, u and m are unbacked sizes: they change with routing and placement and never cause a recompile (R' is a
fixed multiple of R where the layer's carrier bounds the room for rows). So is E_r, the length of a shard, at more
than one rank: owners may move without a recompile. A placement is data, int8 on the CPU (2 owner, 1 replica), that
flows from ``place`` to whatever uses it, so a backward always uses its forward's.

``layer`` is the number of a ``hecate.runtime.state.layer.Layer``. Operators return fresh tensors, never views
of their inputs; a read that is free at one rank (``own_experts``) is a plain autograd function instead. Those that
communicate can be split into a start and a wait, and have a record that says all that others ask about them
(``hecate.runtime.comm.collective``).
"""

from __future__ import annotations

import importlib
import pkgutil

from hecate.runtime.comm.collective import collective_named

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["collective_named"]
