"""How help looks: options in panels, the few that matter first, and commands in groups.

A parameter says its panel by typer's ``rich_help_panel``, and that it is not among the first by ``hidden``: where there
are many, --help leaves it out and --help-all shows it. Types of the parser are not named, since they are in different
modules in different versions of typer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from feddar.errors import UserError
from feddar.methods import closest, nearest
from feddar.settings import PANELS

FEW = 16
"""A command with at most so many options shows all of them."""
WIDTH = {"max_content_width": 100}
"""Lines of help are as wide as the terminal, and not wider than this."""
_NAMES_UP_TO = 30
_ALL = "feddar.help_all"


class Command(TyperCommand):
    """A command whose help shows options in panels, and of many only the first."""

    def __init__(self, name: str | None, *, params: list[Any], **more: Any) -> None:
        options = [each for each in params if each.param_type_name == "option"]
        many = any(each.name == "help_all" for each in options)
        self.later = {each.name for each in options if each.hidden and many}
        for each in options:
            each.hidden = False  # the shell completes them all
        super().__init__(name, params=params, **more)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options; the last line says how many options are left out."""
        left_out = set() if ctx.meta.get(_ALL) else self.later
        shown = [each for each in self.get_params(ctx) if each.name not in left_out]
        _write_panels(formatter, [(_panel_of(each), each.get_help_record(ctx)) for each in shown], PANELS)
        if left_out:
            formatter.write_paragraph()
            formatter.write_text(f"{len(left_out)} more options: {ctx.command_path} --help-all")


def _panel_of(param: Any) -> str:
    if param.param_type_name == "argument":
        return "arguments"
    return getattr(param, "rich_help_panel", None) or "options"


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool | None,
    typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show all options and exit."),
]
"""The option of commands with more than a ``FEW`` options; it ends the command, and so has no value there."""


class Group(TyperGroup):
    """The program itself, whose help shows its commands in groups, each in one line."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the options of the program itself."""
        commands: Mapping[str, Any] = self.commands
        room = formatter.width - max(map(len, commands)) - 4
        lines = [(each.rich_help_panel, (name, each.get_short_help_str(room))) for name, each in commands.items()]
        _write_panels(formatter, lines)
        _write_panels(formatter, [("options", each.get_help_record(ctx)) for each in self.get_params(ctx)])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is named; if there is none, name the nearest."""
        if args and args[0] not in self.commands and not ctx.resilient_parsing:
            raise UserError(f"there is no command '{args[0]}': {nearest(args[0], list(self.commands))}")
        return super().resolve_command(ctx, args)


def _write_panels(
    formatter: Any, records: Iterable[tuple[str, tuple[str, str] | None]], order: Iterable[str] = ()
) -> None:
    """Write names and what they mean, in panels that share the columns: arguments, these in order, then any others."""
    panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in ("arguments", *order)}
    for panel, record in records:
        if record is not None:
            panels.setdefault(panel, []).append(record)
    names = [len(name) for panel in panels.values() for name, _ in panel]
    width = max((length for length in names if length <= _NAMES_UP_TO), default=0)
    for panel, rows in panels.items():
        if rows:
            with formatter.section(f"{panel[0].upper()}{panel[1:]}"):
                formatter.write_dl([(name.ljust(width), meaning) for name, meaning in rows], _NAMES_UP_TO)


def said_of(error: Any) -> str:
    """Return what the parser found wrong as one sentence, with the nearest option and with the command's help."""
    context, wrong = getattr(error, "ctx", None), error.format_message().strip()
    if hasattr(error, "option_name") and hasattr(error, "possibilities"):
        close = closest(error.option_name.lstrip("-"), [each.lstrip("-") for each in error.possibilities or ()])
        wrong = f"{error.message}." + (f" Did you mean --{close}?" if close else "")
    return f"{wrong} (see: {context.command_path if context else 'feddar'} --help)"
