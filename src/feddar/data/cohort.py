"""A cohort: clients (hospitals), each with samples (x, y, z) of known domains z (race groups, scanners).

Its table ``counts[client, domain]`` (L_im in the paper) gives all weights of samples: L_i, L_m and the re-weighting
u_m = L / (L_m M), with which the ordinary sample-weighted objective equals the plain mean over domains (section 4.1
of the paper).

The module also makes train/test splits and folds, and the controlled mixtures pi_i ~ Dir(alpha p) of the
experiments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddar.data.columns import Column, Table, UnknownLevel, infer_all, inputs, require_distinguishable
from feddar.data.domain_structure import DomainStructure, Term, domains_in
from feddar.data.image_cache import in_memory
from feddar.data.images import Scaling, scaling_for
from feddar.data.layout import Input, InputKind, layout_for, layout_of
from feddar.data.notebooks import as_html
from feddar.data.spellings import plain_name
from feddar.errors import RowError, UserError
from feddar.lazy import pandas as pd
from feddar.methods import nearest
from feddar.objectives import Objective, objective_for
from feddar.objectives.labels import (
    Asked,
    LabelColumns,
    Scalar,
    as_column,
    by_distinct,
    distinct_in_order,
    numbers_of,
    require_known,
    without_gaps,
)

CHUNK = 512
"""The number of samples whose features are computed at once: enough to be fast, and few enough to fit in memory."""
COUNTED_AT_ONCE = 2**16
"""The number of samples that ``Cohort.counts`` counts at once."""
MOST_NAMED = 10
"""The most clients or domains that an error names."""


@dataclass(frozen=True, eq=False, repr=False)
class Cohort:
    """Samples with their domain and client, as indices into the names ``domains`` and ``clients``."""

    x: tuple[Tensor, ...]
    y: Tensor
    domain: Tensor
    client: Tensor
    domains: tuple[str, ...]
    clients: tuple[str, ...]
    objective: Objective
    """What is predicted: two classes, several classes, a number or several outcomes."""
    group: Tensor | None = None
    weight: Tensor | None = None
    """The weights of samples in training, [n] in float64; None if all count the same."""
    columns: tuple[Column, ...] | None = None
    """The columns of the table that the inputs were made from; `Run.predict` encodes a new table by them."""
    scaling: Scaling | None = None
    """If the first input is images with pixels from 0 to 255: how they are scaled for the encoder."""
    structure: DomainStructure | None = None
    """What domains are made of; None if they are no crossing, and belong to nothing."""
    notes: tuple[str, ...] = ()
    """Notes on what was noticed when the samples were read, for the user."""

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        *,
        domain: Any = None,
        client: Any = None,
        group: Any = None,
        weight: Any = None,
        task: Asked = "auto",
        domains: Sequence[Scalar] | None = None,
        clients: Sequence[Scalar] | None = None,
        classes: Sequence[Scalar] | None = None,
        positive: str | None = None,
        objective: Objective | None = None,
        columns: Sequence[Column] | None = None,
        dtype: torch.dtype = torch.float32,
        image_cache: str | Path | None = None,
        structure: DomainStructure | None = None,
    ) -> Cohort:
        """Make a cohort from NumPy arrays, torch tensors, pandas columns or lists.

        ``x`` is one array, a tuple of arrays (an encoder then gets them as separate arguments) or a data frame, whose
        columns may be numbers, truth values, dates or categories, with gaps; ``columns`` says which, else this is
        inferred. Images are pixels [n, channels, height, width] of type uint8. ``domain``, ``client`` and ``group`` may
        hold strings or numbers; left out, there is one domain or one client. A data frame of domains crosses its
        columns; ``structure`` says of others what they are made of. Samples of one ``group`` (a patient) are never
        divided between training and test. ``weight`` says by how much each sample counts in training.
        ``domains``, ``clients`` and ``classes`` fix an order other than the sorted one, and ``positive`` says which of
        two classes is the positive one. The kind of outcome is inferred from the labels, unless ``task`` or an
        ``objective`` is given. With ``image_cache``, a folder, images of a column of paths are kept in a file there
        instead of in memory.

        >>> cohort = Cohort.from_arrays([[0.0], [1.0]], ["no", "yes"], domain=["a", "b"], client=["h1", "h1"])
        >>> cohort.counts.tolist(), cohort.classes
        ([[1, 1]], ('no', 'yes'))
        """
        if isinstance(x, pd.DataFrame):
            x = _with_plain_names(x)
            columns = infer_all(x) if columns is None else columns
        if columns is not None:
            folder = None if image_cache is None else Path(image_cache)
            inputs = table_inputs(x, columns, dtype, image_cache=folder)
        else:
            inputs = tuple(as_inputs(part, dtype) for part in (x if isinstance(x, tuple) else (x,)))
        if isinstance(domain, pd.DataFrame):
            if domains is not None:
                raise UserError("domains of a data frame have the order of its levels: leave out domains.")
            domain, structure = domains_in(domain, [Term(name) for name in domain.columns])
        n = len(inputs[0])
        given = {f"input {i + 1} of x": part for i, part in enumerate(inputs)}
        given |= {"y": y, "domain": domain, "client": client, "group": group, "weight": weight}
        if task not in get_args(Asked):
            raise UserError(f"task is '{task}': there are {', '.join(get_args(Asked))}.")
        for name, column in given.items():
            if isinstance(column, str):
                raise UserError(f"{name} is the text '{column}': give the column itself, such as frame['{column}'].")
            if column is not None and len(column) != n:
                raise UserError(f"{name} has {len(column):,} entries, but x has {n:,} samples: make them equal.")
        if n == 0:
            raise UserError("there are no samples: x is empty.")
        ordered = structure.domains if structure is not None and domains is None else domains
        z, domain_names = _by_name(domain, n, "domain", ordered)
        c, client_names = _by_name(client, n, "client", clients)
        labels = LabelColumns.of(y, task, classes, positive)
        outcome = objective or objective_for(labels)
        target = outcome.require_read(labels)
        target = _in_precision(target, dtype) if target.is_floating_point() else target
        patients = None if group is None else _by_name(group, n, "group", None)[0]
        kinds = None if columns is None else tuple(columns)
        scaling = scaling_for(inputs[0].shape[1]) if _are_pixels(inputs[0]) else None
        counted = None if weight is None else weights_of(weight)
        names = domain_names, client_names
        return cls(inputs, target, z, c, *names, outcome, patients, counted, kinds, scaling, structure)

    @classmethod
    def mixture(
        cls,
        pool: Cohort,
        *,
        clients: int = 5,
        samples: int = 500,
        alpha: float = 1.0,
        prior: Sequence[float] | None = None,
        seed: int = 0,
    ) -> Cohort:
        """Draw clients with domain mixtures pi_i ~ Dir(alpha p), each with ``samples`` samples drawn from ``pool``.

        No sample is drawn twice. Small ``alpha`` gives clients of nearly one domain, large ``alpha`` equal clients.
        """
        if clients < 1 or samples < 1 or not alpha > 0:
            raise UserError("a mixture needs clients >= 1, samples >= 1 and alpha > 0.")
        p = np.full(len(pool.domains), 1 / len(pool.domains)) if prior is None else np.asarray(prior, float)
        if len(p) != len(pool.domains) or (p <= 0).any():
            raise UserError(f"prior needs one positive share for each of the {len(pool.domains)} domains.")
        rng = np.random.default_rng(seed)
        # A Dirichlet draw with tiny concentrations can underflow to 0/0; the lower bound prevents that.
        shares = rng.dirichlet(np.maximum(alpha * p / p.sum(), 1e-3), size=clients)
        wanted = np.stack([rng.multinomial(samples, share / share.sum()) for share in shares])
        available = pool.counts.sum(0).numpy()
        for m, name in enumerate(pool.domains):
            if wanted[:, m].sum() > available[m]:
                raise UserError(
                    f"domain '{name}' runs out: the drawn mixtures ask for {wanted[:, m].sum():,} samples and it has "
                    f"{available[m]:,}; use fewer clients or samples, a larger alpha or another seed."
                )
        rows, holder = [], []
        for m in range(len(pool.domains)):
            shuffled = rng.permutation(np.flatnonzero(pool.domain.numpy() == m))
            rows.append(shuffled[: wanted[:, m].sum()])
            holder.append(np.repeat(np.arange(clients), wanted[:, m]))
        order = np.argsort(np.concatenate(holder), kind="stable")
        drawn = pool.rows(torch.from_numpy(np.concatenate(rows)[order]))
        names = tuple(f"client-{i + 1}" for i in range(clients))
        return replace(drawn, client=torch.from_numpy(np.concatenate(holder)[order]), clients=names)

    def __repr__(self) -> str:
        shapes = ", ".join(str(list(part.shape[1:])) for part in self.x)
        return (
            f"Cohort({len(self):,} samples of shape {shapes}, {len(self.clients)} clients, "
            f"{len(self.domains)} domains, {self.objective.kind})"
        )

    def _repr_html_(self) -> str:
        """Return the samples of each domain at each client, for notebooks."""
        held = pd.DataFrame(self.counts.numpy(), index=list(self.clients), columns=list(self.domains))
        return as_html(self, held)

    def __len__(self) -> int:
        """Return the number of samples, L."""
        return len(self.y)

    @property
    def classes(self) -> tuple[Scalar, ...] | None:
        """The classes in their order; None if the outcome has no classes."""
        return self.objective.classes

    @property
    def counts(self) -> Tensor:
        """L_im: samples of each domain at each client, as [client, domain]."""
        counts = torch.zeros(len(self.clients), len(self.domains), dtype=torch.long)
        # Some at a time: the cell indices of all samples at once can take more memory than training does.
        for client, domain in zip(self.client.split(COUNTED_AT_ONCE), self.domain.split(COUNTED_AT_ONCE), strict=True):
            counts.view(-1).add_(torch.bincount(client * len(self.domains) + domain, minlength=counts.numel()))
        return counts

    @property
    def layout(self) -> tuple[Input, ...]:
        """The kind, shape and dtype of each input."""
        return layout_of(self.x)

    @property
    def codes(self) -> Tensor | None:
        """The level numbers of a table's categories [n, c], 0 where missing; None if there are none."""
        return self._input("categories")

    @property
    def numbers(self) -> Tensor | None:
        """The numeric columns of a table [n, p], NaN where missing; None if there are none."""
        return self._input("numbers")

    def _input(self, kind: InputKind) -> Tensor | None:
        return next((part for part, each in zip(self.x, self.layout, strict=True) if each.kind == kind), None)

    def by_column(self) -> Iterator[tuple[Column, Tensor]]:
        """Yield each column of a table with its part of the inputs: numbers, level numbers or images."""
        measured = iter(() if self.numbers is None else self.numbers.T)
        named = iter(() if self.codes is None else self.codes.T)
        for column in self.columns or ():
            yield column, self.x[0] if column.kind == "image" else next(measured if column.is_numeric else named)

    def patients(self, marked: Tensor) -> int:
        """Return of how many patients the marked samples [n] are: of groups, if there are groups, else of samples."""
        return int(marked.sum() if self.group is None else self.group[marked].unique().numel())

    def rows(self, index: Tensor | slice) -> Cohort:
        """Return the cohort of these samples only (an index, a mask or a slice), with the same names."""
        group, weight = (None if part is None else part[index] for part in (self.group, self.weight))
        x, y = tuple(part[index] for part in self.x), self.y[index]
        return replace(self, x=x, y=y, domain=self.domain[index], client=self.client[index], group=group, weight=weight)

    def without_values(self) -> Cohort:
        """Return a cohort with the same names, counts and shapes, but without any data: all values are 0."""
        client, domain = cells_of(self.counts)
        x = tuple(torch.zeros(1, *part.shape[1:], dtype=part.dtype).expand(part.shape) for part in self.x)
        return replace(self, x=x, y=torch.zeros_like(self.y), client=client, domain=domain, group=None, weight=None)

    def at(self, client: str) -> Cohort:
        """Return the samples of one client: a view if samples are sorted by client, else a copy."""
        order, starts = self._by_client
        number = self.client_numbers[client]
        held = slice(int(starts[number]), int(starts[number + 1]))
        return self.rows(held if order is None else torch.from_numpy(order[held]))

    @cached_property
    def client_numbers(self) -> dict[str, int]:
        """The index of each client, by name."""
        return {name: number for number, name in enumerate(self.clients)}

    def of(self, numbers: Tensor) -> Cohort:
        """Return the samples of several clients, given by index, client after client: a view if they are adjacent."""
        rows = self.rows_of(numbers)
        together = len(rows) > 0 and bool((rows[1:] - rows[:-1] == 1).all())
        return self.rows(slice(int(rows[0]), int(rows[-1]) + 1) if together else rows)

    def rows_of(self, numbers: Tensor) -> Tensor:
        """Return the indices of the samples of these clients, client after client."""
        order, where = self._by_client
        starts = torch.from_numpy(where)
        first, size = starts[numbers], starts[numbers + 1] - starts[numbers]
        # Within a client indices go up by one; at the next client they jump to where its samples begin.
        rows = torch.arange(int(size.sum())) + (first - size.cumsum(0) + size).repeat_interleave(size)
        return rows if order is None else torch.from_numpy(order)[rows]

    @cached_property
    def _by_client(self) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
        """The order that sorts samples by client (None if they are sorted), and where each client's samples begin."""
        client = self.client.numpy()
        starts = np.concatenate([[0], np.bincount(client, minlength=len(self.clients)).cumsum()])
        return (None if (client[1:] >= client[:-1]).all() else np.argsort(client, kind="stable")), starts

    def aligned_to(self, other: Cohort) -> Cohort:
        """Return the same samples with the domain and class indices of another cohort; unknown names are errors."""
        domain = indices(self.domain_names, other.domains, "domain")
        y = other.objective.aligned(self.y, self.objective)
        known = replace(self, domains=other.domains, structure=other.structure, objective=other.objective)
        return replace(known, domain=domain, y=y)

    @property
    def domain_names(self) -> NDArray[np.str_]:
        """The domain of each sample, by name."""
        names: NDArray[np.str_] = np.array(self.domains)[self.domain.numpy()]
        return names

    @property
    def client_names(self) -> NDArray[np.str_]:
        """The client of each sample, by name."""
        names: NDArray[np.str_] = np.array(self.clients)[self.client.numpy()]
        return names

    def split(self, test: float = 0.2, seed: int = 0) -> tuple[Cohort, Cohort]:
        """Divide into training and test parts, stratified by client, domain and label; groups stay together."""
        if not isinstance(test, Real) or not 0 < test < 1:
            raise UserError(f"test must be between 0 and 1, and is {test}.")
        self._require_two_of_each()
        return self._divide(self.held_out(test, seed))

    def held_out(self, test: float, seed: int = 0) -> NDArray[np.bool_]:
        """Return a mask of the samples that ``split`` holds out for testing."""
        place = self._places(seed)
        offset = np.random.default_rng([seed, 1]).random()
        result: NDArray[np.bool_] = np.floor((place + 1) * test + offset) > np.floor(place * test + offset)
        return result

    def folds(self, k: int = 5, seed: int = 0) -> Iterator[tuple[Cohort, Cohort]]:
        """Yield k pairs of training and test parts; every sample is in one test part. Stratified as in ``split``."""
        for number in range(k):
            yield self.fold(number, k, seed)

    def fold(self, number: int, k: int = 5, seed: int = 0) -> tuple[Cohort, Cohort]:
        """Return one of the pairs of ``folds``."""
        if k < 2:
            raise UserError(f"folds must be 2 or more, and is {k}.")
        self._require_two_of_each()
        return self._divide(self._places(seed) % k == number)

    def fingerprint(self) -> str:
        """Return a hash of the samples and names, by which a resumed run checks that its data is the same."""
        names = (self.domains, self.clients, self.objective.fingerprint)
        digest = hashlib.sha256(repr(names if self.structure is None else (*names, self.structure)).encode())
        for tensor in (*self.x, self.y, self.domain, self.client, *(() if self.weight is None else (self.weight,))):
            for first in range(0, len(tensor), CHUNK):
                digest.update(in_memory(tensor[first : first + CHUNK]).contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def _places(self, seed: int) -> NDArray[np.int64]:
        """Return each sample's place in a shuffled order in which every (client, domain, label) cell is contiguous.

        Taking every k-th place then takes a k-th of each client, of each of its domains and of each label there, up
        to one sample, however small the cell. Samples of one group share the place of their first.
        """
        label = self.objective.strata(self.y.numpy())
        unit, first, size = np.arange(len(self)), np.arange(len(self)), np.ones(len(self), int)
        if self.group is not None:
            _, first, unit, size = np.unique(
                self.group.numpy(), return_index=True, return_inverse=True, return_counts=True
            )
        chance = np.random.default_rng(seed).random(len(first))
        domain, client = self.domain.numpy()[first], self.client.numpy()[first]
        order = np.lexsort((chance, size, label[first], domain, client))
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return place[unit]

    def _require_two_of_each(self) -> None:
        unit = np.arange(len(self)) if self.group is None else self.group.numpy()
        what = "sample" if self.group is None else "group"
        for kind, names, holder in (("client", self.clients, self.client), ("domain", self.domains, self.domain)):
            pairs = np.unique(holder.numpy() * (unit.max() + 1) + unit)
            held = np.bincount(pairs // (unit.max() + 1), minlength=len(names))
            small = [f"'{names[place]}'" for place in np.flatnonzero(held < 2)]
            if not small:
                continue
            units = int(held.min())
            who = f"{kind} {small[0]} has {units or 'no'} {what}{'' if units == 1 else 's'}"
            if len(small) > 1:
                more = f" and {len(small) - MOST_NAMED} more" if len(small) > MOST_NAMED else ""
                who = f"{kind}s {', '.join(small[:MOST_NAMED])}{more} have fewer than 2 {what}s"
            how = " (--min-client 2 does, for a table)" if kind == "client" else ""
            each = "this" if len(small) == 1 else "each such"
            raise UserError(
                f"{who}; training and testing need at least 2: leave {each} {kind} out{how} or merge it with another."
            )

    def _divide(self, held_out: NDArray[np.bool_]) -> tuple[Cohort, Cohort]:
        mask = torch.from_numpy(held_out)
        # Sorted by client, so that each client's training samples are a view and not a copy.
        order, _ = self._by_client
        kept = np.flatnonzero(~held_out) if order is None else order[~held_out[order]]
        train, test = _restricted_to_training(self.rows(torch.from_numpy(kept)), self.rows(mask))
        if not len(test):
            raise UserError(f"the test part is empty: {len(self):,} in all are too few for so small a part.")
        for kind, names, count in (
            ("domain", self.domains, train.counts.sum(0)),
            ("client", self.clients, train.counts.sum(1)),
        ):
            for index in torch.nonzero(count == 0).flatten().tolist():
                raise UserError(
                    f"{kind} '{names[index]}' has so few samples that all fell into the test part: use another seed, "
                    f"or merge this {kind} with another."
                )
        return train, test


def cells_of(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return client and domain [L] of samples that have these counts [client, domain], sorted by both."""
    cells = torch.nonzero(counts)
    client, domain = cells.repeat_interleave(counts[cells[:, 0], cells[:, 1]], dim=0).unbind(1)
    return client, domain


def _restricted_to_training(train: Cohort, test: Cohort) -> tuple[Cohort, Cohort]:
    """Restrict the columns of both parts to what occurs in training: its levels, and gaps only where it has some.

    Any other level becomes a missing value in the test part, as an unknown level may in new samples.
    """
    if train.columns is None:
        return train, test
    columns: list[Column] = []
    known: list[Tensor] = []
    for column, values in train.by_column():
        if column.is_numeric:
            columns.append(replace(column, gaps=bool(values.isnan().any())))
        elif column.kind == "category":
            known.append(values[values > 0].unique())
            levels = tuple(column.levels[number - 1] for number in known[-1].tolist())
            columns.append(replace(column, levels=levels))
        else:
            columns.append(column)
    first, second = (replace(part, columns=tuple(columns), x=_renumbered(part, known)) for part in (train, test))
    return first, second


def _renumbered(part: Cohort, known: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if part.codes is None:
        return part.x
    columns = [
        torch.where(torch.isin(column, kept), torch.searchsorted(kept, column) + 1, 0)
        for column, kept in zip(part.codes.T.contiguous(), known, strict=True)
    ]
    return *part.x[:-1], torch.stack(columns, dim=1).to(part.codes.dtype)


def domain_weights(samples_per_domain: Tensor, shares: Tensor | None = None) -> Tensor:
    """Return u_m = s_m L / L_m, with which domain m has the share s_m of the objective; 0 for domains without samples.

    Without ``shares`` they are s_m = 1/M, for the M domains that have samples: the paper's re-weighting.
    """
    held = samples_per_domain > 0
    equal = held.double() / held.sum()
    weights = (equal if shares is None else shares) * samples_per_domain.sum() / samples_per_domain.double()
    return torch.where(held, weights, torch.zeros_like(weights))


def as_inputs(values: Any, dtype: torch.dtype, *, to_learn: bool = True) -> Tensor:
    """Return samples as a new finite tensor [n, ...]; a single column becomes [n, 1].

    With ``to_learn``, a column whose values are all equal after rounding to ``dtype`` is refused.
    """
    exact = _numbers_in(values)
    if _are_pixels(exact):
        return _pixels(exact)
    if exact.ndim == 0:
        raise UserError("x must be an array of samples, and is a single number.")
    tensor = torch.tensor(exact[:, None] if exact.ndim == 1 else exact, dtype=dtype)
    bad = torch.nonzero(~torch.isfinite(tensor))
    if len(bad):
        row, *where = bad[0].tolist()
        raise UserError(
            f"x is missing or not finite in {len(bad):,} places, first in row {row}, position {tuple(where)}: fill it "
            "in, leave the row or column out, or give a data frame, which may have gaps."
        )
    if tensor.ndim == 2 and to_learn:
        for place, (before, after) in enumerate(zip(exact.reshape(tensor.shape).T, tensor.numpy().T, strict=True)):
            require_distinguishable(f"position ({place},) of x", before, after)
    return tensor


def _numbers_in(values: Any) -> NDArray[Any]:
    """Return an array of numbers as it is if they are fractions or pixels, else in double precision."""
    if hasattr(values, "toarray"):
        raise UserError("x is a sparse matrix: give all of its values, x.toarray().")
    if np.ma.is_masked(values):
        raise UserError("x is a masked array: fill it in, x.filled(...), or give a data frame, which may have gaps.")
    if values is None or isinstance(values, dict):
        raise UserError(f"x must be an array or a data frame of samples, and is of the type {type(values).__name__}.")
    try:
        exact = values.detach().numpy() if isinstance(values, Tensor) else np.asarray(values)
        numbers = exact if exact.dtype.kind in "fc" or _are_pixels(exact) else exact.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"x must hold numbers: {str(error).rstrip('.')}.") from None
    if numbers.dtype.kind == "c":
        raise UserError("x holds complex numbers: give real ones, such as their parts or sizes.")
    return numbers


def _with_plain_names(x: pd.DataFrame) -> pd.DataFrame:
    """Return a data frame whose columns are named by texts, each by its own."""
    if x.columns.nlevels > 1:
        raise UserError("the columns of x have names of several levels: give each one name, by x.columns = [...].")
    named = x.rename(columns=str)
    twice = named.columns[named.columns.duplicated()]
    if len(twice):
        raise UserError(f"x has the column '{twice[0]}' more than once: rename one.")
    return named


def require_cohort(given: Any, what: str) -> None:
    """Refuse anything else that is given as a cohort, such as a data frame."""
    if not isinstance(given, Cohort):
        raise UserError(
            f"{what} must be a cohort, and is of the type {type(given).__name__}: make one with "
            "feddar.Cohort.from_arrays(x, y, domain=..., client=...)."
        )


def weights_of(values: Any) -> Tensor:
    """Return weights of samples in float64; one that is missing, negative or infinite is an error with its row."""
    series = as_column(values, "weight")
    numbers = numbers_of(series)
    wrong = {"missing": series.isna().to_numpy(), "not a number": np.isnan(numbers)}
    for why, rows in (wrong | {"infinite": np.isinf(numbers), "negative": numbers < 0}).items():
        if rows.any():
            row = int(rows.argmax())
            given = "" if why == "missing" else f" '{series.iloc[row]}'"
            raise RowError(f"the weight{given} is {why}: weights are numbers from 0 on.", row)
    if not 0 < numbers.sum() < np.inf:
        raise UserError("weights must add up to a positive number: here all are 0, or they are too large.")
    return torch.tensor(numbers)


def _in_precision(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers to predict in the precision of training; one that is too large for it is an error."""
    rounded = numbers.to(dtype)
    too_large = ~rounded.isfinite()
    if bool(too_large.any()):
        row = int(too_large.int().argmax())
        raise RowError(f"the label {float(numbers[row]):g} is too large for {str(dtype).removeprefix('torch.')}.", row)
    return rounded


def _are_pixels(values: Any) -> bool:
    return values.ndim == 4 and values.dtype in (torch.uint8, np.uint8)


def _pixels(images: NDArray[np.uint8]) -> Tensor:
    if images.shape[3] in (1, 3) and images.shape[1] not in (1, 3):
        raise UserError(f"images must be [n, channels, height, width], and are {images.shape}: move the last axis.")
    return torch.tensor(images)


def table_inputs(
    table: Table,
    columns: Sequence[Column],
    dtype: torch.dtype,
    *,
    to_learn: bool = True,
    unknown: UnknownLevel = "error",
    image_cache: Path | None = None,
) -> tuple[Tensor, ...]:
    """Return a table as the inputs of an encoder: images, numbers with NaN where missing, level numbers of categories.

    Each is present if the table has such columns; categories without numeric columns come with an empty array of these.
    """
    precision = np.dtype(str(dtype).removeprefix("torch."))
    options: dict[str, Any] = {"to_learn": to_learn, "unknown": unknown, "image_cache": image_cache}
    images, numbers, codes = inputs(table, columns, precision, **options)
    made = {"image": images, "numbers": torch.from_numpy(numbers), "categories": torch.from_numpy(codes)}
    return tuple(part for each in layout_for(columns) if (part := made[each.kind]) is not None)


def indices(values: Any, names: Sequence[str], what: str) -> Tensor:
    """Return the index of each value in the ``names`` of training; an unknown one is an error with a suggestion."""
    given, found = known_indices(values, names, what)
    require_all_known(given, found, names, what)
    return found


def require_all_known(
    given: NDArray[np.object_], found: Tensor, names: Sequence[str], what: str, advice: str = "", if_missing: str = ""
) -> None:
    """Raise an error for the first value that ``known_indices`` did not find, with advice on what else to do."""
    unknown = found < 0
    if bool(unknown.any()):
        row = int(unknown.int().argmax())
        if not given[row]:
            raise RowError(f"the {what} is missing: fill it in or leave the row out.{if_missing}", row)
        raise RowError(f"{what} '{given[row]}' was not in training: {nearest(given[row], list(names))}{advice}", row)


def known_indices(values: Any, names: Sequence[str], what: str) -> tuple[NDArray[np.object_], Tensor]:
    """Return each sample's value as text, and its index in the names; -1 if missing or unknown."""
    series = as_column(values, what)
    # A run of before may have the name 1.0, which is 1 in tables now.
    number = {plain_name(name): index for index, name in enumerate(names)}
    given = series.map(str).astype(object).where(series.notna(), "")
    found = by_distinct(given, lambda distinct: distinct.map(plain_name).map(number)).fillna(-1)
    return given.to_numpy(), torch.tensor(found.to_numpy(dtype=np.int64))


def _by_name(values: Any, n: int, what: str, names: Sequence[Scalar] | None) -> tuple[Tensor, tuple[str, ...]]:
    """Return the index of each value and the names, sorted unless an order is given. 1 and '1' are the same name."""
    if values is None:
        return torch.zeros(n, dtype=torch.long), (str(names[0]) if names else "all",)
    series = without_gaps(as_column(values, what), what)
    ordered = tuple(dict.fromkeys(map(str, distinct_in_order(series) if names is None else names)))
    number = {name: i for i, name in enumerate(ordered)}
    index = by_distinct(series, lambda distinct: distinct.map(str).map(number))
    require_known(series, index, what, ordered)
    return torch.tensor(index.to_numpy(dtype=np.int64)), ordered
