"""Draw AUC of FedAvg and feddar for each group of real patients, from docs/results/covid-mx.csv.

Run as `python docs/draw_groups.py`; a test sees that docs/images/groups.svg is the picture that this makes.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import pandas as pd

HERE = Path(__file__).parent
RESULTS, PICTURE = HERE / "results" / "covid-mx.csv", HERE / "images" / "groups.svg"
WIDTH, ROW, TOP, LEFT, RIGHT = 760, 30, 74, 210, 30
LOWEST, HIGHEST = 0.6, 0.95
COLOURS = {"fedavg": "#8a929c", "feddar": "#2457c5"}
INK, FAINT = "#1d2126", "#59616b"


def figures() -> pd.DataFrame:
    """Return for each group the AUC of both methods, means over folds, and its cases; the worst of FedAvg is first."""
    results = pd.read_csv(RESULTS)
    auc = results[(results["scope"] == "domain") & (results["metric"] == "auc") & results["method"].isin(COLOURS)]
    table = auc.pivot_table(index="name", columns="method", values="value")
    table["cases"] = auc[auc["method"] == "feddar"].groupby("name")["count"].sum()
    return table.sort_values("fedavg")


def picture() -> str:
    """Return the SVG."""
    table = figures()
    height = TOP + ROW * len(table) + 30
    rows = "".join(
        _row(TOP + ROW * place, str(row.Index), row.cases, {name: getattr(row, name) for name in COLOURS})
        for place, row in enumerate(table.itertuples())
    )
    ticks = "".join(_tick(value / 100, height) for value in range(60, 96, 5))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="14" role="img" aria-label="AUC of FedAvg and of feddar in each group">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n'
        f'<text x="16" y="26" font-size="16" font-weight="bold" fill="{INK}">AUC in each group of patients: '
        f'<tspan fill="{FAINT}">FedAvg</tspan> and <tspan fill="{COLOURS["feddar"]}">feddar</tspan></text>\n'
        f'<text x="16" y="48" fill="{FAINT}">COVID-19 in Mexico: who was admitted, by health-care system; '
        f"mean of five folds</text>\n{ticks}{rows}</svg>\n"
    )


def _across(auc: float) -> float:
    return round(LEFT + (auc - LOWEST) / (HIGHEST - LOWEST) * (WIDTH - LEFT - RIGHT), 1)


def _tick(auc: float, height: int) -> str:
    x = _across(auc)
    return (
        f'<line x1="{x}" x2="{x}" y1="{TOP - 8}" y2="{height - 28}" stroke="#e4e7eb"/>\n'
        f'<text x="{x}" y="{height - 10}" font-size="12" text-anchor="middle" fill="{FAINT}">{auc:.2f}</text>\n'
    )


def _row(top: int, name: str, cases: int, aucs: dict[str, float]) -> str:
    y, ends = top + ROW // 2 - 4, {method: _across(auc) for method, auc in aucs.items()}
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="6" fill="{COLOURS[method]}"/>\n' for method, x in ends.items())
    return (
        f'<text x="16" y="{y + 5}" fill="{INK}">{escape(name)}</text>\n'
        f'<text x="{LEFT - 24}" y="{y + 5}" font-size="12" text-anchor="end" fill="{FAINT}">{cases:,} cases</text>\n'
        f'<line x1="{ends["fedavg"]}" x2="{ends["feddar"]}" y1="{y}" y2="{y}" stroke="#c3c9d1" stroke-width="3"/>\n'
        + dots
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
