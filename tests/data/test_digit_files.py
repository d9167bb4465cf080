"""Digits in the formats in which their authors publish them."""

import bz2
import gzip
import struct

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from feddar.data.sources import digit_images as digits
from feddar.data.sources.digit_files import open_digits
from feddar.errors import UserError

COUNT = {"train": 12, "test": 5}


def labels(part):
    return np.arange(COUNT[part]) % 10


def pixels(part, *shape):
    """Return smooth pictures, which look alike in any size."""
    rng = np.random.default_rng(COUNT[part])
    height, width = shape[:2]
    down, right = np.linspace(0, 1, height)[:, None], np.linspace(0, 1, width)[None]
    slopes = rng.uniform(0, 1, (COUNT[part], 2, 1, 1))
    grey = 250 * (slopes[:, 0] * down + slopes[:, 1] * right) / 2
    return np.rint(grey if len(shape) == 2 else grey[..., None] * [1, 0.5, 0.2]).astype(np.uint8)


def write_idx(folder, packed=True):
    for part, stem in (("train", "train"), ("test", "t10k")):
        for name, values in (("images-idx3", pixels(part, 28, 28)), ("labels-idx1", labels(part).astype(np.uint8))):
            header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
            path, content = folder / f"{stem}-{name}-ubyte", header + values.tobytes()
            if packed:
                path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
            else:
                path.write_bytes(content)


def usps_rows(part):
    return pixels(part, 16, 16).reshape(-1, 256) / 127.5 - 1


def write_zip(folder):
    for part in COUNT:
        rows = zip(labels(part), usps_rows(part), strict=True)
        text = "".join(f"{y}.0000 {' '.join(f'{v:.4f}' for v in x)} \n" for y, x in rows)
        (folder / f"zip.{part}.gz").write_bytes(gzip.compress(text.encode()))


def write_libsvm(folder):
    for part, name in (("train", "usps.bz2"), ("test", "usps.t.bz2")):
        rows = zip(labels(part), usps_rows(part), strict=True)
        text = "".join(f"{y + 1} {' '.join(f'{i}:{v:.6g}' for i, v in enumerate(x, 1))}\n" for y, x in rows)
        (folder / name).write_bytes(bz2.compress(text.encode()))


def write_mnist_m(folder):
    for part in COUNT:
        (folder / f"mnist_m_{part}").mkdir()
        lines = []
        for row, (picture, label) in enumerate(zip(pixels(part, 32, 32, 3), labels(part), strict=True)):
            name = f"{row:08d}.png"
            Image.fromarray(picture).save(folder / f"mnist_m_{part}" / name)
            lines.append(f"{name} {label}\n")
        (folder / f"mnist_m_{part}_labels.txt").write_text("".join(lines))


def write_svhn(folder):
    for part in COUNT:
        y = np.where(labels(part) == 0, 10, labels(part)).astype(np.uint8)[:, None]
        savemat(folder / f"{part}_32x32.mat", {"X": pixels(part, 32, 32, 3).transpose(1, 2, 3, 0), "y": y})


WRITERS = {
    "mnist": write_idx,
    "usps": write_zip,
    "mnist_m": write_mnist_m,
    "svhn": write_svhn,
}


@pytest.mark.parametrize(("name", "write"), [*WRITERS.items(), ("usps", write_libsvm)])
@pytest.mark.parametrize("within", [False, True], ids=["beside", "in a folder of its own"])
def test_a_source_in_its_own_format_is_read_resized_and_labelled(tmp_path, name, write, within):
    place = tmp_path / name if within else tmp_path
    place.mkdir(exist_ok=True)
    write(place)
    for part, count in COUNT.items():
        found = open_digits(tmp_path, name, part)
        assert found.labels.tolist() == labels(part).tolist()
        rows = np.array([count - 1, 0, 3])
        images = found.images(rows)
        assert images.shape == (3, 28, 28, 3)
        assert images.dtype == np.uint8
        expected = pixels(part, 28, 28, *([3] if name in ("mnist_m", "svhn") else []))[rows]
        expected = expected if expected.ndim == 4 else expected[..., None]
        assert np.abs(images.astype(int) - expected).max() <= (0 if name == "mnist" else 9)


def test_a_sparse_libsvm_row_has_zeros_where_it_says_nothing(tmp_path):
    (tmp_path / "usps").write_text("1 1:-1 256:1\n10 2:0.5\n")
    found = open_digits(tmp_path, "usps", "train")
    assert found.labels.tolist() == [0, 9]
    first = found.images(np.array([0]))[0, ..., 0]
    assert (first[0, 0], first[14, 14], first[-1, -1]) == (0, 128, 255)


def test_all_sources_in_their_own_formats_make_a_pool(tmp_path):
    (tmp_path / "digits").mkdir()
    for write in WRITERS.values():
        write(tmp_path / "digits")
    pool = digits.pool("test", tmp_path, rendered=False)
    assert pool.samples.counts.tolist() == [[COUNT["test"]] * 4]
    mixed = pool.samples.rows(pool.samples.y == 2)
    assert pool.with_images(mixed).x[0].shape == (4, 3, 28, 28)


def test_arrays_come_before_the_published_format(tmp_path):
    write_idx(tmp_path, packed=False)
    assert open_digits(tmp_path, "mnist", "test").labels.tolist() == labels("test").tolist()
    black = np.zeros((1, 28, 28), np.uint8)
    np.savez(tmp_path / "mnist.npz", x_train=black, y_train=[7], x_test=black, y_test=[7])
    assert open_digits(tmp_path, "mnist", "test").labels.tolist() == [7]


def test_an_incomplete_set_names_what_is_absent(tmp_path):
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    open_digits(tmp_path, "mnist", "train")
    with pytest.raises(UserError, match=r"lacks t10k-labels-idx1-ubyte"):
        open_digits(tmp_path, "mnist", "test")
    with pytest.raises(UserError, match=r"lacks svhn\.npz"):
        open_digits(tmp_path, "svhn", "test")


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "file", "damage"),
    [
        ("mnist", "train-images-idx3-ubyte.gz", halve),
        ("mnist", "train-labels-idx1-ubyte.gz", lambda path: path.write_bytes(gzip.compress(b"hello there"))),
        (
            "mnist",
            "train-labels-idx1-ubyte.gz",
            lambda path: path.write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\2\1\1")),
        ),
        ("mnist", "train-labels-idx1-ubyte.gz", lambda path: path.write_bytes(b"no gzip")),
        ("usps", "zip.train.gz", lambda path: path.write_bytes(gzip.compress(b"1.0 0.5 0.5"))),
        ("usps", "zip.train.gz", lambda path: path.write_bytes(gzip.compress(b"1 " + b"2 " * 256))),
        ("usps", "zip.train.gz", lambda path: path.write_bytes(gzip.compress(b""))),
        ("mnist_m", "mnist_m_train_labels.txt", lambda path: path.write_text("00000000.png\n")),
        ("mnist_m", "mnist_m_train_labels.txt", lambda path: path.write_text("00000000.png 12\n")),
        ("svhn", "train_32x32.mat", halve),
        ("svhn", "train_32x32.mat", lambda path: path.write_bytes(b"no matrix")),
        ("svhn", "train_32x32.mat", lambda path: savemat(path, {"X": np.zeros((32, 32, 3, 2))})),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, file, damage):
    WRITERS[name](tmp_path)
    damage(tmp_path / file)
    with pytest.raises(UserError, match=f"cannot read the train part in .*{file}"):
        open_digits(tmp_path, name, "train")


@pytest.mark.parametrize("row", ["1 300:0.5", "1 0:0.5", "1 3", "one 1:0.5", "1 1:7"])
def test_a_wrong_libsvm_row_is_refused(tmp_path, row):
    (tmp_path / "usps.t").write_text(f"2 1:0.5\n{row}\n")
    with pytest.raises(UserError, match=r"cannot read the test part in .*usps\.t"):
        open_digits(tmp_path, "usps", "test")


def test_a_damaged_image_is_named(tmp_path):
    write_mnist_m(tmp_path)
    halve(tmp_path / "mnist_m_train" / "00000003.png")
    found = open_digits(tmp_path, "mnist_m", "train")
    assert len(found.images(np.array([2, 4]))) == 2
    with pytest.raises(UserError, match=r"00000003\.png"):
        found.images(np.array([3]))
