"""The page of a run: whole, by itself, with the plots and alerts that belong there."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from typer.testing import CliRunner

from hecate.cli import app
from hecate.reports.plots import fewer, heat_map, line_plot
from hecate.reports.run_alerts import effective_experts, find_alerts
from hecate.reports.run_data import load_run
from hecate.reports.run_page import page_of
from tests.hecate_compile.reports.made_run import Array, make_run
from tests.support.browser import look_at, needs_browser

_VOID = {"meta", "link", "br", "img"}


class Structure(HTMLParser):
    """Elements of a page, and whether every one is closed in its turn."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID:
            return
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "figcaption"):
            self.titles.append(data)


def structure_of(page: str) -> Structure:
    parser = Structure()
    parser.feed(page)
    parser.close()
    assert not parser.open
    return parser


def skewed(experts: int, hottest: float) -> Callable[[Array], Array]:
    """Load in which one expert has a part of all rows."""

    def load(number: Array) -> Array:
        rows = np.full((len(number), 2, experts), (1 - hottest) / (experts - 1))
        rows[:, :, 3] = hottest
        return (rows * 10_000).round()

    return load


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page") / "a <run>"
    make_run(folder, ranks=2)
    return page_of(load_run(folder), name="a <run>")


def test_the_page_has_every_part(page: str) -> None:
    found = structure_of(page)
    for title in (
        "a <run>",
        "Alerts",
        "Balance",
        "Load of ranks",
        "Time",
        "Timeline of a step",
        "Memory and traffic",
        "Layers: load and placement of experts",
        "Step time",
        "loss",
        "Memory",
        "Busiest rank over the mean",
        "Rows of ranks, before",
        "Rows of ranks, after",
        "Replicas in a layer",
        "Hidden transfers",
    ):
        assert title in found.titles, title
    for title in ("Rows of experts over the mean", "Holders of experts", "Owners of experts"):
        assert found.titles.count(title) == 2, "once for each layer"
    assert "&lt;run&gt;" in page and "<run>" not in page, "names are text"


def test_the_page_needs_nothing_else(page: str) -> None:
    found = structure_of(page)
    assert not [tag for tag, _ in found.found if tag in ("script", "iframe", "object", "embed")]
    for tag, attributes in found.found:
        for name, value in attributes.items():
            if name in ("src", "href", "srcset", "action"):
                assert value is not None and value.startswith("data:"), (tag, name, value)
    assert "url(" not in page and "@import" not in page
    assert 'name="viewport"' in page, "or a telephone would shrink it"


_SVG = "{http://www.w3.org/2000/svg}"


def pictures(page: str) -> list[ElementTree.Element]:
    found = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)
    return [ElementTree.fromstring(base64.b64decode(picture)) for picture in found]


def words(picture: ElementTree.Element) -> list[str]:
    return [node.text or "" for node in picture.iter(f"{_SVG}text")]


def test_every_plot_is_a_picture_whose_letters_are_text(page: str) -> None:
    found = pictures(page)
    assert len(found) == structure_of(page).found.count(("figcaption", {})) > 10
    # Wider ones could not be read on a telephone.
    assert {picture.attrib["width"] for picture in found} == {"288pt"}
    for picture in found:
        assert {"step", "ms since the step began"} & set(words(picture))


def test_a_heat_map_shows_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.zeros((50, 4))
    values[25:, 1] = 1.0
    values[:, 3] = np.nan
    shown: list[Any] = []
    drawn = Axes.imshow
    monkeypatch.setattr(
        Axes, "imshow", lambda self, picture, **how: shown.append(picture) or drawn(self, picture, **how)
    )
    (picture,) = pictures(heat_map(values, np.arange(100, 150), title="x", rows="expert"))
    assert np.array_equal(shown[0], values.T, equal_nan=True)
    assert {"expert", "step", "100"} <= set(words(picture))
    heat_map(values * np.nan, np.arange(50), title="x", rows="expert")


def test_a_long_run_is_averaged_not_sampled() -> None:
    values = np.zeros((40_000, 1))
    values[123], values[500:600] = 4000.0, np.nan
    small, firsts = fewer(values, np.arange(40_000))
    assert small.shape == (400, 1) and small[1] == 40 and firsts[:3].tolist() == [0, 100, 200]
    assert np.isnan(small[5]) and np.nansum(small) == 40


def test_a_line_with_gaps() -> None:
    values = np.array([1.0, np.nan, 3.0, 4.0, np.inf, 6.0])
    (picture,) = pictures(line_plot({"a": values}, np.arange(6), title="x"))
    (drawn,) = (group for group in picture.iter(f"{_SVG}g") if len(list(group.iterfind(f"{_SVG}g/{_SVG}use"))) == 2)
    line = drawn.find(f"{_SVG}path")
    assert line is not None and line.attrib["d"].count("L") == 1, "no line through a gap; two lone points can be seen"
    assert "nan" not in line_plot({"a": values * np.nan}, np.arange(6), title="x").lower()


# --- alerts ---


def kinds(root: Path) -> set[str]:
    return {alert.kind for alert in find_alerts(load_run(root))}


def test_a_good_run_has_no_alerts(tmp_path: Path) -> None:
    make_run(tmp_path, steps=80)
    assert kinds(tmp_path) == set()
    assert "Nothing stands out" in page_of(load_run(tmp_path), name="x")


def dead(number: Array) -> Array:
    load = np.full((len(number), 2, 8), 100)
    load[number > 50, 1, 6] = 0
    return load


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("dead", {"load_of": dead}),
        ("collapse", {"load_of": skewed(8, 0.97)}),
        ("imbalance", {"load_of": skewed(8, 0.6)}),
        ("overlap", {"exposed_of": lambda number: np.where(number > 55, 0.9, 0.1)}),
        ("nan", {"loss_of": lambda number: np.where(number > 50, np.nan, 1.0)}),
        ("nan", {"loss_of": lambda number: np.where(number == 70, np.inf, 1.0)}),
        ("slow", {"seconds_of": lambda number: np.where(number % 10 == 5, 1.0, 0.1)}),
        ("memory", {"memory_of": lambda number: (1e9 + number * 2e7).astype(np.int64)}),
    ],
)
def test_an_alert_for_what_goes_wrong(kind: str, given: dict[str, Any], tmp_path: Path) -> None:
    make_run(tmp_path, steps=80, **given)
    assert kind in kinds(tmp_path)


@pytest.mark.parametrize(
    ("loss_of", "when"),
    [
        (lambda number: np.where(number >= 500, np.nan, 1.0), "from step 500 on"),
        (lambda number: number * np.nan, "from step 0 on"),
        (lambda number: np.where(number == 70, np.inf, 1.0), "at step 70"),
        (lambda n: np.where(n == 70, np.inf, np.where(n >= 300, np.nan, 1.0)), "at step 70 and from step 300 on"),
    ],
)
def test_the_steps_without_a_finite_loss(loss_of: Callable[[Array], Array], when: str, tmp_path: Path) -> None:
    make_run(tmp_path, steps=1000, chunk=1000, ranks=1, loss_of=loss_of)
    run = load_run(tmp_path)
    assert [alert.text for alert in find_alerts(run)] == [f"loss is not a finite number {when}"]
    gone = "on" in when.split()
    assert ("<b>nan</b>loss" in page_of(run, name="x")) == gone


def test_the_loss_is_the_last_that_was_logged(tmp_path: Path) -> None:
    make_run(tmp_path, steps=45, loss_of=lambda number: np.where(number % 10, np.nan, number))
    assert "<b>40</b>loss" in page_of(load_run(tmp_path), name="x")
    assert "nan" not in kinds(tmp_path), "values that were not logged are no alert"


def test_the_timeline_begins_with_the_step(tmp_path: Path) -> None:
    make_run(tmp_path, steps=5)
    run = load_run(tmp_path)
    late = [replace(line, times=line.times + 0.95) for line in run.timelines]
    page = page_of(replace(run, timelines=tuple(late)), name="x")
    (axis,) = (words(picture) for picture in pictures(page) if "ms since the step began" in words(picture))
    assert {"0", "1000", "rank 0", "rank 1"} <= set(axis), "and not with the first collective, 950 ms later"
    assert "Longest waits in this step" in page and page.count("made_up") == 2


def test_effective_experts() -> None:
    loads = np.array([[1, 1, 1, 1], [4, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    assert effective_experts(loads) == pytest.approx([4, 1, 2, 1])


# --- sizes of runs ---


@pytest.mark.parametrize(("steps", "ranks"), [(1, 1), (41, 16)])
def test_runs_of_all_sizes_have_a_page(steps: int, ranks: int, tmp_path: Path) -> None:
    make_run(tmp_path, steps=steps, ranks=ranks, experts=16)
    structure_of(page_of(load_run(tmp_path), name="x"))


def test_a_run_of_which_ranks_are_missing_has_a_page(tmp_path: Path) -> None:
    make_run(tmp_path, ranks=4, missing=(1, 3))
    page = page_of(load_run(tmp_path), name="x")
    structure_of(page)
    assert "nothing of ranks [1, 3]" in page


# --- the command ---


def test_the_command(tmp_path: Path) -> None:
    make_run(tmp_path / "x", steps=80, load_of=dead)
    ran = CliRunner().invoke(app, ["report", str(tmp_path / "x")])
    assert ran.exit_code == 0, ran.output
    assert "80 steps of 2 rank(s)" in ran.output and "no rows for expert 6" in ran.output
    page = (tmp_path / "x" / "report.html").read_text()
    assert 'data-kind="dead"' in page and structure_of(page)
    assert CliRunner().invoke(app, ["report", str(tmp_path / "x"), "--strict"]).exit_code == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{}/none"], "there is no folder"),
        (["{}/none", "--out", "{}/x.html"], "there is no such folder"),
        (["{}"], "no start000"),
        (["{}/x", "--out", "{}/none/x.html"], "there is no folder"),
        (["{}/damaged"], "cut off at byte 0"),
    ],
)
def test_bad_input_is_explained(arguments: list[str], said: str, tmp_path: Path) -> None:
    make_run(tmp_path / "x", steps=5)
    folder = make_run(tmp_path / "damaged", steps=5)
    (folder / "rank0.steps").write_bytes(b"x" * 100)
    ran = CliRunner().invoke(app, ["report", *(argument.format(tmp_path) for argument in arguments)])
    text = "".join(ran.output.replace("│", " ").split())
    assert ran.exit_code == 2 and said.replace(" ", "") in text, ran.output


def test_without_matplotlib_the_command_says_how_to_get_it(tmp_path: Path) -> None:
    make_run(tmp_path, steps=5)
    program = "import sys; sys.modules['matplotlib'] = None; from hecate.cli import app; app()"
    command = [sys.executable, "-c", program, "report", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1 and "pip install 'hecate-compile[report]'" in ran.stdout, ran.stdout + ran.stderr
    assert not (tmp_path / "report.html").exists()


# --- a browser ---

# What is inside closed details is not seen.
_MEASURED = """(() => {
  const shown = [...document.querySelectorAll("img")].filter(one => one.checkVisibility());
  const box = one => one.getBoundingClientRect();
  return {
    reaches: document.documentElement.scrollWidth,
    pictures: shown.map(one => [box(one).width, box(one).height, one.naturalWidth]),
  };
})()"""


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_in_a_browser(width: int, tmp_path: Path) -> None:
    make_run(tmp_path / "x", steps=80, load_of=dead)
    seen = look_at(page_of(load_run(tmp_path / "x"), name="x"), _MEASURED, width=width, folder=tmp_path)
    assert seen.console == () and seen.asked == ()
    assert seen.value["reaches"] <= width, "nothing sticks out to the right"
    found = seen.value["pictures"]
    assert len(found) > 10 and all(wide > 200 and high > 80 and natural > 0 for wide, high, natural in found)


@pytest.mark.slow
@needs_browser
def test_what_is_wrong_with_a_page_is_seen(tmp_path: Path) -> None:
    wrong = '<img src="https://example.org/x.png"><script>nothing.at_all</script><div style="width:900px">x</div>'
    seen = look_at(wrong, _MEASURED, width=400, folder=tmp_path)
    assert seen.value["reaches"] >= 900 and seen.value["pictures"][0][2] == 0
    assert any("nothing is not defined" in line for line in seen.console)
    assert seen.asked == ("https://example.org/x.png",)
