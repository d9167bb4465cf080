"""A user's own table: how long until training starts, beside a bare read of the file, and the memory of a large one.

Synthetic tables: 100,000 rows x 50 mixed columns as CSV, and 2 million rows x 30 columns as Parquet.
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd

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
    from feddar.datasets import find_source
    from feddar.phases import Client
    from feddar.settings import DataSettings
    from feddar.training import train

    class Begun(Exception):  # noqa: N818
        pass

    answer = Client.answer

    def watched(client, request):
        if request.phase.name == "heads":
            raise Begun
        return answer(client, request)

    options = DataSettings(data=str(path), **ROLES)
    start = time.perf_counter()
    cohort = find_source(options).load(options, 0)
    part, test = cohort.split()
    with patch.object(Client, "answer", watched):
        try:
            train(part, test=test)
        except Begun:
            return time.perf_counter() - start
    raise AssertionError("training never began")


def write_large(path: Path) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    pieces = (pa.Table.from_pandas(table(200_000, 22, 0, 5, 0, 0, seed)) for seed in range(10))
    first = next(pieces)
    with ParquetWriter(path, first.schema) as writer:
        writer.write_table(first)
        for piece in pieces:
            writer.write_table(piece)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mixed.csv"
        table(100_000, 25, 8, 8, 4, 2).to_csv(path, index=False)
        bare = min(timed(lambda: pd.read_csv(path)) for _ in range(3))
        ours = min(until_training(path) for _ in range(3))
        print(f"100,000 rows x 50 columns, from the file to the start of training: {ours:.2f} s (target 5)")
        print(f"  beside pandas.read_csv alone, {bare:.2f} s: {ours / bare:.1f} times")
        large = Path(folder) / "large.parquet"
        write_large(large)
        command = [sys.executable, "-m", "feddar.cli", "run", str(large), *FLAGS]
        options = ["--rounds", "1", "--head-epochs", "1", "--batch-size", "512", "--jobs", "1"]
        took = timed(lambda: subprocess.run([*command, *options, "--out", f"{folder}/run"], check=True, stdout=-3))
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024**2
        print(f"2,000,000 rows x 30 columns of Parquet, one round: peak {peak:.2f} GB (target 4), {took:.0f} s in all")


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
