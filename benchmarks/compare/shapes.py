"""The paper's models, scaled down, and links of matching speed.

All lengths of a model (hidden size, feed-forward size, tokens per rank, sequence) are divided by :data:`SCALE`, so
the bytes of a rank's tokens over the bytes of an expert stay what they are. An expert has three matrices
(gate, up, down) of together the size of the paper's two. What is not the paper's:

- 32 experts on 8 ranks, four on each, where the paper has two on each: the recorded traces have 32;
- layers: 2 for its 12 and 4 for its 24;
- two nodes of four ranks for its four of eight. So half of the rows leave a node where routing is even, not three
  quarters, and four ranks share a link, not eight: the exchange weighs a third of what it does there, compared with
  compute. What overlap can hide (t, in experts) is kept, so the exchange could not be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SCALE = 8
NODES, RANKS_PER_NODE = 2, 4
WORLD_SIZE = NODES * RANKS_PER_NODE
# Of a core for each rank; what is left of two cores is for threads that communicate.
CORES = 0.15
VOCABULARY = 128
# Of DDP's buckets of gradients, which are 25 MB as it ships: a matrix here has SCALE**2 times fewer elements than the
# paper's, so a bucket holds as many matrices as it would there. With 25 MB all gradients would be in one, and would
# wait for the whole backward.
BUCKET_MB = 25 / SCALE**2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model.

    Attributes:
        hidden, ffn: sizes of a token and of an expert's inside.
        sequences, sequence: the batch of a rank.
        shared: size of the inside of a shared expert; 0 for none.
    """

    name: str
    hidden: int
    ffn: int
    sequences: int
    sequence: int
    layers: int = 2
    experts: int = 32
    top_k: int = 2
    shared: int = 0

    @property
    def tokens(self) -> int:
        """Of one rank in a step."""
        return self.sequences * self.sequence

    @property
    def rows(self) -> int:
        """Tokens, each counted once for every expert that it goes to."""
        return self.tokens * self.top_k

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.ffn * 4

    @property
    def forward_flops(self) -> tuple[int, int]:
        """Of one layer and rank with even routing: attention (causal), and experts."""
        attention = self.tokens * (8 * self.hidden**2 + 2 * self.sequence * self.hidden)
        return attention, self.rows * 6 * self.hidden * self.ffn + self.tokens * 6 * self.hidden * self.shared


def _paper(name: str, hidden: int, sequence: int, layers: int) -> Shape:
    hidden, sequence, tokens = hidden // SCALE, sequence // SCALE, 8192 // SCALE
    # Three matrices instead of two, in whole vectors.
    ffn = round(4 * hidden / 3 / 4) * 4
    return Shape(name=name, hidden=hidden, ffn=ffn, sequence=sequence, sequences=tokens // sequence, layers=layers)


SHAPES = {
    shape.name: shape
    for shape in (
        _paper("gpt-moe-s", 768, 2048, 2),
        _paper("gpt-moe-l", 1536, 2048, 2),
        _paper("bert-moe", 1024, 512, 2),
        _paper("bert-moe-deep", 1024, 512, 4),
        # Many small experts: Qwen3-MoE's ratio of hidden to feed-forward size, top 8 of 64, and a shared expert.
        Shape(name="modern", hidden=96, ffn=36, sequence=256, sequences=2, experts=64, top_k=8, shared=96),
    )
}


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link of a node.

    Attributes:
        experts_hidden: t, how many experts cross it in the time of a layer's attention, for GPT-MoE-S.
    """

    name: str
    experts_hidden: float


# Cluster A: 100 Gb/s for eight V100; cluster B: 400 Gb/s for eight A100 (paper, section 5).
LINKS = {link.name: link for link in (Link(name="a", experts_hidden=3.4), Link(name="b", experts_hidden=5.5))}


def link_rate(link: Link, attention: float) -> float:
    """Bytes per second that make t what it is on that cluster.

    Args:
        attention: measured seconds of GPT-MoE-S's attention, forward, per layer (``calibrate.py``).
    """
    return link.experts_hidden * SHAPES["gpt-moe-s"].expert_bytes / attention


def ratios(shape: Shape, rate: float, attention: float) -> dict[str, float]:
    """The dimensionless numbers of a cell.

    Args:
        attention: as in :func:`link_rate`; other operations are taken to be as fast.
    """
    base = SHAPES["gpt-moe-s"].forward_flops[0]
    own, experts = (flops * attention / base for flops in shape.forward_flops)
    crossing = RANKS_PER_NODE * shape.rows * shape.hidden * 4 * (1 - 1 / NODES)
    return {
        "exchange / layer forward": crossing / rate / (own + experts),
        "experts hidden by attention (t)": own * rate / shape.expert_bytes,
        "token bytes of a rank / expert bytes": shape.rows * shape.hidden * 4 / shape.expert_bytes,
    }


def build(shape: Shape) -> Any:
    """The model with random weights, the same on every rank; its router is :mod:`benchmarks.compare.routing`'s."""
    import torch
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    options: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden,
        moe_intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        max_position_embeddings=shape.sequence,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    if shape.shared:
        config = Qwen2MoeConfig(**options, shared_expert_intermediate_size=shape.shared)
        return Qwen2MoeForCausalLM(config)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**options, head_dim=shape.hidden // 4))
