"""What runs show of themselves in Python: a figure, and the page."""

import inspect

import pytest

import feddar
from feddar.errors import UserError
from feddar.results import training
from helpers.cohorts import make_cohort


@pytest.fixture(scope="module")
def parts():
    return make_cohort(n=300).split(0.3)


@pytest.fixture(scope="module")
def run(parts, tmp_path_factory):
    return feddar.train(parts[0], test=parts[1], rounds=3, out=tmp_path_factory.mktemp("runs") / "run")


def curves(axes):
    return [line for line in axes.lines if len(line.get_xdata()) > 2]


def test_the_figure_has_the_metric_of_every_domain_and_the_losses(run):
    for metric in (None, "accuracy"):
        by_domain, losses = run.plot(metric).axes
        shown = run.history[run.history["metric"] == (metric or "auc")]
        for line, domain in zip(curves(by_domain), run.cohort.domains, strict=True):
            values = shown[(shown["scope"] == "domain") & (shown["name"] == domain)]["value"] * (100 if metric else 1)
            assert line.get_ydata().tolist() == pytest.approx(values.tolist())
        assert [text.get_text() for text in by_domain.texts] == [*run.cohort.domains, "in use"]
        assert [text.get_text() for text in losses.texts] == ["train", "validation", "in use"]
    assert run.plot()._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="there is no metric 'mse' of this outcome"):
        run.plot("mse")


def test_runs_without_a_test_part_or_validation_show_their_losses_and_new_ones_nothing(parts, tmp_path):
    alone = feddar.train(parts[0], rounds=3, validation=0)
    (losses,) = alone.plot().axes
    assert [text.get_text() for text in losses.texts] == ["train"]
    with pytest.raises(UserError, match=r"give some, as report\(path, test=...\)"):
        alone.report("page.html")
    alone.report(tmp_path / "alone.html", test=parts[1])
    worst = alone.evaluate(parts[1]).query("name == 'domain_min' and metric == 'auc'")["value"].item()
    assert f"{worst:.3f}".lstrip("0") in (tmp_path / "alone.html").read_text()
    alone.history = alone.history.head(0)
    with pytest.raises(UserError, match="nothing to plot"):
        alone.plot()


def test_of_many_domains_none_is_named():
    part, test = make_cohort(n=400, domains=9).split(0.3)
    by_domain, _ = feddar.train(part, test=test, rounds=1).plot().axes
    assert [text.get_text() for text in by_domain.texts] == ["in use"] and len(by_domain.lines) == 10


def test_the_page_is_that_of_the_folder_or_of_a_run_without_one(run, parts, tmp_path):
    run.report(tmp_path / "trained.html")
    feddar.load(run.folder).report(tmp_path / "loaded.html", "Mine")
    trained, loaded = ((tmp_path / name).read_text() for name in ("trained.html", "loaded.html"))
    assert "Decision curve" in trained and "<h1>Mine</h1>" in loaded
    elsewhere = feddar.train(parts[0], test=parts[1], rounds=1)
    elsewhere.report(tmp_path / "bare.html")
    bare = (tmp_path / "bare.html").read_text()
    assert "Decision curve" not in bare and "feddar.train(cohort, &#39;feddar&#39;, ...)" in bare
    elsewhere.report(tmp_path / "tested.html", test=parts[1])
    assert "Decision curve" in (tmp_path / "tested.html").read_text()
    (tmp_path / "notes.html").write_text("mine")
    with pytest.raises(UserError, match=r"is no page of feddar"):
        run.report(tmp_path / "notes.html")


def test_train_and_load_give_such_runs_and_keep_their_signatures(run):
    assert isinstance(run, feddar.Run) and isinstance(feddar.load(run.folder), feddar.Run)
    assert inspect.signature(feddar.train) == inspect.signature(training.train)
    assert feddar.train.__doc__ == training.train.__doc__
