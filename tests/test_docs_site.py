"""The pages of the site: all are listed, links hold, tutorials run, and pictures are those that scripts draw."""

import re
import shlex
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
from docs import draw_floors, draw_groups

from feddar import objectives
from feddar.methods import METHODS
from helpers.command import feddar

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
FENCED = re.compile(r"^```.*?^```", flags=re.S | re.M)


def anchors(page):
    """Return the anchors of a page's headings, which GitHub and the site make alike."""
    titles = re.findall(r"^#+ +(.*)$", FENCED.sub("", page.read_text()), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_page_is_in_the_contents():
    listed = re.findall(r"^```{toctree}\n(.*?)^```", (DOCS / "index.md").read_text(), flags=re.S | re.M)
    names = [line for block in listed for line in block.splitlines() if line and not line.startswith(":")]
    assert sorted(names) == sorted(
        page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES if page != DOCS / "index.md"
    )


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *PAGES], ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page):
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text()))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} leads to {name}, which is not there"
        assert not anchor or anchor in anchors(file), f"{page.name} leads to #{anchor}, which {file.name} does not have"


@pytest.mark.more
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
@patch.dict(METHODS)
@patch.object(objectives, "KINDS", objectives.KINDS)
def test_the_cells_of_tutorials_run(page, tmp_path):
    names = {}
    for cell in re.findall(r"^```{code-cell} ipython3\n(.*?)^```", page.read_text(), flags=re.S | re.M):
        code = re.sub(r"^:.*\n", "", cell, flags=re.M)  # without tags
        if code.startswith("!"):
            command, *arguments = shlex.split(code[1:])
            assert command == "feddar"
            feddar(*arguments, cwd=tmp_path)
        else:
            with chdir(tmp_path), redirect_stdout(StringIO()):
                exec(compile(code, page.name, "exec"), names)
    assert len(names["run"].results() if "run" in names else names["results"]) > 0


@pytest.mark.parametrize("script", [draw_floors, draw_groups], ids=lambda script: script.__name__)
def test_pictures_are_those_that_their_scripts_draw(script):
    assert script.PICTURE.read_text(encoding="utf-8") == script.picture()


def test_packages_of_the_site_are_pinned_beside_those_of_the_lock():
    pinned, locked = (
        [line.split("==")[0].lower().replace("_", "-") for line in file.read_text().splitlines() if "==" in line]
        for file in (DOCS / "requirements.txt", ROOT / "requirements.lock")
    )
    assert {"sphinx", "furo", "myst-nb"} <= set(pinned) and not set(pinned) & set(locked)
    assert len(pinned) + 1 == len((DOCS / "requirements.txt").read_text().splitlines())
