"""Reinforcement learning of an MoE model: GRPO, in which training sends tokens to the experts of the rollout.

    torchrun --nproc-per-node 2 examples/grpo_replay.py
    python examples/grpo_replay.py                         one process, the same numbers
    ... --no-replay                                        the router chooses anew in training

A small model with random weights learns to write lowercase letters. Each step generates several texts for each
prompt, rates them, and updates the model twice by the clipped ratio of probabilities now and in the rollout. Routers
would send some tokens to other experts than the rollout did: once weights have changed, or at once where an inference
engine rounds differently. Everything that is Hecate is marked.

Source: "DeepSeekMath" (2024) for GRPO; the rewards are made up.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import hecate  # 1

# Prompts come in this many parts, which ranks share, or one process takes one after the other.
PARTS, TEXTS, PROMPT, NEW = 2, 8, 4, 12
CLIP = 0.2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--updates", type=int, default=2, help="of each rollout")
    parser.add_argument("--no-replay", action="store_true", help="let the router choose anew in training")
    parser.add_argument("--backend", choices=["inductor", "aot_eager"], default="aot_eager")
    return parser.parse_args()


def build() -> Qwen3MoeForCausalLM:
    """The same weights in every process."""
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_experts=8,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


def log_probabilities(logits: Tensor, texts: Tensor) -> Tensor:
    """Of the new bytes of texts ``[n, length]``, from logits ``[n, length - 1, bytes]``: ``[n, NEW]``."""
    logits, new = logits[:, -NEW:].float(), texts[:, -NEW:]
    return logits.log_softmax(-1).gather(-1, new.unsqueeze(-1)).squeeze(-1)


def roll_out(model: torch.nn.Module, seed: int) -> tuple[Tensor, Tensor, Tensor, hecate.Routing]:
    """Texts for one prompt, their advantages, log-probabilities and routing."""
    torch.manual_seed(seed)
    device = next(model.parameters()).device
    prompts = torch.randint(97, 123, (1, PROMPT)).expand(TEXTS, PROMPT).to(device)
    model.eval()
    with hecate.record_routing(model) as routing:  # 2
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=NEW,
            do_sample=True,
            top_k=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    model.train()
    texts, logits = out.sequences, torch.stack(out.logits, dim=1)
    rewards = ((texts[:, PROMPT:] >= 97) & (texts[:, PROMPT:] < 123)).float().mean(dim=1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return texts, torch.stack([advantages, rewards]), log_probabilities(logits, texts), routing


def main() -> None:
    args = parse_arguments()
    model = build()
    if torch.cuda.is_available():
        model.to(f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}")
    hecate.compile(model, hecate.Config(backend=args.backend))  # 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = range(rank, max(PARTS, size), size)
    for step in range(args.steps):
        rollouts = [roll_out(model, step * max(PARTS, size) + part) for part in own]
        apart = torch.zeros(args.updates, device=next(model.parameters()).device)
        for update in range(args.updates):
            for turn, (texts, (advantages, _), old, routing) in enumerate(rollouts, start=1):
                hecate.set_requires_gradient_sync(model, turn == len(rollouts))
                with nullcontext() if args.no_replay else hecate.replay_routing(model, routing):  # 4
                    logits = model(input_ids=texts[:, :-1]).logits
                new = log_probabilities(logits, texts)
                ratio = (new - old).exp()
                gain = torch.minimum(
                    ratio * advantages[:, None], ratio.clip(1 - CLIP, 1 + CLIP) * advantages[:, None]
                )
                (-gain.mean() / len(rollouts)).backward()
                apart[update] = torch.maximum(apart[update], (new - old).detach().abs().max())
            hecate.clip_grad_norm_(model, 1.0)  # 5
            optimizer.step()
            optimizer.zero_grad()
        reward = torch.stack([rewards.mean() for _, (_, rewards), *_ in rollouts]).mean()
        if size > 1:
            dist.all_reduce(reward)
            dist.all_reduce(apart, dist.ReduceOp.MAX)
        if rank == 0:
            shown = ", ".join(f"{value:.1e}" for value in apart.tolist())
            print(
                f"step {step}: reward {float(reward) / size:.4f}, log-probabilities at most {shown} apart", flush=True
            )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
