"""The model card: its numbers are those of the run's folder, and nothing in it is invented or taken for markup."""

import re
import shutil
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import feddar
from feddar.errors import UserError
from feddar.federation.coordinator import coordinate
from feddar.report.cards.content import QUESTIONS, Card, CardTable, Commands, Items, Paragraph, Question, Section
from feddar.report.cards.files import as_html, as_markdown, write_card, write_questions
from feddar.report.cards.model_card import read_card
from feddar.report.numbers import metric_name, number
from feddar.results.figure_files import read_figures, remove_figures
from helpers.cohorts import make_cohort
from helpers.sites import NAMES, local_link, make_sites, make_study, with_facts, write_tables

OLD = Path(__file__).parents[1] / "results" / "runs-0.1"


def trained(folder, cohort, **options):
    """Train on a part of a cohort, test on the rest, and return the folder."""
    train, test = cohort.split(test=0.3, seed=0)
    feddar.train(train, test=test, out=folder, rounds=2, **options)
    return folder


def several_outcomes():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3))
    y = pd.DataFrame({"died": x[:, 0] + rng.normal(size=400) > 0, "re_admitted": x[:, 1] > 0.8})
    return feddar.Cohort.from_arrays(x, y, domain=rng.choice(["a", "b"], 400), client=rng.choice(["x", "y"], 400))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Give the folder of a run with a yes/no outcome, in which a domain is called as the rows of all samples are."""
    cohort = make_cohort()
    domain = np.where(cohort.domain_names == "domain-0", "all", cohort.domain_names)
    cohort = feddar.Cohort.from_arrays(cohort.x[0], cohort.y, domain=domain, client=cohort.client_names)
    return trained(tmp_path_factory.mktemp("card") / "run", cohort, validation=0.1, sensitivity=0.8)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"), rows=90)


def section(card, title):
    return next(each for each in card.sections if each.title == title)


def texts(card, title):
    return " ".join(block.text for block in section(card, title).blocks if isinstance(block, Paragraph | Commands))


def table(card, title):
    """Return a table of the card by its title: the cells of each row, by the first."""
    found = [b for s in card.sections for b in s.blocks if isinstance(b, CardTable) and b.title == title]
    assert len(found) == 1, title
    return [dict(zip(found[0].header, row, strict=True)) for row in found[0].rows]


def shown(figure):
    return f"{figure.value:.3f}" + (f" ({figure.low:.3f} to {figure.high:.3f})" if figure.interval else "")


def test_its_numbers_are_those_of_the_folder(run):
    card, figures = read_card(run), read_figures(run)
    parts = [*figures.by_domain.items(), ("all", figures.overall)]
    performance = table(card, "Performance by domain")
    calibration, decisions = table(card, "Calibration"), table(card, "Decisions by domain")
    assert [row["domain"] for row in performance] == ["all", "domain-1", "domain-2", "all"]
    for (name, found), *rows in zip(parts, performance, calibration, decisions, strict=True):
        assert [row["domain"] for row in rows] == [name] * 3
        assert rows[0]["AUC, higher is better"] == shown(found["auc"])
        assert rows[0]["log-loss, lower is better"] == shown(found["log_loss"])
        assert rows[1]["slope"] == shown(found["calibration_slope"])
        assert rows[1]["intercept"] == shown(found["calibration_intercept"])
        assert rows[2]["sensitivity"] == shown(found["sensitivity"])
        assert rows[2]["threshold"] == f"{found['threshold'].value:.3f}"
        assert rows[2]["positives"] == f"{found['sensitivity'].positives:.0f}"
        assert rows[2]["flagged"] == f"{100 * found['selection_rate'].value:.1f} %"
    curve = figures.calibration[figures.calibration["scope"] == "all"]
    tenths = table(card, "Predicted and observed, all domains")
    assert [row["predicted risk"] for row in tenths] == [f"{value:.3f}" for value in curve["predicted"]]
    gap = table(card, "Largest difference between any two domains")[0]
    assert (gap["of"], gap["difference"]) == ("AUC", shown(figures.gaps["auc"]))
    curves = [curve for _, curve in figures.decisions.groupby(["scope", "name"], sort=False)]
    benefits = table(card, "Net benefit (flagging nobody has 0)")
    for curve, row, (_, found) in zip(curves, benefits, parts, strict=True):
        (at,) = curve[curve["threshold"].map("{:.2f}".format) == row["at threshold"]].to_dict("records")
        assert abs(at["threshold"] - found["threshold"].value) <= 0.0051
        assert row["net benefit"] == f"{at['net_benefit']:.3f} ({at['low']:.3f} to {at['high']:.3f})"
    assert "finds 80 % of the positives" in texts(card, "Operating point")


def test_its_counts_are_those_of_the_folder(run):
    card, loaded = read_card(run), feddar.load(run)
    rows = table(card, "Samples by domain")
    assert [row["trained on"] for row in rows[:-1]] == [str(n) for n in loaded.cohort.counts.sum(0).tolist()]
    assert rows[-1]["trained on"] == str(len(loaded.cohort))
    held_out = loaded.history[(loaded.history["split"] == "validation") & (loaded.history["scope"] == "all")]
    assert rows[-1]["validation"] == str(held_out["count"].iloc[0])
    overall = read_figures(run).overall["auc"]
    assert rows[-1]["tested on"] == str(overall.count)
    assert rows[-1]["positives (test)"] == f"{overall.positives:.0f} ({100 * overall.positives / overall.count:.1f} %)"
    by_site = table(card, "Samples trained on, by site and domain")
    assert {row["site"]: int(row["trained on"]) for row in by_site} == dict(
        zip(loaded.cohort.clients, loaded.cohort.counts.sum(1).tolist(), strict=True)
    )
    scores = loaded.history.query("round == @loaded.round and scope == 'client' and metric == 'auc'")
    assert [row["AUC"] for row in table(card, "Performance by site")] == [f"{value:.3f}" for value in scores["value"]]


def test_it_says_how_it_was_trained_and_what_identifies_it(run):
    card, about = read_card(run), feddar.load(run)
    assert f"Round {about.round} of 2 is in use" in texts(card, "Analysis methods")
    assert [row["value"] for row in table(card, "What identifies it")] == ["0", about.fingerprint]
    assert "pooled on one machine" in texts(card, "Privacy")
    assert "the same model without corrections" in texts(card, "Sites")
    assert "2209.04007" in as_markdown(card) and "2209.04007" in as_html(card)
    assert re.match(r"This model predicts [^.]*\. On \d+ held-out samples its AUC is ", card.summary)


def test_what_a_folder_does_not_know_is_asked(run):
    """The cohort was made in Python, so that this is asked, too: every question there is stands on this card."""
    card = read_card(run)
    assert sorted(question.key for question in card.questions if not question.answer) == sorted(QUESTIONS)
    for text in (as_markdown(card), as_html(card)):
        assert text.count("To be answered by the author:") == len(QUESTIONS)


@pytest.mark.parametrize(
    ("make", "expected", "missing"),
    [
        (lambda: make_cohort(classes=3), "3 classes", "Calibration was not examined"),
        (lambda: make_cohort(classes=0), "a number", "Calibration was not examined"),
        (several_outcomes, "2 yes / no outcomes", None),
    ],
)
def test_it_is_written_of_every_kind_of_outcome(make, expected, missing, tmp_path):
    card = read_card(trained(tmp_path / "run", make()))
    assert expected in card.summary and not re.search(r"\bnan\b", as_markdown(card))
    figures = read_figures(tmp_path / "run")
    main = figures.table["metric"].iloc[0]
    assert f"its {metric_name(main)} is {number(figures.overall[main].value, metric=main)} (" in card.summary
    if missing:
        assert missing in texts(card, "Calibration by domain")
        assert "There is no operating point" in texts(card, "Operating point")
        assert "threshold_rationale" not in [question.key for question in card.questions]
    else:
        row = table(card, "Performance by outcome")[0]
        assert row["AUC of re_admitted"] == shown(figures.by_domain["a"]["auc:re_admitted"])
        assert table(card, "Calibration of died")[-1]["slope"] == shown(figures.overall["calibration_slope:died"])


@pytest.mark.parametrize("name", ["credible", "personal", "companion", "number", "minmax", "coordinator"])
def test_of_a_run_of_an_earlier_version_it_says_what_is_missing_and_how_to_get_it(name):
    card = read_card(OLD / name)
    assert "training it again, writes it" in texts(card, "Performance by domain")
    rows = table(card, "Performance by domain")
    history = feddar.load(OLD / name).history
    metric = history[(history["split"] == "test") & (history["scope"] == "domain")]["metric"].iloc[0]
    expected = history.query("round == 2 and split == 'test' and scope == 'domain' and metric == @metric")
    values = [next(cell for title, cell in row.items() if title != "domain") for row in rows[:-1]]
    assert values == [number(value, scale=1, metric=metric) for value in expected["value"]]
    untested = section(card, "What was not tested").blocks[0]
    assert isinstance(untested, Items) and "Calibration and decisions." in untested.texts


@pytest.fixture(scope="module", params=[False, True], ids=["single replies", "secure sums"])
def federated(request, tables, tmp_path_factory):
    folder = tmp_path_factory.mktemp("federated")
    study = with_facts(make_study(tables, rounds=1, method="fedavg-mh"), secure=request.param)
    coordinate(study, local_link(make_sites(tables, folder / "kept")), folder / "out")
    return folder, request.param


def test_between_sites_it_says_who_saw_what_and_what_only_sites_know(federated):
    folder, secure = federated
    card = read_card(folder / "out")
    assert "3 sites took part: hospital-1, hospital-2, hospital-3." in texts(card, "Participants")
    assert ("only sums over sites were revealed" in texts(card, "Participants")) == secure
    assert ("Samples trained on, by site and domain" in as_markdown(card)) != secure
    settings = {row["setting"]: row["value"] for row in table(card, "Privacy settings")}
    assert settings["secure sums"] == ("yes" if secure else "no")
    assert settings["rows for each column of a head, from which it is sent (floor)"] == "0"
    seen = {row["what"]: row["coordinator"] for row in table(card, "Who sees what")}
    assert ("sums over three" in seen["a site's replies: parameters, sums, figures"]) == secure
    assert "on one machine, on which the clients were simulated" not in as_markdown(card)
    assert "feddar server --config" in texts(card, "How to reproduce it")
    figures = read_figures(folder / "out")
    assert table(card, "Performance by domain")[-1]["AUC, higher is better"] == shown(figures.overall["auc"])
    assert "if patients have several rows" in texts(card, "Data preparation")


def test_a_sites_copy_of_a_model_has_a_card_that_refers_to_the_coordinator(federated):
    folder, _ = federated
    card = read_card(folder / "kept" / NAMES[0] / "model")
    assert "the coordinator's folder has them" in texts(card, "Performance by domain")
    assert "one site's copy" in texts(card, "Source of data") and "pooled" not in texts(card, "Privacy")
    assert "Samples trained on, by site and domain" not in as_markdown(card)  # counts are those of all sites


def test_it_names_what_was_not_tested(tmp_path):
    rng = np.random.default_rng(0)
    x, domain = rng.normal(size=(300, 2)), np.array(["large"] * 250 + ["small"] * 30 + ["absent"] * 20)
    y = (x[:, 0] > 0).astype(int)
    y[260:280] = 0
    train = feddar.Cohort.from_arrays(x, y, domain=domain, client=["here"] * 300)
    test = feddar.Cohort.from_arrays(x[:280], y[:280], domain=domain[:280], client=["there"] * 280)
    feddar.train(train, test=test, rounds=1, out=tmp_path / "run")
    (blocks, *_) = section(read_card(tmp_path / "run"), "What was not tested").blocks
    said = " ".join(blocks.texts)
    assert "which were tested and not trained at: there." in said and "External validation" not in said
    assert "fewer than 10 positives" in said and f"small ({y[250:280].sum()})" in said and "large (" not in said
    assert "Domains without test samples: absent." in said


def test_a_run_without_test_samples_has_a_card_that_says_so(tmp_path):
    feddar.train(make_cohort(200), rounds=1, out=tmp_path / "run")
    card = read_card(tmp_path / "run")
    assert "How good it is, this folder does not say." in card.summary
    for title in ("Performance by domain", "Calibration by domain", "Differences between domains"):
        assert "not evaluated on test samples" in texts(card, title)


def test_without_figures_there_are_no_intervals(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    remove_figures(folder)
    (*_, overall) = table(read_card(folder), "Performance by domain")
    assert re.fullmatch(r"0\.\d{3}", overall["AUC, higher is better"])


def test_a_comparison_is_refused_and_one_of_its_runs_is_named(run, tmp_path):
    inside = shutil.copytree(run, tmp_path / "runs" / "feddar" / "seed-0-fold-0")
    with pytest.raises(UserError, match=f"holds a comparison: name one of its runs, such as {inside}"):
        read_card(tmp_path)


# The files


def test_answers_are_in_the_card_and_the_template_has_every_question(run, tmp_path):
    write_questions(run, tmp_path / "answers.toml")
    template = tomllib.loads((tmp_path / "answers.toml").read_text())
    assert template == dict.fromkeys(QUESTIONS, "")
    text = (tmp_path / "answers.toml").read_text()
    text = text.replace('ethics = ""', 'ethics = """\nThe <board> of\nA|B.\n\n2. paragraph\n"""')
    (tmp_path / "answers.toml").write_text(text)
    card = write_card(run, tmp_path / "card.md", tmp_path / "answers.toml")
    assert sum(bool(question.answer) for question in card.questions) == 1
    written = (tmp_path / "card.md").read_text()
    assert "The &lt;board&gt; of A&#124;B.\n\n2\\. paragraph\n" in written
    write_card(run, tmp_path / "card.html", tmp_path / "answers.toml")
    assert "<p>The &lt;board&gt; of A|B.</p><p>2. paragraph</p>" in (tmp_path / "card.html").read_text()
    with pytest.raises(UserError, match=r"answers\.toml exists, and may hold answers"):
        write_questions(run, tmp_path / "answers.toml")


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        ('etics = "yes"', "the card has no question 'etics': did you mean 'ethics'"),
        ("ethics = 1", "the answer to ethics is not text"),
        ("ethics", "not valid TOML"),
    ],
)
def test_answers_that_are_none_are_refused(run, tmp_path, content, refused):
    (tmp_path / "answers.toml").write_text(content)
    with pytest.raises(UserError, match=refused):
        write_card(run, tmp_path / "card.md", tmp_path / "answers.toml")
    assert not (tmp_path / "card.md").exists()


@pytest.mark.parametrize("name", ["card.md", "card.html"])
def test_words_of_the_author_are_never_written_over(run, tmp_path, name):
    out, answers = tmp_path / name, tmp_path / "answers.toml"
    answers.write_text('ethics = "Approved."')
    write_card(run, out)
    write_card(run, out, answers)
    write_card(run, out, answers)
    before = out.read_bytes()
    with pytest.raises(UserError, match="has an answer to ethics, which is not given now"):
        write_card(run, out)
    assert out.read_bytes() == before
    out.write_bytes(before.replace(b"Approved.", b"Approved in May."))
    with pytest.raises(UserError, match="was changed by hand"):
        write_card(run, out, answers)
    assert b"in May" in out.read_bytes()
    out.write_text("# My own notes\n")
    with pytest.raises(UserError, match="exists and is no card of feddar"):
        write_card(run, out, answers)
    with pytest.raises(UserError, match=r"let it end in \.md or \.html"):
        write_card(run, tmp_path / "card.pdf")


def test_the_page_needs_no_network_and_no_script(run):
    page = as_html(read_card(run))
    assert "default-src 'none'" in page and "<script" not in page
    assert not re.search(r"(src|href)=.(?!#)", page)


# Names


class Text(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, sorted(name for name, _ in attrs if name != "class")))

    def handle_data(self, data):
        self.text += data


def card_of(name):
    blocks = (
        Paragraph(name),
        Paragraph(f"It is {name} here."),
        Items((name, f"and {name}")),
        CardTable(name, (name, "b"), ((name, name), ("c", name)), words=True),
        Commands(name),
        Question("key", name),
        Question("key", "What?", f"{name}\n\n{name}"),
    )
    return Card(f"Model card: {name}", f"It is {name}.", name, (Section("Title", "item 1", blocks),))


def read(html):
    parser = Text()
    parser.feed(html)
    return parser.tags, " ".join(parser.text.split())


SIGNS = st.text(st.sampled_from("<>&|*_`[]()#!~\\-+=.:1ab \"'$/") | st.characters(exclude_categories=("C", "Z")))


PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def assert_only_text(name, write, render=str):
    """Assert that a card with a name in all places has the tags of any other card, and the name as it is."""
    tags, text = read(render(write(card_of(name))))
    expected, plain = read(render(write(card_of("HARMLESS"))))
    assert tags == expected
    assert text == plain.replace("HARMLESS", name)


@example("#")
@example("a ##")
@given(SIGNS.map(lambda text: " ".join(text.split())).filter(bool))
def test_no_name_is_taken_for_markup(name):
    """Whatever a column or a site is called, it is text, and all of it."""
    assert_only_text(name, as_markdown, PARSER.render)


@pytest.mark.parametrize("name", ["<b>", "a|b", "</code></pre><script>alert(1)</script>", "&lt; \"' {{ 1 }}"])
def test_no_name_is_taken_for_html(name):
    assert_only_text(name, as_html)
    assert_only_text(name, as_markdown, PARSER.render)
