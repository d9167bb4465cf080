"""Makes small DICOM files with pydicom; there is no patient behind them."""

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid


def dicom(pixels, kind="MONOCHROME2", bits=None, syntax=ExplicitVRLittleEndian, **tags):
    """Return a data set with these pixels [height, width] or [height, width, 3], of 8 or 16 bits."""
    found, meta = Dataset(), FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = syntax, SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = found.SOPInstanceUID = generate_uid(entropy_srcs=["test"])
    found.file_meta, found.SOPClassUID = meta, SecondaryCaptureImageStorage
    found.PatientName, found.Modality = "Synthetic", "OT"
    found.Rows, found.Columns = pixels.shape[:2]
    found.SamplesPerPixel = 3 if pixels.ndim == 3 else 1
    if pixels.ndim == 3:
        found.PlanarConfiguration = 0
    found.PhotometricInterpretation = kind
    found.BitsAllocated = 8 * pixels.dtype.itemsize
    found.BitsStored = bits or found.BitsAllocated
    found.HighBit, found.PixelRepresentation = found.BitsStored - 1, int(pixels.dtype.kind == "i")
    found.PixelData = np.ascontiguousarray(pixels).tobytes()
    found["PixelData"].VR = "OW" if pixels.dtype.itemsize > 1 else "OB"
    for name, value in tags.items():
        setattr(found, name, value)
    return found


def write_dicom(path, pixels, **tags):
    """Write such a data set, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dicom(pixels, **tags).save_as(path, enforce_file_format=True)
    return path


def chest(rng, ill, size=64):
    """Return something like a chest film [size, size] of 12 bits: two dark lungs, one with an opacity if ``ill``."""
    y, x = np.mgrid[0 : 1 : size * 1j, 0 : 1 : size * 1j]
    values = 2600 + 300 * rng.random() + rng.normal(0, 60, (size, size))
    for centre in (0.3, 0.7):
        values -= 1600 * np.exp(-((((x - centre) / 0.13) ** 2 + ((y - 0.5) / 0.3) ** 2) ** 2))
    if ill:
        side, height = rng.choice([0.3, 0.7]), 0.4 + 0.25 * rng.random()
        values += 1200 * np.exp(-((x - side) ** 2 + (y - height) ** 2) / 0.008)
    return np.clip(values, 0, 4095).astype(np.uint16)
