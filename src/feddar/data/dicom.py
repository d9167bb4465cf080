"""DICOM files as pictures of 8 bits: what a viewer shows first.

Stored values pass through the modality transform (rescale or table), then through the first window or table of the
VOI module, or without one through the full range of the stored bits; MONOCHROME1, in which low values are bright, is
inverted. Colours become RGB. See PS3.3 of the standard, C.7.6.3, C.11.1 and C.11.2.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from feddar.errors import UserError

if TYPE_CHECKING:
    from pydicom import Dataset

SUFFIXES = (".dcm", ".dicom")
GREY = ("MONOCHROME1", "MONOCHROME2")
PALETTE = "PALETTE COLOR"
COLOUR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
"""Colours that pydicom returns as RGB."""
AGAIN = "get it again, or take out its row"
DECODERS = "pip install pylibjpeg pylibjpeg-libjpeg pylibjpeg-openjpeg, or write it without compression"


class UnusableDicomError(ValueError):
    """A DICOM file that is whole, but cannot be used as it is; ``remedy`` says what to do."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


def is_dicom(path: Path) -> bool:
    """Return whether a file is DICOM, by its name or by its mark; archives often write it without an ending."""
    if path.suffix.lower() in SUFFIXES:
        return True
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def read_dicom(path: Path) -> NDArray[np.uint8]:
    """Return the picture in a DICOM file: grey [height, width] or RGB [height, width, 3]."""
    try:
        from pydicom import dcmread
        from pydicom.errors import InvalidDicomError
    except ImportError:
        raise UserError(f"reading {path} needs pydicom: pip install 'feddar[dicom]'.") from None
    try:
        dataset = dcmread(path)
    except InvalidDicomError:
        raise UnusableDicomError("it is no DICOM file", AGAIN) from None
    frames = int(dataset.get("NumberOfFrames") or 1)
    if frames > 1:
        raise UnusableDicomError(f"it holds {frames} frames", "write the one to learn from as a file of its own")
    kind = str(dataset.get("PhotometricInterpretation"))
    if kind not in (*GREY, PALETTE, *COLOUR):
        raise UnusableDicomError(f"its photometric interpretation is {kind}", "write it as MONOCHROME2 or RGB")
    stored = _stored(dataset)
    if kind in GREY:
        shares = _shares(stored, dataset)
        return _as_bytes(1 - shares if kind == "MONOCHROME1" else shares)
    if kind == PALETTE:
        from pydicom.pixels.processing import apply_color_lut

        stored = apply_color_lut(stored, dataset)
        return _as_bytes(stored / np.iinfo(stored.dtype).max)
    return _as_bytes(stored / (2 ** int(dataset.BitsStored) - 1))


def _stored(dataset: Dataset) -> NDArray[Any]:
    """Return the stored values; colours as RGB."""
    if "PixelData" not in dataset:
        raise UnusableDicomError("it holds no pixels", "take out its row")
    from pydicom.pixels.utils import pixel_array

    try:
        return pixel_array(dataset)
    except (AttributeError, KeyError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        syntax = dataset.file_meta.get("TransferSyntaxUID")
        if syntax is not None and syntax.is_compressed:
            raise UnusableDicomError(f"its compression, {syntax.name}, cannot be decoded here", DECODERS) from None
        raise UnusableDicomError(str(error), AGAIN) from None


def _shares(stored: NDArray[Any], dataset: Dataset) -> NDArray[np.float64]:
    """Return grey values as shares of the range that is shown, from 0 (the window's lower end) to 1."""
    from pydicom.pixels.processing import apply_modality_lut, apply_voi

    values = apply_modality_lut(stored, dataset)
    if dataset.get("VOILUTSequence"):
        table = dataset.VOILUTSequence[0]
        return np.asarray(apply_voi(values, dataset) / (2 ** int(table.LUTDescriptor[2]) - 1), np.float64)
    values = values.astype(np.float64)
    if dataset.get("WindowCenter") is None or dataset.get("WindowWidth") is None:
        low, high = _full_range(dataset)
        return np.asarray(np.clip((values - low) / (high - low), 0, 1), np.float64)
    centre, width = (_first(dataset[name].value) for name in ("WindowCenter", "WindowWidth"))
    return _in_window(values, centre, width, str(dataset.get("VOILUTFunction") or "LINEAR"))


def _in_window(values: NDArray[np.float64], centre: float, width: float, function: str) -> NDArray[np.float64]:
    """Return the place of values in a window, from 0 to 1, by one of the three functions of C.11.2.1.

    >>> _in_window(np.array([0.0, 50.0, 200.0]), 50.5, 101, "LINEAR").tolist()
    [0.0, 0.5, 1.0]
    """
    if not width >= (1 if function == "LINEAR" else 1e-9):
        raise UnusableDicomError(f"its window is {width:g} wide", "mend WindowWidth, or take out its row")
    if function == "SIGMOID":
        return np.asarray(1 / (1 + np.exp(np.clip(-4 * (values - centre) / width, -700, 700))))
    exact = function == "LINEAR_EXACT"
    middle, span = (centre, width) if exact else (centre - 0.5, max(width - 1, 1e-9))
    return np.clip((values - middle) / span + 0.5, 0, 1)


def _full_range(dataset: Dataset) -> tuple[float, float]:
    """Return the least and the greatest value that the file could hold, after the modality transform."""
    if dataset.get("ModalityLUTSequence"):
        return 0.0, 2.0 ** int(dataset.ModalityLUTSequence[0].LUTDescriptor[2]) - 1
    bits, signed = int(dataset.BitsStored), int(dataset.PixelRepresentation)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    slope, intercept = float(dataset.get("RescaleSlope") or 1), float(dataset.get("RescaleIntercept") or 0)
    ends = sorted((low * slope + intercept, high * slope + intercept))
    return ends[0], ends[1]


def _first(value: Any) -> float:
    """Return a number, or the first of several."""
    return float(value[0] if hasattr(value, "__getitem__") and not isinstance(value, str) else value)


def _as_bytes(shares: NDArray[np.floating]) -> NDArray[np.uint8]:
    return np.asarray((255 * shares).round().astype(np.uint8))
