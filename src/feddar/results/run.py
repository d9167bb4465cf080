"""A run: a trained model with everything needed to use it, check it or continue its training; ``train`` returns it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from feddar.algorithm.decoupled import with_added_heads
from feddar.algorithm.local_training import predict, predict_as_each
from feddar.algorithm.mixture import Mixture, predict_mixed
from feddar.algorithm.offsets import with_offsets
from feddar.algorithm.protocol import NOTHING, OwnState, Phase
from feddar.algorithm.rounds import Position, Standing
from feddar.algorithm.state import ServerState
from feddar.data.cohort import Cohort, as_inputs, require_cohort, table_inputs
from feddar.data.notebooks import as_html, by_name
from feddar.errors import RowError, UserError
from feddar.evaluation.figures import Figures, figures_from_scores
from feddar.evaluation.metrics import evaluate
from feddar.evaluation.operating_point import OperatingPoint
from feddar.evaluation.validation import Choice, choice_of, results_in, validation_losses
from feddar.lazy import pandas as pd
from feddar.methods import Method, there_are
from feddar.models.model import Model, build_model, in_precision
from feddar.models.parameters import Parameters
from feddar.options import UnknownOptions, showing
from feddar.results.figure_files import MISSING_COLUMNS
from feddar.results.prediction import MISSING, MIX, Membership, Predicted
from feddar.results.run_folder import (
    METRICS_COLUMNS,
    METRICS_FILE,
    MODEL_FILE,
    Stored,
    cohort_facts,
    described_cohort,
    read_metrics,
    read_model,
    replacing,
    require_same_shapes,
    write_metrics,
    write_model,
    writing,
)
from feddar.settings import CONFIG_FILE, DataSettings, Settings, Unknown, checked, write_config

if TYPE_CHECKING:
    from feddar.results.onnx_export import Exported


@dataclass(repr=False)
class Run:
    """A trained model, that of round ``round``, with its settings, data description and metrics.

    With validation it is the model of the best round, and ``standing``, where training stands, may be rounds later.
    """

    settings: Settings
    model: Model
    cohort: Cohort
    """The data trained on; in a loaded run it has names, counts and shapes, but no values."""
    state: ServerState
    own: dict[str, OwnState]
    """Each client's own state, as far as it is known here (between sites it is not)."""
    round: int
    method: Method
    """The method's row used in that round (FedAvg during warm-up)."""
    history: pd.DataFrame
    fingerprint: str
    standing: Standing
    """Where training stands, and goes on from."""
    folder: Path | None = None
    """The folder that it was trained in or read from, if there is one."""

    @classmethod
    def begin(cls, settings: Settings, model: Model, cohort: Cohort, initial: Parameters, fingerprint: str) -> Run:
        """Return a run before its first round."""
        settings.require_fitting()
        history = pd.DataFrame(columns=METRICS_COLUMNS)
        start = Position(0, settings.row_in(1), ServerState(initial))
        standing = Standing(start, {})
        return cls(settings, model, cohort, start.state, {}, 0, start.method, history, fingerprint, standing)

    def __repr__(self) -> str:
        return f"Run({self.settings.method}, {self.round} of {self.settings.rounds} rounds, {self.cohort!r})"

    def _repr_html_(self) -> str:
        """Return the test metrics of the run by domain, for notebooks."""
        return as_html(self, by_name(self.results(), "metric"))

    def reach(self, standing: Standing) -> None:
        """Set where training stands; its model is used if it is the best so far, or if there is no validation."""
        position, self.standing = standing.position, standing
        if position.best is None or position.is_best:
            self.round, self.method = position.round, position.method
            self.state, self.own = position.state, standing.own

    def restore(self, stored: Stored) -> None:
        """Set the model in use and where training stands to what a model file holds."""
        used = stored.standing.position.best or stored.standing.position
        self.round, self.method, self.state, self.own = used.round, used.method, stored.state, stored.own
        self.standing = stored.standing

    def at(self, position: Position) -> Run:
        """Return a copy of this run with the round, method and state of a position."""
        return replace(self, round=position.round, method=position.method, state=position.state)

    @showing(Unknown)
    def predict_proba(
        self, x: Any, domain: Any = None, client: Any = None, **unknown: Unpack[UnknownOptions]
    ) -> NDArray[np.floating]:
        """Return probabilities [n, classes] in the order of ``cohort.classes``; for ``unknown``, see ``predict``."""
        if self.model.objective.in_units:
            raise UserError("this model predicts a number, not classes: use predict.")
        return self._predicted(x, domain, client, unknown).values

    @showing(Unknown)
    def predict(
        self, x: Any, domain: Any = None, client: Any = None, **unknown: Unpack[UnknownOptions]
    ) -> NDArray[Any]:
        """Return predicted labels, or numbers for regression.

        ``domain`` and ``client`` are one name for all samples or a name for each; they are needed where the method
        uses them. ``domain`` may be a data frame with the columns of crossed or ordered domains. A name that was not in
        training, or a missing one, is an error, unless ``unknown_domain`` or ``unknown_client`` is ``"average"``: then
        the result is the mean of all domains' or clients' predictions, weighted by their samples in training. With
        ``missing_domain="mixture"`` a sample without a domain gets the mean of the domains' predictions, weighted by
        their samples in training at its client, if that is given and known. A
        category's value that was not in training is an error too, unless ``unknown_category`` is ``"missing"``.
        """
        return self.model.objective.labels(self._predicted(x, domain, client, unknown).values)

    @showing(Unknown)
    def predictions(
        self, x: Any, domain: Any = None, client: Any = None, **unknown: Unpack[UnknownOptions]
    ) -> pd.DataFrame:
        """Return a data frame with the prediction of each sample and its explanation; arguments as for ``predict``.

        Columns: ``domain_used`` (empty where the domain is unknown or not used), ``head`` (what predicted: a domain's
        name, ``all``, ``client NAME``, ``average of N`` or ``mixture of N``), ``class`` and ``probability_CLASS`` of
        each class, or ``prediction``, and ``note`` (on values that were not in training; else empty).
        """
        return self._predicted(x, domain, client, unknown).frame(self)

    def evaluate(self, test: Cohort) -> pd.DataFrame:
        """Return metrics of the model in use by domain and client: scope, name, metric, value, count."""
        require_cohort(test, "what is evaluated")
        return evaluate(test.aligned_to(self.cohort), self._tested(test))

    def figures(self, test: Cohort, validation: Cohort | None = None) -> Figures:
        """Return every figure of the model in use by domain, with intervals: also calibration and decisions.

        Rates are those at the operating point of the settings, which may have to be chosen on ``validation``.
        """
        point, objective = OperatingPoint.of(self.settings), self.model.objective
        point.require_possible(objective, validation is not None)
        chosen_on = None if validation is None or not point.chosen else self._tested(validation)
        sizes = len(self.cohort.domains), len(objective.risk_outcomes)
        thresholds = point.thresholds(validation, chosen_on, *sizes)
        return figures_from_scores(test.aligned_to(self.cohort), self._tested(test), thresholds)

    def missing_domains(self, test: Cohort) -> pd.DataFrame | None:
        """Return the metrics of the model in use as they are, and as they were if all domains were ``missing``.

        Columns: scope (domain, all, summary), name, metric, value, missing, count. Then each sample gets the mixture of
        heads by the shares of domains at its client. None where predictions do not depend on the domain.
        """
        if not self.needs_domain or len(self.cohort.domains) < 2:
            return None
        aligned = test.aligned_to(self.cohort)
        scores = self.scores(aligned.x, torch.full_like(aligned.domain, MISSING), aligned.client_names)
        known, missing = (evaluate(aligned, each, by_client=False) for each in (self._tested(test), scores))
        return known.assign(missing=missing["value"])[MISSING_COLUMNS]

    def _tested(self, test: Cohort) -> Tensor:
        """Return the scores of samples with known domains."""
        aligned = test.aligned_to(self.cohort)
        return self.scores(aligned.x, aligned.domain, aligned.client_names)

    def results(self) -> pd.DataFrame:
        """Return the test metrics of the round in use or, without validation, their means over the last rounds."""
        return results_in(self.history, self.settings)

    def choice(self) -> Choice | None:
        """Return which round's model is used, and why; None without validation."""
        return choice_of(validation_losses(self.history), self.settings)

    def scores(self, x: tuple[Tensor, ...], domain: Tensor, client: NDArray[np.str_] | None) -> Tensor:
        """Return the scores of samples [n, outputs]; see ``answers``."""
        return self.answers(x, domain, client)[0]

    def answers(
        self, x: tuple[Tensor, ...], domain: Tensor, client: NDArray[np.str_] | None
    ) -> tuple[Tensor, NDArray[np.object_]]:
        """Return scores [n, outputs] by the head of each sample's domain or its client's model, and the heads' names.

        A domain of -1 is unknown: its score is that of the mean of all domains' predictions, weighted by samples; by
        those at its client, for one that is ``MISSING``. For a client that was not in training, see
        ``Method.for_unseen_client``.
        """
        x, shares = in_precision(x, self.model.dtype), self._shares_of_domains(domain, client)
        if not self.method.keeps_own or (client is None and not self.method.personal):
            return self._common_answers(x, domain, shares)
        if client is None:
            raise UserError(f"{self.method.name} has a part of its own at each client: give client=... as well.")
        scores = torch.zeros(len(domain), self.model.outputs, dtype=self.model.dtype)
        heads: NDArray[np.object_] = np.full(len(domain), f"average of {len(self.cohort.clients)}", dtype=object)
        names, holder = np.unique(client, return_inverse=True)
        by_client = torch.from_numpy(np.argsort(holder, kind="stable")).split(np.bincount(holder).tolist())
        for name, rows in zip(names, by_client, strict=True):
            mine = tuple(part[rows] for part in x), domain[rows], shares[rows]
            if name in self.cohort.client_numbers:
                scores[rows], heads[rows.numpy()] = self._answers_at(name, *mine)
            elif self.method.companion or not self.method.personal:
                scores[rows], heads[rows.numpy()] = self._common_answers(*mine)
            else:
                each = (self._answers_at(known, *mine)[0] for known in self.cohort.clients)
                samples = self.cohort.counts.sum(1).double()
                scores[rows] = self._mean_scores(each, samples / samples.sum())
        return scores, heads

    def has_shares(self, client: str) -> bool:
        """Return whether the samples of each domain at a client are known; at a site only those of all clients are."""
        return client in self.cohort.client_numbers and len(self.cohort.clients) > 1

    def shares_at(self, clients: Sequence[str]) -> Tensor:
        """Return the shares of domains among the training samples of clients, or of all where they are not known."""
        counts, number = self.cohort.counts, self.cohort.client_numbers
        every = counts.sum(0)
        rows = torch.stack([counts[number[name]] if self.has_shares(name) else every for name in clients])
        return rows.double() / rows.sum(1, keepdim=True).clamp_min(1)

    def _shares_of_domains(self, domain: Tensor, client: NDArray[np.str_] | None) -> Tensor:
        """Return the shares by which domains count where a sample's own is not known, [n, M]; [n, 0] if all are known.

        Of a domain that is ``MISSING`` they are those at the sample's client.
        """
        if not self.needs_domain or bool((domain >= 0).all()):
            return torch.zeros(len(domain), 0)
        every, missing = self.shares_at([""]).expand(len(domain), -1), domain == MISSING
        if client is None:
            return every
        names, holder = np.unique(client, return_inverse=True)
        return torch.where(missing[:, None], self.shares_at(names.tolist())[torch.from_numpy(holder)], every)

    def _common_answers(
        self, x: tuple[Tensor, ...], domain: Tensor, shares: Tensor
    ) -> tuple[Tensor, NDArray[np.object_]]:
        if self.method.assigns:
            return self._mixed_answers(x, None)
        phase = Phase("evaluate", *self.method.common)
        return self._answers_by(self.state.in_use, phase, x, domain, shares, self._head_names)

    @property
    def _head_names(self) -> Sequence[str]:
        """The names of what answers samples of each domain in the common model."""
        domains = self.cohort.domains
        return domains if "domain" in self.method.common else ["all"] * len(domains)

    def _answers_at(
        self, client: str, x: tuple[Tensor, ...], domain: Tensor, shares: Tensor
    ) -> tuple[Tensor, NDArray[np.object_]]:
        if self.method.assigns:
            return self._mixed_answers(x, client)
        names = [f"client {client}"] * len(self.cohort.domains) if self.method.personal else self._head_names
        return self._answers_by(self.used_at(client), Phase("evaluate", *self.method.used), x, domain, shares, names)

    def _mixed_answers(self, x: tuple[Tensor, ...], client: str | None) -> tuple[Tensor, NDArray[np.object_]]:
        """Return the scores of all components by their shares, at this client or over all."""
        phase, shares = Phase("evaluate", self.method.encoder, self.method.heads), self.shares_of_components(client)
        scores = predict_mixed(self.model, phase, self.state.in_use, x, shares)
        return scores, np.full(len(scores), f"components at {client}" if client else "components", dtype=object)

    def shares_of_components(self, client: str | None) -> Tensor:
        """Return the shares of learned components [K] at a client, or over all clients where it has none of its own."""
        known, everywhere = Mixture.of(self.own.get(client or "", NOTHING)), self.state.components
        assert everywhere is not None  # it is counted in every round of a mixture
        return everywhere / everywhere.sum() if known is None else known.shares

    def used_at(self, client: str) -> Parameters:
        """Return the parameters that a client predicts with: common ones, its own in their place, and what it adds."""
        own = self.own.get(client, NOTHING)
        return with_added_heads(with_offsets(self.state.in_use.with_own(own.parameters), own), own)

    def _answers_by(
        self,
        parameters: Parameters,
        phase: Phase,
        x: tuple[Tensor, ...],
        domain: Tensor,
        shares: Tensor,
        names: Sequence[str],
    ) -> tuple[Tensor, NDArray[np.object_]]:
        """Return scores and head names by these parameters; ``names`` are the head names of each domain.

        Where a sample's domain is not known, domains count by its ``shares`` [n, M].
        """
        unknown = domain < 0
        if not self.needs_domain or not bool(unknown.any()):
            known = domain.clamp_min(0)
            return predict(self.model, phase, parameters, x, known), np.array(names, dtype=object)[known.numpy()]
        scores = torch.zeros(len(domain), self.model.outputs, dtype=self.model.dtype)
        words, numbers = np.where(domain == MISSING, "mixture of ", "average of "), (shares > 0).sum(1).numpy()
        heads: NDArray[np.object_] = words.astype(object) + numbers.astype(str).astype(object)
        asked, rest = ((tuple(part[rows] for part in x), domain[rows], shares[rows]) for rows in (~unknown, unknown))
        scores[~unknown], heads[~unknown.numpy()] = self._answers_by(parameters, phase, *asked, names)
        each = predict_as_each(self.model, phase, parameters, rest[0], len(self.cohort.domains))
        scores[unknown] = self._mean_scores(each, rest[2])
        return scores, heads

    def _mean_scores(self, each: Iterable[Tensor], shares: Tensor) -> Tensor:
        """Return scores of the mean prediction of several models, weighted by shares [models] or [n, models].

        Predictions are averaged, not parameters, since averaging the parameters of different models has no meaning.
        """
        objective = self.model.objective
        predicted = (objective.predictions(found.double()) for found in each)
        every = zip(shares.unbind(-1), predicted, strict=True)
        mean = sum(share.reshape(-1, *[1] * (found.ndim - 1)) * found for share, found in every)
        return objective.scores_of(torch.as_tensor(mean)).to(self.model.dtype)

    def save(self, path: str | Path) -> None:
        """Write the run folder; one that holds another run is refused."""
        folder = Path(path)
        if (folder / MODEL_FILE).exists() and read_model(folder)[0]["fingerprint"] != self.fingerprint:
            raise UserError(f"{folder} already holds a run on other data: choose another folder.")
        with writing(folder):
            self.save_config(folder, None)
            write_metrics(folder, self.history)
            self.checkpoint(folder)

    def export(self, path: str | Path, client: str | None = None) -> Exported:
        """Write the model as one ONNX file, checked with onnxruntime; with ``client``, only that client's model."""
        from feddar.results.onnx_export import export

        return export(self, path, client)

    def save_config(self, folder: Path, source: DataSettings | None) -> None:
        """Make the folder and write config.toml: the settings, and where the data came from if that is known."""
        folder.mkdir(parents=True, exist_ok=True)
        tables = {} if source is None else {"data": source}
        with replacing(folder / CONFIG_FILE) as temporary:
            write_config(temporary, **tables, training=self.settings)

    def checkpoint(self, folder: Path) -> None:
        """Write the model file atomically (see ``replacing``)."""
        about = {"settings": self.settings.model_dump(), "fingerprint": self.fingerprint}
        write_model(folder, self.own, self.standing, cohort_facts(self.cohort) | about)

    @property
    def needs_domain(self) -> bool:
        """Whether a prediction depends on the domain."""
        return self.method.needs_domain

    def _predicted(self, x: Any, domain: Any, client: Any, unknown: UnknownOptions) -> Predicted:
        allowed = checked(Unknown, {**unknown})
        table = x.rename(columns=str) if self.cohort.columns is not None and isinstance(x, pd.DataFrame) else None
        inputs = self._inputs(x if table is None else table, allowed)
        n = len(inputs[0])
        mixed = allowed.of_missing("domain") == "mixture"
        if domain is None and len(self.cohort.domains) > 1 and self.needs_domain:
            if not mixed:
                raise UserError(f"give the domain of each sample as domain=...; {there_are(self.cohort.domains)}{MIX}")
            domain = [None] * n
        domain, notes = self._named(domain) if isinstance(domain, pd.DataFrame) else (domain, {})
        domains = Membership.of("domain", domain if self.needs_domain else None, n, self.cohort.domains, allowed)
        client = self.cohort.clients[0] if client is None and len(self.cohort.clients) == 1 else client
        held = client if self.method.keeps_own or mixed else None
        # Without offsets of its own a new client has the common model, so none need be refused.
        lenient = allowed if self.method.personal else allowed.model_copy(update={"unknown_client": "average"})
        clients = Membership.of("client", held, n, self.cohort.clients, lenient)
        holders = None if held is None else clients.given.astype(str)
        scores, heads = self.answers(inputs, domains.index, holders)
        values = self.model.objective.predictions(scores.double()).numpy()
        bad = ~np.isfinite(values if values.ndim == 1 else values.sum(1))
        if bad.any():
            raise RowError("the model gives no number here: a value is missing or too large.", int(bad.argmax()))
        return Predicted(values, table, domains, clients, heads, notes if self.needs_domain else {})

    def _named(self, columns: pd.DataFrame) -> tuple[pd.Series[Any], dict[int, str]]:
        """Return the domain of each row of the columns that name it, and notes on numbers outside of training."""
        structure = self.cohort.structure
        if structure is None:
            raise UserError("the domains of this run are one column's: give that column as domain=..., no data frame.")
        named = structure.columns_in(columns)
        return structure.names(named), structure.outside(named)

    def _inputs(self, x: Any, allowed: Unknown) -> tuple[Tensor, ...]:
        """Return x as inputs of the encoder, made in the same way as in training."""
        dtype, columns = self.model.dtype, self.cohort.columns
        if columns is not None and isinstance(x, pd.DataFrame):
            inputs = table_inputs(x, columns, dtype, to_learn=False, unknown=allowed.unknown_category)
        else:
            inputs = tuple(as_inputs(part, dtype, to_learn=False) for part in (x if isinstance(x, tuple) else (x,)))
        shapes, expected = ([tuple(part.shape[1:]) for part in given] for given in (inputs, self.cohort.x))
        if shapes != expected:
            raise UserError(f"x has samples of shape {shapes}, and the model was trained on {expected}.")
        return inputs


def load(path: str | Path, encoder: nn.Module | None = None, device: str = "cpu") -> Run:
    """Read a run folder. If the encoder was a module given by the user, ``encoder`` must be one of the same shape.

    The run predicts on ``device``, whatever it was trained on.
    """
    folder = Path(path)
    stored = read_model(folder)
    about, state, own, standing = stored
    settings = checked(Settings, about["settings"] | {"device": device})
    cohort = described_cohort(about)
    if settings.encoder == CUSTOM_ENCODER and encoder is None:
        raise UserError(f"the run in {folder} has an encoder of its own: give load(path, encoder=...) the same module.")
    model, _ = build_model(cohort, encoder if encoder is not None else settings.encoder, settings.trained())
    require_same_shapes(model, stored, folder)
    metrics = folder / METRICS_FILE
    history = read_metrics(metrics) if metrics.exists() else pd.DataFrame(columns=METRICS_COLUMNS)
    history = history[history["round"] <= standing.position.round].reset_index(drop=True)
    return Run(
        settings,
        model,
        cohort,
        state,
        own,
        about["round"],
        Method(**about["method"]),
        history,
        about["fingerprint"],
        standing,
        folder,
    )


CUSTOM_ENCODER = "custom"
