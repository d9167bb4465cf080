"""DICOM files: what they show, against the standard's formulas and pydicom's own, and what is said of others."""

import sys

import numpy as np
import pytest
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut, convert_color_space
from pydicom.uid import JPEGLSLossless, RLELossless

from feddar.data.dicom import is_dicom, read_dicom
from feddar.data.images import UnreadableImagesError, read_images
from feddar.errors import UserError
from helpers.dicom_files import dicom, write_dicom

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)
GREYS = np.round(255 * (np.arange(4096.0) / 4095)).reshape(64, 64)
WINDOW = {"RescaleSlope": 2, "RescaleIntercept": -1024, "WindowCenter": 300, "WindowWidth": 1500}


def shown(tmp_path, pixels, **tags):
    return read_dicom(write_dicom(tmp_path / "one.dcm", pixels, **tags))


def table_of(values, bits=16, first=0):
    found = Dataset()
    found.LUTDescriptor, found.LUTData = [len(values), first, bits], list(map(int, values))
    found["LUTDescriptor"].VR, found["LUTData"].VR = "US", "US"
    return found


@pytest.mark.parametrize("function", [None, "LINEAR", "LINEAR_EXACT", "SIGMOID"])
@pytest.mark.parametrize("kind", ["MONOCHROME1", "MONOCHROME2"])
def test_rescale_and_window_are_those_of_the_standard(tmp_path, function, kind):
    tags = WINDOW | ({"VOILUTFunction": function} if function else {})
    found = shown(tmp_path, RAMP, kind=kind, bits=12, **tags)
    values = []
    for stored in RAMP.flatten().tolist():  # C.11.2.1.2 and C.11.2.1.3, value by value
        x, c, w = 2 * stored - 1024, 300, 1500
        if function == "SIGMOID":
            share = 1 / (1 + np.exp(-4 * (x - c) / w))
        elif function == "LINEAR_EXACT":
            share = 0 if x <= c - w / 2 else 1 if x > c + w / 2 else (x - c) / w + 0.5
        else:
            low, high = c - 0.5 - (w - 1) / 2, c - 0.5 + (w - 1) / 2
            share = 0 if x <= low else 1 if x > high else (x - (c - 0.5)) / (w - 1) + 0.5
        values.append(1 - share if kind == "MONOCHROME1" else share)
    np.testing.assert_array_equal(found.flatten(), np.round(255 * np.array(values)))
    plain = dicom(RAMP, bits=12, **tags)
    theirs = apply_voi_lut(apply_modality_lut(RAMP, plain), plain)  # from the least to the greatest value of 12 bits
    share = (theirs + 1024) / (2 * 4095)
    np.testing.assert_allclose(found, 255 * (1 - share if kind == "MONOCHROME1" else share), atol=0.51)


def test_of_several_windows_the_first_is_shown(tmp_path):
    several = WINDOW | {"WindowCenter": [300, 40], "WindowWidth": [1500, 80]}
    np.testing.assert_array_equal(shown(tmp_path, RAMP, bits=12, **several), shown(tmp_path, RAMP, bits=12, **WINDOW))


def test_without_a_window_all_stored_bits_are_shown(tmp_path):
    np.testing.assert_array_equal(shown(tmp_path, RAMP, bits=12), GREYS)
    signed = (RAMP.astype(np.int32) - 2048).astype(np.int16)
    np.testing.assert_array_equal(shown(tmp_path, signed, bits=12), GREYS)
    falling = shown(tmp_path, RAMP, bits=12, RescaleSlope=-1, RescaleIntercept=4095)
    np.testing.assert_array_equal(falling, np.round(255 * ((4095.0 - RAMP) / 4095)))
    eight = RAMP.astype(np.uint8)
    np.testing.assert_array_equal(shown(tmp_path, eight), eight)


def test_tables_of_values_are_looked_up(tmp_path):
    rng = np.random.default_rng(0)
    curve = rng.integers(0, 65536, 4096)
    for name in ("VOILUTSequence", "ModalityLUTSequence"):
        table = table_of(curve)
        if name == "ModalityLUTSequence":
            table.ModalityLUTType = "US"
        found = shown(tmp_path, RAMP, bits=12, **{name: [table]})
        np.testing.assert_array_equal(found.flatten(), np.round(curve / 257))


def test_colours_become_rgb(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    np.testing.assert_array_equal(shown(tmp_path, pixels, kind="RGB"), pixels)
    in_ybr = convert_color_space(pixels, "RGB", "YBR_FULL")
    np.testing.assert_allclose(shown(tmp_path, in_ybr, kind="YBR_FULL").astype(int), pixels, atol=2)


def test_a_palette_is_looked_up(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 256, (6, 8), dtype=np.uint8)
    palette = np.random.default_rng(1).integers(0, 65536, (256, 3)).astype(np.uint16)
    tags = {}
    for place, colour in enumerate(("Red", "Green", "Blue")):
        tags[f"{colour}PaletteColorLookupTableDescriptor"] = [256, 0, 16]
        tags[f"{colour}PaletteColorLookupTableData"] = palette[:, place].tobytes()
    found = shown(tmp_path, numbers, kind="PALETTE COLOR", **tags)
    np.testing.assert_array_equal(found, np.round(palette[numbers] / 257.0))


def test_a_file_is_known_by_its_mark_and_resized_as_other_images(tmp_path):
    path = write_dicom(tmp_path / "IM0001", RAMP, bits=12)
    assert is_dicom(path)
    found = read_images([path], 64)[0].numpy()
    np.testing.assert_array_equal(found, np.stack([GREYS] * 3))


def test_rle_is_decoded(tmp_path):
    compressed = dicom(RAMP, bits=12)
    compressed.compress(RLELossless)
    compressed.save_as(tmp_path / "rle.dcm", enforce_file_format=True)
    np.testing.assert_array_equal(read_dicom(tmp_path / "rle.dcm"), GREYS)


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        ({"NumberOfFrames": 3}, r"it holds 3 frames\): write the one to learn from as a file of its own\."),
        ({"kind": "HSV"}, r"photometric interpretation is HSV\): write it as MONOCHROME2 or RGB\."),
        ({"WindowCenter": 5, "WindowWidth": 0}, r"its window is 0 wide\): mend WindowWidth"),
        ({"PixelData": b"12"}, r"get it again, or take out its row\."),
        (
            {"syntax": JPEGLSLossless, "PixelData": encapsulate([b"nothing."])},
            r"JPEG-LS.*cannot be decoded here\): pip install pylibjpeg .*, or write it without compression\.",
        ),
    ],
)
def test_what_cannot_be_used_is_said_with_its_remedy(tmp_path, tags, said):
    with pytest.raises(UnreadableImagesError, match=r"cannot read the image .*one\.dcm \(.*" + said) as error:
        read_images([write_dicom(tmp_path / "one.dcm", RAMP, **tags)], 16)
    assert "\n" not in str(error.value)


def test_a_file_without_pixels_or_without_dicom_is_said(tmp_path):
    empty = dicom(RAMP)
    del empty.PixelData
    empty.save_as(tmp_path / "empty.dcm", enforce_file_format=True)
    with pytest.raises(UnreadableImagesError, match=r"it holds no pixels"):
        read_images([tmp_path / "empty.dcm"], 16)
    (tmp_path / "text.dcm").write_text("hello")
    with pytest.raises(UnreadableImagesError, match=r"it is no DICOM file"):
        read_images([tmp_path / "text.dcm"], 16)


def test_without_pydicom_the_package_is_named(tmp_path, monkeypatch):
    path = write_dicom(tmp_path / "one.dcm", RAMP)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(UserError, match=r"needs pydicom: pip install 'feddar\[dicom\]'\."):
        read_images([path], 16)
