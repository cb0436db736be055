"""All kernels, what decides most first, and their cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.gpu_check import dispatch, experts, links, products, rows, sparse_attention
from benchmarks.gpu_check.case import DTYPES, Case, Maker, Sizes

# What decides most comes first.
KERNELS: dict[str, tuple[Callable[[Maker, torch.dtype], Case | Iterator[Case]], Sequence[torch.dtype]]] = {
    "grouped_mm": (products.products, DTYPES),
    "weight_grads": (products.weight_grads, DTYPES),
    "gather_rows": (rows.gather, DTYPES),
    "scatter_rows": (rows.scatter, DTYPES),
    "sum_replicas": (experts.sum_gradients, DTYPES),
    "clear_rows": (rows.clear, DTYPES[:1]),
    "pack_experts": (experts.pack, DTYPES),
    "unpack_experts": (experts.unpack, DTYPES),
    # float32 has smaller blocks.
    "s2_forward": (sparse_attention.forward, (torch.bfloat16, torch.float16)),
    "s2_backward": (sparse_attention.backward, (torch.bfloat16, torch.float16)),
    "expand_segments": (rows.expand, (torch.int64,)),
    "split_rows": (rows.split, (torch.int64,)),
    "put_rows": (links.put, DTYPES),
    "take_rows": (links.take, DTYPES),
    "post_words": (links.post, (torch.int64,)),
    "wait_words": (links.wait, (torch.int64,)),
    "balance_rows": (dispatch.balance, (torch.int64,)),
    "ticket_segments": (dispatch.segments, (torch.int64,)),
    "device_dispatch": (dispatch.all_of_it, (torch.int64,)),
}


def cases_of(name: str, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """One case after the other, made when it is its turn."""
    make, dtypes = KERNELS[name]
    for dtype in dtypes:
        made = make(Maker(sizes, device), dtype)
        yield from [made] if isinstance(made, Case) else made
