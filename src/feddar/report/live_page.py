"""The page of a training that runs: its parts, made anew from what is known whenever somebody asks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import pandas as pd

from feddar.evaluation.metrics import worst
from feddar.evaluation.validation import SPLIT
from feddar.federation.site import MIN_CELL
from feddar.report import figures
from feddar.report.figures import AxisScale, Panel
from feddar.report.live import Known, Seat, WatchedTraining
from feddar.report.numbers import UNDEFINED, byte_size, direction, duration, metric_name, metric_title, number, percent
from feddar.report.page import HERE, rendered, templates
from feddar.report.page_tables import MOST_CLIENTS

PARTS = "live_parts.html.jinja"
SCRIPTS = ("page.js", "live.js")
MOST_LINES = 12
"""So many domains have a curve: those with the most samples."""
PHASES = {
    "census": "counting samples",
    "adopt": "handing out parameters",
    "together": "training the model",
    "heads": "training the heads",
    "encoder": "training the encoder",
    "personal": "training personal models",
    "pool": "pooling heads",
    "offsets": "fitting corrections of sites",
    "label-shift": "correcting by rates of labels",
    "validate": "validation",
    "evaluate": "evaluation",
    "measure": "evaluation",
}


def page_of(known: Known) -> str:
    """Return the whole page, as it is now."""
    told = state_of(known)
    style = (HERE / "live.css").read_text(encoding="utf-8")
    return rendered(
        "live.html.jinja", **told, known=known, scripts=SCRIPTS, more_style=style, colours=_colours, few=MIN_CELL
    )


def _colours(light: dict[str, str], dark: dict[str, str]) -> str:
    """Return the colours of both themes as a style: as the system says, until the reader chooses."""
    by_day, by_night = ("; ".join(f"--{name}: {colour}" for name, colour in each.items()) for each in (light, dark))
    classes = "\n".join(f".{name} {{ color: var(--{name}); }}" for name in light)
    return (
        f":root {{ {by_day} }}\n"
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {by_night} }} }}\n'
        f':root[data-theme="dark"] {{ {by_night} }}\n{classes}'
    )


def script(name: str) -> bytes:
    """Return a script of the page."""
    return (HERE / name).read_bytes()


def json_of(known: Known) -> bytes:
    """Return what has to be shown now, as the page's script gets it."""
    return json.dumps(state_of(known), ensure_ascii=False, allow_nan=False).encode()


def state_of(known: Known) -> dict[str, Any]:
    """Return the title, whether it has ended, and the content of each part of the page as HTML."""
    parts = {
        "end": _part("end", known.ending),
        "now": _part("facts", _facts(known)),
        "figures": _figures(known.trainings),
        "domains": _domains(known.trainings),
        "seats": _part("seats", _seat_table(known)),
        "notes": _part("notes", known.notes),
    }
    done = f"{_round(known)}: " if known.trainings and not known.ending else ""
    return {"title": f"{done}{known.title}", "ended": bool(known.ending), "parts": parts}


def _part(name: str, *content: Any) -> str:
    """Return a part of the page: a macro of its template with this content."""
    return str(getattr(templates().get_template(PARTS).module, name)(*content)).strip()


def _round(known: Known) -> str:
    training = known.trainings[-1]
    shown = min(max(known.round, training.round), training.settings.rounds)
    return f"round {shown} of {training.settings.rounds}"


def _facts(known: Known) -> list[tuple[str, str]]:
    """Return what is said first: where the training stands and how long it takes."""
    if not known.trainings:
        return []
    training = known.trainings[-1]
    facts = [("Method", training.settings.method), ("Round", _round(known).removeprefix("round "))]
    if not known.ending:
        facts += _now(known)
    if known.started is not None:
        facts.append(("Time", duration(known.now - known.started)))
    left = training.seconds_left(known.now)
    if left is not None and not known.ending:
        stops_early = training.best is not None and training.settings.patience < training.settings.rounds
        facts.append(("Left", ("at most " if stops_early else "about ") + duration(left)))
    if training.best is not None:
        facts.append(("Round in use", f"{training.best}, by validation"))
    scores = pd.Series([score.value for score in training.domains.values()], dtype=float).dropna()
    if len(scores):
        ends = (number(value, metric=training.metric) for value in (scores.mean(), worst(training.metric, scores)))
        facts.append((f"{metric_name(training.metric)}, mean and worst domain", " and ".join(ends)))
    return facts


def _now(known: Known) -> list[tuple[str, str]]:
    """Return what is being done, and how many have answered."""
    if not known.phase:
        return [("Now", "waiting for sites" if known.unit == "site" else "starting")]
    states = [seat.state for seat in known.seats.values()]
    answered, asked = states.count("answered"), states.count("answered") + states.count("working")
    return [
        ("Now", PHASES.get(known.phase, known.phase)),
        ("Answered", f"{answered:,} of {asked:,} {known.unit}s"),
    ]


@lru_cache(maxsize=2)
def _figures(trainings: tuple[WatchedTraining, ...]) -> str:
    """Return the curves, which stay the same until a round ends."""
    return _part("figures", [*_panels(trainings)])


def _panels(trainings: Sequence[WatchedTraining]) -> Iterator[tuple[Panel, list[str]]]:
    """Yield the main metric by domain of each training, then the losses of all, each with the names of its lines."""
    for place, training in reversed([*enumerate(trainings)]):
        curve = _curve(training, "test")
        if len(curve):
            shown = _largest(training)
            title = f"{metric_title(training.metric)} by domain"
            note = f"of {training.settings.method}; {direction(training.metric)}"
            if len(shown) < len(training.domains):
                note += f"; the {len(shown)} domains with the most samples, of {len(training.domains)}"
            yield _panel(f"metric-{place}", title, note, curve.reindex(columns=shown), training.metric, {})
    for split, title in ((SPLIT, "Validation loss"), ("train", "Training loss")):
        curves = {training.settings.method: _curve(training, split).get("all") for training in trainings}
        found = {name: curve for name, curve in curves.items() if curve is not None}
        if found:
            best = {training.settings.method: training.best for training in trainings} if split == SPLIT else {}
            marked = {name: best_round for name, best_round in best.items() if best_round is not None}
            note = "a diamond marks the round in use" if marked else "lower is better"
            yield _panel(split, title, note, pd.DataFrame(found), "log_loss", marked)


def _curve(training: WatchedTraining, split: str) -> pd.DataFrame:
    """Return a value for each round and name."""
    rows = [each for each in training.values if each.split == split]
    return pd.DataFrame(rows, columns=["round", "split", "name", "value"]).pivot(
        index="round", columns="name", values="value"
    )


def _largest(training: WatchedTraining) -> list[str]:
    """Return the domains with the most test samples, in their own order."""
    largest = sorted(training.domains, key=lambda name: -training.domains[name].samples)[:MOST_LINES]
    return [name for name in training.domains if name in largest]


def _panel(
    key: str, title: str, note: str, curve: pd.DataFrame, metric: str, marked: dict[str, int]
) -> tuple[Panel, list[str]]:
    names = [str(name) for name in curve.columns]
    scale, text = AxisScale.over(curve.to_numpy().ravel(), ()), partial(number, metric=metric)
    figure = figures.curves(curve, figures.strokes(names), scale, 0, text, percent(metric), marked)
    last = curve.iloc[-1]
    words = f"After round {curve.index[-1]}: " + ", ".join(f"{name} {text(last[name])}" for name in names) + "."
    return Panel(key, title, note, words, figure), names


@lru_cache(maxsize=2)
def _domains(trainings: tuple[WatchedTraining, ...]) -> str:
    """Return a table of the domains of the last training that was tested, with the strokes of their curves."""
    tested = [training for training in trainings if training.domains]
    if not tested:
        return ""
    training = tested[-1]
    strokes = figures.strokes(_largest(training))
    rows = [
        (name, strokes.get(name), number(score.value, metric=training.metric), f"{score.samples:,}")
        for name, score in training.domains.items()
    ]
    return _part("domains", metric_name(training.metric), rows)


def _seat_table(known: Known) -> dict[str, Any]:
    """Return the clients or sites: first those with a problem, then those with the most samples."""
    training = known.trainings[-1] if known.trainings else None
    scores = training.clients if training else {}
    by_size = sorted(known.seats, key=lambda name: (-scores[name].samples if name in scores else 0, name))
    odd = [name for name in by_size if known.seats[name].problem]
    shown = {*[*odd, *by_size][:MOST_CLIENTS]}
    return {
        "unit": known.unit,
        "metric": metric_name(training.metric) if training and scores else "",
        "rows": [_seat_row(name, known, training) for name in sorted(shown)],
        "of": len(known.seats),
    }


def _seat_row(name: str, known: Known, training: WatchedTraining | None) -> dict[str, Any]:
    seat: Seat = known.seats[name]
    score = training.clients.get(name) if training else None
    return {
        "name": name,
        "state": seat.state,
        "problem": seat.problem,
        "traffic": [f"{seat.seconds:.1f} s", byte_size(seat.sent), byte_size(seat.received)],
        "value": number(score.value, metric=training.metric) if score and training else UNDEFINED,
        "samples": f"{score.samples:,}" if score else UNDEFINED,
    }
