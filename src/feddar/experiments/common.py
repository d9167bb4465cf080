"""What the experiments share: checking their arguments and writing their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import pandas as pd

from feddar.errors import UserError

Setting = TypeVar("Setting")


def pick(scales: Mapping[str, Setting], scale: str, seeds: int) -> Setting:
    """Return the setting called `scale`, having checked it and the number of seeds."""
    if scale not in scales:
        raise UserError(f"The scale must be one of {', '.join(scales)}, not {scale!r}.")
    if seeds < 1:
        raise UserError(f"At least one seed is needed, not {seeds}.")
    return scales[scale]


def write(out: Path, results: pd.DataFrame, table: str) -> None:
    """Write `results.csv` and `table.md` into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    results.to_csv(out / "results.csv", index=False)
    (out / "table.md").write_text(table, encoding="utf-8")
