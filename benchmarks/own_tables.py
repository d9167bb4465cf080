"""A user's own table: how long until training starts, beside a bare read of the file, and the memory of a large one.

Synthetic tables: 100,000 rows x 50 mixed columns as CSV, and 2 million rows x 30 columns as Parquet.
"""

import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd

from benchmarks.figures import Figure, seconds

ROLES = {"client": "hospital", "domain": "race", "target": "outcome"}
FLAGS = [part for name, value in ROLES.items() for part in (f"--{name}", value)]


def table(rows: int, numbers: int, whole: int, categories: int, truths: int, dates: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    columns = {
        f"number{i}": np.where(rng.random(rows) < 0.05, np.nan, rng.normal(size=rows).round(4)) for i in range(numbers)
    }
    columns |= {f"whole{i}": rng.integers(0, 100, rows) for i in range(whole)}
    columns |= {f"category{i}": rng.choice([f"level {j}" for j in range(3 + 4 * i)], rows) for i in range(categories)}
    columns |= {f"truth{i}": rng.choice(["yes", "no"], rows) for i in range(truths)}
    columns |= {
        f"date{i}": (np.datetime64("2020-01-01") + rng.integers(0, 900, rows)).astype(str) for i in range(dates)
    }
    columns |= {"hospital": rng.choice([f"h{j}" for j in range(20)], rows), "race": rng.choice(list("ABCDE"), rows)}
    risk = np.nan_to_num(columns["number0"]) + rng.normal(size=rows)
    return pd.DataFrame(columns | {"outcome": np.where(risk > 0.5, "bad", "good")})


def until_training(path: Path) -> float:
    """Seconds from the file to the first request to train: reading, kinds, split, preprocessing, model."""
    from feddar.algorithm.client import Client
    from feddar.data.table_options import TableOptions
    from feddar.data.tables import read_cohort
    from feddar.results.training import train

    class Begun(Exception):  # noqa: N818
        pass

    answer = Client.answer

    def watched(client, request):
        if request.phase.name == "heads":
            raise Begun
        return answer(client, request)

    def begin():
        options = TableOptions(data=str(path), **ROLES)
        part, test = read_cohort(options).split()
        try:
            train(part, test=test, batched=False)
        except Begun:
            return
        raise AssertionError("training never began")

    with patch.object(Client, "answer", watched):
        return seconds(begin)


def write_large(path: Path) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    pieces = (pa.Table.from_pandas(table(200_000, 22, 0, 5, 0, 0, seed)) for seed in range(10))
    first = next(pieces)
    with ParquetWriter(path, first.schema) as writer:
        writer.write_table(first)
        for piece in pieces:
            writer.write_table(piece)


def figures() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mixed.csv"
        table(100_000, 25, 8, 8, 4, 2).to_csv(path, index=False)
        bare = min(seconds(lambda: pd.read_csv(path)) for _ in range(3))
        ours = min(until_training(path) for _ in range(3))
        note = f"{ours / bare:.2g} times pandas.read_csv alone, {bare:.2f} s; least of 3"
        name = "CSV of 100,000 rows x 50 columns, seconds from the file to the start of training"
        yield Figure(name, ours, "<= 5", note)
        large = Path(folder) / "large.parquet"
        write_large(large)
        command = [sys.executable, "-m", "feddar.cli", "run", str(large), *FLAGS, "--out", f"{folder}/run"]
        options = ["--rounds", "1", "--head-epochs", "1", "--batch-size", "512", "--jobs", "1"]
        took = seconds(lambda: subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL))
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024**2
        name = "Parquet of 2,000,000 rows x 30 columns, one round, peak memory in GB"
        yield Figure(name, peak, "<= 4", f"{took:.0f} s in all")
