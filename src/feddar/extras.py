"""Extras: the packages that only some of feddar needs, what they give, and which of them are here.

Which packages an extra has is read from the metadata of the installation, as pip reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from operator import eq, ge, gt, le, lt, ne

GIVES: Mapping[str, str] = {
    "compare": "feddar compare, and pages: feddar report, card.html",
    "dev": "lint, types and tests, with all the other extras",
    "dicom": "DICOM images",
    "excel": "tables in Excel files",
    "flower": "feddar keys, server and client: studies between real sites, on Flower",
    "images": "images, the encoders densenet121 and efficientnet-lite0, and the cohorts digits and fairface",
    "mlflow": "--track mlflow",
    "nvflare": "NVIDIA FLARE: its jobs between sites, and feddar simulate --engine nvflare",
    "onnx": "feddar export: a model as one file that runs without feddar",
    "parquet": "tables and predictions in Parquet files",
    "plots": "figures: feddar paper, and the drawn digits of the cohort digits",
    "simulation": "feddar simulate --engine flower",
    "sklearn": "FedDARClassifier and FedDARRegressor, and the pooled references of feddar compare",
    "tensorboard": "--track tensorboard",
    "wandb": "--track wandb",
}
"""What each extra is for; this is the one place that says it."""

_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)\s*(?:\[(?P<extras>[^\]]*)\])?\s*(?P<wanted>[^;]*?)\s*(?:;(?P<marker>.*))?"
)
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w.-]+)""")
_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*([\d.]+)")
_COMPARISONS: Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": ge, "<=": le, "==": eq, "!=": ne, ">": gt, "<": lt,
}  # fmt: skip


@dataclass(frozen=True)
class Package:
    """A package that is needed: the versions that will do (``>=1.26``), and the one that is here, None if it is not."""

    name: str
    wanted: str
    found: str | None

    @property
    def will_do(self) -> bool:
        """Whether it is here in a version that will do."""
        if self.found is None:
            return False
        here = _numbers(self.found)
        return all(_COMPARISONS[sign](here, _numbers(bound)) for sign, bound in _CLAUSE.findall(self.wanted))


@dataclass(frozen=True)
class Extra:
    """A group of packages that one installs by name, as in ``pip install 'feddar[plots]'``."""

    name: str
    packages: tuple[Package, ...]

    @property
    def gives(self) -> str:
        """What it is for."""
        return GIVES[self.name]

    @property
    def lacking(self) -> tuple[Package, ...]:
        """The packages that are not here, or in a version that will not do."""
        return tuple(each for each in self.packages if not each.will_do)

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install 'feddar[{self.name}]'"


def extras() -> tuple[Extra, ...]:
    """Return every extra of feddar."""
    names = sorted(metadata("feddar").get_all("Provides-Extra") or ())
    return tuple(Extra(name, packages_of("feddar", name)) for name in names)


def packages_of(distribution: str, extra: str | None = None) -> tuple[Package, ...]:
    """Return the packages that a distribution needs, or that one extra of it adds, each once."""
    return tuple({each.name: each for each in _packages_of(distribution, extra)}.values())


def _packages_of(distribution: str, extra: str | None) -> Iterator[Package]:
    for text in _requirements(distribution):
        parts = _REQUIREMENT.fullmatch(text)
        assert parts is not None, text
        of_extra = _EXTRA.search(parts["marker"] or "")
        if (of_extra and of_extra[1]) != extra:
            continue
        yield Package(parts["name"], parts["wanted"], _installed_version(parts["name"]))
        for inner in (parts["extras"] or "").split(","):
            if inner:
                yield from _packages_of(parts["name"], inner.strip())


def _requirements(distribution: str) -> list[str]:
    try:
        return requires(distribution) or []
    except PackageNotFoundError:
        return []


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """Return a version's numbers, without zeros at the end and without what builds add to it (``+cpu``).

    >>> _numbers("2.10.0+cpu")
    (2, 10)
    """
    public, _, _ = text.partition("+")
    return tuple(int(part) for part in re.sub(r"(\.0)*$", "", public).split(".") if part.isdigit())
