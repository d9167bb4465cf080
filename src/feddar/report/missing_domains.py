"""What it costs where the domain of samples is missing, for the terminal, the page and the model card.

The numbers come from ``missing-domains.csv`` in the folder of a run: those of the model in use as they are, and as they
were if all test samples had no domain, so that each got the mixture of heads by the shares of domains at its client.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from rich.console import Console

from feddar.report.numbers import metric_name, number
from feddar.results.figure_files import MISSING_FILE, read_missing_domains

MEAN, ALL = "mean domain", "all samples"
TITLE = "If the domain were missing"
ABOUT = (
    "As they are, and as if all test samples had no domain and were predicted by the mixture of heads by the shares of "
    "domains at their client (--missing-domain mixture)."
)


def costs(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return value and ``missing`` by part (domains, their mean and all samples) of the main metric and log-loss."""
    part = frame["name"].where(frame["scope"] == "domain", frame["name"].map({"domain_avg": MEAN, "all": ALL}))
    rows = frame.assign(part=part)[frame["metric"].isin((metric, "log_loss")) & part.notna()]
    found: pd.DataFrame = rows[["part", "metric", "value", "missing"]].reset_index(drop=True)
    return found


def cost_table(frame: pd.DataFrame, metric: str) -> tuple[list[str], dict[str, list[tuple[str, float]]]]:
    """Return titles of columns, and by part metric and value under each: as they are, and as if missing."""
    found = costs(frame, metric)
    metrics = sorted(found["metric"].unique(), key=metric.__ne__)
    titles = [title for each in metrics for title in (metric_name(each), f"{metric_name(each)}, missing")]
    by_part = found.set_index(["part", "metric"])
    ways = ("value", "missing")
    return titles, {
        str(part): [(each, float(by_part.loc[(part, each), way])) for each in metrics for way in ways]
        for part in dict.fromkeys(found["part"])
    }


def say_cost(console: Console, folder: Path, metric: str) -> None:
    """Print what it costs in the mean domain; nothing where it is not known."""
    frame = read_missing_domains(folder)
    if frame is None:
        return
    found = costs(frame, metric)
    said = [
        f"{metric_name(row['metric'])} {number(row['missing'], metric=row['metric'])} instead of "
        f"{number(row['value'], metric=row['metric'])}"
        for row in found[found["part"] == MEAN].to_dict("records")
    ]
    console.print(
        f"\nIf all domains were missing (--missing-domain mixture), the mean domain had {' and '.join(said)}: "
        f"{MISSING_FILE}",
        highlight=False,
    )
