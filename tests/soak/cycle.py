"""One cycle: a run that is killed somewhere, and whether everything is there afterwards."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hecate.checkpoints.publish import manifest_of, published
from hecate.checkpoints.safety.files import CorruptError, check_files
from tests.soak import launch
from tests.soak.kill import EVERYWHERE, FIRST_ONLY, WHOM, Kill


@dataclass
class Summary:
    """What happened in all cycles so far."""

    cycles: int = 0
    struck: int = 0
    places: Counter[str] = field(default_factory=Counter)
    whom: Counter[str] = field(default_factory=Counter)
    saved: int = 0
    loads: int = 0
    problems: list[str] = field(default_factory=list)

    def text(self) -> str:
        """For people."""
        lines = [
            f"{self.cycles} cycles, {self.struck} of them with a kill that struck, {self.loads} loads, "
            f"{self.saved} steps reported as saved, {len(self.problems)} problems",
            "where: " + ", ".join(f"{place} {count}" for place, count in sorted(self.places.items())),
            "whom: " + ", ".join(f"{whom} {count}" for whom, count in sorted(self.whom.items())),
        ]
        return "\n".join(lines + self.problems)


def draw_kill(draw: random.Random) -> Kill:
    """A kill somewhere, of somebody."""
    place = draw.choice(EVERYWHERE + FIRST_ONLY)
    often = place not in ("verifying", "reading")
    return Kill(
        place,
        draw.randint(1, 4) if often else 1,
        draw.randrange(3),
        draw.choice(WHOM),
        draw.choice((0.0, 0.0, 0.002 * draw.random(), 0.05 * draw.random())),
    )


class Soak:
    """Cycles on one folder of checkpoints, each of which goes on from what the one before left."""

    def __init__(self, seed: int, *, steps: int = 12) -> None:
        self._draw, self._steps = random.Random(seed), steps
        self._folder = Path(tempfile.mkdtemp(prefix="hecate-soak-"))
        self._reported = 0
        self.summary = Summary()

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def cycle(self, kill: Kill | None = None) -> None:
        """Run, be killed, look."""
        kill = kill if kill is not None else draw_kill(self._draw)
        size, number = self._draw.randint(1, 3), self.summary.cycles
        notes = self._folder / f"notes{number}"
        notes.mkdir()
        arguments = {"folder": str(self._folder / "checkpoints"), "notes": str(notes), "steps": self._steps}
        arguments |= {"seed": number, "kill": vars(kill)}
        try:
            code = launch.run(size, arguments)
        except launch.StillRunning as error:
            self._problem(kill, size, str(error))
            code = 0
        lines = [json.loads(line) for line in _lines(notes / "log")]
        restarted = sum(line["what"] == "loaded" for line in lines) > size
        struck = code != 0 or restarted or not any(line["what"] == "done" for line in lines)
        self.summary.cycles += 1
        if struck:
            self.summary.struck += 1
            self.summary.places[kill.place] += 1
            self.summary.whom[kill.whom] += 1
        if code > 0:
            said = "".join(path.read_text()[-1500:] for path in sorted(notes.rglob("stderr.log")))
            self._problem(kill, size, f"it ended with {code}\n{said}")
        for line in lines:
            self._look_at(line, kill, size)
        self._look_at_folder(kill, size, clean=not struck)
        shutil.rmtree(notes)

    def _look_at(self, line: dict[str, object], kill: Kill, size: int) -> None:
        step = int(str(line["step"]))
        if line["what"] == "saved":
            self.summary.saved += line["rank"] == 0
            self._reported = max(self._reported, step)
        elif line["what"] == "loaded":
            self.summary.loads += line["rank"] == 0
            if step < self._reported:
                self._problem(kill, size, f"step {self._reported} was reported as saved, and {step} was loaded")
        elif line["what"] == "wrong":
            self._problem(kill, size, f"step {step} on rank {line['rank']}: {line['more']}")

    def _look_at_folder(self, kill: Kill, size: int, *, clean: bool) -> None:
        folder = self._folder / "checkpoints"
        for one in published(folder):
            try:
                check_files(one.path, manifest_of(one.path).files)
            except CorruptError as error:
                self._problem(kill, size, f"{one.path.name} was published, and {error}")
        drafts = [path.name for path in folder.glob("*.tmp-*")] if folder.is_dir() else []
        if clean and drafts:
            self._problem(kill, size, f"a run that was not killed left {drafts}")

    def _problem(self, kill: Kill, size: int, text: str) -> None:
        self.summary.problems.append(f"cycle {self.summary.cycles}, {size} ranks, {kill}: {text}")


def _lines(path: Path) -> list[str]:
    # The last line may be of a process that was killed in it.
    return [line for line in path.read_text().split("\n")[:-1] if line] if path.exists() else []
