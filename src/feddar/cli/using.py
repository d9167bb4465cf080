"""Commands that use trained models: predict, export, report, card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from feddar.cli.console import AllowCode, Device, console, say_written
from feddar.cli.options import with_options
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
    device: Device = "cpu",
    _: AllowCode = None,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Predict for new samples, and say which head answered."""
    from feddar.report.terminal import show_predictions
    from feddar.results.file_prediction import find_run, predict_file, read_new, require_new_file

    columns = {"client": client, "domain": domain, "target": target, "group": group}
    require_new_file(out, trained, Path(data))
    run = find_run(trained, device)
    chunks = read_new(run, trained, data, {role: name for role, name in columns.items() if name is not None}, given)
    show_predictions(console, run, predict_file(run, chunks, out, **given), out)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[Path, typer.Option("--out", help="The .onnx file to write.")] = Path("model.onnx"),
    client: Annotated[
        str | None, typer.Option("--client", help="Export what this client uses; of a personal method, its own model.")
    ] = None,
    device: Device = "cpu",
    _: AllowCode = None,
) -> None:
    """Write a trained model as one ONNX file, and check the file."""
    from feddar.results.file_prediction import find_run

    written = find_run(run, device).export(out, client)
    more = f"; it computes {written.encoders} encoders for every sample" * (written.encoders > 1)
    console.print(
        f"Written: [bold]{escape(str(out))}[/bold], {out.stat().st_size / 1e3:,.0f} kB{more}\n"
        f"Checked with onnxruntime: scores differ from the run's by at most {written.scores:.1e} of their size, "
        f"predictions by at most {written.difference:.1e}",
        highlight=False,
    )


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="A comparison's folder, or folders of runs.")],
    out: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
    title: Annotated[
        str | None, typer.Option("--title", help="Its heading; says what was compared if left out.")
    ] = None,
) -> None:
    """Write one page about a comparison, or about several runs."""
    from feddar.report.page import write_page

    write_page(runs, out, title)
    say_written(out)


def card(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[Path, typer.Option("--out", help="The card to write, .md or .html.")] = Path("card.md"),
    answers: Annotated[
        Path | None, typer.Option("--answers", help="TOML file with the author's answers to the card's questions.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option("--questions", help="Write the questions into this new TOML file, and no card.")
    ] = None,
) -> None:
    """Write a model card of a run: for whom, and how good by group.

    It has data, performance and calibration by group with intervals, what was not tested, and how to make it again.
    """
    from feddar.report.cards.files import write_card, write_questions

    if questions is not None:
        write_questions(run, questions)
        say_written(questions)
        return
    written = write_card(run, out, answers)
    say_written(out)
    left = sum(not question.answer for question in written.questions)
    if left:
        more = "" if answers else f"; feddar card {escape(str(run))} --questions answers.toml writes them into a file"
        console.print(f"Questions that the author has to answer: {left}{more}", highlight=False)
