"""Images that are kept in a file: the same bits as in memory, made again when an image changes."""

import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from feddar.data import image_cache
from feddar.data.cohort import Cohort
from feddar.data.columns import Column
from feddar.data.image_cache import ImagesTooLargeError, StoredImages, images_for, in_memory
from feddar.data.images import read_images
from feddar.errors import UserError
from feddar.results.training import train


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{number}.png" for number in range(40)]
    for number, path in enumerate(paths):
        pixels = rng.integers(0, 90, (14, 17, 3), dtype=np.uint8) + np.uint8(150 * (number % 2))
        Image.fromarray(pixels).save(path)
    return paths


def cohort_of(files, cache=None):
    table = pd.DataFrame({"photo": list(map(str, files)), "age": np.arange(40.0)})
    columns = [Column("photo", "image", size=12), Column("age", "number")]
    given = {"domain": ["a", "a", "b", "b"] * 10, "client": ["h1", "h1", "h1", "h2", "h2"] * 8, "image_cache": cache}
    return Cohort.from_arrays(table, [0, 1] * 20, columns=columns, **given)


def test_choosing_rows_reads_nothing_and_anything_else_reads_the_chosen(files, tmp_path, monkeypatch):
    plain, kept = read_images(files, 12), images_for(files, 12, tmp_path / "cache")
    mask = torch.arange(40) % 3 == 0
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    with monkeypatch.context() as patch:
        patch.setattr(image_cache, "in_memory", lambda _: pytest.fail("images were read"))
        chosen = {"slice": kept[5:20:2], "mask": kept[mask], "order": kept[order], "twice": kept[order][mask][1:]}
        chosen["select"] = kept.index_select(0, order)
    expected = {"slice": plain[5:20:2], "mask": plain[mask], "order": plain[order], "twice": plain[order][mask][1:]}
    expected["select"] = plain[order]
    for name, part in chosen.items():
        assert isinstance(part, StoredImages)
        assert part.shape == expected[name].shape and part.dtype == torch.uint8
        assert torch.equal(in_memory(part), expected[name])
        assert torch.equal(part.float() / 2, expected[name].float() / 2)
    assert torch.equal(kept[7], plain[7])
    assert torch.equal(kept[:, 1], plain[:, 1])
    assert torch.equal(torch.cat([kept[:2], plain[:1]]), torch.cat([plain[:2], plain[:1]]))
    assert "StoredImages([40, 3, 12, 12])" in repr(kept)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_has_the_same_bits_with_images_in_a_file(files, tmp_path, jobs):
    states = []
    for cache in (None, tmp_path / "cache"):
        cohort = cohort_of(files, cache)
        assert isinstance(cohort.x[0], StoredImages) == (cache is not None)
        train_part, test = cohort.split(0.25)
        run = train(train_part, test=test, rounds=2, batch_size=4, jobs=jobs)
        scores = run.scores(cohort.x, cohort.domain, None)
        states.append((cohort.fingerprint(), train_part.fingerprint(), scores, run.history.to_csv()))
    (before, *_, table), (after, *_, same) = states
    assert before == after and states[0][1] == states[1][1]
    assert torch.equal(states[0][2], states[1][2])
    assert table == same


def test_the_file_is_written_once_and_again_when_an_image_changes(files, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    images_for(files, 12, folder)
    (first,) = folder.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(image_cache, "decoded", lambda *_: pytest.fail("images were decoded again"))
        images_for(files, 12, folder)
    Image.fromarray(np.full((14, 17, 3), 9, np.uint8)).save(files[4])
    os.utime(files[4], ns=(1, 1))
    changed = images_for(files, 12, folder)
    (second,) = folder.iterdir()
    assert first != second
    assert torch.equal(in_memory(changed), read_images(files, 12))
    assert images_for(files, 10, folder).shape == (40, 3, 10, 10)
    second.parent.joinpath(next(folder.iterdir()).name).write_bytes(b"cut")
    assert torch.equal(in_memory(images_for(files, 10, folder)), read_images(files, 10))


def test_nothing_is_left_of_images_that_cannot_be_read_or_written(files, tmp_path):
    files[3].unlink()
    with pytest.raises(UserError, match=r"cannot read the image .*3\.png"):
        images_for(files, 12, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(UserError, match=r"cannot keep images in .*: .*; choose another folder with --image-cache\."):
        images_for(files[:2], 12, files[0])


def test_images_too_large_for_memory_are_told_where_to_go(files, monkeypatch):
    monkeypatch.setattr(image_cache, "memory_size", lambda: 40 * 3 * 12 * 12 * 3)
    with pytest.raises(ImagesTooLargeError, match=r"40 images of 12 x 12 pixels take .* GB.*: keep them in a file"):
        cohort_of(files)
    assert len(cohort_of(files, files[0].parent / "cache")) == 40


TRAINED = """
import sys, threading, time
from pathlib import Path
import numpy as np, pandas as pd, torch
from torch import nn
from feddar.data.cohort import Cohort
from feddar.data.columns import Column
from feddar.results.training import train

def anonymous():
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon")]
    return 1024 * int(line.split()[1])

def sample():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)

before = anonymous()
peak = [before]
threading.Thread(target=sample, daemon=True).start()
files, count = sorted(Path(sys.argv[1]).glob("*.png")), int(sys.argv[2])
table = pd.DataFrame({"photo": [str(files[row % len(files)]) for row in range(count)]})
given = {"columns": [Column("photo", "image", size=64)], "domain": np.arange(count) % 2, "client": np.arange(count) % 3}
cohort = Cohort.from_arrays(table, np.arange(count) % 2, **given, image_cache=sys.argv[3] or None)
part, test = cohort.split(0.2)
encoder = nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(48, 4))
train(part, "fedavg", encoder, test=test, rounds=1, batch_size=64)
print(peak[0] - before)
"""


@pytest.mark.more
def test_training_takes_less_memory_than_the_images(files, tmp_path):
    count = 45_000
    pixels = count * 3 * 64 * 64
    peaks = []
    for folder in ("", str(tmp_path / "cache")):
        command = [sys.executable, "-c", TRAINED, str(files[0].parent), str(count), folder]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    in_memory_peak, in_file_peak = peaks
    assert in_memory_peak > pixels  # the measure sees images in memory
    assert in_file_peak < 0.75 * pixels, f"{in_file_peak / 1e6:.0f} MB for {pixels / 1e6:.0f} MB of images"
