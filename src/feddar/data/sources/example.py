"""Example tables of three hospitals to try the commands with: synthetic, small, and with missing values.

The outcome depends on age, lactate, oxygen saturation and ward. The effect of lactate differs between race groups, and
every hospital has its own mixture of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from feddar.errors import UserError

HOSPITALS = ("hospital-1", "hospital-2", "hospital-3")
RACES = ("Asian", "Black", "White")
MIXTURES = ((0.15, 0.15, 0.7), (0.2, 0.6, 0.2), (0.5, 0.1, 0.4))
LACTATE = {"Asian": -0.5, "Black": 1.5, "White": 1.0}
"""The change of the outcome's log-odds per unit of lactate, by race."""


def write_example(folder: Path, rows: int = 400, seed: int = 0) -> list[Path]:
    """Write one table per hospital into a new folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already: name a new folder for the tables.")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, name in enumerate(HOSPITALS):
        files.append(folder / f"{name}.csv")
        draw_table(np.random.default_rng([seed, number]), MIXTURES[number], rows).to_csv(files[-1], index=False)
    return files


def draw_table(rng: np.random.Generator, mixture: tuple[float, ...], rows: int) -> pd.DataFrame:
    """Draw the patients of a hospital with this mixture of race groups."""
    race = rng.choice(RACES, rows, p=mixture)
    age = rng.normal(62, 14, rows).clip(18, 99).round()
    lactate = rng.lognormal(0.5, 0.5, rows).round(1)
    saturation = (99 - rng.exponential(4, rows)).clip(60, 100).round()
    ward = rng.choice(["emergency", "surgery", "medicine"], rows, p=[0.5, 0.2, 0.3])
    steepness = np.array([LACTATE[each] for each in race])
    odds = (age - 62) / 20 + steepness * (lactate - 1.8) + (94 - saturation) / 6 + 0.5 * (ward == "emergency") - 1
    worse = rng.random(rows) < 1 / (1 + np.exp(-odds))
    return pd.DataFrame(
        {
            "patient": [f"{rng.integers(16**6):06x}" for _ in range(rows)],
            "race": race,
            "sex": rng.choice(["f", "m"], rows),
            "age": age.astype(int),
            "lactate": np.where(rng.random(rows) < 0.1, np.nan, lactate),
            "saturation": saturation.astype(int),
            "ward": ward,
            "intensive_care": np.where(worse, "yes", "no"),
        }
    )
