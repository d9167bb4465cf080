"""A site (client): it checks its own table against the study, answers requests, and stores its private state on disk.

``Site.answer`` returns the bytes of the answer to a message and never raises. Errors are shown at the site in full,
with file and line; the coordinator gets only a text without any values of patients. The folder of a site has a log of
all answers and, for each run: the study, the replies of the last rounds (which are sent again if the coordinator
resumes from an earlier checkpoint), the site's own parameters after each of the last phases and after the best round so
far, and in the end the model.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file, save_file

from feddar.algorithm.client import Client
from feddar.algorithm.local_training import samples_by_domain
from feddar.algorithm.names import named_own, named_parameters, named_reply, own_from, parameters_from, state_from
from feddar.algorithm.participation import takes_part
from feddar.algorithm.processors import Processor, Processors
from feddar.algorithm.protocol import NOTHING, SILENT, OwnState, Reply, Request
from feddar.algorithm.rounds import Position, Standing
from feddar.algorithm.wire import as_reply, as_request, pack, reply_header, unpack
from feddar.data.name_lists import as_list
from feddar.data.table_options import TableOptions
from feddar.errors import TrainingError, UserError, one_line, printable
from feddar.federation.column_scales import much_wider_than_own
from feddar.federation.links.link import Handler
from feddar.federation.lock import alone_in
from feddar.federation.privacy.answer_log import AnswerLog
from feddar.federation.privacy.answer_once import FAILED, NEEDED_BY_LATE, AnsweredPhases
from feddar.federation.privacy.minimum_cell import MinimumCell
from feddar.federation.privacy.norm_bound import NormBound
from feddar.federation.privacy.plausible_models import IMPLAUSIBLE, PlausibleModels
from feddar.federation.privacy.secure import require_cryptography
from feddar.federation.privacy.secure.fixed_point import RangeError
from feddar.federation.privacy.secure.summands import domains_of, summands
from feddar.federation.private_folder import private_folder
from feddar.federation.refused import RefusedError
from feddar.federation.rehearsal import Rehearsal, build, floor_of
from feddar.federation.request_checks import PlannedRequests
from feddar.federation.step_files import KEPT_ROUNDS, StepFiles
from feddar.federation.study import FEWEST, DisagreementError, Study
from feddar.models.devices import find_device
from feddar.models.encoders.own import allow_code, require_allowed
from feddar.models.model import Model
from feddar.models.parameters import OWN, Parameters, Tensors
from feddar.results.run import Run
from feddar.results.run_folder import METRICS_COLUMNS, replacing, write_metrics
from feddar.results.training import fixed_threads
from feddar.settings import Settings, checked

if TYPE_CHECKING:
    from feddar.federation.privacy.secure.member import Member
    from feddar.federation.security.certificates import Key

MIN_CELL = 5
MOST_COUNTED = 50
"""The number of sites that a model may be of, each with all the rows that a site may have."""
MOST_RUNS = 10
"""The number of runs of one study that a site takes part in: with ``study`` given, its answers are bounded by it."""

Say = Callable[[str], None]


class NoPartError(RefusedError):
    """This site cannot take part in the run until its user does something; ``here`` is the text shown at this site."""

    def __init__(self, why: str, here: str) -> None:
        super().__init__(why)
        self.here = here


class NotJoinedError(RefusedError):
    """This site has not joined the run."""


class Site:
    """One site of a federation."""

    def __init__(
        self,
        name: str,
        data: Path,
        folder: Path,
        *,
        min_cell: int = MIN_CELL,
        study: Study | None = None,
        say: Say = print,
        ended: Callable[[str], None] = lambda _: None,
        identity: Key | None = None,
        device: str = "cpu",
    ) -> None:
        """With ``study``, the site joins only that study; without it any, which is for rehearsals on one machine.

        ``ended`` is called when the site has nothing more to do: with "" at the end of the run, else with the reason.
        ``identity`` is the key that other sites know it by; without one it makes its own. It trains on ``device``.
        """
        if study is not None:
            require_allowed(study.training.encoder)
        self.name, self.data, self.folder, self.ended = name, data, folder, ended
        self.min_cell, self.agreed, self.identity = min_cell, study, identity
        self.device = checked(Settings, {"device": device}).device
        find_device(self.device)  # one that is not there is refused at once
        self.say: Say = lambda text: say(printable(text))
        self.participation: _Participation | None = None
        self.log = AnswerLog(folder)
        self.turn = threading.Lock()

    def answer(self, message: bytes) -> bytes:
        """Return the answer to a message of the coordinator, once the log has it; an error is an answer, too."""
        with self.turn:
            try:
                with alone_in(self.folder):
                    content = self._answer(message)
                    self.log.write(message, content)
            except OSError as error:
                self.say(f"failed: {self.folder} cannot be written ({error.strerror}), so nothing is sent")
                return pack({"kind": "failed", "why": "it cannot write down what it answers."})
            return content

    def _answer(self, message: bytes) -> bytes:
        kind, why = "refused", ""
        try:
            about, tensors = unpack(message)
            return self._answers(about, message)(about, tensors)
        except NotJoinedError as error:
            kind, why = "stranger", str(error)
        except NoPartError as error:
            self.ended(printable(error.here))
            why = str(error)
        except RefusedError as error:
            self.say(f"refused: {error}")
            why = str(error)
        except DisagreementError as error:
            self.ended(printable(str(error)))
            where = ", ".join(dict.fromkeys(each.what for each in error.found))
            why = f"its data does not agree with the study in {where}."
        except Exception as error:
            self.say(f"failed: {_said(error)}")
            kind, why = FAILED["kind"], FAILED["why"]
        return pack({"kind": kind, "why": why})

    def _answers(self, about: dict[str, Any], message: bytes) -> Callable[[dict[str, Any], Tensors], bytes]:
        asked = partial(self._asked, hashlib.sha256(message).digest())
        known: dict[str, Callable[[dict[str, Any], Tensors], bytes]] = {
            "join": self._join, "ask": asked, "finish": self._finish,
            "keys": self._announce, "shares": self._share, "reveal": self._reveal,
        }  # fmt: skip
        kind = about.get("kind")
        if not isinstance(kind, str) or kind not in known:
            raise RefusedError(f"it does not understand a message of the kind {kind!r:.50}.")
        return known[kind]

    def _join(self, about: dict[str, Any], _: Tensors) -> bytes:
        if not isinstance(about.get("study"), dict):
            raise RefusedError("there is no study in the message.")
        study = Study.from_tables(about["study"], "the coordinator's study")
        self._require_agreed(study)
        run = self._run_folder(about)
        self._require_few_runs(study, run)
        self.participation = _Participation(self, study, run)
        self.participation.keep_facts()
        client = self.participation.client
        validated = f", {len(client.validation):,} to choose the round by" if client.validation is not None else ""
        self.say(
            f"joined study '{study.facts.name}' with {len(client.train):,} samples to train on{validated} and "
            f"{len(client.test or ()):,} to test on"
        )
        self.say(f"digest of the study, the same at all sites: {study.digest}")
        for sentence in seen_in(study):
            self.say(sentence)
        absent = study.lacking(self.data)
        if absent:
            self.say(f"its table lacks {', '.join(absent)}: missing in all rows")
        optional = [column.name for column in study.columns if column.optional and column.name not in absent]
        if study.facts.secure and optional:
            few = f"if fewer than {FEWEST} sites have such a column, the coordinator sees sums of these sites alone"
            self.say(f"sites may lack {', '.join(optional)}: {few}")
        if self.participation.few:
            names, weighed = ", ".join(self.participation.few), ", or so few have nearly all of the weight"
            why = f"fewer than {self.min_cell} patients to train on" + (weighed if study.facts.sample_weight else "")
            self.say(f"samples of {names} are left out: {why}")
        return pack({"kind": "joined"})

    def _require_agreed(self, study: Study) -> None:
        if self.agreed is not None and study.content != self.agreed.content:
            raise NoPartError(
                "the study offered is not the one it agreed to.",
                f"the coordinator offers the study '{study.facts.name}' ({study.digest}), and --study is another one "
                f"({self.agreed.digest}): ask the coordinator for the file.",
            )
        try:
            require_allowed(study.training.encoder)
        except UserError as error:
            raise NoPartError(
                "the study names code of the site's own as encoder, which it has not allowed.", str(error)
            ) from None

    def _require_few_runs(self, study: Study, run: Path) -> None:
        others = [path for path in self.folder.glob(f"*/{FACTS_FILE}") if path.parent != run]
        if sum(_is_of(study, path) for path in others) >= MOST_RUNS:
            raise NoPartError(
                f"it has taken part in {MOST_RUNS} runs of this study, and takes part in no more.",
                f"this site has taken part in {MOST_RUNS} runs of this study: see what they asked for (feddar client "
                f"log --state {self.folder}), and name another folder with --state if another run is meant.",
            )

    def _announce(self, about: dict[str, Any], _: Tensors) -> bytes:
        return pack({"kind": "keys", **self._participation(about).member.announce(about.get("setup"))})

    def _share(self, about: dict[str, Any], _: Tensors) -> bytes:
        shared = self._participation(about).member.share(about.get("setup"), about.get("roster"))
        return pack({"kind": "shares", **shared})

    def _reveal(self, about: dict[str, Any], _: Tensors) -> bytes:
        return pack({"kind": "reveal", **self._participation(about).member.reveal(about)})

    def _asked(self, digest: bytes, about: dict[str, Any], tensors: Tensors) -> bytes:
        """Return the answer to a request, whose SHA-256 is ``digest``."""
        participation = self._participation(about)
        request = as_request(about, tensors)
        participation.planned.require(request)
        if not takes_part(request, self.name):
            raise RefusedError(f"this site does not train in round {request.round}.")
        secure = participation.secure_terms(request, about)
        content = participation.answered.stored(request)
        if content is not None:
            self.say(f"round {request.round}: {request.phase.name} was answered before; the same reply is sent again")
        else:
            content = self._worked(participation, request, str(about["run"]))
        if secure is not None:
            content = participation.masked(request, content, secure, digest)
        limit = about.get("limit")
        if type(limit) is int and len(content) > limit:
            raise RefusedError(f"its reply is larger than the {limit:,} bytes that can be carried.")
        return content

    def _worked(self, participation: _Participation, request: Request, run: str) -> bytes:
        """Do the work of a request, and return the answer, which is stored: there is no other one."""
        if objection := participation.answered.objection(request):
            raise RefusedError(objection)
        if objection := participation.planned.objection(request) or participation.models.objection(request):
            self.say(f"refused: {objection}")
            participation.answered.keep(request, pack(IMPLAUSIBLE))
            return pack(IMPLAUSIBLE)
        client, own = participation.client, participation.own
        client.own = own.before(request)
        if _needs_own(request) and not _has_own(client.own):
            return pack({"kind": "lacks"})
        self.say(f"round {request.round}: {DOING.get(request.phase.name, request.phase.name)}")
        for warning in participation.new_warnings(request):
            self.say(warning)
        begun = time.monotonic()
        try:
            with fixed_threads(participation.study.training.threads):
                reply = client.answer(request)
            facts = {"run": run, "round": request.round, "step": request.step, "phase": request.phase.name}
            spent = {"seconds": round(time.monotonic() - begun, 3)}
            about = {"kind": "reply", **facts, **spent, **reply_header(reply)}
            content = pack(about, participation.kept(request, reply))
        except Exception as error:
            self.say(f"failed: {_said(error)}")
            content = pack(FAILED)
        else:
            if client.own:
                own.keep(request, client.own)
            participation.models.keep(request, reply)
        participation.answered.keep(request, content)
        return content

    def _finish(self, about: dict[str, Any], tensors: Tensors) -> bytes:
        """Store the trained model, with this site's own parameters, as a run that can be used here."""
        participation = self._participation(about)
        study, facts, last = participation.study, participation.study.facts, about.get("round")
        counts = about.get("counts")
        if type(last) is not int or not isinstance(counts, list) or not all(type(count) is int for count in counts):
            raise RefusedError("the message does not say of which round and how many rows the model is.")
        most = facts.max_rows * MOST_COUNTED
        if (
            not 1 <= last <= study.training.rounds
            or len(counts) != len(facts.domains)
            or not 0 <= min(counts) <= sum(counts) <= most
        ):
            raise RefusedError("the study has no such round, domains or rows.")
        cohort = study.cohort((self.name,), torch.tensor([counts]))
        method = study.training.row_in(last)
        own = participation.own.after_round(last)
        if "client" in method.used and not own:
            raise RefusedError("it has no parameters of its own, without which the model is not whole.")
        history = pd.DataFrame(columns=METRICS_COLUMNS)
        state, kept = state_from(tensors), {self.name: own}
        run = Run(
            study.training.trained(), participation.client.model, cohort, state, kept, last, method, history,
            study.digest, Standing(Position(last, method, state), kept),
        )  # fmt: skip
        out = participation.folder / "model"
        roles = {"domain": facts.domain, "target": facts.target, "group": facts.group, "image": study.image}
        roles["sample_weight"] = facts.sample_weight
        reading = {"missing": as_list(facts.missing), "spellings": facts.spellings}
        source = {"data": str(self.data)} | {role: name for role, name in (roles | reading).items() if name}
        run.save_config(out, checked(TableOptions, source))
        write_metrics(out, run.history)
        run.checkpoint(out)
        latest = self.folder / "model"
        latest.unlink(missing_ok=True)
        latest.symlink_to(out.relative_to(self.folder))
        self.say(f"the run is finished; the model is in {latest}: feddar predict {latest} NEW_DATA")
        self.ended("")
        return pack({"kind": "done"})

    def _run_folder(self, about: dict[str, Any]) -> Path:
        if not re.fullmatch(r"[0-9a-f]{8,64}", str(about.get("run"))):
            raise RefusedError("the run has no proper name.")
        return self.folder / str(about["run"])

    def _participation(self, about: dict[str, Any]) -> _Participation:
        """Return this site's part in the run, which it joined before, possibly in another process."""
        folder = self._run_folder(about)
        if self.participation is None or self.participation.folder != folder:
            if not (folder / FACTS_FILE).exists():
                raise NotJoinedError("it has not joined this run.")
            study = _study_in(folder / FACTS_FILE)
            self._require_agreed(study)
            self.participation = _Participation(self, study, folder)
        return self.participation


def processors_of(min_cell: int, study: Study, model: Model) -> tuple[Processor, ...]:
    """Return the privacy processors of a site in a study with that model, in their order."""
    return MinimumCell(min_cell), NormBound(study.facts.max_norm), floor_of(study, model)


FACTS_FILE, ROWS_FILE = "study.json", "rows.txt"
CHANGED = "changed/"
"""What names of parameters begin with that a stored reply has changed."""


def seen_in(study: Study) -> list[str]:
    """Return what a site says of who sees its replies in a study."""
    if not study.facts.secure:
        return ["the coordinator sees each reply of this site: the study has no secure sums"]
    found = ["the coordinator learns sums over at least three sites, and nothing of this site alone"]
    if study.facts.keys is None:
        found.append("the study lists no keys of sites: a coordinator could take part in sums under names of its own")
    if study.training.row().assigns:
        found.append("a component that the samples of one site alone are of is that site's own model, seen as a sum")
    return found


def _facts_in(path: Path) -> dict[str, Any]:
    """Return what a site wrote down of a run when it joined it: the study, and the fingerprint of its data."""
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return facts


def _study_in(path: Path) -> Study:
    return Study.from_tables(_facts_in(path)["study"], str(path))


def _is_of(study: Study, path: Path) -> bool:
    """Return whether a file is of a run of that study; one that cannot be read counts as one."""
    try:
        return _study_in(path).content == study.content
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return True


DOING = {
    "census": "counting samples",
    "adopt": "taking over common parameters",
    "heads": "training heads",
    "encoder": "training the encoder",
    "together": "training",
    "personal": "training the site's own model",
    "pool": "summing gradient and curvature of heads",
    "offsets": "correcting heads for its own samples",
    "label-shift": "correcting scores by its rates of labels",
    "validate": "finding the loss on its validation samples",
    "measure": "evaluating on its test samples",
}


class _Participation:
    """A site's part in one run: its data, its client and its own parameters."""

    def __init__(self, site: Site, study: Study, folder: Path) -> None:
        self.study, self.folder, self.data = study, folder, site.data
        cohort = study.read_site(site.data, site.name)
        self.fingerprint = cohort.fingerprint()
        self._require_as_before()
        train, test = study.divided(cohort)
        model, initial = build(study)
        model = replace(model, device=find_device(site.device, model.dtype))
        self.floor = floor_of(study, model)
        processors = Processors.of(processors_of(site.min_cell, study, model))
        admitted = processors.admit(train)
        part, validation = study.validated(admitted, max(processors.min_patients, 1))
        self.client = Client(site.name, part, test, model, processors, validation)
        marks = model.objective.class_marks(self.client.train.y)
        held = None if marks is None else marks.any(0)
        self.planned = PlannedRequests(study, model, samples_by_domain(self.client.train), held)
        # Of a file of weights that training starts from, only the coordinator knows what is in it.
        self.models = PlausibleModels(folder, model, None if study.training.weights else initial, self.client.train)
        if not len(self.client.train):
            few = f"fewer than {max(site.min_cell, 1)} patients of every domain to train on."
            raise NoPartError(f"it has {few}", f"{site.data} has {few}")
        counted = zip(study.facts.domains, samples_by_domain(train), samples_by_domain(admitted), strict=True)
        self.few = [domain for domain, before, after in counted if before and not after]
        if len(train) > study.facts.max_rows:
            many = f"more than the {study.facts.max_rows:,} rows that the study allows"
            raise NoPartError(f"it has {many}.", f"{site.data} has {many}: ask for a study with a larger max_rows.")
        self.secure = self._member(site) if study.facts.secure else None
        self.own = OwnParameters(folder / "own")
        self.answered = AnsweredPhases(folder / "replies")
        self.warned: frozenset[str] = frozenset()

    def _require_as_before(self) -> None:
        path = self.folder / FACTS_FILE
        if not path.exists():
            return
        if _facts_in(path)["data"] != self.fingerprint:
            raise NoPartError(
                "its data has changed since the run began.",
                f"{self.data} has changed since the run began: put back what it was, or wait for another run.",
            )
        if _study_in(path).content != self.study.content:
            raise RefusedError("the study has changed since the run began.")

    def _member(self, site: Site) -> Member:
        """Return this site's part in the secure sums of the run."""
        require_cryptography()
        from feddar.federation.privacy.secure.masking import Identity
        from feddar.federation.privacy.secure.member import Held, Member
        from feddar.federation.security.identity import own_identity

        identity = Identity(site.identity or own_identity(site.folder))
        held = Held(tuple(samples_by_domain(self.client.train).tolist()), self.floor.least)
        return Member(self.folder / "secure", self.folder.name, site.name, identity, self.study.facts.keys, held)

    @property
    def member(self) -> Member:
        """This site's part in secure sums, if the study has them."""
        if self.secure is None:
            raise RefusedError("the study has no secure sums.")
        return self.secure

    @cached_property
    def rehearsal(self) -> Rehearsal:
        """What sites of this study answer, by which their sums are laid out."""
        return Rehearsal(self.study)

    def secure_terms(self, request: Request, about: dict[str, Any]) -> dict[str, Any] | None:
        """Return by which keys, and over which sites, the answer to a request is summed; None if it is not masked.

        In a study with secure sums a site answers nothing else; only that it has done what says nothing needs no mask.
        """
        if self.secure is None or request.phase.name in SILENT:
            return None
        terms = about.get("secure")
        if not isinstance(terms, dict) or type(terms.get("rows")) is not int:
            raise RefusedError("the study has only secure sums, and a single reply was asked for.")
        if terms["rows"] > self.study.facts.max_rows * MOST_COUNTED or not isinstance(terms.get("sites"), list):
            raise RefusedError("more rows are said to be behind the sum than sites can have.")
        if request.phase.name != "census":
            self._require_rows(terms["rows"])
        return terms

    def _require_rows(self, rows: int) -> None:
        """Refuse a sum over fewer rows than were said at first in this run; these must be no fewer than the site's.

        If they are, it takes part in no sum of the run. So only one number is ever compared with the site's rows.
        """
        path = self.folder / ROWS_FILE
        if not path.exists():
            with replacing(path) as temporary:
                temporary.write_text(str(rows), encoding="utf-8")
        first = int(path.read_text(encoding="utf-8"))
        if first < len(self.client.train):
            raise RefusedError("fewer rows were said to be behind sums of this run than this site has.")
        if rows < first:
            raise RefusedError("fewer rows are said to be behind the sum than before.")

    def kept(self, request: Request, reply: Reply) -> Tensors:
        """Return the tensors of a reply as they are stored; for secure sums with the parameters that it changes.

        Its changes are always those of these. Of other ones, which come when the phase is asked for again, whether they
        fit into the sum would say by halves what the site has trained.
        """
        tensors = named_reply(reply)
        if self.secure is None:
            return tensors
        encoders = {key: request.parameters.encoder(key) for key in reply.encoders}
        changed = Parameters(encoders, {key: request.parameters.heads[key] for key in reply.heads})
        return tensors | {f"{CHANGED}{name}": value.clone() for name, value in named_parameters(changed).items()}

    def masked(self, request: Request, content: bytes, terms: dict[str, Any], digest: bytes) -> bytes:
        """Return an answer as what it adds to the sum over sites, masked; that work failed has nothing to add."""
        about, tensors = unpack(content)
        if about["kind"] != "reply":
            return content
        changed = {name.removeprefix(CHANGED): each for name, each in tensors.items() if name.startswith(CHANGED)}
        others = {name: each for name, each in tensors.items() if not name.startswith(CHANGED)}
        reply = as_reply((self.client.name,), about, others)
        # It has no place for domains that too few hold of the sites that are there now, which a stored reply may have.
        layout = self.rehearsal.layout(request, len(terms["sites"]), terms["rows"])
        try:
            words = layout.encode(summands(replace(request, parameters=parameters_from(changed)), reply))
        except RangeError as error:
            why = f"{error}."
            self.answered.keep(request, pack({"kind": "refused", "why": why}))
            raise RefusedError(why) from None
        domains = [] if request.phase.assigns else domains_of(each.name for each in layout.fields)
        self.member.mask(words, terms, digest, (request.round, request.phase.name), domains)
        header = {name: about[name] for name in ("run", "round", "step", "phase", "seconds")}
        return pack({"kind": "masked", **header}, {"masked": torch.from_numpy(words.view(np.int64))})

    def new_warnings(self, request: Request) -> list[str]:
        """Return what the site's own people should know of the model of a request, and have not been told."""
        found = much_wider_than_own(self.study, request.parameters, self.models.own_scale)
        new = [sentence for sentence in found if sentence not in self.warned]
        self.warned |= {*new}
        return new

    def keep_facts(self) -> None:
        """Write the study and the fingerprint of the data, from which another process can continue."""
        private_folder(self.folder)
        with replacing(self.folder / FACTS_FILE) as temporary:
            temporary.write_text(json.dumps({"study": self.study.tables(), "data": self.fingerprint}), encoding="utf-8")


class OwnParameters:
    """Files of the parameters that never leave a site, as they were after each of the last phases."""

    def __init__(self, folder: Path) -> None:
        self.files = StepFiles(folder, ".safetensors")

    def before(self, request: Request) -> OwnState:
        """Return the own parameters as they were before a request."""
        earlier = [path for place, path in self.files.kept() if place < (request.round, request.step)]
        return own_from(load_file(earlier[-1])) if earlier else NOTHING

    def after_round(self, number: int) -> OwnState:
        """Return the own parameters as they were after a round; of a site that joined later, the first that it has."""
        every = [path for _, path in self.files.kept()]
        files = self.files.until(number)[-1:] or every[:1]
        return own_from(load_file(files[0])) if files else NOTHING

    def keep(self, request: Request, own: OwnState) -> None:
        """Store the own parameters after a request, and delete those of rounds that no coordinator can come back to.

        Those of the best round so far are kept: the model in use may be of that round.
        """
        private_folder(self.files.folder)
        with replacing(self.files.path(request)) as temporary:
            save_file({name: value.contiguous() for name, value in named_own(own).items()}, temporary)
        old, best = (self.files.until(number) for number in (request.round - KEPT_ROUNDS, request.best))
        for path in old[:-1]:
            if path not in best[-1:]:
                path.unlink()


def _said(error: Exception) -> str:
    """Return what the site's own people read of an error."""
    return str(error) if isinstance(error, (UserError, TrainingError)) else one_line(error)


def _needs_own(request: Request) -> bool:
    """Return whether the answer to a request starts from the site's own parameters."""
    return request.phase.is_personal and request.phase.name not in NEEDED_BY_LATE


def _has_own(own: OwnState) -> bool:
    """Return whether a site has an own encoder or head."""
    return OWN in own.parameters.encoders or OWN in own.parameters.heads


def open_site(options: dict[str, Any]) -> Handler:
    """Return the handler of a site by the configuration that its own people wrote for an engine.

    Options are data, name, study, state, min-cell, device, and allow-code: encoders that are code, with commas between
    them.
    """
    for needed in ("data", "name", "study"):
        if not options.get(needed):
            raise UserError(f"this site's configuration does not say its {needed}: add {needed}='...' to it.")
    allow_code(*str(options.get("allow-code", "")).split(","))
    name, study = str(options["name"]), Study.read(Path(options["study"]))
    folder = Path(options.get("state") or f"feddar-{name}")
    min_cell = int(options.get("min-cell", MIN_CELL))
    device = str(options.get("device", "cpu"))
    return Site(name, Path(options["data"]), folder, min_cell=min_cell, study=study, device=device).answer
