"""Loops over experts as a graph can have them: a turn for every expert, and counts of a known length.

Model code likes to leave out experts that no token has chosen. How many turns are left then depends on the routing:

    hit = mask.sum(dim=(-1, -2)).greater(0).nonzero()          for expert in range(num_experts):
    for expert in hit:                                             choice, token = torch.where(mask[expert])
        choice, token = torch.where(mask[expert[0]])               if token.numel() == 0:
        out.index_add_(0, token, ...)                                  continue
                                                                   out.index_add_(0, token, ...)

The left becomes a loop over ``range(mask.shape[0])``; from the right ``continue`` goes. Only loops in these few
spellings are changed, and only where a turn without rows changes nothing: the only effect of a turn is written to
rows that it has found by its expert (``out.index_add_(0, token, y)``, ``out[token] += y``, ``out[token] = y``), and
these are none. All other loops stay unchanged, and a loop over a list whose experts would do something with no rows
is refused on several ranks. A mask is taken to have no negative entries.

| file | concern |
|---|---|
| ``rewrite`` | which methods of which modules |
| ``turns`` | a loop that leaves experts out, as one that does not; ``bincount`` of a known length |
| ``spellings`` | what such loops look like |
| ``empty_turns`` | the proof that a turn without rows changes nothing |
| ``callees`` | whether a module in a list does anything without rows |
"""

from hecate.wrap.loops.rewrite import ChangedLoops, make_loops_traceable

__all__ = ["ChangedLoops", "make_loops_traceable"]
