"""Public tables as cohorts: what all of them share once their files are one table with a row for each sample.

The roles of columns have defaults, which the options of the user's own tables change; what would reveal the outcome is
never a feature; rows that cannot be learned from are left out and counted in notes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from feddar.data.cohort import Cohort
from feddar.data.domain_structure import domains_in, terms_in
from feddar.data.name_lists import names_in
from feddar.data.table_options import ColumnOptions, TableOptions
from feddar.data.tables import as_cohort, columns_of
from feddar.errors import UserError
from feddar.methods import nearest


@dataclass(frozen=True)
class PublicTable:
    """The facts about a public table that its reader does not know."""

    name: str
    rows: str
    """What a row is, in the plural."""
    roles: Mapping[str, str]
    """The default column of each role: client, domain, target, and group if samples belong together."""
    outcomes: tuple[str, ...]
    """Columns that are known only afterwards: possible targets, never features."""
    not_features: tuple[str, ...]
    """Further columns that are features only if --features names them."""
    unknown_domain: str | None = None
    """The domain of rows without one; None leaves them out."""
    fewest: Mapping[str, int] = field(default_factory=lambda: {"client": 10, "domain": 10})
    """A client or domain needs so many groups (rows, where there are none), to be split."""

    def cohort(self, table: pd.DataFrame, options: ColumnOptions) -> Cohort:
        """Return the table as a cohort, with the client, domain and target columns of the options."""
        given = {"client": options.client, "domain": options.domain, "target": options.target, "group": options.group}
        roles = {**self.roles, **{role: name for role, name in given.items() if name is not None}}
        self._check(table, roles, options)
        kept, notes = self._usable(table, roles)
        ignored = ",".join([*names_in(options.ignore), *self.outcomes, *self.not_features])
        columns = options.model_dump(exclude={"folder"}) | roles | {"ignore": ignored}
        made = as_cohort(kept, roles, TableOptions(**columns))
        return replace(made, notes=(*notes, *made.notes))

    def _check(self, table: pd.DataFrame, roles: Mapping[str, str], options: ColumnOptions) -> None:
        """Refuse unknown columns, and options that would make the evaluation invalid."""
        known, features = list(table.columns), names_in(options.features)
        named = [name for role in ("client", "domain", "target") for name in columns_of(role, roles[role])]
        for name in [*named, *features, *names_in(options.ignore)]:
            if name not in known:
                raise UserError(f"{self.name} has no column '{name}': {nearest(name, known)}")
        if roles.get("group") != self.roles.get("group"):
            together = f"keeps the {self.rows} of a {self.roles.get('group')} together"
            alone = f"has {self.rows} of which each is a patient or person of its own"
            raise UserError(f"{self.name} {together if 'group' in self.roles else alone}: leave out --group.")
        for name in features:
            if name in self.outcomes:
                raise UserError(f"'{name}' is an outcome, known afterwards only: leave it out of --features.")

    def _usable(self, table: pd.DataFrame, roles: Mapping[str, str]) -> tuple[pd.DataFrame, list[str]]:
        """Return the rows that can be learned from, and notes on those left out."""
        notes: list[str] = []
        plain = [name for term in terms_in(roles["domain"]) if not term.ordered for name in term.columns]
        unknown = {} if self.unknown_domain is None else dict.fromkeys(plain, self.unknown_domain)
        kept = table.fillna(unknown)
        needed = [role for role in ("target", "client", "domain", "group") if role in roles]
        for name in [name for role in needed for name in columns_of(role, roles[role])]:
            missing = kept[name].isna()
            if missing.any():
                notes.append(self._left_out(f"whose {name} is not known", missing, table))
            kept = kept[~missing]
        before = None
        while len(kept) != before:  # leaving out a domain may make a client too small, and the reverse
            before = len(kept)
            for role, fewest in self.fewest.items():
                named = domains_in(kept, roles[role])[0] if role == "domain" else kept[roles[role]]
                few = _sizes(kept, named, roles.get("group")) < fewest
                if few.any():
                    found = named[few].map(str).unique()
                    which = "; ".join(found[:5]) + ("; …" if len(found) > 5 else "")
                    units = f"{roles['group']}s" if "group" in roles else self.rows
                    notes.append(self._left_out(f"whose {role} has fewer than {fewest} {units} ({which})", few, table))
                    kept = kept[~few]
        if kept.empty:
            raise UserError(f"none of the {self.rows} of {self.name} can be used: {' '.join(notes)}")
        return kept.reset_index(drop=True), notes

    def _left_out(self, which: str, those: pd.Series[bool], table: pd.DataFrame) -> str:
        return f"{self.rows} {which} are left out: {int(those.sum()):,} of {len(table):,}."


def _sizes(table: pd.DataFrame, named: pd.Series[Any], group: str | None) -> pd.Series[int]:
    """Return, for each row, how many groups (rows, without one) share its name."""
    by = (table[group] if group else named).groupby(named)
    return by.transform("nunique") if group else by.transform("size")


def read_columns(path: Path, columns: Sequence[str], origin: str, **how: Any) -> pd.DataFrame:
    """Return these columns of a CSV file, packed or not; a file that cannot be read so is an error that names it."""
    try:
        table: pd.DataFrame = pd.read_csv(path, usecols=lambda name: name in columns, low_memory=False, **how)
        for column in columns:
            if column not in table.columns:
                raise ValueError(f"it has no column '{column}'")
        if table.empty:
            raise ValueError("it has no rows")
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise unreadable(path, error, origin) from None
    return table[list(columns)]


def unreadable(path: Path, error: Exception, origin: str) -> UserError:
    """Return the error to raise for a file that is not what was published."""
    return UserError(f"cannot read {path} ({str(error).strip()}): get it again from {origin}.")


def numbers_in(values: pd.Series[Any]) -> pd.Series[float]:
    """Return a column as numbers, NaN where it is empty; anything else is a ``ValueError`` with its line."""
    found = pd.to_numeric(values, errors="coerce")
    wrong = found.isna() & values.notna()
    if wrong.any():
        row = int(wrong.to_numpy().argmax())
        raise ValueError(f"column '{values.name}' holds {values.iloc[row]!r} in line {row + 2}")
    return found
