"""Tables with a column of DICOM files, from the command line: run, resume, predict, and the page of the cohort."""

import re

import numpy as np
import pandas as pd
import pytest

from feddar.data import image_cache
from feddar.results.run import load
from helpers.command import feddar
from helpers.dicom_files import chest, write_dicom

COLUMNS = ["--client", "site", "--domain", "scanner", "--target", "ill", "--image", "film", "--image-size", 16]
SMALL = [*COLUMNS, "--method", "feddar-wa", "--rounds", 2, "--jobs", 1]


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    """Films of two scanners, of which one writes MONOCHROME1, and a run on them."""
    folder, rng, rows = tmp_path_factory.mktemp("clinic"), np.random.default_rng(0), []
    for number in range(48):
        ill, old = bool(number % 2), number % 4 > 1
        film, kind = chest(rng, ill, 32), "MONOCHROME1" if old else "MONOCHROME2"
        write_dicom(folder / "films" / f"{number:02}.dcm", 4095 - film if old else film, bits=12, kind=kind)
        rows.append((f"h{number % 3}", "old" if old else "new", f"films/{number:02}.dcm", "yes" if ill else "no"))
    pd.DataFrame(rows, columns=["site", "scanner", "film", "ill"]).to_csv(folder / "cases.csv", index=False)
    feddar("run", "cases.csv", *SMALL, "--out", "run", cwd=folder)
    return folder


def test_dicom_files_go_from_run_to_predict(clinic):
    feddar("predict", "run", "cases.csv", "--out", "table.csv", cwd=clinic)
    feddar("predict", "run", "films", "--domain", "old", "--out", "folder.csv", cwd=clinic)
    table, folder = (pd.read_csv(clinic / f"{name}.csv") for name in ("table", "folder"))
    assert len(table) == len(folder) == 48
    assert table["probability_yes"].between(0, 1).all() and table["probability_yes"].nunique() > 40
    old = table["domain"] == "old"
    np.testing.assert_allclose(folder["probability_yes"][old], table["probability_yes"][old], rtol=1e-6)


def test_large_images_are_kept_beside_the_run_with_the_same_bits(clinic, monkeypatch):
    monkeypatch.setattr(image_cache, "memory_size", lambda: 48 * 3 * 16 * 16)
    said = feddar("run", "cases.csv", *SMALL, "--out", "large", cwd=clinic)
    assert "note: images are large, and kept in large.images." in said
    (kept,) = (clinic / "large.images").iterdir()
    assert kept.stat().st_size == 48 * 3 * 16 * 16
    assert (clinic / "large" / "metrics.csv").read_text() == (clinic / "run" / "metrics.csv").read_text()
    first, second = (load(clinic / name) for name in ("run", "large"))
    assert first.fingerprint == second.fingerprint
    written = kept.stat().st_mtime_ns
    feddar("run", "cases.csv", "--resume", "--out", "large", cwd=clinic)
    assert kept.stat().st_mtime_ns == written
    assert "--image-cache FOLDER" in feddar("cohort", "cases.csv", *COLUMNS, cwd=clinic, code=2)
    feddar("cohort", "cases.csv", *COLUMNS, "--image-cache", "large.images", "--out", "large.html", cwd=clinic)
    assert kept.stat().st_mtime_ns == written


def test_the_page_of_a_cohort_shows_some_images_of_each_domain(clinic):
    def page(seed):
        said = feddar("cohort", "cases.csv", *COLUMNS, "--seed", seed, "--out", f"{seed}.html", cwd=clinic)
        assert f"page: {seed}.html" in said
        return (clinic / f"{seed}.html").read_text()

    first = page(0)
    images = re.findall(r'<img src="(data:image/jpeg;base64,[^"]+)" alt="image \d of (\w+)"', first)
    assert [domain for _, domain in images] == ["new"] * 6 + ["old"] * 6
    assert len({source for source, _ in images}) == 12
    assert len(first) < 60_000
    assert "it stays at the site that holds them" in first
    assert page(0) == first
    assert page(1) != first
    assert "let it end in .html" in feddar("cohort", "cases.csv", *COLUMNS, "--out", "page.txt", cwd=clinic, code=2)


def test_the_page_of_a_cohort_without_images_has_no_sheet(tmp_path):
    feddar("cohort", "synthetic", "--out", "page.html", cwd=tmp_path)
    page = (tmp_path / "page.html").read_text()
    assert "Who holds what" in page and "<img" not in page and "it stays at the site" not in page


def test_files_that_are_missing_or_broken_are_named_at_once(clinic):
    table = (clinic / "cases.csv").read_text()
    for number in (1, 4, 9, 12):
        table = table.replace(f"films/{number:02}.dcm", f"gone/{number:02}.dcm")
    (clinic / "gone.csv").write_text(table)
    said = feddar("run", "gone.csv", *SMALL, "--out", "none", cwd=clinic, code=2)
    assert "gone.csv, line 3: cannot read 4 images: gone/01.dcm (there is no such file), " in said
    assert "and 1 more: mend the path, or take out its row." in said
    assert not (clinic / "none").exists()


def test_paths_that_are_not_read_are_named(clinic):
    pd.read_csv(clinic / "cases.csv").assign(age=range(48)).to_csv(clinic / "aged.csv", index=False)
    roles = COLUMNS[:6]
    said = " ".join(feddar("cohort", "aged.csv", *roles, cwd=clinic).split())
    assert "column 'film' is left out, as it holds paths of images: --image film reads them." in said
    assert "but paths of images: add --image film." in feddar("cohort", "cases.csv", *roles, cwd=clinic, code=2)
