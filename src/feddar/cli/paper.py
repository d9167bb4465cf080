"""The command `paper`, which makes the paper's figures and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from feddar.cli.console import Device, console
from feddar.cli.options import completing
from feddar.experiments import EXPERIMENTS


def paper(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help=f"One of {', '.join(EXPERIMENTS)}.", autocompletion=completing(*EXPERIMENTS)
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the results [default: results/NAME].")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="How many repetitions.")] = None,
    scale: Annotated[str | None, typer.Option("--scale", help="small or full, the paper's own settings.")] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Trainings at a time. [default: one for each core or GPU]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the folder.")] = False,
    data: Annotated[str | None, typer.Option("--data", help="Folder of the data sets; else FEDDAR_DATA.")] = None,
    only: Annotated[
        str | None,
        typer.Option("--only", help="Parts to run, as a,b: cohorts of never-worse; alphas and methods of others."),
    ] = None,
    device: Device = "cpu",
) -> None:
    """Make a figure or table of the paper, from data to picture."""
    from feddar.experiments import find_experiment
    from feddar.experiments.common import ExperimentOptions
    from feddar.models.devices import default_jobs
    from feddar.results.run_folder import writing
    from feddar.settings import Settings, checked

    experiment = find_experiment(name)
    folder = out or Path("results") / name
    device = checked(Settings, {"device": device}).device
    jobs = jobs or default_jobs(device)
    options = ExperimentOptions(folder, console.print, seeds, scale, jobs, resume, data, only, device)
    with writing(folder):
        experiment(options)
    console.print(f"Written: {folder}/results.csv, {folder}/table.md, {folder}/figure.png")
