"""The page: one self-contained HTML file made from the files of a comparison or of runs.

Every number on it comes from ``results.csv``, ``curves.csv`` or ``config.toml`` (for runs: ``metrics.csv`` and the
files of their figures). Tables and heat maps are HTML and figures are SVG, each once for every metric, or for every
run; the page shows those of the metric and of the run that are chosen.
It needs no network, and a content security policy forbids any access to one. Parts without data are left out.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from math import isnan
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import BaseModel

from feddar.data.sources import source_named
from feddar.errors import UserError
from feddar.evaluation.figures import Figure, bounds
from feddar.evaluation.validation import SPLIT
from feddar.report import figures, missing_domains, page_tables
from feddar.report.figures import AxisScale, Dot, Panel
from feddar.report.folders import Compared, Difference, Mean, Tested, is_synthetic, read_folders
from feddar.report.markdown import POOLED, evaluated_with, meaningless_gaps, not_shown, of_methods
from feddar.report.numbers import AREAS, counted, direction, metric_name, metric_title, percent
from feddar.report.page_tables import GAP_WORDS, MOST_PANELS, amount, largest, metric_name_in_text, number, samples
from feddar.report.run_figures import figure_views
from feddar.report.validation import about_choices, span
from feddar.results.run_folder import replacing, writing
from feddar.settings import Plan, Settings

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
MARK = b"<span>feddar</span>"
"""What every page has, also those of version 0.1, and other files do not."""
FEW_METHODS = 5


def write_page(folders: Sequence[Path], out: Path, title: str | None = None) -> None:
    """Read a comparison folder, or run folders, and write one HTML file; a file that is no page of ours is kept."""
    require_page(out)
    save_page(_render(_content(read_folders(folders), title)), out)


def require_page(out: Path) -> None:
    """Refuse what no page can be written to, and to make one without the packages that it needs."""
    require_page_name(out)
    require_packages("jinja2", "scipy")


def require_page_name(out: Path) -> None:
    """Refuse a name that is not that of a page, or of a folder, or of a file that is no page of ours."""
    if out.is_dir():
        raise UserError(f"{out} is a folder: name a file for the page, such as {out / 'report.html'}.")
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{out} is not the name of a page: let it end in .html.")
    if out.exists() and MARK not in out.read_bytes():
        raise UserError(f"{out} exists and is no page of feddar: choose another name with --out.")


def save_page(page: str, out: Path) -> None:
    """Write a page whole, or not at all."""
    with writing(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as temporary:
            temporary.write_text(page, encoding="utf-8")


def require_packages(*packages: str) -> None:
    """Refuse to make a page without the packages that it needs."""
    for package in packages:
        try:
            import_module(package)
        except ImportError:
            raise UserError(f"the page needs the package {package}: pip install 'feddar[compare]'.") from None


def rendered(template: str, **content: Any) -> str:
    """Return a template of this folder with its content, and with style and colours."""
    style = (HERE / "page.css").read_text(encoding="utf-8")
    return templates().get_template(template).render(**content, style=style, light=figures.LIGHT, dark=figures.DARK)


@cache
def templates() -> Environment:
    """Return the templates of this folder, each of which is read once."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _render(content: dict[str, Any]) -> str:
    script = (HERE / "page.js").read_text(encoding="utf-8")
    cells = [view["cells"] for view in content["views"]]
    return rendered("page.html.jinja", **content, script=script, embedded=_json(cells), hashes=_hash(script))


def _json(value: Any) -> str:
    """Return JSON that is safe inside a script element."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def _hash(script: str) -> str:
    """Return the hash by which the content security policy allows a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _content(c: Compared, title: str | None) -> dict[str, Any]:
    """Return the values of the template: what is the same for all metrics, and a view for each of them."""
    who, lines, gaps = page_tables.shown_clients(c), figures.strokes(c.methods), _gaps(c)
    views, possible = figure_views(c)
    data = str(c.config.get("data", {}).get("data", "the data"))
    where = Path(data).name if c.study is None else f"the study “{c.study}”"
    what = c.methods[0] if len(c.methods) == 1 else counted(c.methods, "method")
    return {
        "c": c,
        "title": title or f"{what} {'on' if c.study is None else 'in'} {where}",
        "data": data,
        "synthetic": is_synthetic(data),
        "reference": _reference(c) or "",
        "views": [_view(view, who, lines) for view in c.views],
        "predicted_with": evaluated_with(c.rows),
        "not_shown": not_shown(c.results, c.metric),
        "facts": _facts(c),
        "repeats": _repeats(c),
        "last": _last(c),
        "choices": {method: " ".join(about_choices(each)) for method, each in c.choices.items()},
        "references": page_tables.reference_table(c),
        "pooled": " ".join(POOLED.split()),
        "validation": _validation_panels(c, lines),
        "gaps": page_tables.gap_table(c, gaps) if gaps else None,
        "gap_words": _gap_words(gaps),
        "meaningless": of_methods(meaningless_gaps(c.results)),
        "figures": views,
        "missing_title": missing_domains.TITLE,
        "about_missing": missing_domains.ABOUT,
        "figures_of": possible,
        "figure_words": {view.title: _gap_words(view.gap_names) for view in views},
        "gap_panels": _gap_panels(c, gaps),
        "shown_domains": len(_shown_domains(c)),
        "lines": lines,
        "shown_lines": _shown_lines(c),
        "who": who,
        "counts": None if who is None else page_tables.count_table(c, who),
        "settings": _settings(c),
    }


def _view(c: Compared, who: page_tables.ShownClients | None, lines: dict[str, figures.Stroke]) -> dict[str, Any]:
    """Return what the page shows of one metric."""
    curves = {place: c.curve(*place) for place in _curve_places(c)}
    panels = {
        "differences": _difference_panels(c),
        "domains": _domain_panels(c),
        "curves": _curve_panels(c, curves, lines),
    }
    low, high = page_tables.cell_limits(c)
    heat = {} if who is None or isnan(low) else {name: page_tables.cell_table(c, who, name) for name in c.methods}
    return {
        "c": c,
        "metric": metric_name(c.metric),
        "direction": direction(c.metric),
        "intervals": c.figure_intervals,
        "finding": _finding(c),
        "title": metric_title(c.metric),
        "averaged": _averaged(c),
        "scores": _shaped(page_tables.score_table(c), "domain", "test samples", metric_name(c.metric)),
        "others": _metric_table(c, c.other_means),
        "outcomes": _metric_table(c, c.outcome_means),
        "differences": page_tables.difference_table(c) if c.differences else None,
        "panels": panels,
        "panel_tables": {
            panel.key: page_tables.curve_table(curve, c.metric)
            for panel, curve in zip(panels["curves"], curves.values(), strict=True)
        },
        "heat": next(iter(heat.values()), None),
        "limits": [number(end, c.metric) for end in ((high, low) if c.lower_is_better else (low, high))],
        "cells": {name: _texts(table) for name, table in heat.items()},
    }


def _averaged(c: Compared) -> str:
    """Return over what a metric is a mean, of several outcomes and several classes; else an empty text."""
    if c.outcome_means:
        return "mean over outcomes"
    gaps = {*_gaps(c), *(name for of in c.figures.values() for name in of.gaps)}
    of_classes = "accuracy" in gaps and c.metric in AREAS  # of yes/no outcomes there are gaps in rates instead
    return "mean over classes, each against all others" if of_classes else ""


def _metric_table(c: Compared, by_metric: dict[str, dict[str, Mean]]) -> page_tables.PageTable | None:
    """Return a table of metrics; None if there are none."""
    table = page_tables.metric_table(c, by_metric)
    return _shaped(table, "metric", "better is", "mean domain") if by_metric else None


def _shaped(table: page_tables.PageTable, *titles: str) -> page_tables.PageTable:
    """Return a table of several methods as it is, and of one with its columns as rows."""
    return table if len(table.rows) > 1 else page_tables.turned(table, *titles)


def _texts(table: page_tables.PageTable) -> list[list[Any]]:
    """Return the text and the shade of each cell of a heat map, row by row."""
    every = (cell for _, cells in table.rows for cell in cells)
    return [[cell.text] if cell.shade is None else [cell.text, round(cell.shade, 3)] for cell in every]


def _repeats(c: Compared) -> str:
    """Return a text on the folds and seeds that means are taken over."""
    if c.units == 1:
        return "one split and seed"
    folds, seeds = c.results["fold"].nunique(), c.results["seed"].nunique()
    split = "one split" if folds == 1 else counted(folds, "fold")
    return split if seeds == 1 else f"{split} × {counted(seeds, 'seed')}"


def _last(c: Compared) -> str:
    return " or ".join(map(str, c.averaged_rounds))


def _facts(c: Compared) -> list[tuple[str, str]]:
    tested = page_tables.everything(c)
    positive = "" if tested.positives is None else f", {tested.positives:,} positive"
    rounds = "" if c.curves.empty else f" of {int(c.curves['round'].max())}"
    clients = c.names("client")  # none where only sums over sites are known
    return [
        ("Methods", f"{len(c.methods)}" + (f", reference {c.reference}" if c.differences else "")),
        ("Repeats", _repeats(c)),
        _counted(c, rounds),
        ("Cohort", counted(c.names("domain"), "domain") + (f", {counted(clients, 'client')}" if clients else "")),
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
    mean, worst = (amount(c.means["summary", name][method].mean, c.metric) for name, method in best.items())
    name = metric_name_in_text(c.metric)
    if len(c.methods) == 1:
        return [f"{first} has {name} {mean} in the mean domain and {worst} in the worst{_worst_domain(c)}."]
    then = " and" if first == second else f", {second}"
    said = [f"{first} is best in the mean domain ({name} {mean}){then} in the worst domain ({name} {worst})."]
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


def _worst_domain(c: Compared) -> str:
    """Return the name of the only method's worst domain, after a comma; nothing if it may be another each time."""
    (method,) = c.methods
    lowest = c.means["summary", c.worst][method].mean
    names = [name for name in c.names("domain") if c.means["domain", name][method].mean == lowest]
    return "" if c.worst_of or len(c.names("domain")) == 1 or not names else f", {names[0]}"


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
    if not of.clear:
        few = f"{of.pairs} pairs are too few to call it better"
        return f"{where} {method} leads {c.reference}{_gain(c, name, method)}; {few}."
    return f"{where} {method} is better than {c.reference}{_gain(c, name, method)}."


def _clearly_worse(c: Compared, of: Difference) -> bool:
    return of.clear and (of.difference > 0) == c.lower_is_better


def _gain(c: Compared, name: str, method: str, sign: int = 1) -> str:
    """Return by how much a method is better than the reference (worse, if the sign is -1), with the interval."""
    of, scale = c.differences[name][method], c.means["summary", name][c.reference].mean
    sign *= -1 if c.lower_is_better else 1
    low, high = (number(end, c.metric, scale) for end in sorted((sign * of.low, sign * of.high)))
    ends = "" if isnan(of.low) else f" (95 % interval {low} to {high})"
    points = " percentage points" if percent(c.metric) > 1 else ""
    return f" by {number(sign * of.difference, c.metric, scale)}{points}{ends}"


def _mean_dots(
    c: Compared, means: dict[str, Mean], metric: str, lower: bool, without: Container[str] = ()
) -> list[Dot]:
    """Return a row with mean ± sd for every method; those ``without`` are never the best."""
    first = page_tables.best(means, lower, without)
    rows = []
    for method in c.methods:
        of = means.get(method, Mean(float("nan"), float("nan"), 0))
        away = 0.0 if isnan(of.sd) else of.sd
        is_best = of.mean == first and method not in without
        role = "best" if is_best else "reference" if method == _reference(c) else "other"
        hover = f"{method}: {number(of.mean, metric)} {page_tables.sd_text(of, metric)}".strip()
        rows.append(Dot(method, of.mean, of.mean - away, of.mean + away, role, hover))
    return rows


def _mean_panels(
    c: Compared,
    part: str,
    rows: dict[str, list[Dot]],
    notes: Sequence[str],
    metrics: Iterable[str],
    start: float | None = None,
) -> list[Panel]:
    """Return panels on one scale, by title, each with a note, the metric it shows and a line at the reference."""
    every = [row for of in rows.values() for row in of]
    ends = [end for row in every for end in (row.low, row.high)]
    scale = AxisScale.over([row.middle for row in every], ends, start, bounds(c.metric))
    panels = []
    for index, ((title, own), note, metric) in enumerate(zip(rows.items(), notes, metrics, strict=True)):
        reference = [row for row in own if row.method == _reference(c)]
        marked = {"Best": [row for row in own if row.role == "best"], "Reference": reference}
        words = " ".join(f"{word}: {'; '.join(row.hover for row in of)}." for word, of in marked.items() if of)
        guide = reference[0].middle if reference else None
        figure = figures.dots(own, guide, scale, percent(metric))
        panels.append(Panel(f"{c.metric}-{part}-{index}", title, note, words, figure))
    return panels


def _reference(c: Compared) -> str | None:
    """Return the reference, if there are differences from it."""
    return c.reference if c.differences else None


def _shown_domains(c: Compared) -> dict[str, Tested]:
    """Return the (at most 12) domains with the most samples, in the order of the file."""
    held = c.tested("domain")
    return {name: held[name] for name in largest({name: of.n for name, of in held.items()}, MOST_PANELS)}


def _domain_panels(c: Compared) -> list[Panel]:
    held = _shown_domains(c)
    if len(c.methods) == 1:
        return _domains_of_one(c, held)
    rows = {name: _domain_dots(c, name) for name in held}
    return _mean_panels(c, "domain", rows, [samples(of) for of in held.values()], [c.metric] * len(held))


def _domain_dots(c: Compared, domain: str) -> list[Dot]:
    """Return a row for every method in a domain; lines are intervals of a run's figures, if it has them."""
    rows = _mean_dots(c, c.means["domain", domain], c.metric, c.lower_is_better)
    return [_with_interval(c, dot, c.figure(dot.method, domain)) for dot in rows]


def _with_interval(c: Compared, dot: Dot, of: Figure | None) -> Dot:
    if of is None:
        return dot
    said = page_tables.bracketed(number(of.low, c.metric), number(of.high, c.metric))
    return replace(dot, low=of.low, high=of.high, hover=f"{dot.hover} {said}")


def _domains_of_one(c: Compared, held: dict[str, Tested]) -> list[Panel]:
    """Return one panel with a row for each domain, for a page with one method."""
    rows = []
    for name, of in held.items():
        (dot,) = _domain_dots(c, name)
        few = page_tables.few(of)
        rows.append(replace(dot, method=name, role="other", hover=f"{name}: {dot.hover}", more=few))
    return _mean_panels(c, "domain", {c.methods[0]: rows}, [""], [c.metric])


def _gaps(c: Compared) -> dict[str, dict[str, Mean]]:
    """Return the gaps between domains, for each metric for which they were measured."""
    return {metric: found for metric in dict.fromkeys(c.results["metric"]) if (found := c.gap(metric))}


def _gap_words(names: Iterable[str]) -> dict[str, str]:
    """Return what it is that domains differ in, by the name of the metric."""
    return {metric_name(name): GAP_WORDS[name] for name in names if name in GAP_WORDS}


def _gap_panels(c: Compared, gaps: dict[str, dict[str, Mean]]) -> list[Panel]:
    rows = {
        f"Gap in {metric_name(name)}": _mean_dots(c, means, name, True, page_tables.incomparable(c, name))
        for name, means in gaps.items()
    }
    return _mean_panels(c, "gap", rows, [""] * len(rows), gaps, start=0.0)


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
        Panel(f"{c.metric}-difference-{index}", title, "", words, figures.dots(part, 0.0, shared, percent(c.metric)))
        for index, (title, part) in enumerate(parts.items())
    ]


def _difference_dot(c: Compared, method: str, of: Difference, scale: float) -> Dot:
    low, high = (of.difference if isnan(end) else end for end in (of.low, of.high))
    role = "open" if not of.clear else "better" if (high < 0) == c.lower_is_better else "worse"
    said = number(of.difference, c.metric, scale, sign=True)
    hover = f"{method}: {said} {page_tables.interval(of, c.metric, scale)}".strip()
    return Dot(method, of.difference, low, high, role, hover)


def _curve_places(c: Compared) -> list[tuple[str, str]]:
    """Return the (scope, name) of each training curve: the mean and the worst domain, then each domain."""
    own = c.curves[c.curves["metric"] == c.metric]
    known = set(zip(own["scope"], own["name"], strict=True))
    places = [("summary", "domain_avg"), ("summary", c.worst), *(("domain", name) for name in _shown_domains(c))]
    return [place for place in places if place in known]


def _curve_panels(
    c: Compared, curves: dict[tuple[str, str], pd.DataFrame], lines: dict[str, figures.Stroke]
) -> list[Panel]:
    values = (value for curve in curves.values() for value in curve.to_numpy().ravel())
    scale = AxisScale.over(values, (), limits=bounds(c.metric))
    held = c.tested("domain")
    panels = []
    for index, ((scope, name), curve) in enumerate(curves.items()):
        title = c.summaries[name].capitalize() if scope == "summary" else name
        text = partial(number, metric=c.metric)
        ends = ", ".join(f"{method} {text(value)}" for method, value in curve.iloc[-1].items())
        figure = figures.curves(curve, lines, scale, 0 if c.choices else max(c.last), text, percent(c.metric))
        note = page_tables.few(held[name]) if scope == "domain" else ""
        panels.append(Panel(f"{c.metric}-curve-{index}", title, note, f"After the last round: {ends}.", figure))
    return panels


def _validation_panels(c: Compared, lines: dict[str, figures.Stroke]) -> list[Panel]:
    """Return a panel with the validation loss of each method, marked at the round in use; none without validation."""
    if not c.choices:
        return []
    curve = c.curve(SPLIT, "all")
    marked = {method: int(median(choice.round for choice in each)) for method, each in c.choices.items()}
    words = " ".join(f"{method}: {' '.join(about_choices(each))}" for method, each in c.choices.items())
    scale, text = AxisScale.over(curve.to_numpy().ravel(), ()), partial(number, metric="log_loss")
    figure = figures.curves(curve, lines, scale, 0, text, marked=marked)
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
