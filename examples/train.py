"""Train a small Qwen3-MoE as a byte-level language model on text files, with Hecate.

    torchrun --nproc-per-node 2 examples/train.py                      the text of Python's standard library
    torchrun --nproc-per-node 2 examples/train.py --text ~/my/texts    any folder with text files
    python examples/train.py                                           one process
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train.py --checkpoints runs/1 --resume
                                                                       goes on where it was, whatever killed it

The model is the unmodified transformers one, with random weights; everything that is Hecate is marked.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import hecate  # 1

SUFFIXES = {".py", ".txt", ".md", ".rst", ".json", ".html", ".c", ".h", ".cpp", ".rs", ".go", ".js", ".ts", ".java"}


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    standard_library = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--text", type=Path, default=standard_library, help="folder with text files")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, of all ranks together")
    parser.add_argument("--micro-batches", type=int, default=1, help="batches per step, whose gradients add up")
    parser.add_argument("--length", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--auxiliary-loss", type=float, default=0.0, help="weight of the load-balancing loss")
    parser.add_argument("--backend", choices=["inductor", "aot_eager"], default="inductor")
    parser.add_argument("--policy", choices=["hecate", "static", "gather"], default="hecate")
    parser.add_argument("--checkpoints", type=Path, help="folder to save to")
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--record", type=Path, help="file for a trace of the routing, trace.npz")
    parser.add_argument("--monitor", type=Path, help="folder for a run that hecate report draws")
    parser.add_argument("--dump", type=Path, default=Path("hecate-dump"), help="folder for the graphs")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--generate", type=int, default=60, help="bytes to generate at the end")
    args = parser.parse_args(given)
    if min(args.steps, args.micro_batches) < 1 or args.experts < 2 or not 1 <= args.top_k <= args.experts:
        parser.error("needs at least 1 step and micro-batch, 2 experts, and --top-k between 1 and --experts")
    if args.resume and args.checkpoints is None:
        parser.error("--resume needs --checkpoints, the folder to go on from")
    if args.save_every < 1 or args.batch < int(os.environ.get("WORLD_SIZE", 1)):
        parser.error("needs --save-every of at least 1, and a sequence in --batch for every rank")
    return args


def read_text(folder: Path, limit: int = 16 * 2**20) -> torch.Tensor:
    """All text files below ``folder`` as one uint8 tensor, at most ``limit`` bytes, in a fixed order."""
    if not folder.is_dir():
        raise SystemExit(f"--text {folder}: no such folder")
    parts, size = [], 0
    for path in sorted(folder.rglob("*")):
        # Installed packages differ from machine to machine; the library itself does not.
        if path.suffix not in SUFFIXES or "site-packages" in path.parts or not path.is_file():
            continue
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    if size < 100_000:
        raise SystemExit(f"--text {folder}: {size} bytes of text, at least 100,000 are needed")
    return torch.frombuffer(bytearray(b"".join(parts)[:limit]), dtype=torch.uint8)


def unigram_loss(text: torch.Tensor) -> float:
    """Cross-entropy in nats of a model that knows only how frequent each byte is."""
    p = torch.bincount(text.int(), minlength=256).double() / len(text)
    p = p[p > 0]
    return float(-(p * p.log()).sum())


def sample_batch(text: torch.Tensor, rows: int, length: int, number: int) -> torch.Tensor:
    """The batch of this number, the same on all ranks and whenever it is asked for."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(0, len(text) - length, (rows, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


def generate(model: torch.nn.Module, prompt: bytes, count: int, rows: int, length: int) -> bytes:
    """Sample ``count`` bytes after ``prompt``.

    Every rank computes the same thing on a batch of the training shape, so that no new graph is compiled.
    """
    generator = torch.Generator().manual_seed(0)
    written = list(prompt)
    device = next(model.parameters()).device
    for _ in range(count):
        window = written[-length:]
        ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
        ids[0, : len(window)] = torch.tensor(window)
        logits = model(input_ids=ids, labels=ids).logits[0, len(window) - 1].float().cpu()
        choices = torch.topk(logits / 0.7, 40)
        picked = torch.multinomial(choices.values.softmax(-1), 1, generator=generator)
        written.append(int(choices.indices[picked]))
    return bytes(written)


def make_model(args: argparse.Namespace) -> Qwen3MoeForCausalLM:
    """The same weights in every process."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        moe_intermediate_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=args.hidden // 4,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        max_position_embeddings=args.length,
        output_router_logits=args.auxiliary_loss > 0,
        router_aux_loss_coef=args.auxiliary_loss,
        use_cache=False,
        # Byte 0 does not occur in text, so generation never stops early.
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


def build() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A smaller model and a batch of one rank, for hecate explain, dump and bisect of examples/train.py:build."""
    args = parse_arguments(["--layers", "2", "--hidden", "64", "--experts", "8", "--batch", "4", "--length", "64"])
    ids = sample_batch(read_text(args.text, limit=2**20), args.batch, args.length, number=0)
    return make_model(args), {"input_ids": ids, "labels": ids}


def main() -> None:
    args = parse_arguments()
    text = read_text(args.text)
    model = make_model(args)
    if torch.cuda.is_available():
        # Ranks share GPUs if there are too few.
        model.to(f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}")
    model = hecate.compile(  # 2
        model, hecate.Config(backend=args.backend, policy=args.policy, dump=args.dump)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / args.steps))
    )

    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = next(model.parameters()).device
    start, losses = 0, []
    if args.resume:
        loaded = hecate.load(args.checkpoints, model, optimizer, required=False)  # 3
        if loaded is not None:
            schedule.load_state_dict(loaded.extra["schedule"])
            start, losses = loaded.step, loaded.extra["losses"]
    console = Console(quiet=rank != 0, width=None)
    console.print(f"{len(text):,} bytes of {args.text} on {size} rank(s); compiling, about a minute ...")
    if start:
        console.print(f"going on from step {start}, saved in {args.checkpoints}")
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    recording = hecate.record(model, args.record) if args.record else nullcontext()
    monitor = hecate.monitor(model, args.monitor, first_step=start * args.micro_batches) if args.monitor else None
    with recording, monitor or nullcontext(), Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=args.steps, completed=start)
        for step in range(start, args.steps):
            began = time.perf_counter()
            total = torch.zeros((), device=device)
            for micro in range(args.micro_batches):
                batch = sample_batch(text, args.batch, args.length, step * args.micro_batches + micro)
                ids = batch.tensor_split(size)[rank].to(device)
                hecate.set_requires_gradient_sync(model, micro == args.micro_batches - 1)
                # Gradients are averaged over ranks, whose parts may differ by a sequence.
                share = len(ids) * size / args.batch / args.micro_batches
                loss = model(input_ids=ids, labels=ids).loss * share
                loss.backward()
                total += loss.detach()
            hecate.clip_grad_norm_(model, 1.0)  # 4
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(total, size))
            if monitor is not None:
                monitor.log(loss=losses[-1])
            if args.checkpoints and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
                extra = {"schedule": schedule.state_dict(), "losses": losses}
                hecate.save(args.checkpoints, model, optimizer, step=step + 1, extra=extra, keep=3)  # 5
            rate = args.micro_batches * args.batch * args.length / (time.perf_counter() - began)
            shown = f"loss {losses[-1]:.3f}, {rate:,.0f} tokens/s"
            if step % 10 == 0 or step in (start, args.steps - 1):
                imbalance = hecate.stats(model).imbalance  # 6
            progress.update(task, advance=1, description=f"{shown}, max/mean rows {imbalance:.2f}")

    rows = -(-args.batch // size)
    written = generate(model, args.prompt.encode(), args.generate, rows, args.length)
    last = sum(losses[-10:]) / len(losses[-10:])
    statistics = hecate.stats(model)  # all ranks together
    if rank == 0:
        print(hecate.explain(model), statistics, sep="\n")
    console.print(f"first loss {losses[0]:.3f}, last loss {last:.3f} (mean of the last 10 steps)")
    console.print(f"byte unigram model {unigram_loss(text):.3f}")
    console.print(f"generated: {written.decode(errors='replace')!r}", markup=False)
    console.print(f"graphs before and after every pass: {args.dump}/rank0")
    if dist.is_initialized():
        dist.destroy_process_group()


def mean_over_ranks(loss: torch.Tensor, size: int) -> float:
    if size > 1:
        dist.all_reduce(loss)
    return float(loss) / size


if __name__ == "__main__":
    main()
