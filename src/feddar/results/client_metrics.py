"""The metrics of each client, of the model in use, where there are too many clients to have them in metrics.csv.

They are a table of their own, written once at the end of training: ``clients.parquet`` or, without pyarrow,
``clients.csv.gz``, both with the columns that ``Run.evaluate`` returns.
"""

from __future__ import annotations

from gzip import GzipFile
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path

from feddar.lazy import pandas as pd
from feddar.results.csv_files import write_csv
from feddar.results.run_folder import replacing, writing

PARQUET_FILE, CSV_FILE = "clients.parquet", "clients.csv.gz"
ABOUT_CLIENTS = (
    f"There are too many clients to show each: their metrics are in {PARQUET_FILE} ({CSV_FILE} without pyarrow) in the "
    "folder of the run."
)
"""What pages, tables and the terminal say in place of metrics of clients."""


def write_client_metrics(folder: Path, metrics: pd.DataFrame) -> None:
    """Write the rows of clients into a run's folder."""
    rows = metrics[metrics["scope"] == "client"].reset_index(drop=True)
    with writing(folder):
        if find_spec("pyarrow") is not None:
            with replacing(folder / PARQUET_FILE) as temporary:
                rows.to_parquet(temporary, engine="pyarrow", index=False)
            return
        with (
            replacing(folder / CSV_FILE) as temporary,
            temporary.open("wb") as raw,
            # Without name and time in it, the file of a resumed run has the same bits as that of another.
            GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
            TextIOWrapper(packed, encoding="utf-8", newline="") as file,
        ):
            write_csv(rows, file)


def remove_client_metrics(folder: Path) -> None:
    """Remove the metrics of clients by a model that is about to be trained further."""
    with writing(folder):
        for file in (PARQUET_FILE, CSV_FILE):
            (folder / file).unlink(missing_ok=True)


def are_left_out(results: pd.DataFrame) -> bool:
    """Return whether results have the mean over clients, but no metrics of each."""
    averaged = results[results["name"].eq("client_avg") & results["scope"].eq("summary")]
    return bool((averaged["count"] > 0).any()) and not bool(results["scope"].eq("client").any())
