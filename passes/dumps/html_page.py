"""The frame of every page that Hecate writes: one file that needs no network, readable on a telephone."""

from __future__ import annotations

from html import escape

_STYLE = """
:root{color-scheme:light}
*{box-sizing:border-box}
body{font:15px/1.45 system-ui,sans-serif;color:#1a1a1a;background:#fff;margin:0 auto;max-width:1280px;padding:16px}
h1{font-size:1.5em;margin:0 0 4px}
details{margin:8px 0}summary{cursor:pointer;padding:4px 0}
@media(max-width:600px){body{padding:8px;font-size:14px}}
"""


def html_page(title: str, body: str, style: str) -> str:
    """Return the whole file.

    Args:
        body: as HTML.
        style: rules beside those that all pages share.
    """
    # The empty icon keeps browsers from asking a server for one.
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )
