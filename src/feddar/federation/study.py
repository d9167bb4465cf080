"""The study: one TOML file that fixes method, model, columns, domains and classes for all sites.

    [study]      its name, the columns of domain and target, all domains and classes
    [columns]    the features: the kind of each column, or the levels of a category; whether sites may lack it
    [training]   the settings of a run
    [terms]      the coordinator's settings: how many sites it needs, and how long it waits

Preprocessing follows from the columns' kinds, and its statistics are sums over sites. A site checks its own data
against the study before it joins, and reports all disagreements at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from feddar.algorithm.weighting import require_classes
from feddar.data.cohort import Cohort, weights_of
from feddar.data.columns import Column, Kind, inputs
from feddar.data.domain_structure import DomainStructure, Factor, crossed, structure_of, terms_in
from feddar.data.files import Reading, open_tables
from feddar.data.images import scaling_for
from feddar.data.layout import layout_for
from feddar.data.name_lists import as_list, names_in
from feddar.data.spellings import as_spelled
from feddar.data.table_options import TableOptions, learned_domains
from feddar.data.tables import (
    WEIGHT,
    TableFiles,
    columns_of,
    labels_in,
    place,
    quoted,
    read_cohort,
    reading_of,
)
from feddar.data.validation import divided as held_out_by_client
from feddar.data.validation import most_held_out
from feddar.errors import RowError, UserError
from feddar.evaluation.operating_point import OperatingPoint
from feddar.federation.coordinator_settings import CoordinatorSettings
from feddar.methods import nearest
from feddar.models.encoders import is_table
from feddar.objectives import Objective, from_facts, with_classes
from feddar.objectives.labels import LabelColumns, Scalar, written
from feddar.results.run_folder import names_only
from feddar.settings import Settings, checked, read_config, write_config

TABLES = ("study", "columns", "training", "terms")
KINDS = get_args(Kind)
FEWEST = 3
"""The least number of sites of a secure sum: of two, each knows the other's part."""
APART = 2
"""The least number of sites by which two secure sums of the same samples may differ."""
MOST_LISTED = 10
"""The most values that are listed of those that are not in the study."""


CONSONANTS, VOWELS = "bdfghjklmnprstvz", "aiou"


def spoken(data: bytes) -> str:
    """Return an even number of bytes as words of five letters, two bytes a word (proquints, Wilkerson 2009)."""
    letters = ((CONSONANTS, 12), (VOWELS, 10), (CONSONANTS, 6), (VOWELS, 4), (CONSONANTS, 0))
    words = (int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2))
    return "-".join("".join(kind[word >> shift & len(kind) - 1] for kind, shift in letters) for word in words)


class Facts(BaseModel):
    """The table [study]: what all sites have to agree on, beside columns and training."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(description="What the study is called.")
    domain: str = Field(
        pattern=r"[^,\s]", description="Column that names the domain; a,b crosses two, a/b: b has the a, a:spline bins."
    )
    target: str = Field(min_length=1, description="Column to predict.")
    group: str | None = Field(None, description="Column (patient) whose rows stay together in splits.")
    sample_weight: str | None = Field(None, description="Column of weights of samples in training.")
    domains: tuple[str, ...] = Field(min_length=1, description="The domains there are.")
    factors: tuple[Factor, ...] | None = Field(None, description="What domains are made of, if of several columns.")
    classes: tuple[str | bool | int | float, ...] | None = Field(
        None, min_length=2, description="The classes, the positive one last; none for a number to predict."
    )
    objective: dict[str, Any] | None = Field(None, description="What is predicted, where classes do not tell.")
    missing: tuple[str, ...] = Field(default=(), description="Texts that stand for a missing value, beside the usual.")
    spellings: Literal["merge"] | None = Field(
        default=None, description="Whether names of domains may differ from these in letter case and blanks."
    )
    test: float = Field(0.2, gt=0, lt=1, description="Share of its samples that each site holds out for testing.")
    floor: float = Field(
        default=3.0,
        ge=0,
        description="Rows of a domain, for each column of a head, from which its head and second-order sums are sent.",
    )
    secure: bool | None = Field(
        default=None, description="Whether the coordinator learns only sums over sites; it does from three sites on."
    )
    keys: dict[str, str] | None = Field(default=None, description="Fingerprint of the key that each site is known by.")
    max_norm: float = Field(
        default=10.0, gt=0, description="A phase moves no tensor by more than this, times 1 + its length."
    )
    max_rows: int = Field(default=10**6, ge=1, description="Rows that a site may have at most.")


@dataclass(frozen=True)
class Disagreement:
    """Where a site's data does not fit the study; only ``what``, which has no values in it, is sent to others."""

    what: str
    why: str


@dataclass(frozen=True)
class Study:
    """The content of a study file."""

    facts: Facts
    columns: tuple[Column, ...]
    training: Settings
    """Settings that depend on the kind of data, and are left open, are set by the columns: the same at every site."""
    coordinator: CoordinatorSettings

    def __post_init__(self) -> None:
        object.__setattr__(self, "training", self.training.resolved(is_table(layout_for(self.columns))))
        if self.facts.secure is None:
            secure = self.facts.model_copy(update={"secure": self.coordinator.sites >= FEWEST})
            object.__setattr__(self, "facts", secure)

    @classmethod
    def read(cls, path: Path) -> Study:
        """Read a study file."""
        return cls.from_tables(read_config(path, TABLES), str(path))

    @classmethod
    def from_tables(cls, tables: dict[str, Any], where: str) -> Study:
        """Return the study in the tables of a file or message; errors begin with ``where`` they come from."""
        try:
            json.dumps(tables, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise UserError(f"{where} has characters that are no text.") from None
        for title in TABLES:
            if not isinstance(tables.get(title, {}), dict):
                raise UserError(f"{where}: [{title}] is no table.")
        for title in ("study", "columns"):
            if not tables.get(title):
                raise UserError(f"{where} has no table [{title}], which a study needs: make one with `feddar study`.")
        try:
            facts = checked(Facts, tables["study"])
            columns = tuple(_column(name, entry) for name, entry in tables["columns"].items())
            study = cls(
                facts,
                columns,
                checked(Settings, tables.get("training", {})),
                checked(CoordinatorSettings, tables.get("terms", {})),
            )
            study._require_sound()
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        return study

    @classmethod
    def of(
        cls,
        cohort: Cohort,
        name: str,
        options: TableOptions,
        training: Settings,
        coordinator: CoordinatorSettings,
        **limits: Any,
    ) -> Study:
        """Return the study that fits an example cohort; ``limits`` are other facts, such as ``secure``."""
        found = {
            "name": name,
            "domain": options.domain or "",
            "target": options.target or "",
            "group": options.group,
            "sample_weight": options.sample_weight,
            "domains": cohort.domains,
            "factors": None if cohort.structure is None else cohort.structure.factors,
            "classes": cohort.classes,
            "objective": None if with_classes(cohort.classes) == cohort.objective else cohort.objective.facts(),
            "missing": tuple(names_in(options.missing)),
            "spellings": "merge" if options.spellings == "merge" else None,
            "test": options.test,
        }
        facts = checked(Facts, found | limits)
        study = cls(facts, cohort.columns or (), training, coordinator)
        study._require_sound()
        return study

    def tables(self) -> dict[str, Any]:
        """Return the study as tables, for a file or a message to sites."""
        return {
            "study": self.facts.model_dump(exclude_none=True, exclude=set() if self.facts.missing else {"missing"}),
            "columns": {column.name: _column_entry(column) for column in self.columns},
            "training": self.training.model_dump(exclude_none=True, exclude=set(Settings.of_one_machine)),
            "terms": self.coordinator.model_dump(),
        }

    def write(self, path: Path) -> None:
        """Write the study file, with the columns in their order, which all sites must share."""
        tables = self.tables()
        if any(isinstance(entry, dict) for entry in tables["columns"].values()):
            # TOML's writer puts tables last: if one column is a table, all are written as tables, to keep their order.
            tables["columns"] = {name: _as_table(entry) for name, entry in tables["columns"].items()}
        write_config(path, **tables)

    @property
    def content(self) -> str:
        """What all sites agree on, as text: everything but [terms]; columns in the order of the encoder's inputs."""
        return json.dumps({title: table for title, table in self.tables().items() if title != "terms"})

    @property
    def digest(self) -> str:
        """The SHA-256 of what all sites agree on, as words that two people can read to each other."""
        return spoken(hashlib.sha256(self.content.encode()).digest())

    @property
    def image(self) -> str:
        """The column of image paths; empty if there is none."""
        return next((column.name for column in self.columns if column.kind == "image"), "")

    @property
    def structure(self) -> DomainStructure | None:
        """What domains are made of; None if that is one plain column."""
        return structure_of(self.facts.factors)

    def roles(self) -> dict[str, str]:
        """Return the column of each role: domain, target and, if there are, group and weight."""
        given = {"domain": self.facts.domain, "target": self.facts.target, "group": self.facts.group}
        given[WEIGHT] = self.facts.sample_weight
        return {role: name for role, name in given.items() if name is not None}

    def cohort(self, clients: tuple[str, ...], counts: torch.Tensor) -> Cohort:
        """Return a cohort with names, counts [client, domain] and shapes of inputs, but without data."""
        blank = names_only(self.facts.domains, clients, self.objective, counts, layout_for(self.columns))
        weight = torch.ones(len(blank), dtype=torch.float64) if self.facts.sample_weight else None
        scaling = scaling_for(3) if self.image else None
        return replace(blank, columns=self.columns, weight=weight, scaling=scaling, structure=self.structure)

    def read_site(self, path: Path, name: str) -> Cohort:
        """Read a site's own table, which must agree with the study."""
        table = self.files(path)
        found = list(self.disagreements(table))
        if found:
            listed = "".join(f"\n  - {each.why}" for each in found)
            raise DisagreementError(f"the data in {path} does not agree with the study:{listed}", found)
        facts = self.facts
        try:
            return Cohort.from_arrays(
                table,
                labels_in(table, facts.target),
                domain=self._domain(table),
                structure=self.structure,
                client=np.full(len(table), name),
                group=table[facts.group] if facts.group else None,
                weight=table[facts.sample_weight] if facts.sample_weight else None,
                objective=self.objective,
                domains=facts.domains,
                columns=self.columns,
            )
        except RowError as problem:
            raise UserError(f"{place(table, problem.row)}: {problem.reason}") from None

    def divided(self, cohort: Cohort) -> tuple[Cohort, Cohort]:
        """Return the training and test part of a site's samples."""
        held_out = torch.from_numpy(cohort.held_out(self.facts.test, self.training.seed))
        return cohort.rows(~held_out), cohort.rows(held_out)

    def validated(self, train: Cohort, least: int) -> tuple[Cohort, Cohort | None]:
        """Return a site's training part without the samples held out to choose the round in use, and these.

        Of each domain they are of at least ``least`` patients, as are those left to train on, or there are none.
        """
        if not self.training.validation:
            return train, None
        return held_out_by_client(train, self.training.validation, self.training.seed, least)

    def most_validated(self, counts: Tensor, sites: int) -> Tensor:
        """Return how many rows of each domain [M] so many sites hold out at most, given those they train on."""
        share = self.training.validation or 0.0
        if self.facts.group is None:
            return most_held_out(counts, share, sites)
        # A patient may have any number of rows, and be held out with all of them.
        return torch.where(counts > 0, self.facts.max_rows * sites - counts, 0) if share else torch.zeros_like(counts)

    def files(self, path: Path) -> TableFiles:
        """Open a site's table: one file, or all files in a folder."""
        if not path.exists():
            raise UserError(f"there is no table {path}: name the CSV or Parquet file of this site with --data.")
        categories = [column.name for column in self.columns if column.kind == "category"]
        optional = [column.name for column in self.columns if column.optional]
        files = open_tables(path, Reading(missing=self.facts.missing))
        return TableFiles(files, self.roles(), self.image, categories, optional)

    def lacking(self, path: Path) -> list[str]:
        """Return the optional columns that a site's table lacks."""
        return [column.name for column in self.columns if column.name not in self.files(path).columns]

    def disagreements(self, table: TableFiles) -> Iterator[Disagreement]:
        """Yield everything in a table that does not fit the study."""
        roles = [name for role, given in self.roles().items() for name in columns_of(role, given)]
        needed = dict.fromkeys([*roles, *(column.name for column in self.columns if not column.optional)])
        absent = [name for name in needed if name not in table.columns]
        for name in absent:
            yield Disagreement(f"column '{name}'", f"there is no column '{name}': {nearest(name, table.columns)}")
        for name in roles:
            if name not in absent and (missing := table[name].isna()).any():
                where = table.line(int(missing.argmax()))
                yield Disagreement(f"column '{name}'", f"{where}: column '{name}' is empty there; fill it in.")
        for column in self.columns:
            if column.name in table.columns:
                yield from _column_disagreements(table, column)
        if self.facts.sample_weight and self.facts.sample_weight not in absent:
            yield from _weight_disagreements(table, self.facts.sample_weight)
        if not {*columns_of("domain", self.facts.domain)} & {*absent}:
            yield from self._domain_disagreements(table)
        if not {*columns_of("target", self.facts.target)} & {*absent}:
            yield from self._target_disagreements(table)

    def _domain(self, table: TableFiles) -> pd.Series[Any]:
        """Return the domain of each row of a site's table, by the study's name if spellings are merged."""
        columns = [table[term.column] for term in terms_in(self.facts.domain)]
        named = crossed(columns) if self.structure is None else self.structure.names(columns)
        return as_spelled(named, self.facts.domains) if self.facts.spellings == "merge" else named

    def _domain_disagreements(self, table: TableFiles) -> Iterator[Disagreement]:
        what, known = f"domain column '{self.facts.domain}'", self.facts.domains
        try:
            named = self._domain(table)
        except RowError as problem:
            yield Disagreement(what, f"{table.line(problem.row)}: {problem.reason}")
            return
        if self.structure is not None:
            for column, why in self.structure.misplaced(table, known, named):
                yield Disagreement(f"domain column '{column}'", why)
        domain = named.dropna().map(str)
        unknown = domain[~domain.isin(known)].value_counts()
        for name, count in unknown[:MOST_LISTED].items():
            why = f"domain '{name}' ({count:,} rows) is not in the study: {nearest(str(name), list(known))}"
            yield Disagreement(what, why)
        if len(unknown) > MOST_LISTED:
            yield Disagreement(what, f"{len(unknown) - MOST_LISTED:,} more domains are not in the study.")

    def _target_disagreements(self, table: TableFiles) -> Iterator[Disagreement]:
        labels = labels_in(table, self.facts.target)
        read = self.objective.read(LabelColumns.of(labels)).reshape(len(labels), -1)
        for name, numbers in zip(labels.columns, read.T, strict=True):
            column = labels[name]
            wrong = column.notna().to_numpy() & np.isnan(numbers) & ~column.duplicated().to_numpy()
            for row in np.flatnonzero(wrong)[:MOST_LISTED].tolist():
                why = f"{table.line(row)}: '{column[row]}' in column '{name}' {self.objective.refusal}"
                yield Disagreement(f"target column '{name}'", why)

    @property
    def objective(self) -> Objective:
        """The objective: what is predicted."""
        given = self.facts.objective
        return with_classes(self.facts.classes) if given is None else from_facts(given)

    def _require_sound(self) -> None:
        """Refuse a study that contradicts itself."""
        facts = self.facts
        if OperatingPoint.of(self.training).chosen:
            raise UserError(
                "flag and sensitivity are chosen on validation samples, of which sites send only losses: "
                "give a threshold."
            )
        lists: tuple[tuple[str, tuple[Scalar, ...]], ...] = (
            ("domains", facts.domains),
            ("classes", facts.classes or ()),
        )
        for what, names in lists:
            texts = [*map(written, names)]
            twice = [name for name in names if texts.count(written(name)) > 1]
            if twice:
                raise UserError(f"{what} names {twice[0]!r} twice: once is enough.")
        if self.structure is not None:
            self.structure.require_fits(facts.domain, facts.domains)
        require_classes(self.objective, self.training)
        learned = [column.name for column in self.columns]
        for role, given in self.roles().items():
            for name in columns_of(role, given):
                if role != "domain" and name in learned:
                    raise UserError(f"column '{name}' is the {role}, which is not learned from: leave it out.")
        if sum(column.kind == "image" for column in self.columns) > 1:
            raise UserError("[columns] has more than one column of images: leave one.")
        if self.training.trains_a_part and self.facts.secure:
            raise UserError(
                "in secure sums all sites train in every round: leave out participation and clients_per_round, or make "
                "the study with --no-secure."
            )


class DisagreementError(UserError):
    """A site's data does not fit the study."""

    def __init__(self, message: str, found: list[Disagreement]) -> None:
        super().__init__(message)
        self.found = found


def _weight_disagreements(table: TableFiles, name: str) -> Iterator[Disagreement]:
    if table[name].isna().any():  # which has been said
        return
    try:
        weights_of(table[name])
    except RowError as problem:
        yield Disagreement(f"column '{name}'", f"{table.line(problem.row)}: {problem.reason}")
    except UserError as problem:
        yield Disagreement(f"column '{name}'", f"column '{name}': {problem}")


def _column_disagreements(table: TableFiles, column: Column) -> Iterator[Disagreement]:
    what = f"column '{column.name}'"
    values = table[column.name]
    if not column.gaps and column.kind != "image" and (missing := values.isna()).any():
        rows = int(missing.sum())
        why = (
            f"{table.line(int(missing.argmax()))}: {what} is empty there{_more(rows)}, and the study says it never is."
        )
        yield Disagreement(what, why)
    try:
        inputs(table, [column])
    except RowError as problem:
        reason = problem.reason
        if column.kind == "category":
            known = ", ".join(column.levels[:10]) + ", …" * (len(column.levels) > 10)
            held = str(values.iloc[problem.row])
            reason = f"{what} holds {held!r}, and the study knows {known}; mend it, or leave it empty."
        yield Disagreement(what, f"{table.line(problem.row)}: {reason}")


def _more(rows: int) -> str:
    return f" and in {rows - 1:,} more" if rows > 1 else ""


def _column(name: str, entry: Any) -> Column:
    """Return the column of an entry in [columns]: a kind, the levels of a category, or a table of both and more."""
    entry = _as_table(entry)
    if not isinstance(entry, dict) or set(entry) - {*_COLUMN}:
        raise UserError(f"[columns] {name} must be a kind ({', '.join(KINDS)}) or a list of levels.")
    entry = {"kind": "category"} | entry if "levels" in entry else entry
    kind, levels, gaps, size, optional = (entry.get(key, default) for key, default in _COLUMN.items())
    if kind not in KINDS:
        raise UserError(f"[columns] {name} has the kind {kind!r}: there are {', '.join(KINDS)}.")
    if (kind == "category") != bool(levels):
        raise UserError(f"[columns] {name}: a category, and nothing else, lists its levels.")
    if not isinstance(levels, list) or not all(isinstance(level, (str, int)) for level in levels):
        raise UserError(f"[columns] {name}: levels are a list of texts.")
    texts = tuple(str(level).strip() for level in levels)
    if len(set(texts)) < len(texts) or "" in texts:
        raise UserError(f"[columns] {name}: each level is a text of its own.")
    if type(gaps) is not bool:
        raise UserError(f"[columns] {name}: gaps is true or false.")
    if type(optional) is not bool or (optional and kind == "image"):
        raise UserError(f"[columns] {name}: optional is true or false, and images are not optional.")
    if type(size) is not int or not 8 <= size <= 1024:
        raise UserError(f"[columns] {name}: the size of images is from 8 to 1024 pixels.")
    return Column(name, kind, texts, gaps or optional, size if kind == "image" else 0, optional)


def _as_table(entry: Any) -> Any:
    """Return an entry that is a kind or a list of levels as a table; anything else as it is."""
    return {"kind": entry} if isinstance(entry, str) else {"levels": entry} if isinstance(entry, list) else entry


_COLUMN: dict[str, Any] = {"kind": None, "levels": [], "gaps": False, "size": 96, "optional": False}


def _column_entry(column: Column) -> Any:
    """Undo ``_column``: return the shortest entry for a column."""
    if column.kind == "image":
        return {"kind": "image", "size": column.size}
    if column.gaps:
        more = "optional" if column.optional else "gaps"
        return {**({"levels": list(column.levels)} if column.levels else {"kind": column.kind}), more: True}
    return list(column.levels) or column.kind


def study_of_table(
    name: str, options: TableOptions, training: Settings, coordinator: CoordinatorSettings, **limits: Any
) -> Study:
    """Read an example table (of one site or several, or a folder of one each), and return the study that fits it.

    Columns that some files of a folder lack are optional.
    """
    if learned_domains(options.domain) is not None:
        raise UserError(
            f"between sites a column names the domains by which results are reported, and '{options.domain}' is none: "
            "give one, and a method that learns its own, such as feddar-mixture."
        )
    headers = [file.header for file in open_tables(Path(options.data), reading_of(options))]
    roles = {"domain": options.domain, "target": options.target or "", "group": options.group, "client": options.client}
    given = {role: quoted(role, named, headers[0]) for role, named in roles.items() if named is not None}
    needed = [name for role, named in given.items() if named for name in columns_of(role, named)]
    lacking = [name for name in _not_in_all(headers) if name not in {*needed, options.image}]
    optional = dict.fromkeys([*names_in(options.optional), *lacking])
    options = options.model_copy(update={**given, "optional": as_list(optional)})
    return Study.of(read_cohort(options, of_one_client=True), name, options, training, coordinator, **limits)


def _not_in_all(headers: Sequence[Sequence[str]]) -> list[str]:
    """Return the columns that some files have and others lack, in their order."""
    every = dict.fromkeys(name for header in headers for name in header)
    return [name for name in every if not all(name in header for header in headers)]
