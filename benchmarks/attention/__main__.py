"""S2-Attention beside dense attention: alone, in generation, in a training step, and what models learn with it.

    python -m benchmarks.attention                          alone, decode and step; half an hour on one core
    python -m benchmarks.attention --full                   lengths up to 32,768; two hours
    python -m benchmarks.attention alone --flex             compiled flex_attention too, forward only: torch 2.13 has
                                                            no backward of it on CPUs
    python -m benchmarks.attention language retrieval       quality; half an hour

Parts:

    alone       forward, and forward with backward, against scaled_dot_product_attention(is_causal=True)
    decode      one new token: dense attention to all keys, S2 to what the sparse cache keeps; bytes of both
    step        a training step of a small Qwen3-MoE in which attention is most of the work, 8,192 tokens
    language    a byte-level language model, dense and with S2, from the same seed to the same step
    retrieval   recall of key-value pairs among noise, which needs the whole context: 6 kinds of attention, 3 seeds

One thread, and CPU time of this process: other programs on the machine hardly show. Systems alternate call by call,
in the other order in every second round. A ratio is that of two calls of the same round; a launch says the median
over its rounds, and what is printed is the median over launches with the lowest and the highest. Beside it stands the
bound: one over the share of blocks that are computed. Samples are written to build/benchmarks/attention.json (or
where ``HECATE_RESULTS`` says), each part with the commit that made it, and beside them a plot of what ran.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.attention import alone, decode, language, retrieval, step
from benchmarks.attention.plot import plot
from benchmarks.attention.timing import Call, joined
from benchmarks.results_folder import results_folder

PARTS: dict[str, ModuleType] = {
    "alone": alone,
    "decode": decode,
    "step": step,
    "language": language,
    "retrieval": retrieval,
}


# Parts whose spread is over seeds, or that have none.
QUALITY = ("language", "retrieval")
# Seconds after which a launch is ended; the longest takes a quarter of it.
LIMIT = 7200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; by default the first three")
    parser.add_argument("--launches", type=int, default=3, help="of what is timed")
    parser.add_argument("--full", action="store_true", help="lengths up to 32,768, and more rounds")
    parser.add_argument("--flex", action="store_true", help="compiled flex_attention beside it, forward only")
    parser.add_argument("--rounds", type=int, help="calls of each system in a launch")
    parser.add_argument("--lengths", type=int, nargs="*", help="tokens, instead of the usual ones")
    parser.add_argument("--steps", type=int, help="of training, for quality: 1,000 of retrieval, 600 of language")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--launch-to", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(PARTS)}")
    if args.launches < 1:
        parser.error("--launches: at least 1")
    if args.launch_to is not None:
        # One part in this process, for the one that asked.
        (part,) = args.parts
        args.launch_to.write_text(json.dumps(run_part(part, args)))
        return
    parts = args.parts or tuple(PARTS)[:3]
    # Now, for the checkout may change while this runs.
    path, commit = results_folder() / "attention.json", described()
    found: dict[str, list[Any]] = {part: [] for part in parts}
    for number in range(args.launches):
        for part in parts:
            if number and part in QUALITY:
                continue
            found[part].append(launch(part, sys.argv[1:]))
            write(path, part, found[part], commit)
    results = {part: joined(found[part]) if part not in QUALITY else found[part][0] for part in parts}
    for part in parts:
        print("\n".join(PARTS[part].table(results[part])))
    if {"alone", "decode"} & set(results):
        plot(results, path.with_suffix(".png"))


def run_part(part: str, args: argparse.Namespace) -> Any:
    """What one launch says of one part."""
    torch.set_num_threads(1)
    rounds = args.rounds or (5 if args.full else 3)
    lengths = args.lengths or [2048, 4096, 8192, *([16384, 32768] if args.full else [])]
    calls: dict[str, Call] = {
        "alone": lambda: alone.run(lengths, rounds, with_flex=args.flex),
        "decode": lambda: decode.run(args.lengths or [8192, 32768, *([131072] if args.full else [])], 10 * rounds),
        "step": lambda: step.run(args.lengths[0] if args.lengths else 8192, rounds),
        "language": lambda: language.run(args.steps or 600),
        "retrieval": lambda: retrieval.run(args.steps or 1000, args.seeds),
    }
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        # What would be measured is dense.
        warnings.filterwarnings("error", message=".*attention stays dense")
        return calls[part]()


def launch(part: str, options: Sequence[str]) -> Any:
    """:func:`run_part` in a process of its own, with the options of this one."""
    given = [option for option in options if option not in PARTS]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.attention", part, *given, "--launch-to", str(path)]
        subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=LIMIT)
        return json.loads(path.read_text())


def described() -> str:
    """The commit of the checkout."""
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def write(path: Path, part: str, launches: Sequence[Any], commit: str) -> None:
    """Put one part's samples into the file, which may hold other parts of other commits."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    kept = {name: one for name, one in kept.items() if name in PARTS and "launches" in one}
    kept[part] = {"commit": commit, "torch": torch.__version__, "launches": list(launches)}
    path.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
