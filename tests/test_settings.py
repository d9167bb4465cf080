"""Settings as files: what is written is read back as it was."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddar.data.table_options import TableOptions
from feddar.settings import Plan, Settings, read_config, write_config, write_toml

ODD = ["", 'say "a"', "C:\\new", "a\nb\tc\x7f\x00", "äöü 🏥", "[x]", "# no comment", "'"]


@pytest.mark.parametrize("text", ODD)
def test_any_text_comes_back(tmp_path, text):
    options = TableOptions(data=text, client=text, features=text)
    write_config(tmp_path / "config.toml", data=options)
    assert TableOptions(**read_config(tmp_path / "config.toml")["data"]) == options


@given(lr=st.floats(1e-300, 1e300), rounds=st.integers(2, 10**12), bias=st.booleans(), k=st.none() | st.integers(1, 9))
def test_settings_come_back_to_the_bit_and_in_their_order(tmp_path_factory, lr, rounds, bias, k):
    settings, plan = Settings(lr=lr, rounds=rounds, bias=bias, k=k), Plan(methods=["fedavg", "local"])
    path = tmp_path_factory.mktemp("settings") / "config.toml"
    write_config(path, training=settings, compare=plan)
    tables = read_config(path)
    assert (Settings(**tables["training"]), Plan(**tables["compare"])) == (settings, plan)
    assert list(tables["training"]) == list(settings.model_dump(exclude_none=True))


def test_what_is_unset_is_left_out(tmp_path):
    write_config(tmp_path / "config.toml", training=Settings(k=None))
    assert "k" not in read_config(tmp_path / "config.toml")["training"]


def test_the_writer_returns_where_it_wrote(tmp_path):
    values = {"a key": [1, 2.5, True], "table": {"inner": {"x": "y"}}}
    assert tomllib.loads(write_toml(tmp_path / "f.toml", values).read_text()) == values


def test_what_is_left_open_is_set_by_the_kind_of_data():
    table, others = Settings().resolved(is_table=True), Settings().resolved(is_table=False)
    assert (table.encoder, table.validation, table.schedule) == ("wide", 0.1, "cosine")
    assert (table.rate, table.samples_in_batch) == (0.003, 0)
    assert (others.encoder, others.validation, others.schedule) == (None, 0.0, "constant")
    assert (others.rate, others.samples_in_batch) == (0.001, 32)
    assert (Settings().rate, Settings().samples_in_batch) == (0.001, 32)  # before the data is known


def test_what_is_given_stays():
    given = {"encoder": "mlp", "validation": 0.0, "lr": 0.5, "schedule": "constant", "batch_size": 7}
    settings = Settings(**given)
    for is_table in (True, False):
        assert settings.resolved(is_table) == settings
    assert (settings.rate, settings.samples_in_batch) == (0.5, 7)
    assert Settings(batch_size=0).resolved(is_table=False).samples_in_batch == 0


@pytest.mark.parametrize(
    ("method", "site_offset", "average"), [("fedavg", None, True), ("local", None, None), ("feddar-wa", True, True)]
)
def test_another_method_gets_what_it_can_have_of_what_was_asked_for(method, site_offset, average):
    asked = Settings(site_offset=True, average=True, lr=0.5)
    found = asked.fitted_to(method)
    assert (found.method, found.site_offset, found.average, found.lr) == (method, site_offset, average, 0.5)
    found.require_fitting()
    without = Settings(site_offset=False, average=False).fitted_to(method)
    assert (without.site_offset, without.average) == (False, False)
