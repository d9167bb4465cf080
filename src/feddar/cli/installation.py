"""The command about the installation itself: doctor."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version

from rich.markup import escape

from feddar.cli.console import console
from feddar.data.sources.data_folder import VARIABLE, data_folder
from feddar.errors import one_line
from feddar.extras import Extra, Package, extras, packages_of


def doctor() -> None:
    """Say what is installed, and what is missing and for what."""
    _show("This machine", [
        ("feddar", version("feddar")),
        ("Python", f"{platform.python_version()}, {sys.executable}"),
        ("platform", platform.platform()),
        ("processors", _processors()),
        ("devices", _devices()),
        ("data", _data()),
    ])  # fmt: skip
    _show("Packages that it needs", [(each.name, _found(each)) for each in packages_of("feddar")])
    _show("Extras", [(each.name, _state(each)) for each in extras()])


def _show(title: str, rows: Sequence[tuple[str, str]]) -> None:
    console.print(f"[bold]{title}[/bold]")
    width = max(len(name) for name, _ in rows)
    for name, said in rows:
        lines = said.replace("\n", "\n" + " " * (width + 4))
        console.print(f"  {name:{width}}  {escape(lines)}", highlight=False, soft_wrap=True)


def _processors() -> str:
    every = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    return f"{every}" if usable == every else f"{usable} for this process, of {every}"


def _devices() -> str:
    try:
        from feddar.models.devices import devices_here
    except Exception as error:  # an installation that is broken is what this command is for
        return f"unknown, since torch cannot be imported: {one_line(error)}"
    here = devices_here()
    absent = [kind for kind in ("cuda", "mps") if not any(each.startswith(kind) for each in here)]
    return ", ".join(here) + (f" (no {', no '.join(absent)})" if absent else "")


def _data() -> str:
    """Return where the built-in cohorts of real data are looked for."""
    folder = data_folder()
    if folder is None:
        return f"none: name the folder of the real data sets by {VARIABLE} or --data"
    origin = f"named by {VARIABLE}" if os.environ.get(VARIABLE) else "found beside"
    return f"{folder}, {origin}{'' if folder.is_dir() else ', where there is no such folder'}"


def _found(package: Package) -> str:
    """Return the version of a package that is here, and what is wrong with it."""
    if package.will_do:
        return f"{package.found}"
    return f"{package.found or 'missing'}, where {package.wanted} is needed: pip install --upgrade feddar"


def _state(extra: Extra) -> str:
    """Return whether an extra is here and what it gives; if it is missing, also how to get it."""
    if not extra.lacking:
        return f"present: {extra.gives}"
    lacking = ", ".join(
        f"{each.name}, {each.found} is not {each.wanted}" if each.found else each.name for each in extra.lacking
    )
    return f"missing: {extra.gives}\n{extra.install} (lacking: {lacking})"
