"""Triton kernels of the operators, one a file, each with a plain reference beside it.

| file | what one launch does | shapes |
|---|---|---|
| ``gather_rows`` | rows picked, packed and cast | ``[R,H], [n] -> [n,H]`` |
| ``scatter_rows`` | rows brought to their places and cast | ``[n,H], [n] -> [R,H]`` |
| ``pack_experts`` | experts picked into one buffer, and back, tensor by tensor | ``[E,...], [n] -> [n,width]`` |
| ``sum_replicas`` | parts of gradients added to each slot, in order | ``[S,...], [m,width], [S+1], [m]``, in place |
| ``expand_segments`` | ranges joined to one index | ``[G], [G] -> [n]`` |
| ``grouped_mm`` | rows times the matrices of their slots | ``[R,K], [E_r,K,N], [K',K,N], [S] -> [R,N]`` |
| ``weight_grads`` | the gradient of those matrices | ``[R,K], [R,N], [S] -> [E_r,K,N], [K',K,N]`` |
| ``clear_rows`` | zeros where torch's own product leaves memory unwritten | ``[R,N], [S]`` or ``[S,A,B], [S]`` |
| ``launch``, ``operands`` | where kernels run, how they are tuned, and their operands | |

A kernel runs on CUDA, or on the CPU under Triton's interpreter, for float32, bfloat16 and float16. Elsewhere, and for
other dtypes, the function with its name calls the reference, ``*_reference`` in the same file. Operands are on one
device. A dtype that does not fit raises TypeError; a shape, device or layout ValueError. Numbers in an index or in
offsets are not checked on a GPU, for which the host would wait. Results are contiguous.

Kernels know no operators and no layers, and ranks as numbers only. The host waits for the device only while one is
tuned. Those of one-sided exchanges are in ``hecate.runtime.one_sided``, of attention in ``hecate.runtime.attention``.
"""
