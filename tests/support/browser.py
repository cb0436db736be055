"""Pages in a real browser: Chromium without a window, driven by its command line alone."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.extent import ALL

# The page is shown in a frame, because no window is narrower than 500 pixels. Its own text is not touched.
_FRAME = """<!DOCTYPE html>
<meta charset="utf-8"><link rel="icon" href="data:,">
<iframe id="page" srcdoc="{page}" style="width:{width}px;height:900px;border:0"></iframe>
<pre id="found"></pre>
<script>
addEventListener("load", () => {{
  const view = document.getElementById("page").contentWindow;
  const found = (window => {{ const document = window.document; return {expression}; }})(view);
  document.getElementById("found").textContent = JSON.stringify({{
    width: view.innerWidth, value: found, asked: view.performance.getEntriesByType("resource").map(one => one.name),
  }});
}});
</script>
"""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a browser made of a page.

    Attributes:
        value: of the expression.
        console: what it said in its console, such as errors of scripts.
        asked: addresses of what the page wanted beside itself.
    """

    value: Any
    console: tuple[str, ...]
    asked: tuple[str, ...]


def find_browser() -> str | None:
    """The program; Debian and Ubuntu name it chromium."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


# Where all is to be tested, a missing browser is an error (``look_at``), and no reason to test less.
needs_browser = pytest.mark.skipif(
    find_browser() is None and not ALL, reason="no chromium is found: apt install chromium"
)


def look_at(page: str, expression: str, *, width: int, folder: Path) -> Seen:
    """Show a page ``width`` pixels wide, and evaluate an expression of JavaScript in it once it is loaded."""
    browser = find_browser()
    assert browser is not None, "no chromium is found: apt install chromium"
    frame = folder / "frame.html"
    frame.write_text(
        _FRAME.format(page=html.escape(page, quote=True), width=width, expression=expression), encoding="utf-8"
    )
    done = subprocess.run(
        # Without a sandbox, because root has none; the page is our own.
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1400,1000",
            "--enable-logging=stderr",
            "--dump-dom",
            frame.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert text is not None and text[1], f"the page did not load:\n{done.stderr[-3000:]}"
    found = json.loads(html.unescape(text[1]))
    assert found["width"] == width
    said = re.findall(r":CONSOLE[:(]\d+\)?\] (.*)", done.stderr)
    return Seen(value=found["value"], console=tuple(said), asked=tuple(found["asked"]))
