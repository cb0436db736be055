"""``hecate bisect``: which graph pass changes loss or gradients."""

from __future__ import annotations

import ast
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from hecate.commands.bisect_search import Difference, RankResult, compare, first_wrong, read_result
from hecate.commands.bisect_worker import Trial
from hecate.commands.console import console
from hecate.commands.launch import run_ranks
from hecate.commands.script_facts import TOLERANCE, ScriptFacts
from hecate.passes import FINAL_PASSES, JOINT_PASSES, PASSES, REQUIRED, summary_of

# In the order in which they run. What only lets a model be traced, or run node by node, is no part of the search.
_BY_NAME = {
    function.__name__: function
    for function in (*PASSES, *JOINT_PASSES, *FINAL_PASSES)
    if function.__name__ not in REQUIRED
}
NAMES = tuple(_BY_NAME)
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
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="leave out each pass alone, instead of halves")
    ] = False,
    own_batches: Annotated[
        bool, typer.Option("--own-batches", help="the function itself gives every rank a batch of its own, by RANK")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="seconds for one run")] = 300,
) -> None:
    """Run a step with passes switched off, and name the first that changes loss or gradients.

    The function returns a model and a batch of one rank, (nn.Module, dict of tensors), with the same weights in every
    process; instead of the dict it may give a list of batches, and behind them a hecate.Config. Each rank takes
    another part of the batch's rows, repeated to as many as there were. The reference is the step without any pass,
    and for its loss the model without Hecate.

    Ends with code 0 if nothing differs, 1 if something does or the step does not run, 2 if there is no such script.

    Example: hecate bisect mymodel.py:build --ranks 2
    """
    name = _script(script)
    with tempfile.TemporaryDirectory(prefix="hecate-bisect-") as folder:
        trials = _Trials(
            script=name, folder=Path(folder), ranks=ranks, steps=steps, own_batches=own_batches, timeout=timeout,
            console=console(),
        )  # fmt: skip
        code = _search(trials, tolerance, one_by_one=one_by_one)
    raise typer.Exit(code)


def _search(trials: _Trials, tolerance: float | None, *, one_by_one: bool) -> int:
    """Returns the exit code."""
    console = trials.console
    # Step 1: the reference, and whether it is right itself.
    reference = trials.result(NAMES, "without any pass")
    if isinstance(reference, str):
        console.print(
            "The cause is no pass. Look at the script, or at hecate.compile itself: "
            f"hecate explain {trials.script} --ranks {trials.ranks}",
            soft_wrap=True,
        )
        return 1
    facts = [ScriptFacts.from_text(one.facts) for one in reference]
    if tolerance is None:
        tolerance = facts[0].tolerance
    for note in _notes(facts, tolerance):
        console.print(f"note: {note}")
    off = _off_from_plain(trials, reference, facts[0])
    # Step 2: all passes together.
    everything = trials.differ(NAMES, reference, "with all passes")
    if not everything.beyond(tolerance):
        if off is not None and off.beyond(tolerance):
            console.print(
                f"no pass changes the result, but without any pass the loss differs from the model without Hecate "
                f"({off}). The cause is in hecate.compile itself, or the script builds another model each time."
            )
            return 1
        console.print(f"no pass changes loss or gradients by more than {tolerance:.2g}")
        return 0
    # Step 3: which.
    names = [name for name in NAMES if name not in _always_on(facts[0])]
    if one_by_one:
        healing = [
            one for one in names
            if not trials.differ([n for n in NAMES if n != one], reference, f"without {one}").beyond(tolerance)
        ]  # fmt: skip
        if not healing:
            console.print(
                "no pass alone is the cause; without --one-by-one the first is found that changes the result"
            )
            return 1
        found, alone = healing[0], healing
    else:
        count = first_wrong(
            len(names),
            lambda k: trials.differ(names[:k], reference, f"with the first {k}, up to {names[k - 1]}").beyond(
                tolerance
            ),
        )
        found = names[count - 1]
        rest = [one for one in NAMES if one != found]
        healed = not trials.differ(rest, reference, f"with all but {found}").beyond(tolerance)
        alone = [found] if healed else []
    console.print()
    console.print(f"{found} changes the result ({summary_of(_BY_NAME[found]) or 'a pass'}).")
    if len(alone) > 1:
        console.print(f"Without any one of {', '.join(alone)} it is right: the first of them is named.")
    elif alone:
        console.print(f'A way out: hecate.Config(disable_passes=("{found}",)). Without it the result is right.')
    else:
        console.print("It is not the only one: without it alone the result differs still.")
    console.print(
        f"What it changes: hecate dump {trials.script} --ranks {trials.ranks} --out graphs, then open "
        f"graphs/rank0/index.html at {found}.",
        soft_wrap=True,
    )
    return 1


def _always_on(facts: ScriptFacts) -> tuple[str, ...]:
    return ("shard_context",) if facts.attention else ()


def _notes(facts: Sequence[ScriptFacts], tolerance: float) -> Iterator[str]:
    """What the user has to know about the comparison."""
    first = facts[0]
    if len(facts) > 1 and len({one.batches for one in facts}) == 1:
        yield (
            "all ranks have the same batch, so missing or mixed-up communication is not seen: let the function "
            "return rows that differ, and at least one for each rank; or one for each RANK, with --own-batches"
        )
    if first.tolerance > TOLERANCE:
        yield (
            f"the model computes in {first.dtype}, so up to {tolerance:.2g} counts as rounding; rounding may also "
            "send tokens to other experts. In float32 smaller faults are seen"
        )
    if first.random:
        yield (
            f"the forward is random ({', '.join(first.random[:3])}{', ...' if len(first.random) > 3 else ''}), and "
            "graphs draw in another order: switch dropout off in the function, or innocent passes are named"
        )
    if first.wire_dtype:
        yield "Config(wire_dtype=) is left out: it rounds what travels, and without passes other things travel"
    if first.attention:
        yield "shard_context stays on in all runs: it is Config(attention=) itself"


def _off_from_plain(trials: _Trials, reference: Sequence[RankResult], facts: ScriptFacts) -> Difference | None:
    """How far the loss without any pass is from that of the model without Hecate; None if nobody knows."""
    bare: Sequence[RankResult] | str = reference
    if facts.left_out:
        # The plain model computes something else than with these.
        options = " and ".join(f"{name}=" for name in facts.left_out)
        bare = trials.result(NAMES, f"without any pass, and without {options}", kind="bare")
    plain = trials.result((), "the model without Hecate", kind="plain")
    if isinstance(bare, str) or isinstance(plain, str):
        trials.console.print("note: so whether the step without any pass is right itself is not known")
        return None
    return compare(bare, plain, gradients=False)


@dataclass(kw_only=True)
class _Trials:
    """Runs trials, each in processes of its own.

    Attributes:
        script: ``file.py:function``.
        folder: for results.
        log: what the last trial printed.
    """

    script: str
    folder: Path
    ranks: int
    steps: int
    timeout: float
    console: Console
    own_batches: bool = False
    log: str = ""
    _known: dict[frozenset[str], Difference] = field(default_factory=dict)
    _count: int = 0

    def differ(self, enabled: Collection[str], reference: Sequence[RankResult], what: str) -> Difference:
        """How far a run with some passes is from the reference; run once."""
        key = frozenset(enabled)
        if key not in self._known:
            self._begin(what)
            ran = self.run([name for name in NAMES if name not in key])
            self._known[key] = Difference(error=ran) if isinstance(ran, str) else compare(ran, reference)
            self._end(self._known[key])
        return self._known[key]

    def result(
        self, disabled: Sequence[str], what: str, kind: Literal["compiled", "bare", "plain"] = "compiled"
    ) -> list[RankResult] | str:
        """Results of all ranks, or why there are none."""
        self._begin(what)
        ran = self.run(disabled, kind)
        if isinstance(ran, str):
            self._end(Difference(error=ran))
        else:
            self.console.print(f"loss {ran[0].loss[0]:.6g}")
        return ran

    def run(
        self, disabled: Sequence[str], kind: Literal["compiled", "bare", "plain"] = "compiled"
    ) -> list[RankResult] | str:
        """The same, without a word."""
        self._count += 1
        out = self.folder / str(self._count)
        out.mkdir()
        trial = Trial(
            script=self.script, out=str(out), disabled=tuple(disabled), kind=kind, steps=self.steps,
            own_batches=self.own_batches,
        )  # fmt: skip
        code, self.log = run_ranks(
            "hecate.commands.bisect_worker", [trial.as_text()], ranks=self.ranks, timeout=self.timeout,
            environment={"OMP_NUM_THREADS": "1"} | dict(os.environ),
        )  # fmt: skip
        if code is None:
            return f"no end after {self.timeout:g} s"
        if code:
            return _reason(self.log)
        try:
            return [read_result(out / f"rank{rank}.npz") for rank in range(self.ranks)]
        except ValueError as error:
            return str(error)

    def _begin(self, what: str) -> None:
        # Before it runs, so that one who waits knows for what.
        self.console.print(f"{what}: ", end="", soft_wrap=True)

    def _end(self, found: Difference) -> None:
        self.console.print(str(found), soft_wrap=True)
        if found.error:
            for line in self.log.rstrip().splitlines()[-_TAIL:]:
                self.console.print(f"    {line}", soft_wrap=True)


def _reason(output: str) -> str:
    """The first error that a rank printed."""
    for line in output.splitlines():
        text = line.partition("]:")[2].strip() if line.startswith("[rank") else line.strip()
        kind, colon, _ = text.partition(": ")
        if colon and kind.rpartition(".")[2].endswith(("Error", "Exception")) and " " not in kind:
            return text[:400]
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it ended without a word"


def _script(given: str) -> str:
    """``file.py:function`` of what the user gave; looks without running it."""
    file, _, function = given.rpartition(":") if ":" in given else (given, "", "build")
    path = Path(file)
    if not path.is_file():
        raise typer.BadParameter(f"there is no file {file}; expected file.py, or file.py:function")
    try:
        tree = ast.parse(path.read_text(), str(path))
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        raise typer.BadParameter(f"{file} is not a Python file: {error}") from None
    # Of a star nobody knows what it brings.
    if not {function, "*"} & set(_defined(tree)):
        raise typer.BadParameter(
            f"{file} has no {function}(): a function that returns a model and a batch. Another name: {file}:NAME"
        )
    return f"{path.resolve()}:{function}"


def _defined(node: ast.AST) -> Iterator[str]:
    """Names that a module binds, in blocks too, and not those inside functions and classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child.name
        elif isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in child.names)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        else:
            yield from _defined(child)
