"""Loops over experts as a graph can have them: a turn for every expert, and counts of a known length.

Model code likes to leave out experts that no token has chosen. How many turns are left then depends on the routing:

    hit = mask.sum(dim=(-1, -2)).greater(0).nonzero()          for expert in range(num_experts):
    for expert in hit:                                             choice, token = torch.where(mask[expert])
        choice, token = torch.where(mask[expert[0]])               if token.numel() == 0:
        out.index_add_(0, token, ...)                                  continue
                                                                   out.index_add_(0, token, ...)

The left becomes a loop over ``range(mask.shape[0])``; from the right ``continue`` goes. Only these few spellings are
changed, of masks without negative entries, and only where a turn's one effect is written to rows that its expert has
(``out.index_add_(0, token, y)``, ``out[token] += y``, ``out[token] = y``): without rows it changes nothing. A loop
over a list whose experts would do something without rows is refused on several ranks.
"""

from hecate.wrap.loops.rewrite import ChangedLoops, make_loops_traceable

__all__ = ["ChangedLoops", "make_loops_traceable"]
