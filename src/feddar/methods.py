"""The table of methods. A method is data: which scope holds each group of parameters, and how it is trained.

Adding a method is adding a row. ``scope`` says who shares a group of parameters: everyone (``global``), everyone
with samples of that domain (``domain``), or nobody (``client``: it never leaves the client).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from feddar.errors import UserError

Scope = Literal["global", "domain", "client"]
Companion = Literal["tuned", "pulled", "mixed"]
Ascent = Literal["projected", "exponentiated"]
OwnWeight = Literal["agnostic", "fair"]
Assignment = Literal["client", "sample"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the table: a method of federated learning."""

    name: str
    paper: str
    encoder: Scope = "global"
    heads: Scope = "global"
    alternating: bool = False
    """A round trains the heads first and then the encoder; otherwise both at once."""
    second_order: bool = False
    """Heads are aggregated by their curvature (FedDAR-SA); otherwise by the weighted average."""
    reweighted: bool = False
    """Samples are weighted by u_m = L / (L_m M), so that every domain counts the same."""
    by_evidence: bool = False
    """As far as there is evidence that domains are alike, samples are weighted so less, and heads trained less."""
    credible: bool = False
    """For prediction, domains' heads are drawn together where there is little evidence that domains differ."""
    averaged: bool = False
    """For prediction, the model is an average of the last rounds; each round starts from the last one."""
    closed_form: bool = False
    """For prediction, heads of domains are solved for over the encoder as trained (analytic federated learning)."""
    site_offset: bool = False
    """Each client corrects the heads of domains for its own samples; it never sends the corrections."""
    label_shift: bool = False
    """Each client corrects its scores by the rates of labels there; it never sends the corrections."""
    domain_input: bool = False
    """The head gets the sample's domain (one-hot) beside its features."""
    proximal: bool = False
    """The local loss has the proximal term ``mu/2 |w - w_sent|^2`` (FedProx)."""
    minmax: bool = False
    """The weights of domains follow gradient ascent on the domains' risks (FedMinMax, group DRO)."""
    ascent: Ascent = "projected"
    """How: ``projected`` onto the simplex, from the shares of samples, or ``exponentiated``, from equal shares."""
    by_loss: bool = False
    """Clients count by a power of their loss under the model sent (q-FFL)."""
    decoupled: bool = False
    """The common model is trained with balanced classes, and each client adds a head of its own to it (Fed-RoD)."""
    own_weight: OwnWeight | None = None
    """Clients count by weights that they keep: of ascent on their loss (``agnostic``: AFL), or by how their gap between
    domains differs from the common one (``fair``: FairFed)."""
    assigns: Assignment | None = None
    """Domains are not those that are known, but learned: a sample is of each as probably as its loss says (``sample``),
    or all of a client are of the one with the least loss (``client``)."""
    private_norm: bool = False
    """Batch-norm layers stay with their client (FedBN)."""
    companion: Companion | None = None
    """A whole model that each client keeps beside the common one and is evaluated with: the common one fine-tuned
    (``tuned``), one pulled towards it (``pulled``), or a mixture with it (``mixed``)."""
    start: str | None = None
    """The method of all rounds but the last ``tune_rounds``, which continue from it; None if there is none."""
    knob: str | None = None
    """The method's own hyper-parameter, which ``compare --tune`` searches beside the learning rate."""
    in_paper: bool = True
    """Whether the FedDAR paper compares with it."""
    reading: str = ""
    """What we chose where the method's paper leaves it open."""

    @property
    def used(self) -> tuple[Scope, Scope]:
        """The scopes of the encoder and the heads used for prediction."""
        return ("client", "client") if self.companion else self.common

    @property
    def common(self) -> tuple[Scope, Scope]:
        """The same without a companion."""
        return self.encoder, "domain" if self.closed_form else self.heads

    @property
    def weighs(self) -> bool:
        """Whether samples are weighted by their domain in training."""
        return self.reweighted or self.minmax

    @property
    def weighable(self) -> bool:
        """Whether credibility can be used: heads by domain that alternate with a common encoder."""
        common = (self.encoder, self.heads) == ("global", "domain")
        return self.alternating and common and not (self.decoupled or self.assigns)

    @property
    def offsettable(self) -> bool:
        """Whether clients can have offsets: heads by domain over a common encoder, all of them common."""
        return self.used == ("global", "domain") and not (self.private_norm or self.decoupled or self.assigns)

    @property
    def keeps_own(self) -> bool:
        """Whether a client keeps what it never sends: a part of the model, what it adds to heads, or its shares."""
        return self.personal or self.corrected or self.decoupled or self.assigns is not None

    @property
    def keeps_state(self) -> bool:
        """Whether a client keeps anything from round to round: what is its own, or a weight."""
        return self.keeps_own or self.own_weight is not None

    @property
    def corrected(self) -> bool:
        """Whether clients correct the common model for themselves: as they find best, or by their rates of labels."""
        return self.site_offset or self.label_shift

    @property
    def needs_domain(self) -> bool:
        """Whether a prediction depends on the known domain of the sample."""
        return self.domain_input or ("domain" in self.used and not self.assigns)

    @property
    def personal(self) -> bool:
        """Whether there is no prediction without a client's own part of the model."""
        return "client" in self.used or self.private_norm

    @property
    def for_unseen_client(self) -> str:
        """Says what is used for a client that was not in training; a page shows it."""
        if self.companion:
            return "the common model"
        if self.corrected:
            return "the same model without corrections"
        if self.decoupled:
            return "the common head alone"
        if self.assigns:
            return "the same components, by their shares over all clients"
        return "the mean of the clients' predictions, by their samples" if self.personal else "the same model"


_FEDAVG, _FEDPROX, _ZHONG = "McMahan 2017", "Li 2020", "Zhong 2022"
_TUNED = "fine-tuned from each round's common model, one local epoch at half the rate, and never sent back"
_ANCHORED = (
    "solved from the weighted average with `damping`, since a softmax has no curvature along some directions, along "
    "which the formula says nothing; `--damping 0` is the formula to the letter wherever it has a solution"
)
_OURS = (
    "FedDAR-WA in training, with re-weighting and epochs of heads that yield to evidence that domains are alike; for "
    "use, heads are pooled as far as they are, over an average of the last rounds, and each client corrects them for "
    "its own samples as far as clients differ"
)
_APFL = "local part and mixture train after averaging, against the common model; the mixture starts at `mix`"

RECOMMENDED = "feddar"
"""The default of every command."""
LEARNING = "feddar-mixture"
"""The default where domains are to be learned."""

_ROWS = (
    Method(name="local", paper="-", encoder="client", heads="client"),
    Method(name="fedavg", paper=_FEDAVG),
    Method(name="fedavg-ft", paper=_ZHONG, companion="tuned", knob="tune_factor", reading=_TUNED),
    Method(name="separate", paper=_ZHONG, encoder="domain", heads="domain"),
    Method(
        name="fedavg-separate-ft",
        paper=_ZHONG,
        encoder="domain",
        heads="domain",
        start="fedavg",
        knob="tune_factor",
        reading="the last quarter of the rounds (or those averaged) is FedAvg for each domain alone, at half the rate",
    ),
    Method(name="fedavg-mh", paper=_ZHONG, heads="domain"),
    Method(
        name="fedavg-di",
        paper=_ZHONG,
        domain_input=True,
        reading="the domain is an input of the head (one column for each), whose weights start at zero",
    ),
    Method(name="fedprox", paper=_FEDPROX, proximal=True, knob="mu"),
    Method(name="fedprox-ft", paper=_ZHONG, proximal=True, companion="tuned", knob="tune_factor", reading=_TUNED),
    Method(
        name="fedminmax",
        paper="Papadaki 2021",
        minmax=True,
        knob="minmax_lr",
        reading="as many local steps as the others take, not one; weights start at the domains' shares of samples",
    ),
    Method(name="fedrep", paper="Collins 2021", heads="client", alternating=True, knob="head_epochs"),
    Method(name="fedper", paper="Arivazhagan 2019", heads="client"),
    Method(
        name="lg-fedavg",
        paper="Liang 2020",
        encoder="client",
        reading="the last layer, the head, is global and the encoder is local",
    ),
    Method(
        name="fedbn",
        paper="Li 2021",
        private_norm=True,
        in_paper=False,
        reading="equals fedavg where the encoder has no batch norm",
    ),
    Method(
        name="ditto",
        paper="Li 2021b",
        companion="pulled",
        knob="mu",
        in_paper=False,
        reading="the personal model is pulled towards the newly averaged one",
    ),
    Method(name="apfl", paper="Deng 2020", companion="mixed", knob="mix", in_paper=False, reading=_APFL),
    Method(
        name="group-dro",
        paper="Sagawa 2020",
        minmax=True,
        ascent="exponentiated",
        knob="minmax_lr",
        in_paper=False,
        reading="weights start equal and move once a round, by risks under the model sent, not with every batch; risks "
        "are not adjusted by the sizes of domains",
    ),
    Method(
        name="q-ffl",
        paper="Li 2020b",
        by_loss=True,
        knob="q",
        in_paper=False,
        reading="q-FedAvg with L = 1 / lr; under adam, where that says nothing of the gradient, the gain of a step is "
        "by how much the client's loss has fallen; clients count by samples, too, so that q = 0 is fedavg",
    ),
    Method(
        name="afl",
        paper="Mohri 2019",
        own_weight="agnostic",
        knob="minmax_lr",
        in_paper=False,
        reading="over clients, whose weights ascend once a round by exponentiated gradient, not by projected steps, "
        "from their shares of samples; clients train as in fedavg, and each knows its own weight alone",
    ),
    Method(
        name="analytic",
        paper="He 2025",
        closed_form=True,
        knob="ridge",
        in_paper=False,
        reading="the encoder is that of fedavg, with heads of domains in closed form for use after every round; for "
        "classes least squares on centred one-hot labels, as log-odds; the ridge draws a domain's head to that of all",
    ),
    Method(
        name="fairfed",
        paper="Ezzeldin 2023",
        own_weight="fair",
        knob="beta",
        in_paper=False,
        reading="the gap is the largest difference between domains, of the true-positive rate for two classes and of "
        "the mean loss for other outcomes; each client knows its own weight alone, which follows the gaps under the "
        "model sent two rounds before",
    ),
    Method(
        name="fedrod",
        paper="Chen 2022",
        decoupled=True,
        knob="head_epochs",
        in_paper=False,
        reading="classes are balanced by weights at each client, a number to predict is not; a client's own head is "
        "trained after averaging, on features of the new common model",
    ),
    Method(
        name="ifca",
        paper="Ghosh 2020",
        encoder="domain",
        heads="domain",
        assigns="client",
        knob="components",
        in_paper=False,
        reading="models are averaged; they begin apart in their heads, and one that nobody chooses begins again beside "
        "the one that most choose, in the first half of the rounds",
    ),
    Method(
        name="fedem",
        paper="Marfoq 2021",
        encoder="domain",
        heads="domain",
        assigns="sample",
        knob="components",
        in_paper=False,
        reading="a client's shares take five steps of EM in a round, smoothed by one sample of each; components "
        "begin apart in their heads",
    ),
    Method(
        name=LEARNING,
        paper="ours",
        heads="domain",
        alternating=True,
        reweighted=True,
        assigns="sample",
        knob="components",
        in_paper=False,
        reading="FedDAR-WA over the components of fedem, which have one encoder",
    ),
    Method(
        name="feddar-wa",
        paper=_ZHONG,
        heads="domain",
        alternating=True,
        reweighted=True,
        knob="head_epochs",
    ),
    Method(
        name="feddar-sa",
        paper=_ZHONG,
        heads="domain",
        alternating=True,
        second_order=True,
        reweighted=True,
        knob="damping",
        reading=_ANCHORED,
    ),
    Method(
        name=RECOMMENDED,
        paper="ours",
        heads="domain",
        alternating=True,
        reweighted=True,
        by_evidence=True,
        credible=True,
        averaged=True,
        site_offset=True,
        knob="head_epochs",
        in_paper=False,
        reading=_OURS,
    ),
)

METHODS: dict[str, Method] = {row.name: row for row in _ROWS}


def nearest(name: str, names: list[str]) -> str:
    """Return a hint naming the closest of ``names``, or what there is if none is close."""
    close = closest(name, names)
    return there_are(names) if close is None else f"did you mean '{close}'?"


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the closest of ``names``, or None if none is close."""
    by_lower = {each.lower(): each for each in names}
    # A cutoff that accepts one wrong letter in three, and does not suggest 'age' for 'race'.
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.65)
    return by_lower[close[0]] if close else None


def there_are(names: Sequence[str]) -> str:
    """Return a hint that lists the names, as options take them; of more than 30, the first and last 15."""
    quoted = [f'"{name}"' if "," in name else name for name in names]
    shown = quoted if len(names) <= 30 else [*quoted[:15], "…", *quoted[-15:]]
    return f"there are: {', '.join(shown)}."


def find(name: str) -> Method:
    """Return the method of that name; an unknown one is an error that suggests the nearest."""
    if name not in METHODS:
        raise UserError(f"unknown method '{name}': {nearest(name, list(METHODS))}")
    return METHODS[name]
