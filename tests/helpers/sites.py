"""Three sites with small tables of their own, and a study that they agree on: what the tests of federations share."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from feddar.data.table_options import TableOptions
from feddar.federation.coordinator_settings import CoordinatorSettings
from feddar.federation.links.local import LocalLink
from feddar.federation.site import Site
from feddar.federation.study import Study, study_of_table
from feddar.settings import Settings

NAMES = ("hospital-1", "hospital-2", "hospital-3")
DOMAINS = ("A", "B", "C")


def write_tables(folder: Path, rows: int = 60, seed: int = 0) -> Path:
    """Write one table for each site; hospital-3 has no domain C, and 2 rows of B, about which nothing may be said."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(NAMES):
        rng = np.random.default_rng([seed, number])
        mix = [0.4, 0.4, 0.2] if number < 2 else [1, 0, 0]
        domain = rng.choice(DOMAINS, rows, p=mix)
        if number == 2:
            domain[:2] = "B"
        age, lactate = rng.normal(60, 12, rows), rng.normal(2, 1, rows)
        shift = np.select([domain == "A", domain == "B"], [1.0, -1.0], 0.0)
        sick = rng.random(rows) < 1 / (1 + np.exp(-(lactate - 2) * 2 * shift - (age - 60) / 12))
        table = pd.DataFrame(
            {
                "age": age.round(1),
                "lactate": np.where(rng.random(rows) < 0.1, np.nan, lactate.round(3)),
                "ward": rng.choice(["icu", "er"], rows),
                "race": domain,
                "outcome": np.where(sick, "died", "alive"),
            }
        )
        table.to_csv(folder / f"{name}.csv", index=False)
    return folder


def make_study(folder: Path, **training) -> Study:
    """Make the study that these tables are examples of."""
    options = TableOptions(data=str(folder), domain="race", target="outcome", positive="died")
    settings = Settings(**({"rounds": 3, "batch_size": 16, "lr": 1e-2, "head_epochs": 2, "last": 1} | training))
    study = study_of_table(
        "mortality", options, settings, CoordinatorSettings(sites=3, min_clients=2, wait=5, timeout=30)
    )
    # These tables are so small that sites would send no second-order sums; single replies are what most tests look at.
    return with_facts(study, floor=0.0, secure=False)


def with_facts(study: Study, **facts) -> Study:
    """Return the study with other facts, such as its floor of second-order sums."""
    return replace(study, facts=study.facts.model_copy(update=facts))


def with_floor(study: Study, floor: float) -> Study:
    """Return the study with that floor of second-order sums."""
    return with_facts(study, floor=float(floor))


def make_sites(folder: Path, kept: Path, **options) -> dict[str, Site]:
    """Open every site's table."""
    said = options.pop("say", lambda _: None)
    return {name: Site(name, folder / f"{name}.csv", kept / name, say=said, **options) for name in NAMES}


def local_link(sites: dict[str, Site]) -> LocalLink:
    """Connect sites without a network."""
    return LocalLink({name: site.answer for name, site in sites.items()})


def with_patience(study: Study) -> Study:
    """Return the study with time for engines that take long to start on a busy machine."""
    return replace(study, coordinator=CoordinatorSettings(sites=3, min_clients=3, wait=200, timeout=200))
