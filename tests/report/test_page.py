"""The page: every number on it recomputed from the files it was made from, and the page itself in a browser."""

import json
import re
import shutil
import sys
from collections import defaultdict
from html.parser import HTMLParser
from itertools import product

import numpy as np
import pandas as pd
import pytest

from feddar.errors import UserError
from feddar.evaluation.intervals import paired_differences
from feddar.objectives import KINDS
from feddar.objectives.objective import lower_is_better
from feddar.report import figures
from feddar.report.page import write_page
from feddar.report.plots import COLOURS
from feddar.results.training import train
from feddar.settings import DataSettings, Plan, Settings, write_config
from helpers.browser import Opened
from helpers.cohorts import make_cohort

METRICS = {kind.task: kind.metrics for kind in KINDS}
SECOND = {"binary": "accuracy", "multiclass": "log_loss", "regression": "r2"}
"""Another metric of each task, which the page can be switched to."""
METHODS = ("local", "fedavg", "fedrep", "feddar-sa")
RACES = {"White": 4385, "Asian": 770, "Latino": 195}
HOSTILE = ("<b>a</b>", "</script><script>alert(1)</script>", "a & b", "%{x} " + "sixty characters " * 3 + "long")
RESULTS = ["method", "fold", "seed", "scope", "name", "metric", "value", "count"]


def write_comparison(
    folder, task="binary", methods=METHODS, domains=RACES, clients=6, folds=3, rounds=9, data="exam", seed=0, gain=0.04
):
    """Write the files of a comparison with made-up scores; an AUC of few samples may be undefined."""
    rng = np.random.default_rng(seed)
    clients = [f"site {i + 1}" for i in range(clients)] if isinstance(clients, int) else clients
    share = dict(zip(domains, rng.dirichlet(np.full(len(clients), 0.8), len(domains)), strict=True))
    held = {(c, d): int(domains[d] * share[d][i]) for i, c in enumerate(clients) for d in domains}
    metric = METRICS[task][0]
    lower = lower_is_better(metric)
    level = {d: 0.86 + 0.03 * rng.normal() for d in domains}
    luck = {key: rng.normal() for key in product(range(folds), domains)}

    def score(unit, domain, n, done=1.0):
        method, fold, _ = unit
        noise = (0.8 * luck[fold, domain] + 0.2 * rng.normal()) * 0.5 / np.sqrt(n + 20)
        skill = gain * method.startswith("feddar") + 0.005 * methods.index(method) / len(methods)
        value = min(level[domain] + skill + noise - 0.25 * (1 - done), 0.999)
        return 1.2 * (1 - value) if lower else value

    results, curves = [], []
    for unit in product(methods, range(folds), [0]):
        results += [(*unit, *row) for row in scores(unit, task, domains, clients, held, score)]
        for number in range(1, rounds + 1):
            now = {name: score(unit, name, n, 1 - np.exp(-number / 4)) for name, n in domains.items()}
            curves += [(*unit, number, "domain", name, metric, value) for name, value in now.items()]
            curves += [(*unit, number, "summary", name, metric, value) for name, value in summary(now).items()]
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(results, columns=RESULTS).to_csv(folder / "results.csv", index=False)
    columns = [*RESULTS[:3], "round", *RESULTS[3:7]]
    pd.DataFrame(curves, columns=columns).to_csv(folder / "curves.csv", index=False)
    tables = {
        "data": DataSettings(data=data),
        "training": Settings(rounds=rounds),
        "compare": Plan(methods=methods, folds=folds),
    }
    write_config(folder / "config.toml", **tables)
    return folder


def scores(unit, task, domains, clients, held, score):
    """Return what one method has in one fold, by scope, name and metric."""
    method, fold, _ = unit
    metric = METRICS[task][0]
    rng = np.random.default_rng([fold, *method.encode()])
    cases = np.random.default_rng(fold)
    parts = {key: n // 3 + (fold < n % 3) for key, n in held.items() if n // 3 + (fold < n % 3)}
    positive = {key: int(cases.binomial(n, 0.12)) for key, n in parts.items()}
    members = {("all", "all"): [], **{("domain", name): [] for name in domains}}
    members |= {("client", name): [] for name in clients} | {("cell", " | ".join(key)): [] for key in parts}
    for client, domain in parts:
        places = ("all", "all"), ("domain", domain), ("client", client), ("cell", f"{client} | {domain}")
        for place in places:
            members[place].append((client, domain))
    rows, found, second = [], defaultdict(dict), defaultdict(dict)
    for (scope, name), keys in members.items():
        if not keys:
            continue
        n, positives = sum(map(parts.get, keys)), sum(map(positive.get, keys))
        defined = task != "binary" or 0 < positives < n
        found[scope][name] = score(unit, keys[0][1], n) if defined else float("nan")
        rows.append((scope, name, metric, found[scope][name], n))
        rows += [(scope, name, "positives", positives, n)] * (task == "binary")
        second[scope][name] = rng.uniform()
        rows.append((scope, name, SECOND[task], second[scope][name], n))
    for each, by_scope in ((SECOND[task], second), (metric, found)):
        whole = summary(by_scope["domain"]) | {"client_avg": np.nanmean(list(by_scope["client"].values()))}
        rows += [("summary", name, each, value, len(domains)) for name, value in whole.items()]
    gaps = {metric: whole["domain_max"] - whole["domain_min"]}
    gaps |= {
        name: score(unit, next(iter(domains)), 50) / 4 for name in ("tpr", "fpr", "selection_rate") if task == "binary"
    }
    return rows + [("summary", "domain_gap", name, value, len(domains)) for name, value in gaps.items()]


def summary(found):
    values = list(found.values())
    return {"domain_min": np.nanmin(values), "domain_avg": np.nanmean(values), "domain_max": np.nanmax(values)}


class Reader(HTMLParser):
    """Takes the tables, the figures, the script of data and the visible text out of a page."""

    def __init__(self, path):
        super().__init__()
        self.tables, self.figures, self.text, self.data, self.starts = {}, {}, "", "", []
        self.open, self.cell, self.caption = [], None, None
        self.feed(path.read_text(encoding="utf-8"))
        self.embedded = json.loads(self.data)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.starts.append((tag, attrs))
        if tag not in ("meta", "input"):
            self.open.append((tag, attrs))
        if "plot" in attrs.get("class", "").split():
            self.figure = self.figures[attrs["id"]] = Figure()
        elif "row" in attrs.get("class", "").split():
            self.row = self.figure.rows[attrs["title"].split(":")[0]] = {}
        elif "data-span" in attrs:
            self.figure.span = tuple(map(float, attrs["data-span"].split()))
        if tag == "table":
            self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "caption":
            self.caption = ""

    def handle_startendtag(self, tag, attrs):
        attrs = dict(attrs)
        within = {name for _, of in self.open for name in of.get("class", "").split()}
        if "row" in within:
            self.row |= {"mark": attrs["href"]} if tag == "use" else {}
            self.row |= {name: float(attrs[name][:-1]) for name in ("x1", "x2", "x") if name in attrs}
        elif tag == "polyline":
            self.figure.lines[attrs["data-method"]] = attrs
        elif tag == "use" and "curves" in within:
            self.figure.marked.append(float(attrs["x"][:-1]))

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass
        if tag == "table":
            self.tables[self.caption.split(";")[0]] = self.rows

    def handle_data(self, data):
        tags = [tag for tag, _ in self.open]
        if "script" in tags:
            self.data += data if self.open[-1][1].get("id") == "embedded" else ""
        elif "style" not in tags:
            self.text += data
            side, _, at = self.open[-1][1].get("style", "").partition(": ") if self.open else ("", "", "")
            if side in ("left", "top"):
                self.figure.ticks[side].append((float(at[:-1]), float(data.replace("−", "-").replace(",", ""))))
            if "caption" in tags:
                self.caption += data
            elif {"td", "th"} & set(tags):
                self.rows[-1][-1] += data

    def table(self, caption):
        """Return the rows below the head, by name, and the head."""
        head, *rows = [[" ".join(cell.split()) for cell in row] for row in self.tables[caption]]
        return {row[0].removesuffix(" reference"): row[1:] for row in rows}, head[1:]

    def dots(self, key):
        """Return where the dots and the ends of their lines are, by method."""
        figure = self.figures[key]
        return {
            method: [figure.value("left", row[name]) for name in ("x", "x1", "x2")]
            for method, row in figure.rows.items()
        }


class Figure:
    """What was drawn: marks of the axes with their texts, rows of dots, lines over rounds."""

    def __init__(self):
        self.ticks, self.rows, self.lines, self.marked, self.span = defaultdict(list), {}, {}, [], None

    def value(self, side, place):
        """Return the value at a place, by the texts of the axis."""
        (first, low), *_, (last, high) = self.ticks[side]
        return low + (high - low) * (place - first) / (last - first)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_comparison(tmp_path_factory.mktemp("page") / "compared", folds=5)


@pytest.fixture(scope="module")
def results(folder):
    return pd.read_csv(folder / "results.csv")


@pytest.fixture(scope="module")
def page(folder):
    write_page([folder], folder / "report.html")
    return Reader(folder / "report.html")


def values(results, method, scope, name, metric="auc"):
    chosen = (results["method"] == method) & (results["scope"] == scope) & (results["name"] == name)
    return results[chosen & (results["metric"] == metric)].sort_values(["fold", "seed"])


def said(found):
    """Mean ± sd as a table says it; accuracy in per cent."""
    percent = (found["metric"] == "accuracy").all()
    found = found["value"] * (100 if percent else 1)
    form = ".1f" if percent else ".3f"
    if not found.notna().any():
        return "n/a"
    covers = f", {found.notna().sum()} of {len(found)}" if found.isna().any() else ""
    spread = f" ± {found.std():{form}}{covers}" if found.notna().sum() > 1 else ""
    return f"{found.mean():{form}}{spread}"


SUMMARIES = {"mean domain": "domain_avg", "worst domain": "domain_min", "mean client": "client_avg"}


BOTH = pytest.mark.parametrize(("metric", "shown_as"), [("auc", "AUC"), ("accuracy", "accuracy (%)")])


@BOTH
def test_scores(page, results, metric, shown_as):
    rows, head = page.table(f"{shown_as} of each method in each domain")
    places = {title: ("summary", name) for title, name in SUMMARIES.items()} | {
        name: ("domain", name) for name in RACES
    }
    assert len(head) == len(places)
    means = {m: values(results, m, "summary", "domain_avg", metric)["value"].mean() for m in METHODS}
    assert list(rows) == sorted(METHODS, key=means.get, reverse=True)
    for i, (title, place) in enumerate(places.items()):
        assert head[i].startswith(title)
        mean = {m: values(results, m, *place, metric)["value"].mean() for m in METHODS}
        for method in METHODS:
            best = mean[method] == max(mean.values())
            shown = said(values(results, method, *place, metric))
            assert rows[method][i] == (f"★ {shown} (best)" if best else shown)
        if place[0] == "domain":
            n = values(results, "fedavg", *place)["count"].sum()
            positives = int(values(results, "fedavg", *place, "positives")["value"].sum())
            assert head[i] == f"{title} n {n:,} {positives:,} pos."
    assert head[1] == "worst domain of each round and repeat, then averaged"


@pytest.mark.parametrize(
    ("metric", "other", "title"), [("AUC", "accuracy", "accuracy (%)"), ("accuracy (%)", "auc", "AUC")]
)
def test_other_metrics(page, results, metric, other, title):
    rows, head = page.table(f"Metrics other than {metric} of each method, mean domain")
    assert head == [f"{title} higher"]
    means = {m: values(results, m, "summary", "domain_avg", other) for m in METHODS}
    best = max(each["value"].mean() for each in means.values())
    for method, each in means.items():
        assert rows[method] == [f"★ {said(each)} (best)" if each["value"].mean() == best else said(each)]


@BOTH
def test_differences(page, results, metric, shown_as):
    rows, _ = page.table(f"Difference in {shown_as} to fedavg")
    found = paired_differences(results, "fedavg").set_index(["method", "scope", "name", "metric"])
    factor, form = (100, "+.1f") if metric == "accuracy" else (1, "+.3f")
    for place, name in enumerate(SUMMARIES.values()):
        dots = page.dots(f"{metric}-difference-{place}")
        for method in {*METHODS} - {"fedavg"}:
            row = found.loc[(method, "summary", name, metric)]
            by_hand = values(results, method, "summary", name, metric)["value"].to_numpy()
            by_hand = (by_hand - values(results, "fedavg", "summary", name, metric)["value"].to_numpy()).mean()
            assert row["difference"] == pytest.approx(by_hand)
            middle, low, high = (factor * value for value in (by_hand, row["low"], row["high"]))
            assert rows[method][place] == f"{middle:{form}} [{low:{form}}, {high:{form}}]".replace("-", "−")
            assert dots[method] == pytest.approx([middle, low, high], abs=2e-3 * factor)


@BOTH
def test_dots_are_means_and_standard_deviations(page, results, metric, shown_as):
    factor = 100 if metric == "accuracy" else 1
    for place, name in enumerate(RACES):
        dots = page.dots(f"{metric}-domain-{place}")
        for method in METHODS:
            found = factor * values(results, method, "domain", name, metric)["value"]
            ends = [found.mean(), found.mean() - found.std(), found.mean() + found.std()]
            assert dots[method] == pytest.approx(ends, abs=1e-3 * factor), shown_as


def test_gaps(page, results):
    rows, head = page.table("Largest difference between domains")
    assert head == ["AUC", "TPR", "FPR", "selection rate"]
    for place, metric in enumerate(("auc", "tpr", "fpr", "selection_rate")):
        dots = page.dots(f"auc-gap-{place}")
        smallest = min(values(results, m, "summary", "domain_gap", metric)["value"].mean() for m in METHODS)
        for method in METHODS:
            found = values(results, method, "summary", "domain_gap", metric)
            shown = said(found)
            assert rows[method][place] == (f"★ {shown} (best)" if found["value"].mean() == smallest else shown)
            assert dots[method][0] == pytest.approx(found["value"].mean(), abs=1e-3)


def test_the_gap_of_a_method_that_flags_nobody_is_never_the_best(folder, tmp_path):
    """Its gaps in rates are small because it flags nobody, here of one domain."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    results = pd.read_csv(tmp_path / "results.csv")
    rates = results[(results["scope"] == "domain") & (results["metric"] == "auc")].assign(metric="selection_rate")
    nobody = rates["method"].isin(["local", "fedrep"]) & (rates["name"] == "Asian")
    gaps = (results["method"] == "local") & (results["name"] == "domain_gap")
    changed = results.assign(value=results["value"].mask(gaps, 0.0))
    rates = rates.assign(value=rates["value"].mask(nobody, 0.0))
    pd.concat([changed, rates]).to_csv(tmp_path / "results.csv", index=False)
    write_page([tmp_path], tmp_path / "page.html")
    page = Reader(tmp_path / "page.html")
    assert "local, fedrep: Nobody is flagged in Asian at this operating point" in " ".join(page.text.split())
    rows, head = page.table("Largest difference between domains")
    for place, metric in enumerate(head):
        starred = [method for method, cells in rows.items() if cells[place].startswith("★")]
        assert len(starred) == 1 and (starred == ["local"]) == (metric == "AUC")
        best = [name for name, row in page.figures[f"auc-gap-{place}"].rows.items() if row["mark"] == "#shape-diamond"]
        assert best == starred


def test_pooled_references_are_written_as_all_numbers_are(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    results = pd.read_csv(tmp_path / "results.csv")
    pooled = results[(results["method"] == "fedavg") & (results["scope"] == "summary")].assign(method="majority")
    pooled.to_csv(tmp_path / "references.csv", index=False)
    write_page([tmp_path], tmp_path / "page.html")
    rows, head = Reader(tmp_path / "page.html").table("Metrics of models that see all rows in one place")
    assert rows["majority"][1] == said(values(results, "fedavg", "summary", "domain_avg"))
    place = head.index("accuracy (%)")
    assert rows["majority"][place] == said(values(results, "fedavg", "summary", "domain_avg", "accuracy"))


def test_curves(page, folder):
    curves = pd.read_csv(folder / "curves.csv")
    titles = {"Mean domain": "domain_avg", "Worst domain": "domain_min"} | {name: name for name in RACES}
    for place, (title, name) in enumerate(titles.items()):
        mean = curves[curves["name"] == name].groupby(["method", "round"])["value"].mean()
        rows, head = page.table(f"AUC by round: {title}")
        assert head[0] == "round 1"
        assert head[-1] == "round 9"
        figure = page.figures[f"auc-curve-{place}"]
        assert figure.lines.keys() == set(METHODS)
        for method, line in figure.lines.items():
            assert line["data-texts"].split() == [f"{value:.3f}" for value in mean[method]]
            drawn = [figure.value("top", float(point.split(",")[1])) for point in line["points"].split()]
            assert drawn == pytest.approx(mean[method].tolist(), abs=1e-3)
            assert rows[method] == [f"{mean[method, int(column.split()[1])]:.3f}" for column in head]


@BOTH
def test_heat_maps(page, results, metric, shown_as):
    clients = [f"site {i + 1}" for i in range(6)]
    places = [(c, d) for c in [*clients, "all clients"] for d in [*RACES, "all domains"]]

    def rows_of(client, domain, method="fedavg", metric=metric):
        scope = (
            "all"
            if (client, domain) == ("all clients", "all domains")
            else "domain"
            if client == "all clients"
            else "client"
        )
        name = {"all": "all", "domain": domain, "client": client}[scope]
        if client in clients and domain in RACES:
            scope, name = "cell", f"{client} | {domain}"
        return values(results, method, scope, name, metric)

    counts, _ = page.table("Test samples by client and domain")
    cells = page.embedded[0 if metric == "auc" else 1]
    shown_first, _ = page.table(f"{shown_as} by client and domain")
    assert [text for row in shown_first.values() for text in row] == [text for text, *_ in next(iter(cells.values()))]
    undefined = 0
    for i, (client, domain) in enumerate(places):
        held = rows_of(client, domain)
        positives = int(rows_of(client, domain, metric="positives")["value"].sum())
        shown = f"{held['count'].sum():,} {positives:,} pos." if len(held) else "–"
        assert counts[client][i % (len(RACES) + 1)] == shown
        for method in METHODS:
            found = rows_of(client, domain, method)
            shown = said(found).split(" ")[0].strip(",") if len(found) else "–"
            undefined += shown == "n/a"
            assert cells[method][i][0] == shown
    assert undefined or metric != "auc", "the made-up cohort should have cells with one class"


def test_nothing_else_has_numbers(page):
    """Every table of the page is recomputed above."""
    known = {"Largest difference between domains", "Test samples by client and domain"}
    known |= {f"AUC by round: {name}" for name in ("Mean domain", "Worst domain", *RACES)}
    for metric in ("AUC", "accuracy (%)"):
        known |= {f"{metric} of each method in each domain", f"Difference in {metric} to fedavg"}
        known |= {f"Metrics other than {metric} of each method, mean domain", f"{metric} by client and domain"}
    assert set(page.tables) == known
    assert "Accuracy (%) was not written down after every round." in page.text


def test_what_is_said_first(page, results):
    found = paired_differences(results, "fedavg").set_index(["method", "scope", "name", "metric"])
    text = " ".join(page.text.split())
    for where, name in (("mean", "domain_avg"), ("worst", "domain_min")):
        row = found.loc[("feddar-sa", "summary", name, "auc")]
        assert row["low"] > 0
        gain = f"{row['difference']:.3f} (95 % interval {row['low']:.3f} to {row['high']:.3f})"
        assert f"In the {where} domain feddar-sa is better than fedavg by {gain}." in text
    mean, worst = (
        values(results, "feddar-sa", "summary", name)["value"].mean() for name in ("domain_avg", "domain_min")
    )
    assert f"feddar-sa is best in the mean domain (AUC {mean:.3f}) and in the worst domain (AUC {worst:.3f})." in text
    total = sum(values(results, "fedavg", "domain", name)["count"].sum() for name in RACES)
    positives = int(sum(values(results, "fedavg", "domain", n, "positives")["value"].sum() for n in RACES))
    assert f"{total:,}, {positives:,} positive" in text
    assert "the last 5 of 9 rounds" in text
    assert "Synthetic data." in text
    assert "feddar compare exam --config config.toml" in text


def test_what_is_unclear_or_worse_is_called_so(tmp_path):
    write_comparison(tmp_path, methods=("fedavg", "fedrep"), folds=5, rounds=1)
    results = pd.read_csv(tmp_path / "results.csv")
    mean = values(results, "fedavg", "summary", "domain_avg")["value"].to_numpy()
    swinging = mean + np.array([0.02, -0.015, 0.02, -0.015, 0.0])
    results.loc[values(results, "fedrep", "summary", "domain_avg").index, "value"] = swinging
    worst = values(results, "fedavg", "summary", "domain_min")["value"].to_numpy()
    results.loc[values(results, "fedrep", "summary", "domain_min").index, "value"] = worst - 0.01
    clients = values(results, "fedavg", "summary", "client_avg")["value"].to_numpy()
    results.loc[values(results, "fedrep", "summary", "client_avg").index, "value"] = clients - 0.03
    results.to_csv(tmp_path / "results.csv", index=False)
    write_page([tmp_path], tmp_path / "page.html")
    text = " ".join(Reader(tmp_path / "page.html").text.split())
    assert re.search("no clear difference to fedavg: fedrep leads by 0.00[23] .95 % interval −.* to 0", text)
    assert "In the mean client fedrep is worse than fedavg by 0.030 (95 % interval 0.030 to 0.030)." in text
    assert "In the worst domain no method has a better mean than the reference, fedavg." in text
    assert "fedrep is best in the mean domain" in text


@pytest.mark.parametrize("folds", [2, 4])
def test_with_fewer_than_five_pairs_nothing_is_called_clear(tmp_path, folds):
    write_comparison(tmp_path, methods=("fedavg", "feddar-sa"), folds=folds, rounds=1, gain=0.1)
    results = pd.read_csv(tmp_path / "results.csv")
    mean = values(results, "fedavg", "summary", "domain_avg")["value"].to_numpy()
    results.loc[values(results, "feddar-sa", "summary", "domain_avg").index, "value"] = mean + 0.1
    results.to_csv(tmp_path / "results.csv", index=False)
    write_page([tmp_path], tmp_path / "page.html")
    page = Reader(tmp_path / "page.html")
    text = " ".join(page.text.split())
    assert f"feddar-sa leads fedavg by 0.100 (95 % interval 0.100 to 0.100); {folds} pairs are too few" in text
    assert "with 95 % intervals, Student's." in text and "bootstrap" not in text
    assert "clearly" not in text and "feddar-sa is better" not in text
    for place in range(3):
        assert page.figures[f"auc-difference-{place}"].rows["feddar-sa"]["mark"] == "#shape-open"


@pytest.mark.parametrize(("task", "metric"), [("regression", "MSE"), ("multiclass", "accuracy (%)")])
def test_other_tasks(tmp_path, task, metric):
    write_comparison(tmp_path, task, data="study.csv", domains={"1": 300, "2": 200}, folds=5)
    write_page([tmp_path], tmp_path / "page.html", title="My study")
    page, results = Reader(tmp_path / "page.html"), pd.read_csv(tmp_path / "results.csv")
    rows, head = page.table(f"{metric} of each method in each domain")
    assert "pos." not in head[-1]
    assert "at the threshold" not in page.text
    assert "Synthetic" not in page.text
    assert "My study" in page.text
    assert rows["feddar-sa"][0].startswith("★")
    worst = "domain_max" if task == "regression" else "domain_min"
    main = METRICS[task][0]
    assert said(values(results, "fedavg", "summary", worst, main)) == rows["fedavg"][1]
    assert f"feddar-sa is better than fedavg by {'0.0' if task == 'regression' else ''}" in page.text
    assert page.figures[f"{main}-difference-0"].rows["feddar-sa"]["mark"] == "#shape-up"


def test_trainings_that_failed_are_named(tmp_path):
    write_comparison(tmp_path, methods=METHODS, rounds=1)
    results = pd.read_csv(tmp_path / "results.csv")
    whole = sum(values(results, "fedrep", "domain", name)["count"].sum() for name in RACES)
    failed = (results["method"] == "local") & (results["fold"] == 1)
    results[~failed & (results["method"] != "fedavg")].to_csv(tmp_path / "results.csv", index=False)
    write_page([tmp_path], tmp_path / "page.html")
    found = Reader(tmp_path / "page.html")
    assert "Trainings that failed, and are missing in all figures: local (1 of 3), fedavg (3 of 3)." in found.text
    rows, _ = found.table("AUC of each method in each domain")
    assert all(cell.endswith(", 2 of 3") for cell in rows["local"])
    assert f"{whole:,}, " in found.text


def test_what_is_undefined_is_said_and_not_called_best(tmp_path):
    write_comparison(tmp_path, methods=("fedavg", "fedrep"), rounds=1)
    results = pd.read_csv(tmp_path / "results.csv")
    asian = (results["name"] == "Asian") & (results["metric"] == "auc")
    results.assign(value=results["value"].mask(asian & (results["fold"] == 0))).to_csv(
        tmp_path / "results.csv", index=False
    )
    write_page([tmp_path], tmp_path / "page.html")
    text = " ".join(Reader(tmp_path / "page.html").text.split())
    assert "AUC is undefined in some test parts for these domains" in text
    assert "Asian (1 of 3)" in text
    everywhere = results["scope"].isin(["domain", "summary"]) & (results["metric"] == "auc")
    results.assign(value=results["value"].mask(everywhere)).to_csv(tmp_path / "results.csv", index=False)
    write_page([tmp_path], tmp_path / "page.html")
    assert "AUC is undefined in every domain" in Reader(tmp_path / "page.html").text


def test_one_split_has_no_deviation_and_no_interval(tmp_path):
    write_page([write_comparison(tmp_path, folds=1)], tmp_path / "page.html")
    page = Reader(tmp_path / "page.html")
    assert "±" not in page.text
    assert "With one split and one seed there is no interval" in page.text
    rows, _ = page.table("Difference in AUC to fedavg")
    assert all(re.fullmatch(r"[+−]\d\.\d{3}", cell) for row in rows.values() for cell in row)


def test_further_seeds_do_not_count_samples_again(tmp_path, folder, results, page):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    both = pd.concat([results, results.assign(seed=1)])
    both.to_csv(tmp_path / "results.csv", index=False)
    write_page([tmp_path], tmp_path / "page.html")
    again = Reader(tmp_path / "page.html")
    for caption in ("Test samples by client and domain", "AUC by client and domain"):
        assert again.table(caption) == page.table(caption)
    rows, head = again.table("AUC of each method in each domain")
    assert head == page.table("AUC of each method in each domain")[1]
    assert rows["fedavg"][0] == said(values(both, "fedavg", "summary", "domain_avg"))
    assert "5 folds × 2 seeds" in again.text


def test_many_clients_and_domains_are_limited_and_it_says_so(tmp_path):
    domains = {f"group {i}": 200 + i for i in range(13)}
    write_page([write_comparison(tmp_path, clients=45, rounds=2, domains=domains)], tmp_path / "page.html")
    page = Reader(tmp_path / "page.html")
    assert "Shown are the 40 clients with the most test samples, of 45" in page.text
    assert "Shown are the 12 domains with the most samples, of 13" in " ".join(page.text.split())
    rows, _ = page.table("Test samples by client and domain")
    assert len(rows) == 41
    assert (tmp_path / "page.html").stat().st_size < 2_000_000
    results = pd.read_csv(tmp_path / "results.csv")
    one = results[(results["method"] == "fedavg") & (results["scope"] == "client") & (results["metric"] == "auc")]
    largest = one.groupby("name")["count"].sum().nlargest(40)
    assert {int(row[-1].split()[0].replace(",", "")) for row in list(rows.values())[:-1]} == set(largest)


def test_it_is_a_function_of_three_files(folder, tmp_path):
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for name in ("results.csv", "curves.csv", "config.toml"):
        shutil.copy(folder / name, copy / name)
    write_page([copy], copy / "deep" / "page.html")
    write_page([folder], tmp_path / "page.html")
    assert (copy / "deep" / "page.html").read_bytes() == (tmp_path / "page.html").read_bytes()
    assert [path.name for path in (copy / "deep").iterdir()] == ["page.html"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs, two of one method in folders with odd names."""
    place = tmp_path_factory.mktemp("runs")
    part, test = make_cohort(n=240).split(0.25, seed=0)
    source = DataSettings(data="study.csv")
    folders = [place / "plain", place / "<!--<script><b>&amp;", place / HOSTILE[3]]
    for folder, method in zip(folders, ("feddar-wa", "fedavg", "fedavg"), strict=True):
        train(part, method, test=test, rounds=3, last=2, validation=0, out=folder, source=source)
    return folders


def test_runs_are_shown_too(runs, tmp_path):
    write_page(runs[:2], tmp_path / "page.html")
    page = Reader(tmp_path / "page.html")
    rows, head = page.table("AUC of each method in each domain")
    metrics = pd.read_csv(runs[0] / "metrics.csv")
    late = metrics[(metrics["round"] > 1) & (metrics["split"] == "test") & (metrics["metric"] == "auc")]
    mean = late.groupby(["scope", "name"])["value"].mean()
    assert rows["feddar-wa"][0].removeprefix("★ ").removesuffix(" (best)") == f"{mean['summary', 'domain_avg']:.3f}"
    for column, name in zip(head[3:], ("domain-0", "domain-1", "domain-2"), strict=True):
        assert column.startswith(f"{name} n ")
        shown = rows["feddar-wa"][3 + int(name[-1])].removeprefix("★ ").removesuffix(" (best)")
        assert shown == f"{mean['domain', name]:.3f}"
    assert set(rows) == {"feddar-wa", "fedavg"}
    for absent in ("Fairness gaps", "Clients and domains", "±"):
        assert absent not in page.text
    assert "feddar run study.csv --config" in page.text
    assert "torch" in page.text
    write_page(runs[:1], tmp_path / "one.html")
    one = Reader(tmp_path / "one.html")
    assert "Differences to" not in one.text
    assert list(one.figures["auc-domain-0"].rows) == ["domain-0", "domain-1", "domain-2"]
    rows, _ = one.table("AUC in each domain")
    assert rows["worst domain"][1] == f"{mean['summary', 'domain_min']:.3f}"
    text = " ".join(one.text.split())
    assert "The worst domain is found in each round before the mean is taken" in text
    assert "Scores above are means over the last 2 rounds, and so differ from these." in text
    assert one.figures["log_loss-curve-0"].lines, "a run has the curves of every metric"


def test_the_round_in_use_is_said_and_marked(tmp_path):
    part, test = make_cohort(n=240).split(0.25, seed=0)
    options = {"rounds": 12, "lr": 0.05, "batch_size": 8, "patience": 3, "source": DataSettings(data="study.csv")}
    run = train(part, "fedrep", test=test, out=tmp_path / "run", **options)
    last = run.standing.position.round
    assert run.round < last < 12
    write_page([tmp_path / "run"], tmp_path / "page.html")
    page = Reader(tmp_path / "page.html")
    used = run.results().set_index(["scope", "name", "metric"])["value"]
    rows, head = page.table("AUC in each domain")
    assert head == ["test samples", "AUC"]
    assert rows["mean domain"] == ["", f"{used['summary', 'domain_avg', 'auc']:.3f}"]
    assert rows["domain-0"][1] == f"{used['domain', 'domain-0', 'auc']:.3f}"
    by_domain = used["domain"].xs("auc", level="metric")
    assert f"in the worst, {by_domain.idxmin()}." in " ".join(page.text.split())
    assert "found in each" not in page.text
    assert f"Round {run.round} of {last} is in use" in page.text
    assert "training stopped after 3 rounds without a better one, of 12 in all" in page.text
    assert f"The validation loss was best in round {run.round} and had risen by" in page.text
    assert "never the best round" not in page.text
    figure = page.figures["validation-0"]
    (place,), (first, end) = figure.marked, figure.span
    assert first + (end - first) * place / 100 == pytest.approx(run.round, abs=0.01)


def test_two_runs_of_a_method_are_told_apart(runs, tmp_path):
    write_page(runs, tmp_path / "page.html")
    rows, _ = Reader(tmp_path / "page.html").table("AUC of each method in each domain")
    assert set(rows) == {"feddar-wa", *(" ".join(f"fedavg ({folder.name})".split()) for folder in runs[1:])}


def test_wrong_folders(folder, runs, tmp_path):
    out = tmp_path / "page.html"
    (tmp_path / "empty").mkdir()
    for folders, message in (
        ([tmp_path / "empty"], "holds neither a comparison"),
        ([tmp_path / "absent"], "holds neither a comparison"),
        ([folder, runs[0]], "give it alone"),
        ([runs[0], runs[0]], "given twice"),
    ):
        with pytest.raises(UserError, match=message):
            write_page(folders, out)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "results.csv").write_text("method,fold\nfedavg,0\n")
    shutil.copy(folder / "config.toml", tmp_path / "cut")
    with pytest.raises(UserError, match="has no column 'seed'"):
        write_page([tmp_path / "cut"], out)
    with pytest.raises(UserError, match="cannot write to"):
        write_page([folder], tmp_path / "cut" / "results.csv" / "page.html")
    assert not out.exists()


@pytest.mark.parametrize("package", ["jinja2", "scipy"])
def test_what_is_missing_is_named(folder, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"pip install 'feddar\[compare\]'"):
        write_page([folder], tmp_path / "page.html")


def test_text_is_legible_in_both_themes():
    def luminance(colour):
        shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    def contrast(a, b):
        low, high = sorted((luminance(a), luminance(b)))
        return (high + 0.05) / (low + 0.05)

    assert len(set(figures.LIGHT.values())) == len(figures.LIGHT), "colours are found by their value"
    assert figures.DARK.keys() == figures.LIGHT.keys()
    for theme in (figures.LIGHT, figures.DARK):
        assert contrast(theme["ink"], theme["paper"]) > 12
        assert min(contrast(theme["muted"], theme[ground]) for ground in ("paper", "wash")) > 4.5
        assert min(contrast(theme[hue], theme["paper"]) for hue in figures.HUES) > 2.8
        blue, paper = (np.array([int(theme[n][i : i + 2], 16) for i in (1, 3, 5)]) for n in ("blue", "paper"))
        deepest = "#" + "".join(f"{int(part):02x}" for part in (blue + paper) / 2)
        assert contrast(theme["ink"], deepest) > 4.5


def test_marks_of_an_axis_are_round_numbers():
    scale = figures.AxisScale.over([0.0, 0.15], [], start=0.0)
    assert [tick.text for tick in scale.ticks()] == ["0", "0.05", "0.1", "0.15"]
    assert [tick.text for tick in figures.AxisScale(-0.11, 0.11).ticks(100)] == ["−10", "−5", "0", "5", "10"]
    assert figures.AxisScale(1e-8, 1.0, log=True).ticks()[0] == figures.Tick(0.0, "10⁻⁸")
    assert [tick.text for tick in figures.AxisScale(0, 40_000).ticks()][1] == "10,000"
    within = figures.AxisScale.over([1.0, 1.0], [], limits=(0, 1))  # an area has no room beyond 1
    assert (within.low, within.high) == (pytest.approx(0.96), 1)
    assert figures.AxisScale.over([0.9], [1.1], limits=(0, 1)).high > 1.1  # but a standard deviation may reach there
    assert scale.place(0.0) == 0.0


def test_every_method_has_a_stroke_of_its_own():
    methods = [f"method {i}" for i in range(10)] + list(COLOURS) + [f"further {i}" for i in range(5)]
    drawn = figures.strokes(methods)
    assert list(drawn) == methods
    assert len(set(drawn.values())) == len(methods)
    assert all(figures.LIGHT[drawn[name].hue] == colour for name, colour in COLOURS.items())


# The page in a browser.

GROUND = "() => getComputedStyle(document.body).backgroundColor"
LABEL = "() => getComputedStyle(document.querySelector('#auc-domain-0 .row span')).color"
WHITE, INK = "rgb(255, 255, 255)", "rgb(29, 33, 38)"


@pytest.fixture(scope="module")
def opened(page, folder, browser):
    """The page of the comparison, opened once; it starts dark."""
    shown = Opened(browser, folder / "report.html", color_scheme="dark")
    yield shown
    shown.context.close()


def test_sorting_by_mouse_and_keyboard(page, opened):
    shown = opened.page
    rows, head = page.table("AUC of each method in each domain")
    heads = shown.locator("#scores [data-view='0'] thead th")
    latino = 1 + [title.split(" n ")[0] for title in head].index("Latino")

    def order():
        return [name.split()[0] for name in shown.locator("#scores [data-view='0'] tbody th").all_inner_texts()]

    def by(column):
        value = {method: float(re.search(r"\d\.\d+", cells[column - 1])[0]) for method, cells in rows.items()}
        return sorted(METHODS, key=value.get, reverse=True)

    def sorting(*columns):
        return [heads.nth(i).get_attribute("aria-sort") for i in columns]

    assert (sorting(0, 1, latino), order()) == (["none", "descending", "none"], by(1))
    heads.nth(latino).get_by_role("button").click()
    assert (sorting(0, 1, latino), order()) == (["none", "none", "descending"], by(latino))
    heads.nth(latino).get_by_role("button").press("Enter")
    assert (sorting(0, 1, latino), order()) == (["none", "none", "ascending"], by(latino)[::-1])
    heads.nth(0).get_by_role("button").press("Space")
    assert (sorting(0, 1, latino), order()) == (["ascending", "none", "none"], sorted(METHODS))
    shown.keyboard.press("Tab")
    assert shown.evaluate("document.activeElement.closest('th').cellIndex") == 1
    assert opened.wrong == []


def test_choosing_methods(page, opened):
    shown = opened.page
    cells = shown.locator("#clients [data-view='0'] td")
    assert cells.all_inner_texts() == [text for text, *_ in next(iter(page.embedded[0].values()))]
    shown.get_by_label("Method", exact=True).select_option("local")
    assert cells.all_inner_texts() == [text for text, *_ in page.embedded[0]["local"]]
    lines = shown.locator("#auc-curve-0 polyline")
    behind = "lines => lines.map((line) => [line.dataset.method, line.classList.contains('behind')])"
    assert dict(lines.evaluate_all(behind)) == dict.fromkeys(METHODS, False)
    shown.get_by_role("checkbox", name="fedrep").press("Space")
    assert dict(lines.evaluate_all(behind)) == dict.fromkeys(METHODS, False) | {"fedrep": True}
    assert lines.evaluate_all(behind)[0][0] == "fedrep", "what is not in colour should lie behind"
    shown.locator("#auc-curve-0 .field").hover()
    said = shown.locator("#auc-curve-0 .readout").inner_text().split("\n")
    assert said[0] == "round 5"
    assert {line.split()[0] for line in said[1:]} == {*METHODS} - {"fedrep"}
    for line in said[1:]:
        method, text = line.split()
        assert page.figures["auc-curve-0"].lines[method]["data-texts"].split()[4] == text
    assert opened.wrong == []


def test_choosing_the_metric(opened):
    shown = opened.page
    heads = shown.locator("#scores p:visible")
    assert heads.all_inner_texts()[0].startswith("AUC on held-out samples")
    shown.get_by_label("Metric", exact=True).select_option("Accuracy (%)")
    assert heads.all_inner_texts()[0].startswith("Accuracy (%) on held-out samples")
    assert shown.locator("[data-view='0']:visible").count() == 0
    assert shown.locator("#accuracy-domain-0").is_visible()
    field, *rows = shown.locator("#accuracy-domain-0 .field, #accuracy-domain-0 .row svg").all()
    area, inner = field.bounding_box(), [row.bounding_box() for row in rows]
    same = [box[side] == pytest.approx(area[side], abs=1) for box in inner for side in ("x", "width")]
    assert all(same), "marks should be on the field's scale"
    assert area["y"] <= inner[0]["y"] < inner[-1]["y"] + inner[-1]["height"] <= area["y"] + area["height"] + 1
    assert area["height"] < 40 * len(inner)
    opened.fits(360)
    shown.get_by_label("Metric", exact=True).select_option("AUC")
    assert shown.locator("[data-view='1']:visible").count() == 0
    assert opened.wrong == []


def test_it_fits_in_both_themes_and_remembers_the_choice(opened):
    shown, button = opened.page, opened.page.locator("#theme")
    dark = shown.evaluate(GROUND), shown.evaluate(LABEL)
    for width in (1280, 768, 360):
        opened.fits(width)
    assert button.inner_text() == "Light theme"
    button.press("Enter")
    assert button.inner_text() == "Dark theme"
    assert (shown.evaluate(GROUND), shown.evaluate(LABEL)) == (WHITE, INK)
    assert dark[0] != WHITE
    assert dark[1] != INK
    for width in (360, 768, 1280):
        opened.fits(width)
    shown.reload()
    assert (shown.evaluate(GROUND), shown.evaluate(LABEL)) == (WHITE, INK), "the choice should be remembered"
    button.click()
    assert (shown.evaluate(GROUND), shown.evaluate(LABEL)) == dark
    assert opened.wrong == []


def test_it_prints_light_and_within_the_paper(opened):
    shown = opened.page
    shown.emulate_media(media="print")
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert (shown.evaluate(GROUND), shown.evaluate(LABEL)) == (WHITE, INK)
    ends = "parts => parts.map((e) => e.getBoundingClientRect().right - document.querySelector('h1').offsetLeft)"
    assert max(shown.locator("main *:not(svg *)").evaluate_all(ends)) <= 180 / 25.4 * 96 + 1
    out_of_flow = "fields => fields.filter((e) => getComputedStyle(e).position !== 'static').length"
    assert shown.locator(".dots .field").evaluate_all(out_of_flow) == 0, "they would be on the first page"
    assert not shown.locator("#theme").is_visible()
    shown.evaluate("dispatchEvent(new Event('afterprint'))")
    shown.emulate_media(media="screen")
    assert shown.pdf(format="A4", prefer_css_page_size=True).startswith(b"%PDF")
    assert opened.wrong == []


def test_hostile_names_do_no_harm(tmp_path, browser):
    hostile = dict.fromkeys(HOSTILE, 300)
    write_comparison(tmp_path, methods=METHODS[1:3], domains=hostile, clients=[*HOSTILE], rounds=2, data=HOSTILE[1])
    write_page([tmp_path], tmp_path / "page.html", title=HOSTILE[0])
    opened = Opened(browser, tmp_path / "page.html")
    shown = opened.page
    assert shown.title() == HOSTILE[0]
    assert shown.locator("#domains [data-view='0'] h3").all_text_contents() == list(HOSTILE)
    assert shown.locator("#clients tbody").first.locator("th").all_text_contents() == [*HOSTILE, "all clients"]
    assert shown.locator("script").count() == 2
    opened.fits(360)
    opened.context.close()
    assert opened.wrong == []


def test_odd_methods_and_no_storage(runs, tmp_path, browser):
    write_page(runs, tmp_path / "page.html")
    opened = Opened(browser, tmp_path / "page.html")
    shown = opened.page
    rows = shown.locator("#auc-domain-0 .row")
    labels = rows.locator("span").all_text_contents()
    assert {*labels} == {"feddar-wa", *(f"fedavg ({folder.name})" for folder in runs[1:])}
    for row, label in zip(rows.all(), labels, strict=True):
        assert row.get_attribute("title").startswith(f"{label}: 0.")
    opened.fits(360)
    shown.evaluate("Object.defineProperty(window, 'localStorage', { get() { throw new Error('denied'); } })")
    shown.locator("#theme").click()
    assert shown.evaluate("document.documentElement.dataset.theme") == "dark"
    opened.context.close()
    assert opened.wrong == []
