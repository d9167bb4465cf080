"""Commands that use trained models: predict, export, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from feddar.cli.console import AllowCode, console, say_written
from feddar.cli.options import with_options
from feddar.errors import UserError
from feddar.settings import Unknown


@with_options(Unknown)
def predict(
    trained: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    data: Annotated[
        str,
        typer.Argument(
            metavar="NEW_DATA", help="A CSV or Parquet file, an image, a folder of either, or a built-in cohort."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="CSV or Parquet file to write.")] = Path("predictions.csv"),
    client: Annotated[
        str | None, typer.Option("--client", help="Column of the client [default: as in RUN]; of images, its name.")
    ] = None,
    domain: Annotated[
        str | None, typer.Option("--domain", help="Column of the domain [default: as in RUN]; of images, its name.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Column of known labels, if there is one [default: as in RUN].")
    ] = None,
    group: Annotated[
        str | None, typer.Option("--group", help="Column to copy beside them [default: as in RUN].")
    ] = None,
    _: AllowCode = None,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Use a trained model: predict for new samples, and say which head answered."""
    from feddar.report.terminal import show_predictions
    from feddar.results.file_prediction import find_run, predict_file, read_new, require_new_file

    columns = {"client": client, "domain": domain, "target": target, "group": group}
    require_new_file(out, trained, Path(data))
    run = find_run(trained)
    chunks = read_new(run, trained, data, {role: name for role, name in columns.items() if name is not None}, given)
    show_predictions(console, run, predict_file(run, chunks, out, **given), out)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[Path, typer.Option("--out", help="The .onnx file to write.")] = Path("model.onnx"),
    client: Annotated[
        str | None, typer.Option("--client", help="Export what this client uses; of a personal method, its own model.")
    ] = None,
    _: AllowCode = None,
) -> None:
    """Write a trained model as one ONNX file, with the domain as an input, and check it with onnxruntime."""
    from feddar.results.file_prediction import find_run

    written = find_run(run).export(out, client)
    more = f"; it computes {written.encoders} encoders for every sample" * (written.encoders > 1)
    console.print(
        f"Written: [bold]{escape(str(out))}[/bold], {out.stat().st_size / 1e3:,.0f} kB{more}\n"
        f"Checked with onnxruntime: predictions differ from the run's by at most {written.difference:.1e}",
        highlight=False,
    )


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="A comparison's folder, or folders of runs.")],
    out: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
    title: Annotated[
        str | None, typer.Option("--title", help="Its heading; says what was compared if left out.")
    ] = None,
) -> None:
    """Write one self-contained page about a comparison, or about runs on the same data."""
    from feddar.report.page import write_page

    if out.is_dir():
        raise UserError(f"{out} is a folder: name a file for the page, such as {out / 'report.html'}.")
    write_page(runs, out, title)
    say_written(out)
