"""Draw the floors as docs/images/floors.svg, from the contract in pyproject.toml and what packages say of themselves.

Run as `python docs/draw_floors.py`; a test sees that the picture is the one that this makes.
"""

from __future__ import annotations

import ast
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "floors.svg"
WIDTH, HEIGHT, GAP, LEFT = 980, 40, 6, 170
COLOURS = {
    "for people": ("#e8eefc", "cli experiments api runs report"),
    "between sites": ("#fdeee2", "federation"),
    "what is left": ("#e9f5ee", "comparison results"),
    "the method": ("#fbf3d7", "simulation algorithm evaluation models"),
    "the ground": ("#efefef", "data objectives options settings methods lazy errors extras"),
}


def layers() -> list[list[str]]:
    """Return the floors from the top, each a list of modules that do not know each other."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = tables["tool"]["importlinter"]["contracts"][0]
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def first_sentence(name: str) -> str:
    """Return what a package or module says of itself."""
    place = ROOT / "src" / "feddar" / name
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0]


def picture() -> str:
    """Return the SVG."""
    names = [name for layer in layers() for name in layer]
    height = len(names) * (HEIGHT + GAP) + 30
    rows = "".join(_floor(place, name) for place, name in enumerate(names))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" role="img" '
        f'aria-label="The floors of feddar: each imports only what is below it">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n{rows}'
        f'<text x="12" y="{height - 10}" font-size="13" fill="#59616b">Each floor imports only floors below it; '
        "`make lint` checks it.</text>\n</svg>\n"
    )


def _floor(place: int, name: str) -> str:
    top = 6 + place * (HEIGHT + GAP)
    colour = next(colour for colour, held in COLOURS.values() if name in held.split())
    return (
        f'<rect x="6" y="{top}" width="{WIDTH - 12}" height="{HEIGHT}" rx="6" fill="{colour}" stroke="#c3c9d1"/>\n'
        f'<text x="20" y="{top + 26}" font-size="16" font-weight="bold" fill="#1d2126">{escape(name)}</text>\n'
        f'<text x="{LEFT}" y="{top + 26}" font-size="13" fill="#1d2126">{escape(first_sentence(name))}</text>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
