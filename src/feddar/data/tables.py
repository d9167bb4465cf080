"""The user's own table: a file with columns for client, domain and target, or one file per client (``data.files``).

Every other column is a feature: a number, a truth value, a date or a category, with gaps (``data.columns``). A column
that is none of these is left out with a note, unless it was asked for. Error messages name file, column and line.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from feddar.data.cohort import Cohort
from feddar.data.columns import Column, Kind, Table, UnusableColumnError, infer, nested
from feddar.data.domain_structure import DomainStructure, domains_in, quoted_columns, terms_in
from feddar.data.files import Reading, TableFile, is_number, open_tables
from feddar.data.name_lists import entries_in, names_in, option_for
from feddar.data.spellings import merged, plain_name, refusal_of, renamed, same_name, spellings_in
from feddar.data.suspicions import are_paths, notes_on
from feddar.data.table_options import TableOptions, learned_domains
from feddar.data.table_paths import by_name, is_of_several, name_of
from feddar.errors import RowError, UserError
from feddar.methods import there_are
from feddar.objectives.labels import by_distinct

MOST_DOMAINS = 100
FILE = "the file"
"""The pseudo-column of file names, for folders in which each file is a client."""
WEIGHT = "sample weight"
"""The role of the column of weights, whose entries are numbers and no names."""
POOLED = "small clients"
"""The client that clients below ``min_client`` become together."""
MOST_LISTED = 10
"""The most small clients that a note names."""


def read_cohort(options: TableOptions, *, of_one_client: bool = False) -> Cohort:
    """Read a file, or several with one client each, as a cohort; a file ``of_one_client`` has no client column."""
    path = Path(options.data)
    roles = {"client": options.client, "domain": options.domain, "target": options.target, "group": options.group}
    roles[WEIGHT] = options.sample_weight
    if options.client is None and (is_of_several(path) or of_one_client):
        roles["client"] = FILE
    files = open_tables(path, reading_of(options))
    needed = [role for role in ("client", "domain", "target") if roles[role] is None]
    require_none([str(missing_role(role, files[0])) for role in needed])
    given = {role: quoted(role, name, files[0].header) for role, name in roles.items() if name is not None}
    optional = [*names_in(options.optional), *names_in(options.ignore)]
    table = TableFiles(files, given, options.image, names_in(options.categories), optional)
    listed = (
        options.ignore, options.features, options.image, options.categories, options.numbers, options.optional
    )  # fmt: skip
    table.require([*_role_columns(given), *(name for text in listed for name in names_in(text))])
    usable, notes = _usable(table, given, options)
    made = as_cohort(usable, given, options)
    return replace(made, notes=(*made.notes, *notes))


def require_none(problems: Sequence[str]) -> None:
    """Refuse a table that has problems, with all of them at once."""
    if len(problems) > 1:
        numbered = " ".join(f"({number}) {each}" for number, each in enumerate(problems, start=1))
        raise UserError(f"there are {len(problems)} problems: {numbered}")
    if problems:
        raise UserError(problems[0])


def _usable(table: TableFiles, roles: dict[str, str], options: TableOptions) -> tuple[TableFiles, list[str]]:
    """Return a table without rows that lack a role, each name in one spelling, and without small clients; and notes."""
    complete, notes = _complete(table, _role_columns(roles), options.incomplete == "drop")
    checked = [
        name for role, given in roles.items() if role not in ("group", WEIGHT) for name in columns_of(role, given)
    ]
    for name in checked if options.spellings != "keep" else []:
        found = complete.spellings(name)
        if found and options.spellings == "ask":
            complete = complete.with_problems([refusal_of(name, found)])
        elif found:
            complete = complete.with_names(name, merged(found))
            notes.append(f"column '{name}': {_same(found)}.")
    if options.min_client and not complete.problems:
        complete, said = _without_small(complete, roles["client"], options)
        notes += said
    return complete, notes


def _same(found: list[dict[str, int]]) -> str:
    return "; ".join(f"{', '.join(map(repr, list(each)[1:]))} is read as {next(iter(each))!r}" for each in found)


def _complete(table: TableFiles, names: Sequence[str], drop: bool) -> tuple[TableFiles, list[str]]:
    """Return a table without the rows that lack one of these columns; unless they are to be dropped, a problem each."""
    missing = {name: table[name].isna().to_numpy() for name in names}
    gaps = {name: rows for name, rows in missing.items() if rows.any()}
    if not gaps:
        return table, []
    if not drop:
        return table.with_problems([_empty(table, name, rows) for name, rows in gaps.items()]), []
    without = np.any([*gaps.values()], axis=0)
    if without.all():
        raise UserError(f"no row of {table.files[0].path} has all of {', '.join(names)}: name other columns.")
    listed = ", ".join(f"'{name}' ({int(rows.sum()):,})" for name, rows in gaps.items())
    return table.only(~without), [f"{int(without.sum()):,} of {len(table):,} rows are left out, which lack {listed}."]


def _empty(table: TableFiles, name: str, rows: NDArray[np.bool_]) -> str:
    more = f" and in {int(rows.sum()) - 1:,} more" if rows.sum() > 1 else ""
    marks = " (or says NA, None or the like)" if name in table.targets else ""
    return (
        f"{table.line(int(rows.argmax()))}: column '{name}' is empty there{marks}{more}; fill it in or leave the rows "
        "out (--incomplete drop)."
    )


def _without_small(table: TableFiles, client: str, options: TableOptions) -> tuple[TableFiles, list[str]]:
    """Return a table without clients of fewer rows than were asked for, or with all of them as one; and a note."""
    named = table[client].map(str)
    counts = named.value_counts()
    small = counts[counts < options.min_client]
    if small.empty:
        return table, []
    if len(small) == len(counts) and options.small_clients == "drop":
        raise UserError(f"no client has {options.min_client:,} rows or more: lower --min-client.")
    listed = ", ".join(f"'{name}' ({count:,})" for name, count in small[:MOST_LISTED].items())
    listed += f" and {len(small) - MOST_LISTED:,} more" if len(small) > MOST_LISTED else ""
    which = f"{len(small):,} client{'s' * (len(small) > 1)} with fewer than {options.min_client:,} rows"
    if options.small_clients == "pool":
        return table.with_names(client, dict.fromkeys(map(str, small.index), POOLED)), [
            f"pooled as '{POOLED}': {which} ({int(small.sum()):,} row{'s' * (int(small.sum()) > 1)}): {listed}."
        ]
    rows = f"{int(small.sum()):,} of {len(table):,} rows"
    return table.only(~named.isin(small.index).to_numpy()), [f"left out: {which} ({rows}): {listed}."]


def reading_of(options: TableOptions) -> Reading:
    """Return how the files of a table are read."""
    return Reading(options.sep, options.decimal, options.encoding, tuple(names_in(options.missing)))


def missing_role(role: str, file: TableFile) -> UserError:
    """Return the error to raise if no column was given for a role that is needed."""
    return UserError(f"say which column of {file.path} is the {role}: --{role} COLUMN; {there_are(file.header)}")


def as_cohort(table: Table, roles: dict[str, str], options: TableOptions) -> Cohort:
    """Return a table as a cohort; ``roles`` is the column of each role."""
    _require_apart(roles, options)
    columns, notes = _kinds(table, roles, options)
    domain, structure = _domains_of(table, roles["domain"])
    groups = 1 if domain is None else domain.nunique()
    if groups > MOST_DOMAINS:
        raise UserError(f"{options.data}: column '{roles['domain']}' has {groups:,} distinct values; is it a group?")
    labels = labels_in(table, roles["target"])
    if isinstance(table, TableFiles):
        named = [name for name in columns_of("domain", roles["domain"]) if name not in _ordered(roles)]
        domains = pd.DataFrame({name: table[name] for name in named})
        notes = (*notes, *notes_on(table, columns, labels, domains, table.padded, names_in(options.numbers)))
    try:
        cohort = Cohort.from_arrays(
            table,
            labels,
            domain=domain,
            structure=structure,
            client=table[roles["client"]],
            group=table[roles["group"]] if "group" in roles else None,
            weight=table[roles[WEIGHT]] if WEIGHT in roles else None,
            task=options.task,
            columns=columns,
            positive=options.positive,
            image_cache=options.image_cache or None,
        )
    except RowError as problem:
        raise UserError(f"{place(table, problem.row)}: {problem.reason}") from None
    return replace(cohort, notes=notes)


def _domains_of(table: Table, given: str) -> tuple[pd.Series[Any] | None, DomainStructure | None]:
    """Return the domain of each row, and what domains are made of; neither where they are learned."""
    if learned_domains(given) is not None:
        return None, None
    try:
        return domains_in(table, given)
    except RowError as problem:
        raise UserError(f"{place(table, problem.row)}: {problem.reason}") from None


def labels_in(table: Table, target: str) -> pd.DataFrame:
    """Return the columns of labels; ``target`` is one name, or several separated by commas."""
    return pd.DataFrame({name: table[name] for name in columns_of("target", target)})


def quoted(role: str, given: str, header: Sequence[str]) -> str:
    """Return the columns of a role, with quotes around what is the name of a column as it is, and so not taken apart.

    >>> quoted("target", "dead, yes/no", ["age", "dead, yes/no"]), quoted("target", "died,icu", ["died", "icu"])
    ('"dead, yes/no"', 'died,icu')
    """
    if role == "domain":
        return quoted_columns(given, header)
    return f'"{given}"' if role == "target" and given in header and "," in given else given


def columns_of(role: str, given: str) -> list[str]:
    """Return the columns of a role: several for a domain of several columns or several outcomes, else one."""
    if role == "domain":
        return [name for term in terms_in(given) for name in term.columns]
    if role != "target":
        return [given]
    if not all(entries_in(given)):
        raise UserError(f"the {role} '{given}' has a comma without a name beside it: add the name, or take it away.")
    return names_in(given)


def _role_columns(roles: dict[str, str]) -> list[str]:
    return [name for role, given in roles.items() for name in columns_of(role, given)]


def _ordered(roles: dict[str, str]) -> list[str]:
    """Return the columns of numbers that are divided into domains: they are read as numbers, and can be features."""
    return [term.column for term in terms_in(roles["domain"]) if term.ordered] if "domain" in roles else []


def _require_apart(roles: dict[str, str], options: TableOptions) -> None:
    """Refuse a column that is given for two roles that exclude each other."""
    taken, features = _role_columns(roles), names_in(options.features)
    for name in taken:
        if taken.count(name) > 1:
            playing = [role for role, given in roles.items() if name in columns_of(role, given)]
            raise UserError(f"column '{name}' is named twice, as {' and '.join(playing)}: each needs one of its own.")
    for role, given in roles.items():
        for name in columns_of(role, given):
            if role != "domain" and name in features:
                raise UserError(
                    f"column '{name}' is the {role}, which is not learned from: leave it out of --features."
                )
    for name in features:
        if features.count(name) > 1:
            raise UserError(f"--features names column '{name}' twice: leave one out.")
    for name in names_in(options.image):
        if name in {*taken, *names_in(options.ignore)}:
            raise UserError(f"column '{name}' cannot be both --image and ignored or in another role: choose one.")
    for name in names_in(options.optional):
        if name in {*taken, *names_in(options.image)}:
            raise UserError(f"column '{name}' is needed in every file, so it cannot be --optional: leave it out there.")


def _kinds(table: Table, roles: dict[str, str], options: TableOptions) -> tuple[list[Column], tuple[str, ...]]:
    """Return the columns to learn from, and notes on those that were left out."""
    wanted, ignored = names_in(options.features), names_in(options.ignore)
    images, optional = names_in(options.image), names_in(options.optional)
    taken = {*_role_columns(roles)} - {*_ordered(roles)}
    if len(images) > 1:
        raise UserError(f"--image names the one column of image paths, and was '{options.image}'.")
    found = [Column(name, "image", size=options.image_size) for name in images]
    said = _said_kinds(options)
    paths: list[str] = []
    notes, problems = (list(table.notes), list(table.problems)) if isinstance(table, TableFiles) else ([], [])
    for name in wanted or [str(name) for name in table.columns if name not in {*taken, *ignored}]:
        if name in images:
            continue
        try:
            values = table[name]
            column = infer(name, values, said.get(name))
            found.append(replace(column, gaps=True, optional=True) if name in optional else column)
        except UnusableColumnError as problem:
            if problem.row is not None:
                problems.append(
                    f"{place(table, problem.row)}: column '{name}' {problem}; {problem.remedy}{_as_missing(problem)}, "
                    f"or leave it out with {option_for('--ignore', [name])}."
                )
            elif wanted:
                problems.append(f"{options.data}: column '{name}' {problem}; leave it out of --features.")
            elif are_paths(values):
                paths.append(name)
                image = option_for("--image", [name])
                notes.append(f"column '{name}' is left out, as it holds paths of images: {image} reads them.")
            else:
                hint = _if_patients(name, values, options) if problem.may_name else ""
                notes.append(f"column '{name}' is left out: it {problem}.{hint}")
    require_none(problems)
    if not found and paths:
        image = option_for("--image", paths[:1])
        raise UserError(f"{options.data} has no column left to learn from but paths of images: add {image}.")
    if not found:
        raise UserError(f"{options.data} has no column left to learn from beside client, domain and target.")
    return found, tuple(notes)


def _if_patients(name: str, values: pd.Series[Any], options: TableOptions) -> str:
    """Return how to keep rows of one patient together, if a column without gaps may name patients with several rows."""
    present = values.dropna()
    if options.group or len(present) < len(values) or present.nunique() == len(present):
        return ""
    return f" If it names patients, {option_for('--group', [name])} keeps the rows of each in one part."


def _said_kinds(options: TableOptions) -> dict[str, Kind]:
    """Return the kinds of columns that were said to be categories or numbers."""
    categories, numbers = names_in(options.categories), names_in(options.numbers)
    both = [name for name in categories if name in numbers]
    if both:
        raise UserError(f"column '{both[0]}' is both in --categories and in --numbers: choose one.")
    return {**dict.fromkeys(categories, "category"), **dict.fromkeys(numbers, "number")}


def _as_missing(problem: UnusableColumnError) -> str:
    """Return the option that takes the texts of a problem as missing values, as part of a sentence."""
    if not problem.texts or any(sign in text for text in problem.texts for sign in "',\""):
        return ""
    return f", take it as missing with --missing '{','.join(problem.texts)}'"


def place(table: Table, row: int | None) -> str:
    """Return where a row is, for messages: file and line if the table was read from files, else its number."""
    return table.line(row) if isinstance(table, TableFiles) and row is not None else f"row {row}"


class TableFiles:
    """A table in one file, or in several with the same columns but optional ones. Parquet is read by column."""

    def __init__(
        self, files: Sequence[TableFile], roles: dict[str, str], image: str = "", text: Sequence[str] = (),
        optional: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Columns in ``text`` are read as text, even if they look like numbers or truth values.

        A file may lack ``optional`` columns, whose values are then missing there.
        """
        self.image = image
        named = {role: given for role, given in roles.items() if role != WEIGHT}
        self.role_columns, self.targets = _role_columns(named), columns_of("target", roles.get("target", ""))
        self.of_clients = roles.get("client") == FILE
        self.named = [name for name in self.role_columns if name not in {*self.targets, *_ordered(named)}]
        self.files = [file.with_roles(self.named, [*self.named, *text]) for file in files]
        for file in self.files:
            _require_same_columns(self.files[0], file, optional, {*self.role_columns, image})
        if self.of_clients:
            by_name([file.path for file in self.files], otherwise=", or name a column of clients (--client)")
        every = dict.fromkeys(name for file in self.files for name in file.header)
        self.columns = [*every, *([FILE] if self.of_clients else [])]
        for file in self.files:
            if not len(file):
                who = f"client '{name_of(file.path)}' has no samples: " if self.of_clients else ""
                raise UserError(f"{who}{file.path} has a header and no samples below it{file.elsewhere}.")
        self.starts = np.cumsum([0, *map(len, self.files)])
        self.rows: NDArray[np.int64] | None = None
        self.names: dict[str, dict[str, str]] = {}
        self.problems: list[str] = []

    def only(self, kept: NDArray[np.bool_]) -> TableFiles:
        """Return the table with some of its rows."""
        rows = np.arange(len(self)) if self.rows is None else self.rows
        return self._with(rows=rows[kept])

    def with_names(self, column: str, names: dict[str, str]) -> TableFiles:
        """Return the table with other names in a column in place of some."""
        return self._with(names={**self.names, column: {**self.names.get(column, {}), **names}})

    def with_problems(self, problems: list[str]) -> TableFiles:
        """Return the table with more that is wrong with it, which is said when all of it has been looked at."""
        return self._with(problems=[*self.problems, *problems])

    def _with(self, **changed: Any) -> TableFiles:
        made = copy(self)
        made.__dict__.update(changed)
        return made

    def spellings(self, column: str) -> list[dict[str, int]]:
        """Return the names in a column that are written in more than one way; numbers to predict are no names."""
        values = self[column]
        return [] if pd.api.types.is_numeric_dtype(values) else spellings_in(values)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that say how files are read, if it is unusual; of several files that of the first that has one."""
        return next((file.notes for file in self.files if file.notes), ())

    @property
    def padded(self) -> frozenset[str]:
        """The columns of whole numbers that are written with zeros before them, in any of the files."""
        return frozenset().union(*(file.padded for file in self.files))

    def __len__(self) -> int:
        return int(self.starts[-1]) if self.rows is None else len(self.rows)

    def __getitem__(self, name: str) -> pd.Series[Any]:
        values = self._whole(name)
        kept = values if self.rows is None else values.iloc[self.rows].reset_index(drop=True)
        return renamed(kept, self.names[name]) if name in self.names else kept

    def _whole(self, name: str) -> pd.Series[Any]:
        if name == FILE:
            return pd.Series(np.repeat([name_of(file.path) for file in self.files], np.diff(self.starts)))
        parts = [
            self._read(file, name).set_axis(range(start, start + len(file)))
            for file, start in zip(self.files, self.starts, strict=False)
            if name in file.header
        ]
        values = pd.concat(parts) if len(parts) == len(self.files) else pd.concat(parts).reindex(range(self.starts[-1]))
        if name in self.targets:
            return stripped(values)
        return as_names(values) if name in self.named else values

    def line(self, row: int) -> str:
        """Return file and line of a row, for messages."""
        row = row if self.rows is None else int(self.rows[row])
        file = self.files[int(np.searchsorted(self.starts, row, side="right")) - 1]
        return file.line(row - int(self.starts[self.files.index(file)]))

    def require(self, names: Sequence[str]) -> None:
        """Refuse a table that lacks one of these columns."""
        first = self.files[0]
        absent = [name for name in dict.fromkeys(names) if name not in self.columns]
        if absent and any(map(is_number, first.header)):
            raise first.no_header()
        hints = {name: first.hint(name) for name in absent}
        alike = {hint: [f"'{name}'" for name in absent if hints[name] == hint] for hint in hints.values()}
        require_none([
            f"{first.path} has no column{'s' * (len(names) > 1)} {', '.join(names)}: {hint}"
            for hint, names in alike.items()
        ])  # fmt: skip

    def _read(self, file: TableFile, name: str) -> pd.Series[Any]:
        values = file.column(name)
        return paths_beside(file.path, values) if name == self.image else values


def _require_same_columns(first: TableFile, file: TableFile, optional: Sequence[str], needed: set[str]) -> None:
    """Refuse a file with other columns than the first one; all but the ``needed`` ones could be optional."""
    without, more = ({*one.header} - {*other.header} - {*optional} for one, other in ((first, file), (file, first)))
    shared = {*first.header} & {*file.header}
    if 2 * len(shared) < min(len(first.header), len(file.header)):
        raise UserError(
            f"{file.path} is another table than {first.path}, with {len(shared)} of its columns: name one file, or a "
            "pattern of those with the same columns, or join them into one table before."
        )
    for name in without:
        alike = next((other for other in more if same_name(other) == same_name(name)), None)
        if alike:
            raise UserError(f"{file.path} has the column '{alike}', and {first.path} '{name}': write it in one way.")
    if without or more:
        names = sorted(without | more)
        may = "" if needed & {*names} else f", or {option_for('--optional', names)} says which may be lacking"
        raise UserError(
            f"{file.path} has other columns than {first.path}{_listed('without', without)}"
            f"{_listed('with', more)}: every file needs the same ones{may}."
        )


def _listed(what: str, names: set[str]) -> str:
    return f", {what} {', '.join(sorted(names))}" if names else ""


def stripped(values: pd.Series[Any]) -> pd.Series[Any]:
    """Return texts without spaces around them: 'White' and 'White ' are one group."""
    if pd.api.types.is_numeric_dtype(values):
        return values
    if nested(values).any():
        raise UserError(f"column '{values.name}' holds lists or records: write a single value in each row.")
    return by_distinct(values, lambda distinct: distinct.map(_strip))


def _strip(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def as_names(values: pd.Series[Any]) -> pd.Series[Any]:
    """Return names of clients, domains or groups, in their plain form: 1.0 is 1, and there are no blanks around."""
    if pd.api.types.is_float_dtype(values):
        return by_distinct(values, lambda distinct: pd.Series(list(map(plain_name, distinct)), dtype=object))
    if pd.api.types.is_numeric_dtype(values):
        return values
    return by_distinct(stripped(values), lambda distinct: distinct.map(plain_name))


def paths_beside(file: Path, values: pd.Series[Any]) -> pd.Series[Any]:
    """Return paths that are relative to the folder of their table."""
    return values.map(lambda path: str(file.parent / str(path)), na_action="ignore")
