"""Sparse attention, from the user's options to operators and kernels.

| file | what is in it |
|---|---|
| ``pattern`` | the pattern of blocks, what it costs, and which keys a cache keeps; whole numbers, no torch |
| ``options`` | the user's options, checked, and how they become the pattern of a layer; no torch either |
| ``s2_attention`` | the operator: attention whose heads share the context among them |
| ``s2_masks`` | its pattern as masks, and the check of masks at run time |
| ``s2_cache`` | keys and values that are needed again, and one new token's attention to them |
| ``s2_blocks`` | the attention on CPUs |
| ``s2_forward``, ``s2_backward`` | Triton kernels: ``[b,h,S,d]`` -> ``[b,h,S,d], [b,h,S]``, and gradients |

The kernels are imported by the operator, and only where they run.
"""
