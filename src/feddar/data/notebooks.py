"""What a notebook shows of a cohort, a run or a comparison: a line and a table."""

from __future__ import annotations

from html import escape

from feddar.lazy import pandas as pd


def as_html(about: object, table: pd.DataFrame) -> str:
    """Return a line of text above a table, as HTML; of a long table, the first and last rows."""
    return f"<p>{escape(repr(about))}</p>\n{table.to_html(max_rows=60, notebook=True)}"


def by_name(metrics: pd.DataFrame, columns: str) -> pd.DataFrame:
    """Return metrics of ``all``, domains and summaries as a table: a row for each, a column for each of ``columns``.

    Where a cell has several values, it has their mean.
    """
    shown = metrics[metrics["scope"].isin(("all", "domain", "summary"))]
    names = shown.drop_duplicates(["scope", "name"]).set_index(["scope", "name"]).index
    kinds = pd.Index(shown[columns].unique())
    means = shown.groupby(["scope", "name", columns], sort=False)["value"].mean().unstack(columns)
    return means.reindex(index=names, columns=kinds).round(3)
