"""Digits and faces: from files to cohorts, and what is said when files are missing or damaged."""

import re
from io import StringIO

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from rich.console import Console

from feddar.data.cohort import Cohort
from feddar.data.columns import Column
from feddar.data.images import IMAGENET, Scale, read_images, scaling_for
from feddar.data.sources import BUILT_IN, data_folder, find_source, rendered_digits
from feddar.data.sources import digit_images as digits
from feddar.data.sources import face_images as fairface
from feddar.data.sources.image_pool import at_most
from feddar.errors import UserError
from feddar.models.encoders import build_encoder
from feddar.report.terminal import show_cohort
from feddar.results.run import load
from feddar.results.training import train
from helpers.image_sets import FACES_PER_CELL, write_digits, write_faces


@pytest.fixture
def sets(tmp_path, monkeypatch):
    monkeypatch.delenv(data_folder.VARIABLE, raising=False)
    write_digits(tmp_path / "digits")
    write_faces(tmp_path / "fairface")
    return tmp_path


def test_the_data_folder_is_the_one_named_then_the_variables_then_one_beside(tmp_path, monkeypatch):
    monkeypatch.setenv(data_folder.VARIABLE, "from-variable")
    assert str(data_folder.data_folder("named")) == "named"
    assert str(data_folder.data_folder()) == "from-variable"
    monkeypatch.delenv(data_folder.VARIABLE)
    (tmp_path / "shared" / "data").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    assert data_folder.data_folder() == tmp_path / "shared" / "data"


@pytest.mark.parametrize("name", ["digits", "fairface"])
def test_a_missing_set_is_one_sentence_that_names_files_and_origin(name, tmp_path):
    with pytest.raises(UserError, match=r"has no set '.*': put .* with --data or FEDDAR_DATA\.") as error:
        BUILT_IN[name].load(BUILT_IN[name].options(data=name, folder=str(tmp_path)), 0)
    first = {"digits": "mnist.npz", "fairface": "fairface_label_train.csv"}[name]
    assert first in str(error.value)


def test_digits_are_28_x_28_x_3_pixels_with_their_source_as_domain(sets):
    pool = digits.pool("train", sets)
    assert pool.samples.domains == digits.DOMAINS
    assert pool.samples.classes == tuple(range(10))
    some = pool.with_images(at_most(pool.samples, 10))
    assert some.x[0].shape == (50, 3, 28, 28)
    assert some.counts.tolist() == [[10] * 5]
    with np.load(sets / "digits" / "svhn.npz") as file:
        x, y = file["x_train"], file["y_train"]
    svhn = some.rows(some.domain == digits.DOMAINS.index("svhn"))
    picked = np.arange(10) * len(x) // 10
    np.testing.assert_array_equal(svhn.x[0].numpy(), x[picked].transpose(0, 3, 1, 2))
    shown = Scale(some.scaling)(svhn.x[0])
    np.testing.assert_allclose(shown, (x[picked] / 255 - 0.5).transpose(0, 3, 1, 2) / 0.5, atol=1e-6)
    assert svhn.y.tolist() == y[picked].tolist()
    rendered = some.domain == digits.DOMAINS.index("synth")
    numbers = np.arange(10) * digits.SYNTH_COUNT["train"] // 10
    assert torch.equal(
        some.x[0][rendered], torch.from_numpy(rendered_digits.draw(numbers, "train")).permute(0, 3, 1, 2)
    )
    assert some.y[rendered].tolist() == (numbers % 10).tolist()
    mnist = some.rows(some.domain == 0).x[0]
    assert torch.equal(mnist[:, 0], mnist[:, 2])  # grey


def test_rendered_digits_depend_on_number_and_part_alone():
    images = rendered_digits.draw(np.array([3, 14, 3]), "train")
    assert images.shape == (3, 28, 28, 3)
    assert (images[0] == images[2]).all()
    assert (images[1] == rendered_digits.draw(np.array([14]), "train")[0]).all()
    assert (images[0] != rendered_digits.draw(np.array([3]), "test")[0]).any()
    assert rendered_digits.labels(12).tolist() == [*range(10), 0, 1]


@pytest.mark.parametrize("damage", ["truncated", "not a zip", "no y_train", "wrong shape", "pickled"])
def test_a_damaged_digits_file_is_named(sets, damage):
    path = sets / "digits" / "usps.npz"
    with np.load(path) as file:
        x, y = file["x_train"], file["y_train"]
    match damage:
        case "truncated":
            path.write_bytes(path.read_bytes()[:900])
        case "not a zip":
            path.write_bytes(b"hello")
        case "no y_train":
            np.savez(path, x_train=x)
        case "wrong shape":
            np.savez(path, x_train=x[:, :20], y_train=y)
        case "pickled":
            np.savez(path, x_train=x, y_train=np.array([{}] * len(y)))
    with pytest.raises(UserError, match=r"usps\.npz"):
        digits.pool("train", sets)


def test_an_absent_source_is_named(sets):
    (sets / "digits" / "svhn.npz").unlink()
    with pytest.raises(UserError, match=r"lacks svhn\.npz"):
        digits.pool("test", sets)


@pytest.mark.parametrize(("label", "classes"), [("age", 9), ("gender", 2)])
def test_faces_have_any_size_race_as_domain_and_imagenet_units(sets, label, classes):
    pool = fairface.pool("train", label, 24, sets)
    assert pool.samples.domains == fairface.RACES
    assert len(pool.samples.classes) == classes
    assert pool.samples.counts.tolist() == [[9 * FACES_PER_CELL] * 7]
    cohort = pool.with_images(pool.samples.rows(torch.tensor([5, 2])))
    assert cohort.x[0].shape == (2, 3, 24, 24)
    original = Image.open(sets / "fairface" / "train" / "6.jpg").convert("RGB").resize((24, 24), 2)
    mean, sd = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (np.asarray(original) / 255 - mean) / sd
    shown = Scale(cohort.scaling)(cohort.x[0][0])
    np.testing.assert_allclose(shown.permute(1, 2, 0).numpy(), expected, atol=0.15)


def test_only_drawn_images_are_read(sets):
    pool = fairface.pool("train", "age", 16, sets)
    drawn = Cohort.mixture(pool.samples, clients=2, samples=5, alpha=1.0, seed=0)
    kept = {f"{number + 1}.jpg" for number in pool.numbers(drawn)}
    for path in (sets / "fairface" / "train").iterdir():
        if path.name not in kept:
            path.unlink()
    assert len(pool.with_images(drawn)) == 10


@pytest.mark.parametrize("damage", ["missing", "truncated", "text"])
def test_a_missing_or_damaged_image_is_named(sets, damage):
    path = sets / "fairface" / "train" / "4.jpg"
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"no image")
    pool = fairface.pool("train", "gender", 16, sets)
    with pytest.raises(UserError, match=r"cannot read the image .*train/4\.jpg"):
        pool.with_images(pool.samples)


@pytest.mark.parametrize(
    ("before", "after", "said"), [("race", "group", "no column 'race'"), ("20-29", "twenty", "'twenty'")]
)
def test_a_wrong_table_of_labels_is_named(sets, before, after, said):
    path = sets / "fairface" / "fairface_label_train.csv"
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(UserError, match=said) as error:
        fairface.pool("train", "age", 16, sets)
    assert "fairface_label_train.csv" in str(error.value)


def test_drawn_cohorts_follow_their_options(sets):
    given = {"folder": str(sets), "clients": 3, "samples": 8, "alpha": 50.0}
    of_digits, of_faces = BUILT_IN["digits"], BUILT_IN["fairface"]
    drawn = of_digits.load(of_digits.options(data="digits", **given), 1)
    assert drawn.counts.sum(1).tolist() == [8, 8, 8]
    again = of_digits.load(of_digits.options(data="digits", **given), 1)
    assert drawn.fingerprint() == again.fingerprint()
    faces = of_faces.load(of_faces.options(data="fairface", image_size=20, label="gender", **given), 0)
    assert faces.x[0].shape == (24, 3, 20, 20)
    assert faces.classes == ("Female", "Male")


def test_real_digits_and_faces(data_folder):
    for part, least in (("train", 4000), ("test", 2000)):
        assert min(digits.pool(part, data_folder).samples.counts[0].tolist()) >= least
    pool = fairface.pool("val", "age", 32, data_folder)
    cohort = pool.with_images(at_most(pool.samples, 3))
    assert cohort.x[0].shape == (21, 3, 32, 32)
    assert 0.5 < Scale(cohort.scaling)(cohort.x[0]).std() < 2


@pytest.fixture
def clinic(tmp_path):
    """A table beside a folder of images: bright ones are ill, if they are old."""
    rng = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    ill = rng.random(60) < 0.5
    for number, bright in enumerate(ill):
        pixels = rng.integers(0, 60, (20, 24, 3), dtype=np.uint8) + np.uint8(150 * bright)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    table = pd.DataFrame(
        {
            "site": ["h1", "h2"] * 30,
            "scanner": rng.choice(["A", "B"], 60),
            "photo": [f"photos/{number}.png" for number in range(60)],
            "age": np.where(rng.random(60) < 0.2, np.nan, rng.normal(60, 9, 60)),
            "ward": rng.choice(["x", "y", "z"], 60),
            "ill": np.where(ill, "yes", "no"),
        }
    )
    table.to_csv(tmp_path / "cases.csv", index=False)
    return tmp_path / "cases.csv"


def own(path, **options):
    roles = {"client": "site", "domain": "scanner", "target": "ill", "image": "photo", "image_size": 16}
    source = find_source(str(path))
    return source.load(source.options(data=str(path), **(roles | options)), 0)


@pytest.mark.parametrize(
    ("features", "shapes"),
    [("", [(3, 16, 16), (1,), (1,)]), ("photo", [(3, 16, 16)]), ("age", [(3, 16, 16), (1,)]), ("ward,photo", None)],
)
def test_images_of_a_table_are_learned_from_with_the_other_columns_or_alone(clinic, features, shapes):
    cohort = own(clinic, features=features)
    assert cohort.columns[0] == Column("photo", "image", size=16)
    assert [tuple(part.shape[1:]) for part in cohort.x] == (shapes or [(3, 16, 16), (0,), (1,)])
    first = Image.open(clinic.parent / "photos" / "0.png").resize((16, 16), Image.Resampling.BILINEAR)
    assert torch.equal(cohort.x[0][0], torch.from_numpy(np.array(first)).permute(2, 0, 1))
    run = train(cohort, rounds=1, batch_size=8)
    assert run.scores(cohort.x, cohort.domain, None).isfinite().all()


def test_a_model_of_images_and_records_learns_and_predicts_from_a_table(clinic, tmp_path):
    cohort = own(clinic)
    run = train(cohort, rounds=6, batch_size=8, lr=0.01)
    assert run.evaluate(cohort).query("scope == 'all' and metric == 'auc'")["value"].item() > 0.95
    run.save(tmp_path / "run")
    table = pd.read_csv(clinic)
    table["photo"] = [str(clinic.parent / path) for path in table["photo"]]
    found = load(tmp_path / "run").predict_proba(table, domain=table["scanner"])
    positive = torch.sigmoid(run.scores(cohort.x, cohort.domain, None).double()).flatten()
    np.testing.assert_allclose(found[:, 1], positive, rtol=1e-12)


@pytest.mark.parametrize("features", ["", "photo"])
def test_a_cohort_of_images_is_shown(clinic, features):
    console = Console(record=True, width=200, file=StringIO())
    show_cohort(console, own(clinic, features=features), "cases")
    shown = console.export_text()
    assert "inputs: images of 16 x 16 pixels" in shown
    assert ("1 column of numbers" in shown) == (not features)


def test_a_large_image_encoder_is_fused_with_the_record(clinic):
    cohort = own(clinic, image_size=28)
    encoder = build_encoder("digit-cnn+flip", cohort, None).eval()
    assert encoder(torch.rand(5, 3, 28, 28), cohort.x[1][:5], cohort.x[2][:5]).shape == (5, 32)


@pytest.mark.parametrize("damage", ["missing", "truncated", "text", "no path"])
def test_a_missing_or_damaged_image_of_a_table_is_named_with_its_line(clinic, damage):
    path = clinic.parent / "photos" / "3.png"
    content = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "no path":
            clinic.write_text(clinic.read_text().replace("photos/3.png", ""))
        case _:
            path.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"no image")
    with pytest.raises(UserError, match=r"cases\.csv, line 5: ") as error:
        own(clinic)
    assert ("3.png" in str(error.value)) == (damage != "no path")


def test_all_images_that_cannot_be_read_are_counted_in_one_sentence(clinic):
    photos = clinic.parent / "photos"
    for number in (3, 9, 20, 21, 40):
        (photos / f"{number}.png").unlink()
    (photos / "9.png").write_bytes(b"no image")
    with pytest.raises(UserError) as error:
        own(clinic)
    said = str(error.value)
    assert "cases.csv, line 5: cannot read 5 images: " in said
    assert re.search(r"/3\.png \(there is no such file\), .*/9\.png \(.*\), .*/20\.png \(.*\) and 2 more: ", said)
    assert said.endswith("mend the path, or take out its row; get it again, or take out its row.")
    assert "\n" not in said and "21.png" not in said


def test_pixels_stay_bytes_and_are_shown_in_standard_units():
    grey = np.random.default_rng(0).integers(0, 255, (8, 1, 12, 12), dtype=np.uint8)
    cohort = Cohort.from_arrays(grey, [0, 1] * 4)
    assert cohort.x[0].dtype == torch.uint8
    assert cohort.scaling == scaling_for(1)
    assert scaling_for(3) == IMAGENET
    run = train(cohort, rounds=1)
    as_floats = run.predict_proba(grey.astype(float))
    np.testing.assert_array_equal(run.predict_proba(grey), as_floats)
    with pytest.raises(UserError, match="move the last axis"):
        Cohort.from_arrays(grey.transpose(0, 2, 3, 1), [0, 1] * 4)


def test_scans_of_16_bits_are_scaled_from_all_16_and_grey_becomes_colour(tmp_path):
    every = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    Image.fromarray(every).save(tmp_path / "scan.png")
    Image.fromarray(every.astype(np.int32)).save(tmp_path / "scan.tif")  # mode I, as older Pillow opens the former
    for name in ("scan.png", "scan.tif"):
        found = read_images([tmp_path / name], 256)[0]
        assert torch.equal(found[0], found[2])
        brute_force = [round(255 * value / 65535) for value in range(2**16)]
        assert found[1].flatten().tolist() == brute_force


def test_numbers_of_32_bits_are_scaled_from_their_own_range(tmp_path):
    steps = np.linspace(-2, 7, 64, dtype=np.float32).reshape(8, 8)
    Image.fromarray(steps).save(tmp_path / "floats.tif")
    Image.fromarray((10_000 * steps).astype(np.int32)).save(tmp_path / "numbers.tif")
    for found in read_images([tmp_path / "floats.tif", tmp_path / "numbers.tif"], 8):
        np.testing.assert_allclose(found[1].flatten(), np.linspace(0, 255, 64), atol=0.6)
