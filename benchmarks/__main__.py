"""Run benchmark modules, each in its own process: print their figures, keep them, and refresh docs/performance.md.

``python -m benchmarks`` runs all but the slow ones; ``python -m benchmarks NAME ...`` runs those named. Figures of
modules that were not run stay as they were. A target that is not met is reported and is no failure of the benchmark;
the exit code is 1 if a module failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.figures import Entry

MODULES = (
    "images", "tables", "many_clients", "linear", "memory", "traffic", "start_up", "heads_phase", "own_tables",
    "secure_sums",
)  # fmt: skip
SLOW = (
    "gpu",
    "large_images",
    "flower_overhead",
    "flare_overhead",
    "exam_difference",
    "crossed_domains",
    "second_order_by_k",
)
"""They take minutes each or want a GPU, and run by name only."""

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def measured(module: str) -> tuple[list[Entry], bool]:
    """Run one module in its own process; returns its figures, and whether it came to its end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures"
        path.touch()
        program = "import sys; from benchmarks.figures import record; record(*sys.argv[1:])"
        done = subprocess.run([sys.executable, "-c", program, module, str(path)], cwd=ROOT, check=False)
        return [json.loads(line) for line in path.read_text().splitlines()], done.returncode == 0


def run(modules: Iterable[str], results: Path, page: Path) -> tuple[list[Entry], list[str]]:
    """Run modules one after another, keeping what is found after each; returns that, and which modules failed."""
    found: list[Entry] = []
    failed: list[str] = []
    for module in modules:
        print(f"== {module}", flush=True)
        new, whole = measured(module)
        found += new
        if not whole:
            failed.append(module)
        entries = merged(json.loads(results.read_text()) if results.exists() else [], new)
        results.write_text(json.dumps(entries, indent=2) + "\n")
        page.write_text(refreshed(page.read_text(), entries))
    return found, failed


def merged(before: list[Entry], found: list[Entry]) -> list[Entry]:
    """Replace figures by new ones of the same name; others stay."""
    return list(({entry["name"]: entry for entry in before} | {entry["name"]: entry for entry in found}).values())


def refreshed(text: str, entries: list[Entry]) -> str:
    """Return a page with the table between its two markers made anew."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    rows = ["| figure | measured | target | met | how |", "| --- | ---: | --- | --- | --- |"]
    rows += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(entry)) + " |" for entry in entries]
    return "\n".join([before + BEGIN, *rows, END + after])


def cells(entry: Entry) -> tuple[str, ...]:
    met = {True: "yes", False: "**no**", None: ""}[entry["met"]]
    return entry["name"], shown(entry["value"]), entry["target"], met, entry["note"]


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def show(entries: list[Entry], failed: Sequence[str], console: Console) -> None:
    """Print the figures, and what is not met or failed."""
    table = Table("figure", "measured", "target", "met", "how")
    for entry in entries:
        name, value, target, met, note = map(escape, cells(entry))
        table.add_row(name, value, target, "[bold red]no[/]" if entry["met"] is False else met, note)
    console.print(table)
    for entry in entries:
        if entry["met"] is False:
            console.print(f"NOT met: {escape(entry['name'])}: {shown(entry['value'])}, target {entry['target']}")
    for module in failed:
        console.print(f"FAILED: {module}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n")[0])
    help_ = f"{', '.join(MODULES)} (these by default); slow: {', '.join(SLOW)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=help_)
    names = parser.parse_args().names
    for name in names:
        if name not in MODULES + SLOW:
            parser.error(f"there is no benchmark '{name}'; there are {help_}.")
    modules = [f"benchmarks.{name}" for name in names or MODULES]
    results = ROOT / "benchmarks" / "results.json"
    if not names:  # all anew, so that no figure outlives its name
        results.unlink(missing_ok=True)
    found, failed = run(modules, results, ROOT / "docs" / "performance.md")
    show(found, failed, Console())
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
