"""Crossed domains: heads that share the parts of their factors, beside heads of one factor and heads of cells alone.

On the synthetic exam cohort (without images), race x sex x shift, of which sex changes what two columns mean, and shift
changes nothing; and on acs-income, of which models see some rows and the rest is for testing, race x sex. All columns
but race are features of all models. Each is scored by log-loss and AUC in each margin and cell.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

import feddar
from benchmarks.figures import Figure
from feddar.data.cohort import Cohort
from feddar.data.sources import exam_cases as exam
from feddar.data.sources.acs_income_persons import read_persons
from feddar.data.sources.data_folder import data_folder
from feddar.evaluation.metrics import evaluate

TRAINED, TESTED = 6000, 30000
KINDS = ("race alone", "cells alone", "shared parts")


def exam_table(seed: int, times: int) -> pd.DataFrame:
    """Draw exam cases as a table; of women one value weighs more and another less, of men the reverse."""
    data, rng = exam.draw_counts(exam.case_counts() * times, seed, 1.0), np.random.default_rng([seed, times])
    sex, shift = rng.choice(["F", "M"], len(data.y)), rng.choice(["day", "night"], len(data.y))
    moved = np.where(sex == "F", 1, -1) * (data.record[:, 2] - data.record[:, 5])
    risk = 1 / (1 + np.exp(-(data.logit + moved)))
    table = pd.DataFrame(data.record, columns=exam.FEATURES)
    return table.assign(
        race=data.race, sex=sex, shift=shift, client=data.site, y=np.where(rng.random(len(sex)) < risk, "yes", "no")
    )


def acs_table(seed: int) -> pd.DataFrame:
    """Return persons in random order."""
    persons = read_persons(data_folder() / "acs_income").sample(TRAINED + TESTED, random_state=seed, ignore_index=True)
    return persons.dropna(subset="race").rename(columns={"state": "client", "income": "y", "SEX": "sex"})


def scored(table: pd.DataFrame, rows: int, factors: list[str], seed: int) -> pd.DataFrame:
    """Train on the first rows with each kind of heads, and return metrics on the rest, by kind and factor."""
    x, found = table.drop(columns=["race", "client", "y"]), []
    domains = {"race alone": table["race"], "cells alone": table[factors].agg(", ".join, axis=1)}
    for kind in KINDS:
        domain = domains.get(kind, table[factors])
        cohort = Cohort.from_arrays(x, table["y"], domain=domain, client=table["client"])
        train, test = cohort.rows(slice(0, rows)), cohort.rows(slice(rows, None))
        run = feddar.train(train, seed=seed)
        scores = run.scores(test.x, test.domain, test.client_names)
        for scope in [*factors, "cell"]:
            named = domains["cells alone"] if scope == "cell" else table[scope]
            marked = Cohort.from_arrays(np.arange(len(test)), table["y"][rows:], domain=named[rows:])
            metrics = evaluate(marked, scores)
            found.append(metrics.assign(kind=kind, factor=scope))
        print(f"  {kind}: spreads {run.state.domain_spreads.numpy().round(3)}, blend {run.state.blend}", flush=True)
    return pd.concat(found, ignore_index=True)


def figures() -> Iterator[Figure]:
    tasks = {"exam, race x sex x shift": (["race", "sex", "shift"], 5), "acs-income, race x sex": (["race", "sex"], 3)}
    for task, (factors, draws) in tasks.items():
        frames = []
        for seed in range(draws):
            print(f"{task}, {seed}", flush=True)
            if task.startswith("exam"):
                first = exam_table(seed, 1)
                table, rows = pd.concat([first, exam_table(100 + seed, 4)], ignore_index=True), len(first)
            else:
                table, rows = acs_table(seed), TRAINED
            frames.append(scored(table, rows, factors, seed).assign(seed=seed))
        yield from compared(task, pd.concat(frames))


def compared(task: str, metrics: pd.DataFrame) -> Iterator[Figure]:
    """Print each margin and the cells by kind, and by how much shared parts are better than the better other kind."""
    cells = metrics[(metrics["factor"] == "cell") & (metrics["scope"] == "summary")]
    margins = metrics[(metrics["factor"] != "cell") & (metrics["scope"] == "domain")]
    for metric, worst, sign in (("log_loss", "domain_max", -1), ("auc", "domain_min", 1)):
        chosen = pd.concat([margins, cells[cells["name"].isin(["domain_avg", worst])]])
        chosen, draws = chosen[chosen["metric"] == metric], metrics["seed"].nunique()
        table = chosen.pivot_table(index=["factor", "name"], columns=["kind", "seed"], values="value", sort=False)
        for place, row in table.iterrows():
            means = {kind: row[kind].mean() for kind in KINDS}
            better = max(KINDS[:2], key=lambda kind: sign * means[kind])
            gains = sign * (row["shared parts"] - row[better])
            gain, error = gains.mean(), gains.std() / np.sqrt(draws)
            shown = "  ".join(f"{kind} {value:.4f}" for kind, value in means.items())
            print(
                f"  {metric:8} {' '.join(place):16} {shown}  gain over {better} {gain:+.4f} +- {error:.4f}", flush=True
            )
            if place == ("cell", worst):
                what = f"shared parts over the better of race and cells alone, worst cell, {metric} on {task}"
                yield Figure(what, gain, "> 0", f"{gain:+.4f} +- {error:.4f} in {draws} draws")
