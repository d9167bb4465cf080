"""What domains are made of: the columns that name them, which of their levels each has, and what these belong to.

``race,sex`` crosses two columns, and each domain is a cell of theirs. ``scanner/vendor`` has a domain for each scanner,
of which each belongs to one vendor. ``age:spline`` divides a number into bins in their order. These can be crossed with
one another. An entry that is the name of a column as it is, or in double quotes, is not taken apart.

>>> import pandas as pd
>>> table = pd.DataFrame({"scanner": ["a", "b", "c"], "vendor": ["X", "X", "Y"]})
>>> names, structure = domains_in(table, "scanner/vendor")
>>> names.tolist(), structure.shared()[0].tolist()
(['a', 'b', 'c'], [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from feddar.data.columns import Table
from feddar.data.table_options import learned_domains
from feddar.errors import RowError, UserError
from feddar.lazy import pandas as pd
from feddar.methods import nearest
from feddar.objectives.labels import distinct_in_order

ORDERED, ABOVE = ":spline", "/"
MOST_BINS = 10
_ENTRIES = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*$)')
"""The commas that are not within double quotes."""


@dataclass(frozen=True)
class Term:
    """One of the columns that name a domain, the columns that it belongs to, and whether it is an ordered number."""

    column: str
    above: tuple[str, ...] = ()
    ordered: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns of the term."""
        return self.column, *self.above


def terms_in(given: str) -> list[Term]:
    """Return the terms of a domain as options give it; none where domains are learned.

    >>> [(term.column, term.above, term.ordered) for term in terms_in('scanner/vendor,age:spline,"a/b"')]
    [('scanner', ('vendor',), False), ('age', (), True), ('a/b', (), False)]
    """
    terms: list[Term] = []
    if learned_domains(given) is not None:
        return terms
    for entry in map(str.strip, _ENTRIES.split(given)):
        if entry.startswith('"'):
            terms.append(Term(entry.strip('"').strip()))
            continue
        column, *above = (name.strip() for name in entry.removesuffix(ORDERED).split(ABOVE))
        if not all([column, *above]):
            raise UserError(f"the domain '{given}' lacks a name beside a comma or '{ABOVE}': add or take that away.")
        if above and entry.endswith(ORDERED):
            raise UserError(f"the domain '{entry}' is ordered and belongs to something: say one of both.")
        terms.append(Term(column, tuple(above), entry.endswith(ORDERED)))
    return terms


def quoted_columns(given: str, header: Collection[str]) -> str:
    """Return a domain as options give it, with each of its entries in quotes that is the name of a column as it is.

    >>> quoted_columns("race/ethnicity,scanner/vendor", ["race/ethnicity", "scanner", "vendor"])
    '"race/ethnicity",scanner/vendor'
    """
    entries = [given.strip()] if given.strip() in header else [*map(str.strip, _ENTRIES.split(given))]
    signs = (",", ABOVE, ORDERED)
    return ",".join(f'"{each}"' if each in header and any(sign in each for sign in signs) else each for each in entries)


class Factor(BaseModel):
    """A column that is a part of the names of domains, or that these belong to, and its levels."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    column: str = Field(min_length=1, description="The column.")
    levels: tuple[str, ...] = Field(description="The level of each domain, in the order of domains.")
    of: str | None = Field(
        default=None, description="The column that belongs to this one, if it does not name domains."
    )
    edges: tuple[float, ...] = Field(default=(), description="Of an ordered number: the borders of its bins.")

    def named(self, values: pd.Series[Any]) -> pd.Series[Any]:
        """Return the level of each row; a number outside of all bins has that of the nearest."""
        if not self.edges:
            return values
        number, names = numbers_of(self.column, values), bin_names(self.edges)
        place = np.searchsorted(self.edges[1:-1], number, side="right")
        return pd.Series(np.array(names, object)[place], index=values.index).where(~np.isnan(number))

    def shared(self) -> Tensor | None:
        """Return how domains share the parts of this factor, [M, parts]; None if that is all of them alike, or none.

        Domains of one level share one part. Parts of ordered levels are those of which a smooth curve is made: the
        covariance of levels falls with their distance as that of a Matérn process (3/2), which is once differentiable,
        as the integrated Brownian motion behind cubic splines is.
        """
        names = [*dict.fromkeys(self.levels)]
        number = torch.tensor([names.index(level) for level in self.levels])
        if len(names) == 1 or (len(names) == len(self.levels) and not self.edges):
            return None
        one = torch.eye(len(names), dtype=torch.float64)
        return (torch.linalg.cholesky(self._smooth(names)) if self.edges else one)[number]

    def _smooth(self, names: Sequence[str]) -> Tensor:
        """Return the covariance of ordered levels, by the distance of their middles in units of the whole range."""
        edges = torch.tensor(self.edges, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2 / (edges[-1] - edges[0])
        place = torch.tensor([bin_names(self.edges).index(name) for name in names])
        distance = math.sqrt(3) * (middles[place, None] - middles[place]).abs()
        return (1 + distance) * (-distance).exp()


@dataclass(frozen=True)
class DomainStructure:
    """The factors of domains: those that name them in their order, and those that domains belong to."""

    factors: tuple[Factor, ...]

    @property
    def naming(self) -> list[Factor]:
        """The factors whose levels are parts of the domains' names."""
        return [factor for factor in self.factors if factor.of is None]

    @property
    def domains(self) -> list[str]:
        """The names of the domains, in their order.

        >>> table = pd.DataFrame({"age": [5, 15, 10, 6], "sex": ["F", "M", "F", "F"]})
        >>> domains_in(table, "age:spline,sex")[1].domains
        ['5, F', '6-9, F', '10-13, F', '14-15, M']
        """
        return [", ".join(levels) for levels in zip(*(factor.levels for factor in self.naming), strict=True)]

    def shared(self) -> list[Tensor]:
        """Return how domains share the parts of each factor that says more than the domains themselves, [M, parts]."""
        return [shared for factor in self.factors if (shared := factor.shared()) is not None]

    def columns_in(self, frame: pd.DataFrame) -> list[pd.Series[Any]]:
        """Return the columns of the ``naming`` factors in a data frame, which must have them."""
        for factor in self.naming:
            if factor.column not in frame:
                raise UserError(f"domains are made of {factor.column}: {nearest(factor.column, [*map(str, frame)])}")
        return [frame[factor.column] for factor in self.naming]

    def names(self, columns: Sequence[pd.Series[Any]]) -> pd.Series[Any]:
        """Return the domain of each row, by the columns of the ``naming`` factors; missing if one of them is."""
        return crossed([factor.named(values) for factor, values in zip(self.naming, columns, strict=True)])

    def ordered(self, columns: Sequence[str]) -> list[str]:
        """Return which of these columns, those of the ``naming`` factors if they are as many, are divided into bins."""
        pairs = zip(columns, self.naming, strict=True) if len(columns) == len(self.naming) else ()
        return [name for name, factor in pairs if factor.edges]

    def outside(self, columns: Sequence[pd.Series[Any]]) -> dict[int, str]:
        """Return a note for each row, by its place, with a number that is outside of all bins."""
        notes: dict[int, str] = {}
        for factor, values in zip(self.naming, columns, strict=True):
            if factor.edges:
                number, low, high = numbers_of(factor.column, values), factor.edges[0], factor.edges[-1]
                levels = factor.named(values).to_numpy()
                for row in np.flatnonzero((number < low) | (number >= high)).tolist():
                    said = f"{factor.column} {number[row]:g} is outside of training: as {levels[row]}"
                    notes[row] = f"{notes[row]}; {said}" if row in notes else said
        return notes

    def misplaced(self, table: Table, domains: Sequence[str], names: pd.Series[Any]) -> Iterator[tuple[str, str]]:
        """Yield the column and a sentence for each domain that belongs to something else in a table than it should."""
        for factor in self.factors:
            if factor.of is not None:
                known = dict(zip(domains, factor.levels, strict=True))
                expected, found = names.map(str).map(known), table[factor.column].map(str)
                wrong = expected.notna() & table[factor.column].notna() & (expected != found)
                first = wrong & ~pd.DataFrame({"names": names, "found": found}).duplicated()
                for row in np.flatnonzero(first)[:MOST_BINS].tolist():
                    here = f"domain '{names.iloc[row]}' belongs to {factor.column} '{found.iloc[row]}' here"
                    yield factor.column, f"{here}, and to '{expected.iloc[row]}' in the study: one of both is wrong."

    def require_fits(self, given: str, domains: Sequence[str]) -> None:
        """Refuse factors that do not say something of every domain, or are of other columns than the domain is."""
        terms = terms_in(given)
        expected = [
            (column, None if column == term.column else term.column) for term in terms for column in term.columns
        ]
        if [(factor.column, factor.of) for factor in self.factors] != expected:
            raise UserError(f"factors are not those of the columns in the domain '{given}': make the study anew.")
        for factor in self.factors:
            if len(factor.levels) != len(domains):
                raise UserError(f"factor '{factor.column}' has {len(factor.levels)} levels for {len(domains)} domains.")
            if factor.edges and (sorted({*factor.edges}) != [*factor.edges] or len(factor.edges) < 2):
                raise UserError(f"factor '{factor.column}' has edges that do not rise: write them in order, each once.")
            if factor.edges and {*factor.levels} - {*bin_names(factor.edges)}:
                raise UserError(f"factor '{factor.column}' has other levels than its edges say: make the study anew.")


def crossed(columns: Sequence[pd.Series[Any]]) -> pd.Series[Any]:
    """Return the crossing of columns ('White, F'), missing in rows where one of them is; a single one as it is."""
    first, *others = columns
    if not others:
        return first
    joined = pd.DataFrame(dict(enumerate(each.astype("string") for each in others)))
    return first.astype("string").str.cat(joined, sep=", ")


def domains_in(table: Table, given: str | Sequence[Term]) -> tuple[pd.Series[Any], DomainStructure | None]:
    """Return the domain of each row of a table, and what domains are made of; None if that is one plain column."""
    terms = terms_in(given) if isinstance(given, str) else given
    edges = [_edges(table, term.column) if term.ordered else () for term in terms]
    factors = [Factor(column=term.column, levels=(), edges=each) for term, each in zip(terms, edges, strict=True)]
    levels = {factor.column: factor.named(table[factor.column]) for factor in factors}
    names = crossed([*levels.values()])
    if [*terms] == [Term(terms[0].column)]:
        return names, None
    placed = []
    for term, factor in zip(terms, factors, strict=True):
        placed.append(factor)
        for column in term.above:
            levels[column] = table[column]
            _require_nested(table, term.column, column)
            placed.append(Factor(column=column, levels=(), of=term.column))
    first = names.notna() & ~names.duplicated()
    every = pd.DataFrame(levels)[first].map(str).set_axis(names[first].map(str).to_list())
    ranks = {factor.column: bin_names(factor.edges).index for factor in factors if factor.edges}
    in_order = [*map(str, distinct_in_order(names.dropna()))]
    if ranks:
        by_name = every.assign(**{column: every[column].map(rank) for column, rank in ranks.items()})
        in_order = by_name.sort_values([factor.column for factor in factors]).index.tolist()
    ordered = every.loc[in_order]
    found = [factor.model_copy(update={"levels": tuple(ordered[factor.column])}) for factor in placed]
    return names, DomainStructure(tuple(found))


def numbers_of(column: str, values: pd.Series[Any]) -> NDArray[np.float64]:
    """Return an ordered column as numbers, NaN where it is missing; anything else is an error with its row."""
    found = pd.to_numeric(values, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    wrong = (np.isnan(found) & values.notna().to_numpy()) | np.isinf(found)
    if wrong.any():
        row = int(wrong.argmax())
        given = f"column '{column}' holds '{values.iloc[row]}', which is no number"
        raise RowError(f"{given}: {ORDERED} is for numbers, so leave it away or mend the entry.", row)
    return found


def _edges(table: Table, column: str) -> tuple[float, ...]:
    """Return round borders of at most ``MOST_BINS`` bins of an ordered column with about as many rows in each."""
    numbers = numbers_of(column, table[column])
    known = numbers[~np.isnan(numbers)]
    if not len(known) or known.min() == known.max():
        raise UserError(f"column '{column}' has no two numbers, and {ORDERED} needs some: name another column.")
    low, high = float(known.min()), float(known.max())
    unit = _round_number((high - low) / MOST_BINS)
    whole = bool((known == np.round(known)).all())
    unit = max(unit, 1.0) if whole else unit
    inner = np.unique(np.round(np.quantile(known, np.arange(1, MOST_BINS) / MOST_BINS) / unit))
    first, last = math.floor(low / unit), math.floor(high / unit) + 1
    borders = [first, *(int(each) for each in inner if first < each < last), last]
    edges = np.round(np.array(borders) * unit, max(0, -math.floor(math.log10(unit))))
    # A bin without a row is a part of the one below it.
    held = np.histogram(known, edges)[0] > 0
    return tuple(float(edge) for edge in [*edges[:-1][held], edges[-1]])


def _round_number(number: float) -> float:
    """Return the largest of 1, 2 and 5 times a power of ten that is not above a number.

    >>> [_round_number(number) for number in (7.7, 23.0, 0.6)]
    [5.0, 20.0, 0.5]
    """
    power: float = 10.0 ** math.floor(math.log10(number))
    return max(step * power for step in (1, 2, 5) if step * power <= number)


def bin_names(edges: Sequence[float]) -> list[str]:
    """Return the names of the bins between these borders, of which each belongs to the bin above it.

    >>> bin_names([18, 40, 41, 60]), bin_names([0, 0.5, 2])
    (['18-39', '40', '41-59'], ['0 to 0.5', '0.5 to 2'])
    """
    pairs = [*pairwise(edges)]
    if any(edge != round(edge) for edge in edges) or edges[0] < 0:
        return [f"{low:g} to {high:g}" for low, high in pairs]
    return [f"{low:.0f}" if high == low + 1 else f"{low:.0f}-{high - 1:.0f}" for low, high in pairs]


def _require_nested(table: Table, column: str, above: str) -> None:
    """Refuse a column of which a level belongs to several levels of the one above."""
    both = pd.DataFrame({"level": table[column], "above": table[above]}).dropna().drop_duplicates()
    several = both[both["level"].duplicated(keep=False)].groupby("level", sort=False)["above"].agg(list)
    if len(several):
        level, found = several.index[0], several.iloc[0]
        listed = " and ".join(f"'{name}'" for name in found[:2])
        more = f" (and {len(several) - 1:,} more are in several)" if len(several) > 1 else ""
        raise UserError(
            f"{column} '{level}' is in {above} {listed}{more}, and '{column}{ABOVE}{above}' says "
            f"that each is in one: mend the table, or cross the two (--domain {above},{column})."
        )


def factors_of(structure: DomainStructure | None) -> list[dict[str, Any]] | None:
    """Undo ``structure_of``: return the factors of a structure as a model file has them."""
    return None if structure is None else [factor.model_dump() for factor in structure.factors]


def structure_of(factors: Sequence[Mapping[str, Any] | Factor] | None) -> DomainStructure | None:
    """Return the structure of these factors, as a model file or study has them; None if there are none."""
    return DomainStructure(tuple(map(Factor.model_validate, factors))) if factors else None
