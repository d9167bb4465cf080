"""All settings of training, defined once for the command line, configuration files and Python.

``Settings`` holds the paper's hyper-parameters (tau_h is ``head_epochs``, tau_phi is ``encoder_epochs``, T is
``rounds``); ``DataSettings`` says where the samples come from, and sources add their own options to it. Both are
checked when made, and a wrong value is a ``UserError`` of one sentence.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from feddar.errors import UserError
from feddar.methods import METHODS, RECOMMENDED, Method, Scope, find, nearest

Panel = Literal["data", "method", "training", "evaluation", "sites", "safety", "output"]
PANELS: tuple[Panel, ...] = get_args(Panel)
"""The groups of options in a command's help, in their order."""


@dataclass(frozen=True)
class Flag:
    """How the command line shows a field; a model's ``flag_of_fields`` is that of the fields without one."""

    panel: Panel
    first: bool = False
    """Whether it is among the few options that --help shows; --help-all shows all."""
    default: str | None = None
    """What commands take by default, where it is not what Python takes."""
    names: tuple[str, ...] = ()
    """What the shell completes values with; the choices of a ``Literal`` need not be repeated."""


METHOD, EVALUATION = Flag("method"), Flag("evaluation")

ENCODERS = (
    "linear", "mlp", "wide", "exam", "cnn", "maps", "digit-cnn", "resnet34", "densenet121", "efficientnet-lite0",
)  # fmt: skip
"""The names of the encoders, which ``feddar.models.encoders`` builds."""
METRICS = ("auc", "auprc", "log-loss", "brier", "accuracy", "mse", "rmse", "mae", "r2")

OF_TABLES: dict[str, Any] = {
    "encoder": "wide", "validation": 0.1, "lr": 3e-3, "schedule": "cosine", "batch_size": 0,
}  # fmt: skip
"""Settings where samples are rows of a table and the user has left them open."""
OF_OTHERS: dict[str, Any] = {
    "encoder": None, "validation": 0.0, "lr": 1e-3, "schedule": "constant", "batch_size": 32,
}  # fmt: skip
"""The same for images and other inputs: the paper's."""
OPERATING_POINTS = ("threshold", "flag", "sensitivity")
ALTERNATIVES = (OPERATING_POINTS, ("participation", "clients_per_round"))
"""Settings of which one at most is given, so that it replaces another of them that a file has."""


class Settings(BaseModel):
    """The settings of a training: method, hyper-parameters and how the machine does it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    of_one_machine: ClassVar[frozenset[str]] = frozenset(
        {"jobs", "batched", "track", "test_every", "device", "precision", "compile"}
    )
    """Fields that may differ between sites: they only say how one machine does its work."""
    without_effect: ClassVar[frozenset[str]] = frozenset({"jobs", "threads", "track", "metric"})
    """Fields that do not change results, and so may differ when a run is resumed."""

    of_decisions: ClassVar[frozenset[str]] = frozenset({"threshold", "flag", "sensitivity", "threshold_by"})
    """Fields that say whom a trained model flags: they do not change the model."""

    flag_of_fields: ClassVar[Flag] = Flag("training")

    method: Annotated[str, Flag("method", first=True, names=tuple(METHODS))] = Field(
        RECOMMENDED, description="A method of the table (see `feddar methods`)."
    )
    rounds: Annotated[int, Flag("training", first=True)] = Field(
        20, ge=1, description="Communication rounds T, warm-up included."
    )
    seed: Annotated[int, Flag("training", first=True)] = Field(0, ge=0, description="Seed of everything random.")
    encoder: Annotated[str | None, Flag("method", first=True, names=ENCODERS)] = Field(
        None,
        description=f"Encoder by name ({', '.join(ENCODERS)}), or your own as MODULE:NAME; by the data if left out.",
    )
    weights: Annotated[str | None, METHOD] = Field(
        None, description="File the encoder's weights start from: safetensors, or a state dict of torch."
    )
    k: Annotated[int | None, METHOD] = Field(
        None, ge=1, le=100_000, description="Project features to k dimensions under the heads."
    )
    bias: Annotated[bool, METHOD] = Field(True, description="Give heads a constant term.")
    standardise_target: Annotated[bool | None, METHOD] = Field(
        None, description="Learn a number to predict in standard units; if unset, where heads have a constant term."
    )
    head_epochs: int = Field(
        5, ge=1, description="Epochs on the heads per round (tau_h), where they alternate; of feddar, at most."
    )
    encoder_epochs: int = Field(1, ge=1, description="Epochs on the encoder, or on both, per round (tau_phi).")
    lr: float | None = Field(None, gt=0, description="Learning rate; if unset, 0.003 for tables, else 0.001.")
    head_lr: float | None = Field(None, gt=0, description="Learning rate of the heads phase; lr if left out.")
    lr_steps: str = Field("", description="Factors on lr, as ROUND:FACTOR,... ('60:0.1': a tenth after round 60).")
    schedule: Literal["constant", "cosine"] | None = Field(
        None, description="How lr falls over the rounds; if unset, as a cosine for tables, else not at all."
    )
    optimizer: Literal["adam", "sgd"] = Field("adam", description="Made fresh for each client, phase and round.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of sgd.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of the optimiser.")
    batch_size: int | None = Field(
        None,
        ge=0,
        le=1_000_000_000,
        description="Samples in a batch; 0: by the samples of a client, 32 to 256. If unset, 0 for tables, else 32.",
    )
    curvature: Annotated[Literal["hessian", "block", "gram"] | None, METHOD] = Field(
        None,
        description="Curvature of second-order aggregation; the exact Hessian, or gram for many classes.",
    )
    curvature_at: Annotated[Literal["final", "start"], METHOD] = Field(
        "final", description="Head at which curvature is taken."
    )
    damping: Annotated[float, METHOD] = Field(
        0.1, ge=0, description="Second-order aggregation from SA (0) towards WA (large)."
    )
    reweight: Annotated[bool | None, METHOD] = Field(
        None, description="Let every domain count the same; as the method says if unset."
    )
    class_weight: Literal["balanced"] | None = Field(
        None, description="Let every class count the same (risks are then no longer calibrated); by samples if unset."
    )
    credibility: Annotated[bool | None, METHOD] = Field(
        None, description="Weigh heads of domains against their mean, for use; as the method says if unset."
    )
    average: Annotated[bool | None, METHOD] = Field(
        None, description="Use an average of the last rounds' models; as the method says if unset."
    )
    site_offset: Annotated[bool | None, METHOD] = Field(
        None, description="Let each client correct heads for its own samples; as the method says if unset."
    )
    label_shift: Annotated[bool | None, METHOD] = Field(
        None, description="Let each client correct its scores by its rates of labels; as the method says if unset."
    )
    multi_head: Annotated[bool | None, METHOD] = Field(
        None, description="A head for each domain, or one; as the method says if unset."
    )
    domain_input: Annotated[bool | None, METHOD] = Field(
        None, description="Show the head the domain; as the method says if unset."
    )
    alternating: Annotated[bool | None, METHOD] = Field(
        None, description="Heads and encoder in turn; as the method says if unset."
    )
    aggregation: Annotated[Literal["average", "second-order"] | None, METHOD] = Field(
        None, description="How heads of domains are combined; as the method says if unset."
    )
    components: Annotated[int, METHOD] = Field(
        3, ge=2, le=100, description="Domains to learn (ifca, fedem, feddar-mixture)."
    )
    mu: Annotated[float, METHOD] = Field(
        0.1, ge=0, description="Strength of the pull towards the common model (fedprox, ditto)."
    )
    minmax_lr: Annotated[float, METHOD] = Field(
        0.1, ge=0, description="Step of fedminmax and group-dro on weights of domains, and of afl on those of clients."
    )
    q: Annotated[float, METHOD] = Field(
        1.0, ge=0, le=10, description="q-ffl: the power of their loss that clients count by; 0 is fedavg."
    )
    beta: Annotated[float, METHOD] = Field(
        0.1, ge=0, description="fairfed: step of the weights of clients along how fair they are; 0 is fedavg."
    )
    ridge: Annotated[float, METHOD] = Field(
        10.0, ge=0, description="analytic: samples that the pull of a domain's head to that of all counts as."
    )
    mix: Annotated[float, METHOD] = Field(0.5, ge=0, le=1, description="apfl: share of the local model at the start.")
    tune_factor: float = Field(0.5, gt=0, description="Learning rate of fine-tuning, as a multiple of lr.")
    tune_rounds: int | None = Field(
        None, ge=1, description="fedavg-separate-ft: rounds for each domain alone; the last quarter if left out."
    )
    warmup: int = Field(0, ge=0, description="Rounds of FedAvg first.")
    participation: float | None = Field(
        None, gt=0, le=1, description="Share of the clients that train in a round, drawn anew; all if left out."
    )
    clients_per_round: int | None = Field(
        None, ge=1, description="The same as a number of clients; all if there are not more."
    )
    validation: Annotated[float | None, EVALUATION] = Field(
        None,
        ge=0,
        lt=1,
        description="Share of each client's training samples held out to choose the round in use; 0: none, and results "
        "are averages over the last rounds. If unset, 0.1 for tables and 0 for other data.",
    )
    patience: Annotated[int, EVALUATION] = Field(
        5, ge=1, description="Rounds without a better validation loss after which training stops."
    )
    last: Annotated[int, EVALUATION] = Field(
        5, ge=1, description="Without validation, results are averages over this many last rounds."
    )
    test_every: Annotated[int, EVALUATION] = Field(
        1,
        ge=1,
        description="On one machine, test every so many rounds; those that results come from are always tested.",
    )
    metric: Annotated[str | None, Flag("evaluation", names=METRICS)] = Field(
        None, description=f"Metric that is shown first ({', '.join(METRICS)})."
    )
    threshold: Annotated[float | None, EVALUATION] = Field(
        None, gt=0, lt=1, description="Operating point: flag risks above this; if unset, above 0.5."
    )
    flag: Annotated[float | None, EVALUATION] = Field(
        None, gt=0, lt=1, description="Operating point: flag this share of samples (10%), as validation samples say."
    )
    sensitivity: Annotated[float | None, EVALUATION] = Field(
        None, gt=0, le=1, description="Operating point: find this share of positives, as validation samples say."
    )
    threshold_by: Annotated[Literal["all", "domain"], EVALUATION] = Field(
        "all", description="Whether flag and sensitivity choose one threshold for all, or one for each domain."
    )
    batched: bool | None = Field(
        None, description="Train small clients together, as one computation; where it pays if unset."
    )
    jobs: Annotated[int, Flag("training", default="one for each core; 1 with --threads")] = Field(
        1,
        ge=1,
        description="Worker processes; results do not depend on it.",
    )
    threads: int = Field(1, ge=1, description="Threads of one worker; several workers have one each.")
    device: str = Field(
        "cpu", description="Where models work: cpu, cuda, cuda:N, mps, or auto, which takes the first GPU there is."
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Precision in which encoders are trained; heads and sums are always in full precision."
    )
    compile: bool = Field(
        False, description="Train encoders as compiled code, which takes a while to make; for clients one by one."
    )
    track: Annotated[Literal["tensorboard", "mlflow", "wandb"] | None, Flag("output")] = Field(
        None, description="Write every round's figures for this tracker: into the run's folder, or to MLflow."
    )
    dtype: Literal["float32", "float64"] = Field("float32", description="Precision of training.")

    @field_validator("method")
    @classmethod
    def _known_method(cls, name: str) -> str:
        return find(name).name

    @field_validator("device")
    @classmethod
    def _known_device(cls, name: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
            raise UserError(f"there is no device '{name}': choose auto, cpu, cuda, cuda:N (a number) or mps.")
        return name

    @field_validator("threshold", "flag", "sensitivity", mode="before")
    @classmethod
    def _share(cls, given: Any, field: ValidationInfo) -> Any:
        """Return a share that may be written in per cent; per cent without the sign are refused by that name."""
        try:
            share = float(given[:-1]) / 100 if isinstance(given, str) and given.endswith("%") else float(given)
        except (ValueError, TypeError):
            return given
        if 1 < share < 100 and not str(given).endswith("%"):
            raise UserError(f"{field.field_name} is a share: write {given} per cent as {given}% or {share / 100:g}.")
        return share

    @field_validator("lr_steps")
    @classmethod
    def _readable_steps(cls, text: str) -> str:
        _steps(text)
        return text

    def model_post_init(self, _: Any) -> None:
        """Check settings that depend on each other."""
        if self.warmup >= self.rounds:
            raise UserError(f"warmup ({self.warmup}) must be less than rounds ({self.rounds}).")
        row, named = self.row(), find(self.method)
        if self.multi_head is not None and (named.personal or named.encoder != "global"):
            raise UserError(f"multi_head is for methods whose encoder and heads are common, and {row.name} is not one.")
        if row.assigns and (self.multi_head is not None or row.domain_input or row.second_order):
            what = "domain_input" if row.domain_input else "aggregation" if row.second_order else "multi_head"
            raise UserError(f"{what} is for domains that are known, and {row.name} learns its own: leave it out.")
        if row.second_order and row.heads != "domain":
            raise UserError("second-order aggregation is for heads of domains: add multi_head, or leave it out.")
        if row.second_order and (row.by_loss or row.own_weight):
            by = "gaps" if row.own_weight == "fair" else "loss"
            raise UserError(f"{row.name} counts clients by their {by}, which second-order sums do not: choose average.")
        if self.credibility and not row.credible:
            raise UserError("credibility is for heads of domains that are trained in turn with a common encoder.")
        if row.start and self.warmup + self.tuning_rounds >= self.rounds:
            raise UserError(f"{row.name} needs more rounds than warmup and tune_rounds, and has {self.rounds}.")
        points = [name for name in OPERATING_POINTS if getattr(self, name) is not None]
        if len(points) > 1:
            raise UserError(f"{' and '.join(points)} are different operating points: give one of them.")
        if self.participation is not None and self.clients_per_round is not None:
            raise UserError("participation and clients_per_round say the same: leave out one of them.")
        if self.precision != "fp32" and self.dtype == "float64":
            raise UserError(f"precision {self.precision} is for dtype float32: leave out one of them.")
        if self.jobs > 1 and self.threads > 1:
            raise UserError("several jobs run with one thread each: leave threads out or set jobs to 1.")

    def resolved(self, is_table: bool) -> Settings:
        """Return the settings with those that depend on the kind of data set, where the user has left them open."""
        return self.completed(OF_TABLES if is_table else OF_OTHERS)

    def completed(self, by_data: Mapping[str, Any]) -> Settings:
        """Return the settings with these values of those that depend on the data and that the user has left open."""
        unset = {name: by_data[name] for name in OF_TABLES if getattr(self, name) is None}
        return self.model_copy(update=unset) if unset else self

    def trained(self) -> Settings:
        """Return the settings without ``weights``: a trained model does not need the file it started from."""
        return self.model_copy(update={"weights": None})

    def row(self) -> Method:
        """Return the method's row of the table, changed by the settings that override it (``reweight`` and others)."""
        row = find(self.method)
        heads: Scope = row.heads if self.multi_head is None else "domain" if self.multi_head else "global"
        given: dict[str, Any] = {
            "reweighted": self.reweight,
            "by_evidence": None if self.reweight is None else False,
            "credible": self.credibility,
            "averaged": self.average,
            "site_offset": self.site_offset,
            "label_shift": self.label_shift,
            "domain_input": self.domain_input,
            "alternating": self.alternating,
            "second_order": None if self.aggregation is None else self.aggregation == "second-order",
        }
        changed = replace(row, heads=heads, **{name: value for name, value in given.items() if value is not None})
        offset = changed.site_offset and changed.offsettable and self.bias
        alone = changed.personal or changed.decoupled or changed.assigns is not None
        shift = changed.label_shift and not (alone or offset) and self.bias
        credible, averaged = (
            changed.credible and changed.weighable,
            changed.averaged and not (changed.personal or changed.decoupled),
        )
        return replace(changed, credible=credible, averaged=averaged, site_offset=offset, label_shift=shift)

    def require_fitting(self) -> None:
        """Refuse what the method cannot have; methods that are compared share settings, and leave it out."""
        if self.average and not self.row().averaged:
            raise UserError("average is for models that are common: here a part of the model stays with each client.")
        if self.site_offset and not self.row().site_offset:
            raise UserError("site_offset is for heads of domains with a constant term, over a common encoder.")
        if self.label_shift and self.row().site_offset:
            raise UserError(
                f"label_shift is for models that sites do not correct: {self.method} corrects its heads for each site, "
                "which has it already; leave it out, or add site_offset=False (--no-site-offset)."
            )
        if self.label_shift and not self.row().label_shift:
            raise UserError("label_shift is for models that are common, with a constant term in their heads.")

    def unset_for(self, method: str) -> dict[str, None]:
        """Return, as unset, those of the settings that were asked for and that another method cannot have."""
        row = checked(Settings, self.model_dump() | {"method": method}).row()
        had = {"site_offset": row.site_offset, "label_shift": row.label_shift, "average": row.averaged}
        return {name: None for name, has in had.items() if getattr(self, name) and not has}

    def fitted_to(self, method: str) -> Settings:
        """Return the settings for another method, without those that it cannot have."""
        return checked(Settings, self.model_dump() | {"method": method} | self.unset_for(method))

    def row_in(self, round_number: int) -> Method:
        """Return the row used in that round: FedAvg in warm-up, then the method's ``start`` if any, then the method."""
        row = self.row()
        tuned_from = self.rounds - self.tuning_rounds if row.start else 0
        before = "fedavg" if round_number <= self.warmup else row.start if round_number <= tuned_from else None
        if before is None:
            return row
        return find(before) if self.reweight is None else replace(find(before), reweighted=self.reweight)

    def may_choose(self, round_number: int) -> bool:
        """Return whether the model of that round may be chosen for use: not in warm-up, nor in a method's start."""
        return self.row_in(round_number) == self.row()

    @property
    def tuning_rounds(self) -> int:
        """The number of last rounds that fine-tune, in a method with a ``start``; by default at least ``last``."""
        return self.tune_rounds or max(1, min(max(self.rounds // 4, self.last), self.rounds - self.warmup - 1))

    @property
    def rate(self) -> float:
        """The learning rate."""
        return float(OF_OTHERS["lr"] if self.lr is None else self.lr)

    @property
    def samples_in_batch(self) -> int:
        """The number of samples in a batch; 0: by the samples of each client."""
        return int(OF_OTHERS["batch_size"] if self.batch_size is None else self.batch_size)

    @property
    def trains_a_part(self) -> bool:
        """Whether only a part of the clients trains in a round."""
        return self.clients_per_round is not None or (self.participation or 1) < 1

    def lr_factor(self, round_number: int) -> float:
        """Return the factor on the learning rate in that round; rounds count from 1."""
        factor = 1.0
        if self.schedule == "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * (round_number - 1) / self.rounds))
        for after, step in _steps(self.lr_steps):
            factor *= step if round_number > after else 1.0
        return factor


class DataSettings(BaseModel):
    """Where samples come from and how they are split; each source in ``feddar.data.sources`` adds its own fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    flag_of_fields: ClassVar[Flag] = Flag("data")

    data: str = Field(description="A built-in cohort, or the path of a CSV or Parquet file.")
    test: float = Field(0.2, gt=0, lt=1, description="Share of samples held out for testing.")


class Unknown(BaseModel):
    """What prediction does with a sample whose domain, client or category was not in training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    flag_of_fields: ClassVar[Flag] = Flag("data")

    unknown_domain: Literal["error", "average"] = Field(
        "error", description="A domain not in training, or none: refuse it, or average all heads, by their samples."
    )
    missing_domain: Literal["error", "mixture"] | None = Field(
        None,
        description="A domain that is missing: refuse it, or mix heads by the shares that domains have at the sample's "
        "client; if unset, as unknown_domain.",
    )
    unknown_client: Literal["error", "average"] = Field(
        "error", description="The same for clients, of methods with a part of their own at each client."
    )
    unknown_category: Literal["error", "missing"] = Field(
        "error", description="A category's value not in training: refuse it, or take it as missing."
    )

    def of_missing(self, role: str) -> str:
        """Return what is done with a sample without a domain or client (the role): error, average or mixture."""
        unknown: str = getattr(self, f"unknown_{role}")
        return (self.missing_domain or unknown) if role == "domain" else unknown


_SETS = {"all": tuple(METHODS), "paper": tuple(name for name, row in METHODS.items() if row.in_paper)}
"""Names of sets of methods, which may be given in place of method names."""
DEFAULT_METHODS = f"paper,{RECOMMENDED}"
"""The methods of a comparison by default: the paper's, and the one we recommend."""


class Plan(BaseModel):
    """What a comparison compares: every method on the same splits, with the same seeds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    flag_of_fields: ClassVar[Flag] = EVALUATION

    methods: Annotated[tuple[str, ...], Flag("method", first=True, names=(*_SETS, *METHODS))] = Field(
        DEFAULT_METHODS,
        validate_default=True,
        description="Methods separated by commas; paper and all stand for several.",
    )
    folds: Annotated[int, Flag("evaluation", first=True)] = Field(
        5, ge=1, description="Folds of cross-validation; 1: one split, with the share --test held out."
    )
    seeds: int = Field(1, ge=1, description="Repetitions with the seeds SEED, SEED+1, ...")
    reference: Annotated[str | None, Flag("evaluation", names=tuple(METHODS))] = Field(
        None, description="Method that differences are taken to; fedavg, or the first, if left out."
    )
    references: bool = Field(True, description="Fit models that see all rows in one place, to compare with.")
    tune: Annotated[bool, METHOD] = Field(
        False, description="Search lr and each method's own knob, on inner splits of the training part."
    )

    @field_validator("methods", mode="before")
    @classmethod
    def _named_methods(cls, given: Any) -> tuple[str, ...]:
        if not isinstance(given, (str, list, tuple)):
            raise UserError(f"methods must be names, and is {given!r}.")
        names = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(map(str, given))
        names = [each for name in names for each in _SETS.get(name, (name,))]
        for name in names:
            find(name)
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise UserError(f"the method '{twice[0]}' is named twice: once is enough.")
        if not names:
            raise UserError("there is no method to compare: name some, or say paper or all.")
        return tuple(names)

    def model_post_init(self, _: Any) -> None:
        """Set the default reference, and check that it is one of the methods."""
        if self.reference is None:
            object.__setattr__(self, "reference", "fedavg" if "fedavg" in self.methods else self.methods[0])
        if self.reference not in self.methods:
            hint = nearest(str(self.reference), list(self.methods))
            raise UserError(f"the reference '{self.reference}' is not among the methods compared: {hint}")


def trained_rows(training: dict[str, Any], methods: Iterable[str]) -> list[Method]:
    """Return the rows of these methods, changed by the options of a configuration's [training] table."""
    return [checked(Settings, training | {"method": name}).row() for name in methods if name in METHODS]


Model = TypeVar("Model", bound=BaseModel)


def overridden(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of settings with later ones, which replace their alternatives among the earlier ones, too.

    >>> overridden({"flag": 0.1, "lr": 0.01}, {"threshold": 0.2})
    {'lr': 0.01, 'threshold': 0.2}
    """
    replaced = {name for names in ALTERNATIVES if later.keys() & set(names) for name in names}
    return {name: value for name, value in earlier.items() if name not in replaced} | dict(later)


def checked(kind: type[Model], values: dict[str, Any]) -> Model:
    """Return ``kind(**values)``; the first wrong value is a ``UserError`` of one sentence."""
    unknown = [name for name in values if name not in kind.model_fields]
    if unknown:
        raise UserError(f"unknown option '{unknown[0]}': {nearest(unknown[0], list(kind.model_fields))}")
    try:
        return kind(**values)
    except ValidationError as error:
        problem = error.errors()[0]
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, UserError):
            raise cause from None
        name, given = str(problem["loc"][0]), problem["input"]
        message = problem["msg"].removeprefix("Input ").removeprefix("Value error, ")
        raise UserError(f"{name} {message[0].lower()}{message[1:]}; given was {given!r}.") from None


CONFIG_FILE = "config.toml"
"""The configuration in the folder of a run or comparison."""
CONFIG_TABLES = ("data", "training", "compare")


def write_config(path: Path, **tables: BaseModel | Mapping[str, Any]) -> None:
    """Write settings as TOML, one table each; unset fields are left out."""
    write_toml(
        path,
        {
            title: table.model_dump(exclude_none=True) if isinstance(table, BaseModel) else table
            for title, table in tables.items()
        },
    )


def write_toml(path: Path, values: Mapping[str, Any]) -> Path:
    """Write values as a TOML file and return its path; TOML wants tables after plain values."""
    path.write_text(tomli_w.dumps(values), encoding="utf-8")
    return path


def read_toml(path: Path, what: str, verb: str = "is") -> dict[str, Any]:
    """Return the content of a TOML file; errors name it by ``what``, which ``verb`` fits."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {what}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {verb} not valid TOML: {error}.") from None


def read_config(path: Path, titles: Sequence[str] = CONFIG_TABLES) -> dict[str, dict[str, Any]]:
    """Return the tables of a configuration file; other tables than ``titles`` are refused."""
    tables = read_toml(path, f"the configuration {path}")
    for title, table in tables.items():
        if title not in titles or not isinstance(table, dict):
            known = ", ".join(f"[{name}]" for name in titles)
            raise UserError(f"the configuration {path} has '{title}'; only the tables {known} belong there.")
    return tables


def _steps(text: str) -> list[tuple[int, float]]:
    try:
        pairs = [part.split(":") for part in text.split(",") if part]
        steps = [(int(after), float(factor)) for after, factor in pairs]
    except ValueError:
        steps = [(0, -1.0)]
    if not all(0 < factor < float("inf") for _, factor in steps):
        raise UserError(f"lr_steps must read ROUND:FACTOR,ROUND:FACTOR,... with positive factors, and is '{text}'.")
    return steps
