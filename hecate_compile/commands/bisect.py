"""``hecate bisect``: which graph pass changes loss or gradients."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hecate.commands.bisect_search import Difference, RankResult, compare, first_wrong, read_result
from hecate.commands.bisect_worker import Trial
from hecate.passes import FINAL_PASSES, JOINT_PASSES, PASSES, summary_of

# In the order in which they run; a pass that runs in several places is switched off in all.
_BY_NAME = {function.__name__: function for function in reversed((*PASSES, *JOINT_PASSES, *FINAL_PASSES))}
NAMES = tuple(dict.fromkeys(function.__name__ for function in (*PASSES, *JOINT_PASSES, *FINAL_PASSES)))


def bisect(
    script: Annotated[str, typer.Argument(help="file.py, with a function build(); or file.py:function")],
    ranks: Annotated[int, typer.Option(min=1, help="ranks to run on; at one rank few passes have work")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="steps; replicas, if any, come from the second on")] = 2,
    tolerance: Annotated[float, typer.Option(min=0, help="largest relative error that is none")] = 1e-4,
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="leave out each pass alone, instead of halves")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="seconds for one run")] = 300,
) -> None:
    """Run a step with passes switched off, and name the first that changes loss or gradients.

    The function returns a model and a batch of one rank, (nn.Module, dict of tensors), with the same weights in every
    process; instead of the dict it may give a list of batches, and behind them a hecate.Config. The reference is the
    step without any pass, and for its loss the model without Hecate.

    Ends with code 0 if nothing differs, 1 if something does or the step does not run, 2 if there is no such script.

    Example: hecate bisect mymodel.py:build --ranks 2
    """
    name = _script(script)
    console = Console(width=120, markup=False, emoji=False, highlight=False)
    with tempfile.TemporaryDirectory(prefix="hecate-bisect-") as folder:
        trials = _Trials(script=name, folder=Path(folder), ranks=ranks, steps=steps, timeout=timeout, console=console)
        code = _search(trials, tolerance, one_by_one=one_by_one)
    raise typer.Exit(code)


def _search(trials: _Trials, tolerance: float, *, one_by_one: bool) -> int:
    """Returns the exit code."""
    console = trials.console
    # Step 1: the reference, and whether it is right itself.
    reference = trials.run(NAMES, "without any pass")
    if isinstance(reference, str):
        console.print(
            f"without any pass there is no result: {reference}\nThe cause is no pass. Look at the script, or at "
            "hecate.compile itself: hecate explain"
        )
        return 1
    plain = trials.run((), "the model without Hecate", plain=True)
    off = None if isinstance(plain, str) else compare(reference, plain, gradients=False)
    # Step 2: all passes together.
    everything = trials.differ(NAMES, reference, "with all passes")
    if not everything.beyond(tolerance):
        if off is not None and off.beyond(tolerance):
            console.print(
                f"no pass changes the result, but without any pass the loss differs from the model without Hecate "
                f"({off}). The cause is in hecate.compile itself, or the script builds another model each time."
            )
            return 1
        console.print(f"no pass changes loss or gradients by more than {tolerance:g}")
        return 0
    # Step 3: which.
    if one_by_one:
        healing = [
            one for one in NAMES
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
            len(NAMES),
            lambda k: trials.differ(NAMES[:k], reference, f"with the first {k}, up to {NAMES[k - 1]}").beyond(
                tolerance
            ),
        )
        found = NAMES[count - 1]
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
    console.print(f"Its graphs: HECATE_DUMP=graphs, and look for {found}.")
    return 1


@dataclass(kw_only=True)
class _Trials:
    """Runs trials, each in processes of its own.

    Attributes:
        script: ``file.py:function``.
        folder: for results.
    """

    script: str
    folder: Path
    ranks: int
    steps: int
    timeout: float
    console: Console
    _known: dict[frozenset[str], Difference] = field(default_factory=dict)
    _count: int = 0

    def differ(self, enabled: Collection[str], reference: Sequence[RankResult], what: str) -> Difference:
        """How far a run with some passes is from the reference; run once."""
        key = frozenset(enabled)
        if key not in self._known:
            ran = self.run([name for name in NAMES if name not in key], what)
            self._known[key] = Difference(error=ran) if isinstance(ran, str) else compare(ran, reference)
            self.console.print(f"{what}: {self._known[key]}")
        return self._known[key]

    def run(self, disabled: Sequence[str], what: str, *, plain: bool = False) -> list[RankResult] | str:
        """Results of all ranks, or why there are none."""
        self._count += 1
        out = self.folder / str(self._count)
        out.mkdir()
        trial = Trial(script=self.script, out=str(out), disabled=tuple(disabled), plain=plain, steps=self.steps)
        problem = self._launch(trial, out)
        if problem:
            return problem
        try:
            return [read_result(out / f"rank{rank}.npz") for rank in range(self.ranks)]
        except ValueError as error:
            return str(error)

    def _launch(self, trial: Trial, out: Path) -> str:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks), "--rdzv-backend", "c10d",
                    "--rdzv-endpoint", "127.0.0.1:0", "--module"] if self.ranks > 1 else ["-m"]  # fmt: skip
        command = [sys.executable, *launcher, "hecate.commands.bisect_worker", trial.as_text()]
        environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
        # A file, not a pipe: a rank that outlives torchrun would keep a pipe open.
        with (out / "log").open("w+") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                code = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                # torchrun ends its ranks when it is asked to.
                process.terminate()
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                return f"no end after {self.timeout:g} s"
            log.seek(0)
            return _reason(log.read()) if code else ""


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
    if function not in {name for node in tree.body for name in _defined(node)}:
        raise typer.BadParameter(
            f"{file} has no {function}(): a function that returns a model and a batch. Another name: {file}:NAME"
        )
    return f"{path.resolve()}:{function}"


def _defined(node: ast.stmt) -> list[str]:
    """Names that a statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    return []
