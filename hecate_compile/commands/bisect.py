"""``hecate bisect``: which graph pass changes loss or gradients."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hecate.commands.bisect_worker import Difference, Kind, RankResult, Trial, compare
from hecate.commands.console import console
from hecate.commands.launch import run_ranks
from hecate.passes import FINAL_PASSES, JOINT_PASSES, PASSES, REQUIRED, summary_of

# The passes that are searched, in the order in which they run. Passes that only let a model be traced, or run node by
# node, are left out.
_BY_NAME = {
    function.__name__: function
    for function in (*PASSES, *JOINT_PASSES, *FINAL_PASSES)
    if function.__name__ not in REQUIRED
}
NAMES = tuple(_BY_NAME)
# The largest relative error of numbers with 24 bits or more; coarser ones differ by some roundings.
TOLERANCE, _ROUNDINGS = 1e-4, 8
# Lines of a failed trial's output that are shown.
_TAIL = 15


def bisect(
    script: Annotated[str, typer.Argument(help="file.py, with a function build(); or file.py:function")],
    ranks: Annotated[int, typer.Option(min=1, help="ranks to run on; at one rank few passes have work")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="steps; replicas, if any, come from the second on")] = 2,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help=f"largest relative error that is none; by default {TOLERANCE:g}, and more for models in bfloat16 or "
            "float16",
        ),
    ] = None,
    own_batches: Annotated[
        bool, typer.Option("--own-batches", help="the function itself gives every rank a batch of its own, by RANK")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="seconds for one run")] = 300,
) -> None:
    """Run a step with passes switched off, and name the first that changes loss or gradients.

    The function returns a model and a batch of one rank, (nn.Module, dict of tensors), with the same weights in every
    process; instead of the dict it may give a list of batches, and after them a hecate.Config. Each rank takes
    another part of the batch's rows, repeated to as many as there were. The reference is the step without any pass,
    and for its loss the model without Hecate.

    Ends with code 0 if nothing differs, 1 if something does or the step does not run, 2 if there is no such script.

    Example: hecate bisect mymodel.py:build --ranks 2
    """
    file, _, function = script.rpartition(":") if ":" in script else (script, "", "build")
    if not Path(file).is_file():
        raise typer.BadParameter(f"there is no file {file}; expected file.py, or file.py:function")
    with tempfile.TemporaryDirectory(prefix="hecate-bisect-") as folder:
        trials = _Trials(
            script=f"{Path(file).resolve()}:{function}",
            folder=Path(folder),
            ranks=ranks,
            steps=steps,
            own_batches=own_batches,
            timeout=timeout,
            console=console(),
        )
        raise typer.Exit(_search(trials, tolerance))


def _search(trials: _Trials, tolerance: float | None) -> int:
    """Search for the pass, and return the exit code."""
    say = trials.console.print
    # Step 1: the reference, and whether it is right itself.
    reference = trials.result(NAMES, "without any pass")
    if isinstance(reference, str):
        say(
            "The cause is no pass. Look at the script, or at hecate.compile itself: "
            f"hecate explain {trials.script} --ranks {trials.ranks}",
            soft_wrap=True,
        )
        return 1
    facts = [one.facts for one in reference]
    limit = max(TOLERANCE, _ROUNDINGS * facts[0]["rounding"]) if tolerance is None else tolerance
    for note in _notes(facts, limit):
        say(f"note: {note}")
    off = _off_from_plain(trials, reference, facts[0]["options"])
    # Step 2: all passes together.
    if not trials.differ(NAMES, reference, "with all passes").beyond(limit):
        if off is not None and off.beyond(limit):
            say(
                f"no pass changes the result, but without any pass the loss differs from the model without Hecate "
                f"({off}). The cause is in hecate.compile itself, or the script builds another model each time."
            )
            return 1
        say(f"no pass changes loss or gradients by more than {limit:.2g}")
        return 0
    # Step 3: find the first wrong pass.
    names = [name for name in NAMES if name != "shard_context" or "attention" not in facts[0]["options"]]
    count = first_wrong(
        len(names),
        lambda k: trials.differ(names[:k], reference, f"with the first {k}, up to {names[k - 1]}").beyond(limit),
    )
    found = names[count - 1]
    others = [one for one in NAMES if one != found]
    alone = not trials.differ(others, reference, f"with all but {found}").beyond(limit)
    say()
    say(f"{found} changes the result ({summary_of(_BY_NAME[found]) or 'a pass'}).")
    if alone:
        say(f'A way out: hecate.Config(disable_passes=("{found}",)). Without it the result is right.')
    else:
        say("It is not the only one: without it alone the result differs still.")
    say(
        f"What it changes: hecate dump {trials.script} --ranks {trials.ranks} --out graphs, then open "
        f"graphs/rank0/index.html at {found}.",
        soft_wrap=True,
    )
    return 1


def first_wrong(count: int, wrong: Callable[[int], bool]) -> int:
    """Return a k for which the first k of ``count`` passes together are wrong and the first k - 1 are not, by halves.

    ``wrong(count)`` is known to be true and ``wrong(0)`` false; neither is asked.
    """
    good, bad = 0, count
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if wrong(middle) else (middle, bad)
    return bad


def _notes(facts: Sequence[dict[str, Any]], limit: float) -> Iterator[str]:
    """Yield notes on the comparison that the user has to know."""
    first = facts[0]
    if len(facts) > 1 and len({one["batches"] for one in facts}) == 1:
        yield (
            "all ranks have the same batch, so missing or mixed-up communication is not seen: let the function "
            "return rows that differ, and at least one for each rank; or one for each RANK, with --own-batches"
        )
    if _ROUNDINGS * first["rounding"] > TOLERANCE:
        yield (
            f"the model computes in {first['dtype']}, so up to {limit:.2g} counts as rounding; rounding may also "
            "send tokens to other experts. In float32 smaller faults are seen"
        )
    if first["random"]:
        yield (
            "the forward draws random numbers, and graphs draw in another order: switch dropout off in the function, "
            "or innocent passes are named"
        )
    if "wire_dtype" in first["options"]:
        yield "Config(wire_dtype=) is left out: it rounds what travels, and without passes other things travel"
    if "attention" in first["options"]:
        yield "shard_context stays on in all runs: it is Config(attention=) itself"


def _off_from_plain(trials: _Trials, reference: Sequence[RankResult], options: Sequence[str]) -> Difference | None:
    """Return how far the loss without any pass is from that of the model without Hecate; None if that is unknown."""
    bare: Sequence[RankResult] | str = reference
    # With these options the compiled model computes something else than the plain one.
    left_out = " and ".join(f"{name}=" for name in ("attention", "mixed_precision") if name in options)
    if left_out:
        bare = trials.result(NAMES, f"without any pass, and without {left_out}", kind="bare")
    plain = trials.result((), "the model without Hecate", kind="plain")
    if isinstance(bare, str) or isinstance(plain, str):
        trials.console.print("note: so whether the step without any pass is right itself is not known")
        return None
    return compare(bare, plain, gradients=False)


@dataclass(kw_only=True)
class _Trials:
    """Runs trials of ``script``, each in processes of its own, with results in ``folder``."""

    script: str
    folder: Path
    ranks: int
    steps: int
    timeout: float
    console: Console
    own_batches: bool = False
    _count: int = 0

    def differ(self, enabled: Collection[str], reference: Sequence[RankResult], what: str) -> Difference:
        disabled = [name for name in NAMES if name not in enabled]
        ran = self.result(disabled, what, tell=lambda ran: str(compare(ran, reference)))
        return Difference(error=ran) if isinstance(ran, str) else compare(ran, reference)

    def result(
        self,
        disabled: Sequence[str],
        what: str,
        kind: Kind = "compiled",
        tell: Callable[[list[RankResult]], str] = lambda ran: f"loss {ran[0].loss[0]:.6g}",
    ) -> list[RankResult] | str:
        """Return the results of all ranks, or why there are none; print what is run and the outcome."""
        # Printed before the run, so that users know what they wait for.
        self.console.print(f"{what}: ", end="", soft_wrap=True)
        ran, log = self.run(disabled, kind)
        self.console.print(f"no result: {ran}" if isinstance(ran, str) else tell(ran), soft_wrap=True)
        for line in log.rstrip().splitlines()[-_TAIL:] if isinstance(ran, str) else ():
            self.console.print(f"    {line}", soft_wrap=True)
        return ran

    def run(self, disabled: Sequence[str], kind: Kind) -> tuple[list[RankResult] | str, str]:
        """Run a trial; return results or why there are none, and output; BadParameter if the script is refused."""
        self._count += 1
        out = self.folder / str(self._count)
        out.mkdir()
        trial = Trial(self.script, str(out), tuple(disabled), kind, self.steps, self.own_batches)
        code, log = run_ranks(
            "hecate.commands.bisect_worker",
            [json.dumps(asdict(trial))],
            ranks=self.ranks,
            timeout=self.timeout,
            environment={"OMP_NUM_THREADS": "1"} | dict(os.environ),
        )
        for refused in out.glob("refused*"):
            raise typer.BadParameter(refused.read_text())
        if code is None:
            return f"no end after {self.timeout:g} s", log
        if code:
            # The first failure is the cause, since other ranks then wait in vain.
            failed = sorted(out.glob("failed*"), key=lambda path: path.stat().st_mtime_ns)
            return (failed[0].read_text()[:400] if failed else f"exit code {code}"), log
        try:
            return [RankResult.read(out / f"rank{rank}.npz") for rank in range(self.ranks)], log
        except ValueError as error:
            return str(error), log
