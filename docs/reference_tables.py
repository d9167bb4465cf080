"""A Sphinx extension: tables of settings and methods, and the help of commands, made from the code that they describe.

``settings-table MODEL`` lists the fields of a pydantic model, ``methods-table`` the rows of ``feddar.METHODS``, and
``command-reference`` what ``feddar COMMAND --help-all`` says of every command. Also, a link that reads `method.md`, as
is usual on GitHub, reads as the page's title on the site.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from docutils import nodes
from pydantic import BaseModel
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.testing import CliRunner

from feddar.cli import COMMANDS, app
from feddar.cli.options import kinds_of
from feddar.methods import METHODS, RECOMMENDED

COLUMNS = 100
"""Characters in a line of help."""


class Generated(SphinxDirective):
    """A directive that stands for Markdown."""

    def run(self) -> list[nodes.Node]:
        """Return what the Markdown becomes."""
        return self.parse_text_to_nodes(self.markdown(), allow_section_headings=True)

    def markdown(self) -> str:
        """Return what stands in the directive's place."""
        raise NotImplementedError


class SettingsTable(Generated):
    """The fields of a pydantic model, given by its module and name."""

    required_arguments = 1

    def markdown(self) -> str:
        """Return one row for each field: its name, values, default and meaning."""
        home, _, name = self.arguments[0].rpartition(".")
        return settings_table(getattr(import_module(home), name))


class MethodsTable(Generated):
    """The rows of the table of methods."""

    def markdown(self) -> str:
        """Return one row for each method: who shares what, and what was chosen where its paper leaves it open."""
        rows = [
            (
                f"**`{name}`**" if name == RECOMMENDED else f"`{name}`",
                row.encoder,
                row.heads,
                row.paper,
                f"`{row.knob}`" if row.knob else "",
                row.reading,
            )
            for name, row in METHODS.items()
        ]
        return table(("method", "encoder", "heads", "paper", "tuned", "where its paper is open"), rows)


class CommandReference(Generated):
    """The help of every command."""

    def markdown(self) -> str:
        """Return a section for each command, in the groups and the order of `feddar --help`."""
        sections = []
        for group, commands in COMMANDS.items():
            sections.append(f"## {group[0].upper()}{group[1:]}")
            names = [command.__name__.replace("_", "-") for command in commands]
            sections += [f"### feddar {name}\n\n```text\n{help_of(name)}\n```" for name in names]
        return "\n\n".join(sections)


def settings_table(model: type[BaseModel]) -> str:
    """Return a table of a model's fields as Markdown."""
    rows = []
    for name, field in model.model_fields.items():
        kinds = [each.__name__ if isinstance(each, type) else f"`{each}`" for each in kinds_of(field)]
        rows.append((f"`{name}`", ", ".join(kinds), in_words(field), field.description or ""))
    return table(("name", "values", "default", "meaning"), rows)


def in_words(field: Any) -> str:
    """Return the default of a field as it is written in Python, and nothing where it is left open."""
    if field.is_required():
        return "required"
    return "" if field.default in (None, "") else f"`{field.default}`"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def help_of(command: str) -> str:
    """Return all help of a command, in lines of one width."""
    runner, width = CliRunner(), {"COLUMNS": str(COLUMNS)}
    said = [runner.invoke(app, [command, asked], env=width, prog_name="feddar") for asked in ("--help-all", "--help")]
    return next(each.stdout for each in said if each.exit_code == 0).strip()


def name_pages(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Let links whose text is the name of a page's file read as the title of that page."""
    for link in doctree.findall(nodes.reference):
        place = link.get("refuri", "").partition("#")[0].removesuffix(".html")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), place))
        if link.astext().endswith(".md") and target in app.env.titles:
            link.children = [nodes.inline("", app.env.titles[target].astext())]


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx of the directives."""
    app.add_directive("settings-table", SettingsTable)
    app.add_directive("methods-table", MethodsTable)
    app.add_directive("command-reference", CommandReference)
    app.connect("doctree-resolved", name_pages)
    return {"parallel_read_safe": True}
