"""`feddar predict`: tables in, predictions out, and one sentence for whatever is wrong."""

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from feddar.data import chunks
from feddar.data.table_options import TableOptions
from feddar.data.tables import read_cohort
from feddar.objectives import Binary
from feddar.objectives.labels import LabelColumns
from feddar.results.figure_files import read_figures
from feddar.results.run import load
from helpers.command import COLUMNS, feddar

ROLES = {"client": "hospital", "domain": "race", "target": "outcome"}


def study(n=300, seed=0):
    """A table with every kind of column, gaps, codes that look like numbers, and a group with blanks around it."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({"age": rng.normal(60, 10, n).round(6), "crp": rng.lognormal(size=n)})
    table["ward"] = rng.choice(["A", "B", "01", "1"], n, p=[0.4, 0.3, 0.15, 0.15])
    table["smoker"] = rng.choice(["yes", "no"], n)
    table["admitted"] = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, n), "D")
    table.loc[::7, "crp"] = np.nan
    table.loc[::11, ["ward", "smoker"]] = None
    table["hospital"] = [f"0{i % 3}" for i in range(n)]
    table["race"] = rng.choice(["a", "b", " b"], n)
    table["outcome"] = (table["age"] > 60) == (table["race"] == "a")
    return table.assign(outcome=table["outcome"].map({True: "yes", False: "no"}))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    study().to_csv(folder / "study.csv", index=False)
    for method in ("feddar-sa", "fedrep", "fedavg"):
        feddar(
            "run", "study.csv", *COLUMNS, "--rounds", 2, "--jobs", 1, "--method", method, "--out", method, cwd=folder
        )
    return folder


def predictions(path):
    return pd.read_csv(path, dtype={"client": str, "domain": str}, keep_default_na=False)


@pytest.mark.parametrize("rows", [512, 1024])
def test_the_training_file_gets_the_scores_of_training(place, monkeypatch, rows):
    big = pd.concat([study(seed=seed) for seed in range(5)])
    big.to_csv(place / "big.csv", index=False)
    monkeypatch.setattr(chunks.table_chunks, "__defaults__", (rows,))
    feddar("predict", "feddar-sa", "big.csv", "--out", "big-out.csv", cwd=place)
    found, run = predictions(place / "big-out.csv"), load(place / "feddar-sa")
    cohort = read_cohort(TableOptions(data=str(place / "big.csv"), **ROLES))
    assert cohort.columns == run.cohort.columns
    scores = run.scores(cohort.x, cohort.domain, cohort.client_names)
    expected = run.model.objective.predictions(scores.double()).numpy()
    np.testing.assert_array_equal(found[["probability_no", "probability_yes"]], expected)
    assert found["row"].tolist() == list(range(1, len(big) + 1))
    assert found["client"].tolist() == cohort.client_names.tolist()
    assert found["domain"].tolist() == found["domain_used"].tolist() == found["head"].tolist()
    assert found["domain"].tolist() == cohort.domain_names.tolist()
    assert (found["class"] == np.where(expected[:, 1] > 0.5, "yes", "no")).all()
    assert (found["note"] == "").all()


def test_parquet_and_folders_give_the_same(place):
    table = pd.read_csv(place / "study.csv", dtype={"hospital": str, "ward": str})
    table.to_parquet(place / "study.parquet")
    (place / "sites").mkdir()
    for name, part in table.groupby("hospital"):
        part.drop(columns=["hospital", "outcome"]).to_csv(place / "sites" / f"{name}.csv", index=False)
    for method in ("feddar-sa", "fedrep"):
        feddar("predict", method, "study.csv", "--out", "one.csv", cwd=place)
        feddar("predict", method, "study.parquet", "--out", "two.parquet", cwd=place)
        feddar("predict", method, "sites", "--out", "three.csv", cwd=place)
        one, two, three = (
            predictions(place / "one.csv"),
            pd.read_parquet(place / "two.parquet"),
            predictions(place / "three.csv"),
        )
        pd.testing.assert_frame_equal(one, two, check_dtype=False, rtol=1e-6)
        pd.testing.assert_frame_equal(
            one.sort_values("client", kind="stable", ignore_index=True).drop(columns="row"),
            three.drop(columns="row"),
            rtol=1e-6,
        )
        assert set(one["head"]) == ({"a", "b"} if method == "feddar-sa" else {"client 00", "client 01", "client 02"})


def test_codes_that_look_like_numbers_stay_what_they_are(place):
    table = pd.read_csv(place / "study.csv", dtype={"hospital": str, "ward": str})
    coded = table["ward"] == "01"
    table[coded].to_csv(place / "coded.csv", index=False)
    feddar("predict", "feddar-sa", "study.csv", "--out", "one.csv", cwd=place)
    feddar("predict", "feddar-sa", "coded.csv", "--out", "two.csv", cwd=place)
    one, two = predictions(place / "one.csv"), predictions(place / "two.csv")
    np.testing.assert_allclose(two["probability_yes"], one["probability_yes"][coded], rtol=1e-6)


def test_the_summary_counts_rows_heads_and_labels(place):
    shown = feddar("predict", "feddar-sa", "study.csv", "--out", "p.csv", cwd=place)
    found = predictions(place / "p.csv")
    counts = found[found["domain"] == "a"]["class"].value_counts().reindex(["no", "yes"], fill_value=0)
    line = next(line for line in shown.splitlines() if line.startswith("a "))
    assert line.split() == ["a", "a", *map(str, [counts.sum(), *counts])]
    assert "300 rows predicted by feddar-sa (2 of 2 rounds)" in shown
    assert "AUC of the rows with a label" in shown
    assert "Written: p.csv" in shown
    unlabelled = study().assign(outcome=[*["yes", "no", None, "perhaps"], *[None] * 296])
    unlabelled.to_csv(place / "few.csv", index=False)
    assert "298 rows have no label" in feddar("predict", "feddar-sa", "few.csv", cwd=place)
    assert (place / "predictions.csv").exists()


def test_labels_are_evaluated_as_training_does(place):
    run = load(place / "feddar-sa")
    cohort = read_cohort(TableOptions(data=str(place / "study.csv"), **ROLES))
    expected = run.evaluate(cohort).query("scope == 'domain' and metric == 'auc'").set_index("name")["value"]
    shown = feddar("predict", "feddar-sa", "study.csv", "--out", "p.csv", cwd=place).split("AUC")[1]
    for name in "ab":
        line = next(line for line in shown.splitlines() if line.startswith(f"{name} "))
        assert line.split()[-1] == f"{expected[name]:.3f}"


def test_unknown_names_are_refused_with_file_and_line_or_averaged_and_marked(place):
    new = study().head(5)
    new.loc[2, "race"], new.loc[3, "race"], new.loc[4, "ward"] = "c", None, "Z"
    new.loc[1, "hospital"] = "09"
    new.to_csv(place / "new.csv", index=False)
    said = feddar("predict", "feddar-sa", "new.csv", "--unknown-category", "missing", cwd=place, code=2)
    assert "new.csv, line 4: domain 'c' was not in training: there are: a, b." in said
    assert "--unknown-domain average" in said
    said = feddar("predict", "feddar-sa", "new.csv", "--unknown-domain", "average", cwd=place, code=2)
    assert "new.csv, line 6: column 'ward' holds 'Z'" in said
    assert "--unknown-category missing" in said
    average = ["--unknown-domain", "average", "--unknown-category", "missing"]
    shown = feddar("predict", "feddar-sa", "new.csv", *average, "--out", "n.csv", cwd=place)
    assert "note: 1 row: domain 'c' unknown: average of heads" in shown
    found = predictions(place / "n.csv")
    assert found["head"].tolist()[2:4] == ["average of 2"] * 2
    assert found["domain_used"].tolist()[2:4] == ["", ""]
    assert found["note"].tolist()[2:] == [
        "domain 'c' unknown: average of heads",
        "no domain: average of heads",
        "ward 'Z' unknown: as missing",
    ]
    mixture = [*average, "--missing-domain", "mixture"]
    shown = feddar("predict", "feddar-sa", "new.csv", *mixture, "--out", "m.csv", cwd=place)
    client = new["hospital"][3]
    marked = f"no domain: mixture of heads by the shares at client '{client}'"
    assert f"note: 1 row: {marked}" in " ".join(shown.split())
    mixed = predictions(place / "m.csv")
    assert (mixed["head"].tolist()[2:4], mixed["note"][3]) == (["average of 2", "mixture of 2"], marked)
    run = load(place / "feddar-sa")
    shares = run.cohort.counts[run.cohort.client_numbers[client]].numpy()
    each = []
    for name in "ab":
        new.assign(race=name).to_csv(place / "each.csv", index=False)
        feddar("predict", "feddar-sa", "each.csv", *average, "--out", "e.csv", cwd=place)
        each.append(predictions(place / "e.csv")["probability_yes"][3])
    assert mixed["probability_yes"][3] == pytest.approx(np.average(each, weights=shares), rel=1e-5)
    missing = ["--unknown-category", "missing"]
    assert "line 3: client '09' was not in training" in feddar(
        "predict", "fedrep", "new.csv", *missing, cwd=place, code=2
    )
    feddar("predict", "fedrep", "new.csv", *missing, "--unknown-client", "average", "--out", "c.csv", cwd=place)
    assert predictions(place / "c.csv")["head"][1] == "average of 3"
    feddar("predict", "fedavg", "new.csv", *missing, "--out", "f.csv", cwd=place)
    assert set(predictions(place / "f.csv")["head"]) == {"all"}


def test_columns_can_have_other_names_and_be_absent_if_not_needed(place):
    renamed = study().rename(columns={"race": "group", "hospital": "site"}).drop(columns="outcome")
    renamed.to_csv(place / "renamed.csv", index=False)
    said = feddar("predict", "feddar-sa", "renamed.csv", cwd=place, code=2)
    assert "renamed.csv has no column 'race', its domain; --domain COLUMN names another: " in said
    assert "study.csv has no column 'rase', its domain; --domain COLUMN names another: did you mean 'race'?" in feddar(
        "predict", "fedavg", "study.csv", "--domain", "rase", cwd=place, code=2
    )
    feddar("predict", "feddar-sa", "renamed.csv", "--domain", "group", "--out", "p.csv", cwd=place)
    assert predictions(place / "p.csv").columns.tolist()[:3] == ["row", "domain", "domain_used"]
    feddar("predict", "feddar-sa", "renamed.csv", "--unknown-domain", "average", "--out", "p.csv", cwd=place)
    assert set(predictions(place / "p.csv")["head"]) == {"average of 2"}
    assert "AUC" not in feddar("predict", "fedavg", "renamed.csv", "--out", "p.csv", cwd=place)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.rename(columns={"crp": "CRP"}), "no column 'crp', which the model needs: did you mean 'CRP'"),
        (lambda t: t.assign(age=["old", *t["age"][1:]]), "wrong.csv, line 2: column 'age' holds 'old', which is not a"),
        (lambda t: t.assign(smoker=["maybe", *t["smoker"][1:]]), "line 2: column 'smoker' holds 'maybe'"),
        (lambda t: t.assign(admitted=["soon", *t["admitted"][1:]]), "'soon', which is not a date"),
        (lambda t: t.assign(age=[np.inf, *t["age"][1:]]), "'inf', which is not a number"),
        (lambda t: t.head(0), "has a header and no samples"),
    ],
)
def test_a_wrong_table_is_one_sentence(place, change, message):
    change(study()).to_csv(place / "wrong.csv", index=False)
    assert message in feddar("predict", "feddar-sa", "wrong.csv", "--out", "w.csv", cwd=place, code=2)
    assert not (place / "w.csv").exists()
    assert not list(place.glob(".w.csv*"))


def test_wrong_commands_are_one_sentence(place):
    def said(*arguments):
        return feddar("predict", *arguments, cwd=place, code=2)

    assert "there is no run in nowhere" in said("nowhere", "study.csv")
    assert "there is no file or folder none.csv" in said("feddar-sa", "none.csv")
    assert "would be written over study.csv" in said("feddar-sa", "study.csv", "--out", "./study.csv")
    assert "neither a CSV nor a Parquet" in said("feddar-sa", "study.csv", "--out", "p.xlsx")
    assert "unknown_domain should be 'error' or 'average'" in said(
        "feddar-sa", "study.csv", "--unknown-domain", "guess"
    )
    (place / "damaged").mkdir()
    (place / "damaged" / "model.safetensors").write_bytes(b"nothing")
    assert "is damaged" in said("damaged", "study.csv")
    (place / "folder").mkdir()
    (place / "folder" / "a.csv").write_text("race\na\n")
    assert "among its files" in said("feddar-sa", "folder", "--out", "folder/p.csv")
    cell = place / "compared" / "runs" / "fedavg" / "seed-0-fold-0"
    cell.mkdir(parents=True)
    (cell / "model.safetensors").write_bytes((place / "fedavg" / "model.safetensors").read_bytes())
    assert "holds a comparison: name one of its runs, such as compared/runs/fedavg" in said("compared", "study.csv")
    assert "holds a comparison: name one of its runs" in feddar("export", "compared", cwd=place, code=2)
    assert "300 rows" in feddar("predict", cell, "study.csv", "--out", "cell.csv", cwd=place)


def test_only_predictions_are_written_over(place):
    study(20).to_csv(place / "new.csv", index=False)
    study(20).to_parquet(place / "base.parquet")
    (place / "empty.csv").touch()
    (place / "folder.csv").mkdir(exist_ok=True)
    others = {name: (place / name).read_bytes() for name in ("study.csv", "base.parquet", "empty.csv")}
    for name in (*others, "folder.csv"):
        said = feddar("predict", "fedavg", "new.csv", "--out", name, cwd=place, code=2)
        assert f"{name} exists and holds no predictions of feddar: choose another name" in said
    assert {name: (place / name).read_bytes() for name in others} == others
    for name in ("metrics.csv", "deeper/p.csv"):
        said = feddar("predict", "fedavg", "new.csv", "--out", f"fedavg/{name}", cwd=place, code=2)
        assert "lies in the folder of the run" in said
    for name in ("again.csv", "again.parquet"):
        for _ in range(2):
            feddar("predict", "fedavg", "new.csv", "--out", name, cwd=place)


def test_regression_and_crossed_domains(tmp_path):
    table = study().assign(sex=lambda t: np.where(t["age"] > 55, "F", "M"), outcome=lambda t: t["age"] * 2.5)
    table.to_csv(tmp_path / "study.csv", index=False)
    crossed = ["--client", "hospital", "--domain", "race,sex", "--target", "outcome", "--ignore", "crp"]
    feddar("run", "study.csv", *crossed, "--rounds", 1, "--jobs", 1, "--out", "run", cwd=tmp_path)
    table.loc[0, "sex"] = None
    table.to_csv(tmp_path / "new.csv", index=False)
    shown = feddar("predict", "run", "new.csv", "--unknown-domain", "average", "--out", "p.csv", cwd=tmp_path)
    assert "MSE of the rows with a label; lower is better" in shown
    assert "greatest" in shown
    found = predictions(tmp_path / "p.csv")
    assert found["domain"][0] == ""
    assert found["head"][0] == "average of 4"
    assert set(found["domain"][1:]) == {"a, F", "a, M", "b, F", "b, M"}
    assert found["prediction"].dtype == float


def test_a_built_in_cohort_can_be_predicted(tmp_path):
    small = ["--samples", 6, "--rounds", 1, "--jobs", 1, "--out", "run"]
    feddar("run", "synthetic", *small, cwd=tmp_path)
    shown = feddar("predict", "run", "synthetic", "--out", "p.csv", cwd=tmp_path)
    assert "600 rows predicted" in shown
    assert "no columns to name" in feddar("predict", "run", "synthetic", "--domain", "x", cwd=tmp_path, code=2)
    (tmp_path / "new.csv").write_text("a\n1\n")
    assert "was not trained on a table" in feddar("predict", "run", "new.csv", cwd=tmp_path, code=2)


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    """A table with a column of image paths, and models of the images alone and with the record."""
    folder = tmp_path_factory.mktemp("clinic")
    (folder / "photos").mkdir()
    rng = np.random.default_rng(0)
    for number in range(40):
        pixels = rng.integers(0, 255, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{number:02}.png")
    table = study(40)[["age", "hospital", "race", "outcome"]]
    table["photo"] = [f"photos/{number:02}.png" for number in range(40)]
    table.to_csv(folder / "cases.csv", index=False)
    image = ["--image", "photo", "--image-size", 16, "--rounds", 1, "--jobs", 1]
    feddar("run", "cases.csv", *COLUMNS, *image, "--out", "both", cwd=folder)
    # A folder of images names no client, whose own corrections a table would get.
    alone = [*image, "--features", "photo", "--no-site-offset"]
    feddar("run", "cases.csv", *COLUMNS, *alone, "--out", "alone", cwd=folder)
    return folder


def test_images_of_a_table_or_of_a_folder(clinic):
    feddar("predict", "both", "cases.csv", "--out", "both.csv", cwd=clinic)
    feddar("predict", "alone", "cases.csv", "--out", "table.csv", cwd=clinic)
    feddar("predict", "alone", "photos", "--domain", "a", "--out", "folder.csv", cwd=clinic)
    feddar("predict", "alone", "photos/07.png", "--domain", "a", "--out", "one.csv", cwd=clinic)
    table, folder, one = (predictions(clinic / f"{name}.csv") for name in ("table", "folder", "one"))
    of_a = table["domain"] == "a"
    np.testing.assert_allclose(folder["probability_yes"][of_a], table["probability_yes"][of_a], rtol=1e-6)
    assert folder.columns.tolist()[:4] == ["row", "image", "domain", "domain_used"]
    assert one["image"].tolist() == ["photos/07.png"]
    np.testing.assert_allclose(one["probability_yes"][0], folder["probability_yes"][7], rtol=1e-6)
    assert not np.allclose(predictions(clinic / "both.csv")["probability_yes"], table["probability_yes"])


@pytest.mark.parametrize("by", ["all", "domain"])
@pytest.mark.parametrize("point", [("threshold", 0.3), ("flag", "20%"), ("sensitivity", 0.8)], ids=lambda each: each[0])
def test_rows_are_flagged_at_the_operating_point_of_the_run(place, point, by):
    name = f"{point[0]}-{by}"
    feddar(
        "run", "study.csv", *COLUMNS, "--rounds", 2, "--jobs", 1, f"--{point[0]}", point[1], "--threshold-by", by,
        "--out", name, cwd=place,
    )  # fmt: skip
    said = feddar("predict", name, "study.csv", "--out", "one.csv", cwd=place)
    found, figures = predictions(place / "one.csv"), read_figures(place / name)
    limit = found["domain"].map({domain: of["threshold"].value for domain, of in figures.by_domain.items()})
    assert (limit.nunique() == 1) == (by == "all" or point[0] == "threshold")
    flagged = found["probability_yes"] > limit
    assert 0 < flagged.sum() < len(found)
    assert found["flagged"].tolist() == flagged.astype(int).tolist()
    assert f"flagged: {flagged.sum()} of {len(found)} rows" in said
    feddar("predict", name, "study.csv", "--out", "two.parquet", cwd=place)
    assert pd.read_parquet(place / "two.parquet")["flagged"].tolist() == flagged.astype(int).tolist()
    stranger = pd.read_csv(place / "study.csv", dtype=str).assign(race="new")
    stranger.to_csv(place / "new.csv", index=False)
    feddar("predict", name, "new.csv", "--unknown-domain", "average", "--out", "three.csv", cwd=place)
    far = predictions(place / "three.csv")
    at = figures.overall["threshold"].value
    expected = far["probability_yes"].gt(at).astype(int).astype(str).tolist() if not np.isnan(at) else [""] * len(far)
    assert far["flagged"].astype(str).tolist() == expected


def test_without_an_operating_point_nothing_is_flagged(place):
    feddar("predict", "feddar-sa", "study.csv", "--out", "one.csv", cwd=place)
    assert "flagged" not in predictions(place / "one.csv")


def test_each_of_several_outcomes_is_flagged_by_itself(tmp_path):
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(300, 3)), columns=list("abc"))
    table["site"], table["race"] = rng.choice(["x", "y"], 300), rng.choice(["A", "B"], 300)
    table["died"], table["sepsis"] = (table["a"] > 0).astype(int), (table["b"] > 1).astype(int)
    table.to_csv(tmp_path / "t.csv", index=False)
    roles = ["--client", "site", "--domain", "race", "--target", "died,sepsis"]
    feddar("run", "t.csv", *roles, "--rounds", 2, "--flag", "10%", "--out", "run", cwd=tmp_path)
    feddar("predict", "run", "t.csv", cwd=tmp_path)
    found, figures = predictions(tmp_path / "predictions.csv"), read_figures(tmp_path / "run")
    for name in ("died", "sepsis"):
        flagged = found[f"probability_{name}"] > figures.overall[f"threshold:{name}"].value
        assert found[f"flagged_{name}"].tolist() == flagged.astype(int).tolist()


def test_wrong_images_are_one_sentence(clinic):
    def said(*arguments):
        return feddar("predict", *arguments, "--out", "wrong.csv", cwd=clinic, code=2)

    assert "say which domain the images are of: --domain NAME" in said("alone", "photos")
    assert "takes the columns photo, age, not images alone" in said("both", "photos", "--domain", "a")
    (clinic / "bad").mkdir()
    (clinic / "bad" / "x.jpg").write_bytes(b"no image")
    assert "cannot read the image bad/x.jpg" in said("alone", "bad", "--domain", "a")
    (clinic / "bad.csv").write_text("photo,race\nphotos/01.png,a\nphotos/99.png,a\n")
    assert "bad.csv, line 3: cannot read the image photos/99.png (there is no such file): mend the path" in said(
        "alone", "bad.csv"
    )
    assert "photos/01.png: domain 'z' was not in training" in said("alone", "photos/01.png", "--domain", "z")


def test_names_that_a_file_cannot_tell_apart_are_the_same_label():
    for classes, given in (
        ((0, 1), ["0", "1.0", "", "2"]),
        ((False, True), ["FALSE", "true", None, "2"]),
        (("no", "yes"), ["no", "yes", None, "x"]),
    ):
        labels = LabelColumns.of(pd.Series(given, dtype=object))
        np.testing.assert_array_equal(Binary(classes).read(labels), [0, 1, np.nan, np.nan])
