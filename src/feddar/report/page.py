"""The page: one self-contained HTML file made from the files of a comparison or of runs.

Every number on it comes from ``results.csv``, ``curves.csv`` or ``config.toml`` (for runs: ``metrics.csv``). Tables and
heat maps are HTML, and the figures are Plotly's. The library is in the file, so that it opens without a network, and a
content security policy forbids any network access. Parts without data are left out.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
from pydantic import BaseModel

from feddar.data.sources import BUILT_IN, source_named
from feddar.errors import UserError
from feddar.evaluation.validation import SPLIT
from feddar.report import figures, page_tables
from feddar.report.figures import AxisScale, Dot
from feddar.report.folders import Compared, Difference, Mean, Tested, read_folders
from feddar.report.markdown import POOLED, evaluated_with, undefined
from feddar.report.numbers import direction, metric_name
from feddar.report.page_tables import number, samples
from feddar.report.validation import about_choices, span
from feddar.results.run_folder import replacing, writing
from feddar.settings import Plan, Settings

HERE = Path(__file__).parent
MARK = b"<span>feddar</span>"
"""What every page has, also those of version 0.1, and other files do not."""
MOST_PANELS = 12
FEW_METHODS = 5
THRESHOLDED = ("tpr", "fpr", "selection_rate")
GAPS = {
    "auc": "how often a positive is ranked above a negative; no threshold is involved",
    "tpr": "true positive rate: the share of positives that are found",
    "fpr": "false positive rate: the share of negatives that are flagged by mistake",
    "selection_rate": "the share of all samples that are flagged",
}


@dataclass(frozen=True)
class Panel:
    """A figure with its heading, a note, and its content in words (for screen readers)."""

    key: str
    title: str
    note: str
    words: str
    figure: dict[str, Any]


def write_page(folders: Sequence[Path], out: Path, title: str | None = None) -> None:
    """Read a comparison folder, or run folders, and write one HTML file; a file that is no page of ours is kept."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{out} is not the name of a page: let it end in .html.")
    if out.exists() and MARK not in out.read_bytes():
        raise UserError(f"{out} exists and is no page of feddar: choose another name with --out.")
    _require("jinja2", "plotly", "scipy")
    page = _render(_content(read_folders(folders), title))
    with writing(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as temporary:
            temporary.write_text(page, encoding="utf-8")


def _require(*packages: str) -> None:
    for package in packages:
        try:
            import_module(package)
        except ImportError:
            raise UserError(f"the page needs the package {package}: pip install 'feddar[compare]'.") from None


def _render(content: dict[str, Any]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    panels = [panel for part in content["panels"].values() for panel in part]
    scripts = {"library": figures.library(), "script": (HERE / "page.js").read_text(encoding="utf-8")}
    embedded = {
        "figures": {panel.key: panel.figure for panel in panels},
        "dark": {figures.LIGHT[name]: colour for name, colour in figures.DARK.items()},
        "faint": figures.LIGHT["faint"],
    }
    return environment.get_template("page.html.jinja").render(
        **content,
        **scripts,
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        light=figures.LIGHT,
        dark=figures.DARK,
        embedded=_json(embedded),
        hashes=" ".join(map(_hash, scripts.values())),
    )


def _json(value: Any) -> str:
    """Return JSON that is safe inside a script element."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def _hash(script: str) -> str:
    """Return the hash by which the content security policy allows a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _content(c: Compared, title: str | None) -> dict[str, Any]:
    """Return the values of the template."""
    who, gaps = page_tables.shown_clients(c), _gaps(c)
    lines = figures.strokes(c.methods)
    curves = {place: c.curve(*place) for place in _curve_places(c)}
    panels = {
        "differences": _difference_panels(c),
        "domains": _domain_panels(c),
        "curves": _curve_panels(c, curves, lines),
        "validation": _validation_panels(c, lines),
        "gaps": _gap_panels(c, gaps),
    }
    data = str(c.config.get("data", {}).get("data", "the data"))
    what = c.methods[0] if len(c.methods) == 1 else _several(c.methods, "method")
    return {
        "c": c,
        "title": title or f"{what} on {Path(data).name}",
        "data": data,
        "synthetic": data in BUILT_IN and BUILT_IN[data].about.startswith("synthetic"),
        "metric": metric_name(c.metric),
        "direction": direction(c.metric),
        "predicted_with": evaluated_with(c.rows),
        "finding": _finding(c),
        "undefined": undefined(c.results),
        "facts": _facts(c),
        "repeats": _repeats(c),
        "last": _last(c),
        "choices": {method: " ".join(about_choices(each)) for method, each in c.choices.items()},
        "scores": page_tables.score_table(c),
        "others": page_tables.metric_table(c) if c.other_means else None,
        "differences": page_tables.difference_table(c) if c.differences else None,
        "references": page_tables.reference_table(c),
        "pooled": " ".join(POOLED.split()),
        "gaps": page_tables.gap_table(c, gaps) if gaps else None,
        "gap_words": {metric_name(name): GAPS[name] for name in gaps if name in GAPS},
        "panels": panels,
        "panel_tables": {
            panel.key: page_tables.curve_table(curve)
            for panel, curve in zip(panels["curves"], curves.values(), strict=True)
        },
        "shown_domains": len(_shown_domains(c)),
        "lines": lines,
        "shown_lines": _shown_lines(c),
        "who": who,
        "counts": None if who is None else page_tables.count_table(c, who),
        "cells": {} if who is None else {method: page_tables.cell_table(c, who, method) for method in c.methods},
        "cell_limits": None if who is None else page_tables.cell_limits(c),
        "settings": _settings(c),
    }


def _several(things: Sequence[object] | int, what: str) -> str:
    n = things if isinstance(things, int) else len(things)
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _repeats(c: Compared) -> str:
    """Return a text on the folds and seeds that means are taken over."""
    if c.units == 1:
        return "one split and seed"
    folds, seeds = c.results["fold"].nunique(), c.results["seed"].nunique()
    split = "one split" if folds == 1 else _several(folds, "fold")
    return split if seeds == 1 else f"{split} × {_several(seeds, 'seed')}"


def _last(c: Compared) -> str:
    rounds = max(c.last) if c.curves.empty else int(c.curves["round"].max())
    return " or ".join(map(str, dict.fromkeys(min(number, rounds) for number in c.last)))


def _facts(c: Compared) -> list[tuple[str, str]]:
    tested = page_tables.everything(c)
    positive = "" if tested.positives is None else f", {tested.positives:,} positive"
    rounds = "" if c.curves.empty else f" of {int(c.curves['round'].max())}"
    clients = c.names("client")  # none where only sums over sites are known
    return [
        ("Metric", f"{metric_name(c.metric)}, {direction(c.metric)}"),
        ("Methods", f"{len(c.methods)}" + (f", reference {c.reference}" if c.differences else "")),
        ("Repeats", _repeats(c)),
        _counted(c, rounds),
        ("Cohort", _several(c.names("domain"), "domain") + (f", {_several(clients, 'client')}" if clients else "")),
        ("Test samples", f"{tested.n:,}{positive}"),
    ]


def _counted(c: Compared, of: str) -> tuple[str, str]:
    """Return which rounds figures are of, as a fact with its name."""
    if not c.choices:
        return "Averaged over", f"the last {_last(c)}{of} rounds"
    return "Rounds in use", f"{span([choice.round for each in c.choices.values() for choice in each])}{of}"


def _finding(c: Compared) -> list[str]:
    """Return sentences on which method is best in the mean and in the worst domain, and how certain that is."""
    if all(isnan(of.mean) for of in c.means["summary", "domain_avg"].values()):
        return [f"{metric_name(c.metric)} is undefined in every domain: the test samples of each are of one class."]
    best = {name: c.ranked(name)[0] for name in ("domain_avg", c.worst)}
    first, second = best.values()
    mean, worst = (
        f"{metric_name(c.metric)} {number(c.means['summary', name][method].mean)}" for name, method in best.items()
    )
    if len(c.methods) == 1:
        return [f"{first} has {mean} in the mean domain and {worst} in the worst."]
    then = " and" if first == second else f", {second}"
    said = [f"{first} is best in the mean domain ({mean}){then} in the worst domain ({worst})."]
    if c.differences:
        said += [_certainty(c, name, best[name]) for name in best]
        if first != c.reference and _clearly_worse(c, c.differences["client_avg"][first]):
            said.append(f"In the mean client {first} is worse than {c.reference}{_gain(c, 'client_avg', first, -1)}.")
    if c.missing:
        failed = ", ".join(f"{name} ({count} of {c.units})" for name, count in c.missing.items())
        said.append(f"Trainings that failed, and are missing in all figures: {failed}.")
    if not c.paired:
        said.append("These runs differ in their splits or seeds, so a difference may be chance.")
    elif c.units == 1:
        said.append("With one split and one seed there is no interval: a difference may be chance.")
    return said


def _certainty(c: Compared, name: str, method: str) -> str:
    """Return a sentence on how far the best method is from the reference, and whether the difference is clear."""
    where = f"In the {'mean' if name == 'domain_avg' else 'worst'} domain"
    if method == c.reference:
        return f"{where} no method has a better mean than the reference, {c.reference}."
    of = c.differences[name][method]
    if isnan(of.low):
        unknown = "; there are too few pairs to say whether by chance" if c.units > 1 else ""
        return f"{where} {method} leads {c.reference}{_gain(c, name, method)}{unknown}."
    if of.low <= 0 <= of.high:
        return f"{where} there is no clear difference to {c.reference}: {method} leads{_gain(c, name, method)}."
    return f"{where} {method} is better than {c.reference}{_gain(c, name, method)}."


def _clearly_worse(c: Compared, of: Difference) -> bool:
    return of.low > 0 if c.lower_is_better else of.high < 0


def _gain(c: Compared, name: str, method: str, sign: int = 1) -> str:
    """Return by how much a method is better than the reference (worse, if the sign is -1), with the interval."""
    of, scale = c.differences[name][method], c.means["summary", name][c.reference].mean
    sign *= -1 if c.lower_is_better else 1
    low, high = (number(end, scale) for end in sorted((sign * of.low, sign * of.high)))
    ends = "" if isnan(of.low) else f" (95 % interval {low} to {high})"
    return f" by {number(sign * of.difference, scale)}{ends}"


def _mean_dots(c: Compared, means: dict[str, Mean], lower: bool) -> list[Dot]:
    """Return a row with mean ± sd for every method."""
    first = page_tables.best(means, lower)
    rows = []
    for method in c.methods:
        of = means.get(method, Mean(float("nan"), float("nan"), 0))
        away = 0.0 if isnan(of.sd) else of.sd
        role = "best" if of.mean == first else "reference" if method == _reference(c) else "other"
        hover = f"{method}: {number(of.mean)} {page_tables.sd_text(of)}".strip()
        rows.append(Dot(method, of.mean, of.mean - away, of.mean + away, role, hover))
    return rows


def _mean_panels(
    c: Compared, key: str, parts: dict[str, list[Dot]], notes: Sequence[str], start: float | None = None
) -> list[Panel]:
    """Return panels on one scale, each with a line at the reference."""
    rows = [row for part in parts.values() for row in part]
    scale = AxisScale.over([row.middle for row in rows], [end for row in rows for end in (row.low, row.high)], start)
    panels = []
    for index, ((title, part), note) in enumerate(zip(parts.items(), notes, strict=True)):
        reference = [row for row in part if row.method == _reference(c)]
        marked = {"Best": [row for row in part if row.role == "best"], "Reference": reference}
        words = " ".join(f"{word}: {'; '.join(row.hover for row in rows)}." for word, rows in marked.items() if rows)
        guide = reference[0].middle if reference else None
        panels.append(Panel(f"{key}-{index}", title, note, words, figures.dots(part, guide, scale)))
    return panels


def _reference(c: Compared) -> str | None:
    """Return the reference, if there are differences from it."""
    return c.reference if c.differences else None


def _shown_domains(c: Compared) -> dict[str, Tested]:
    """Return the (at most 12) domains with the most samples, in the order of the file."""
    held = c.tested("domain")
    largest = sorted(held, key=lambda name: -held[name].n)[:MOST_PANELS]
    return {name: of for name, of in held.items() if name in largest}


def _domain_panels(c: Compared) -> list[Panel]:
    held = _shown_domains(c)
    if len(c.methods) == 1:
        return _domains_of_one(c, held)
    parts = {name: _mean_dots(c, c.means["domain", name], c.lower_is_better) for name in held}
    return _mean_panels(c, "domain", parts, [samples(of) for of in held.values()])


def _domains_of_one(c: Compared, held: dict[str, Tested]) -> list[Panel]:
    """Return one panel with a row for each domain, for a page with one method."""
    rows = []
    for name in held:
        (dot,) = _mean_dots(c, c.means["domain", name], c.lower_is_better)
        rows.append(replace(dot, method=name, role="other", hover=f"{name}: {dot.hover}"))
    return _mean_panels(c, "domain", {c.methods[0]: rows}, [""])


def _gaps(c: Compared) -> dict[str, dict[str, Mean]]:
    """Return the gaps between domains, for each metric for which they were measured."""
    return {metric: found for metric in (c.metric, *THRESHOLDED) if (found := c.gap(metric))}


def _gap_panels(c: Compared, gaps: dict[str, dict[str, Mean]]) -> list[Panel]:
    parts = {f"Gap in {metric_name(name)}": _mean_dots(c, means, lower=True) for name, means in gaps.items()}
    return _mean_panels(c, "gap", parts, [""] * len(parts), start=0.0)


def _difference_panels(c: Compared) -> list[Panel]:
    if not c.differences:
        return []
    parts = {}
    for name, title in c.summaries.items():
        scale = c.means["summary", name][c.reference].mean
        found = {method: c.differences[name][method] for method in c.methods if method != c.reference}
        parts[title.capitalize()] = [_difference_dot(c, method, of, scale) for method, of in found.items()]
    rows = [row for part in parts.values() for row in part]
    shared = AxisScale.over([0.0, *(row.middle for row in rows)], [end for row in rows for end in (row.low, row.high)])
    words = f"Differences to {c.reference}; the table below has the numbers."
    return [
        Panel(f"difference-{index}", title, "", words, figures.dots(part, 0.0, shared))
        for index, (title, part) in enumerate(parts.items())
    ]


def _difference_dot(c: Compared, method: str, of: Difference, scale: float) -> Dot:
    low, high = (of.difference if isnan(end) else end for end in (of.low, of.high))
    clear = not isnan(of.low) and not low <= 0 <= high
    role = "open" if not clear else "better" if (high < 0) == c.lower_is_better else "worse"
    hover = f"{method}: {number(of.difference, scale, sign=True)} {page_tables.interval(of, scale)}".strip()
    return Dot(method, of.difference, low, high, role, hover)


def _curve_places(c: Compared) -> list[tuple[str, str]]:
    """Return the (scope, name) of each training curve: the mean and the worst domain, then each domain."""
    known = set(zip(c.curves["scope"], c.curves["name"], strict=True))
    places = [("summary", "domain_avg"), ("summary", c.worst), *(("domain", name) for name in _shown_domains(c))]
    return [place for place in places if place in known]


def _curve_panels(
    c: Compared, curves: dict[tuple[str, str], pd.DataFrame], lines: dict[str, figures.Stroke]
) -> list[Panel]:
    scale = AxisScale.over((value for curve in curves.values() for value in curve.to_numpy().ravel()), ())
    panels = []
    for index, ((scope, name), curve) in enumerate(curves.items()):
        title = c.summaries[name].capitalize() if scope == "summary" else name
        ends = ", ".join(f"{method} {number(value)}" for method, value in curve.iloc[-1].items())
        figure = figures.curves(curve, lines, scale, 0 if c.choices else max(c.last))
        panels.append(Panel(f"curve-{index}", title, "", f"After the last round: {ends}.", figure))
    return panels


def _validation_panels(c: Compared, lines: dict[str, figures.Stroke]) -> list[Panel]:
    """Return a panel with the validation loss of each method, marked at the round in use; none without validation."""
    if not c.choices:
        return []
    curve = c.curve(SPLIT, "all")
    marked = {method: int(median(choice.round for choice in each)) for method, each in c.choices.items()}
    words = " ".join(f"{method}: {' '.join(about_choices(each))}" for method, each in c.choices.items())
    figure = figures.curves(curve, lines, AxisScale.over(curve.to_numpy().ravel(), ()), 0, marked)
    return [Panel("validation-0", "Validation loss", "", words, figure)]


def _shown_lines(c: Compared) -> list[str]:
    """Return the methods with coloured curves at first: all if they are few, else the best two and the reference."""
    if len(c.methods) <= FEW_METHODS:
        return c.methods
    return [name for name in c.methods if name in {*c.methods[:2], c.reference}]


def _settings(c: Compared) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return the configuration, table by table, as (name, value, description); empty values are left out."""
    source = source_named(str(c.config.get("data", {}).get("data")))
    known: dict[str, type[BaseModel]] = {"data": source.options, "training": Settings, "compare": Plan}
    shown = []
    for title, table in c.config.items():
        rows = []
        for name, value in table.items():
            field = known[title].model_fields.get(name)
            about = "" if field is None else str(field.description)
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            if text:
                rows.append((name, text, about))
        shown.append((title, rows))
    return shown
