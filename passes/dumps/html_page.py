"""Frame and colours of every page that Hecate writes: one file that needs no network, readable on a telephone."""

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
    """Return the whole file, with ``style`` beside the rules that all pages share."""
    # The empty icon keeps browsers from asking a server for one.
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


# Pale, so that black text can be read on them.
_LAYERS = ("#d7e8fa", "#fde7c8", "#dcefd6", "#f6d9e5", "#e4defa", "#d2efee", "#f7efb5", "#e9ded4")
_OTHER = "#eef0f2"

# Bright enough for black text, strong enough for a bar; similar kinds have one hue (after Okabe and Ito).
KINDS: dict[str, str] = {
    "rows": "#56a5dc",
    "counts": "#e8c547",
    "tickets": "#f2dd8f",
    "replicas": "#7fd1b4",
    "experts": "#36ab85",
    "dense": "#cc79a7",
    "bucket": "#e6b3cf",
    "fractions": "#f2dd8f",
}


def colour_of(layer: str) -> str:
    """Return the colour of a layer by its short name, ``L3``; every eighth has the same."""
    digits = layer.removeprefix("L")
    return _LAYERS[int(digits) % len(_LAYERS)] if digits.isdecimal() else _OTHER


def kind_colour(carries: str) -> str:
    """Return the colour of a collective that carries rows, replicas, ..."""
    return KINDS.get(carries, _OTHER)


def layer_class(layer: str) -> str:
    """Return the name of a layer's colour in a page's style; "" for a layer without a number."""
    digits = layer.removeprefix("L")
    return f"layer{int(digits) % len(_LAYERS)}" if digits.isdecimal() else ""


def style() -> str:
    """Return the rules of all colours, for a page."""
    rules = [f".layer{number}{{background:{colour}}}" for number, colour in enumerate(_LAYERS)]
    rules += [f".carries-{kind}{{box-shadow:inset 5px 0 0 {colour}}}" for kind, colour in KINDS.items()]
    return "\n".join(rules)
