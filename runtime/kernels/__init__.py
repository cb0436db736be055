"""Triton kernels, one in a file. Nothing imports them but operators that run on a GPU: Triton may not be there.

| file | what it computes |
|---|---|
| ``s2_forward`` | S2-Attention and the logarithm of each row's sum |
| ``s2_backward`` | its gradients |
"""
