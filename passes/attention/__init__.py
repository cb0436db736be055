"""The passes of sparse and causal attention, on the graph that Dynamo captured."""

# The operators that they put into graphs are registered when these are imported.
from hecate.runtime.attention import s2_attention, s2_cache, s2_masks

__all__ = ["s2_attention", "s2_cache", "s2_masks"]
