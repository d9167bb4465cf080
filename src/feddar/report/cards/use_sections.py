"""The sections of a model card on its use: in care, privacy, open science, versions, and how to make it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib.metadata import version

from feddar.federation.coordinator import STUDY_FILE
from feddar.federation.site import MIN_CELL
from feddar.report.cards.content import Block, Commands, Items, Paragraph, Section, ask, section, words_table
from feddar.report.cards.trained_run import TrainedRun
from feddar.results.run_folder import MODEL_FILE, notes_in
from feddar.settings import CONFIG_FILE

NO_BOUND = (
    "There is no differential privacy: what the finished model, or a sum over many patients, says of one of them is "
    f"not bounded by a number. {MODEL_FILE} has the names of domains, sites, columns and levels."
)
SAME = "On one kind of processor the same data and seed give the same bits; on another, the last digits differ."
UNSAID = "not in this study"


def use_sections(run: TrainedRun) -> Iterator[Section]:
    """Yield the sections, in the order in which they are read."""
    yield section("Use in care", "item 27, usability", *ask("input_quality", "monitoring"))
    yield section("Privacy", "", *_privacy(run), NO_BOUND)
    asked = ask("ethics", "funding", "protocol", "sharing", "involvement")
    yield section("Ethics and open science", "items 17, 18 and 19", *asked)
    known: dict[str, str] = run.files.about["versions"]
    rows = [*known.items(), ("feddar, which wrote this card", version("feddar"))]
    yield section("Versions", "item 18", *words_table("Trained with", ("software", "version"), rows))
    yield section("How to reproduce it", "item 18, code sharing", *_again(run), *_identity(run), SAME)
    cited = (
        "A. Zhong, H. He, Z. Ren, N. Li, Q. Li: FedDAR: Federated Domain-Aware Representation Learning. 2022. "
        "arXiv:2209.04007, https://arxiv.org/abs/2209.04007",
        f"The feddar developers: feddar: Federated Domain-Aware Representation learning, version {known['feddar']}.",
        "Sections are named after TRIPOD+AI: G. S. Collins et al., BMJ 2024;385:e078378.",
    )
    yield section("Citation", "", Items(cited))


def _privacy(run: TrainedRun) -> Iterator[Block]:
    """Yield who could see what in training."""
    if run.study is not None:
        yield from (Paragraph(note) for note in notes_in(run.files.folder))
        yield from words_table("Privacy settings", ("setting", "value"), _limits(run))
        yield from words_table("Who sees what", ("what", "coordinator", "another site"), _who_sees_what(run))
    elif run.between_sites:
        yield Paragraph("The tables stayed at their sites. The study says how sums were protected.")
    else:
        own = f" {MODEL_FILE} also holds what is each site's own of the model." if run.method.keeps_own else ""
        yield Paragraph(
            "All samples were pooled on one machine, on which the clients were simulated: whoever ran the training "
            f"could read every row.{own}"
        )


def _limits(run: TrainedRun) -> Iterator[tuple[str, str]]:
    """Yield what the study says of privacy; what it leaves out, an earlier version did not have."""
    secure = run.told("secure")
    yield "secure sums", UNSAID if secure is None else "yes" if secure else "no"
    yield "sites known by keys that the study lists", "yes" if run.told("keys") else "no"
    yield "sites waited for", str((run.study or {}).get("terms", {}).get("sites", UNSAID))
    yield "fewest patients of a domain at a site", f"{MIN_CELL}, unless a site has said otherwise at its own place"
    floor, norm = (UNSAID if run.told(name) is None else f"{run.told(name):g}" for name in ("floor", "max_norm"))
    yield "rows for each column of a head, from which it is sent (floor)", floor
    yield "bound of what one phase changes (max_norm)", norm


def _who_sees_what(run: TrainedRun) -> Iterator[tuple[str, str, str]]:
    secure = run.told("secure")
    yield "rows of a table", "nothing", "nothing"
    replies = "sums over three sites or more" if secure else "every reply of every site"
    yield "a site's replies: parameters, sums, figures", replies, "nothing"
    holders = ("how many sites hold each", "which ones") if secure else ("which ones", "nothing")
    yield "the domains that a site holds", *holders
    yield "the model of each round", "all of it", "all of it"
    yield "what is a site's own of the model", "nothing", "nothing"


def _again(run: TrainedRun) -> Iterator[Block]:
    folder, encoder = run.files.folder, run.settings.encoder or ""
    allow = ["--allow-code", encoder] if ":" in encoder else []
    if run.study is not None:
        study = str(folder / STUDY_FILE)
        lines = (
            ["feddar", "server", "--config", study, "--listen", "ADDRESS", "--keys", "KEYS", *allow],
            ["feddar", "client", "--server", "ADDRESS", "--keys", "KEYS", "--data", "TABLE", "--study", study, *allow],
        )
        yield Paragraph("At the coordinator, at each site, and as a rehearsal on one machine:")
        yield Commands("\n".join([*map(shlex.join, lines), f"{run.files.command} {shlex.join(allow)}".strip()]))
    elif run.between_sites:
        yield Paragraph("The coordinator's folder has the study, by which the model can be trained again.")
    elif run.files.data is None:
        yield Paragraph(f"It was trained in Python, by feddar.train with the settings in {folder / CONFIG_FILE}.")
        yield from ask("cohort_code")
    else:
        yield Commands(f"{run.files.command} {shlex.join([*allow, '--out', 'again'])}")


def _identity(run: TrainedRun) -> Iterator[Block]:
    what = "digest of the study" if run.between_sites else "fingerprint of the training data"
    rows = [("seed", str(run.settings.seed)), (what, str(run.files.about["fingerprint"]))]
    yield from words_table("What identifies it", ("what", "value"), rows)
