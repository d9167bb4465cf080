"""What sources say of themselves: each has its own options, and a file may name those of others."""

import subprocess
import sys

import pytest

from feddar.data.sources import (
    BUILT_IN,
    SOURCES,
    find_source,
    read_options,
    resolve_options,
    source_named,
    sources_with,
)
from feddar.data.sources.source import flag_of
from feddar.errors import UserError
from feddar.settings import DataSettings, read_config, write_config

VERSION_0_1 = {
    "client": "hospital", "domain": "race", "target": "outcome", "image": "", "features": "", "ignore": "",
    "task": "auto", "test": 0.25, "difference": 1.0, "label": "age", "image_size": 96, "clients": 5,
}  # fmt: skip
"""What version 0.1 wrote for every source, beside `data`; unset were group, positive, folder, samples and alpha."""


def names(source):
    return set(source.options.model_fields) - {"data"}


def test_every_source_has_its_own_options_and_no_others():
    tables = {"client", "domain", "target", "group", "features", "ignore", "task", "positive", "categories", "numbers"}
    drawn = {"samples", "alpha"}
    reading = {"missing", "sep", "decimal", "encoding", "spellings", "incomplete", "min_client", "small_clients"}
    reading |= {"optional", "sample_weight"}
    assert names(find_source(".")) == {"test", "image", "image_size", "image_cache"} | reading | tables
    assert {name: names(source) for name, source in BUILT_IN.items()} == {
        "exam": {"test", "difference"},
        "synthetic": {"test"} | drawn,
        "digits": {"test", "clients", "folder"} | drawn,
        "fairface": {"test", "clients", "folder", "label", "image_size"} | drawn,
        **dict.fromkeys(("eicu", "covid-mx", "acs-income"), {"test", "folder"} | tables),
    }


def test_an_option_of_several_sources_means_the_same_in_all_of_them():
    for option in {name for source in SOURCES for name in names(source)}:
        fields = [source.options.model_fields[option] for source in sources_with(option)]
        assert all(field.description for field in fields)
        assert len({(field.description, str(field.annotation), str(field.metadata)) for field in fields}) == 1


def test_defaults_are_those_that_suit_the_source():
    of = {name: source.options(data=name) for name, source in BUILT_IN.items()}
    assert (of["synthetic"].samples, of["synthetic"].alpha) == (20, 0.4)
    assert (of["digits"].samples, of["digits"].alpha, of["digits"].clients) == (500, 1, 5)


@pytest.mark.parametrize(
    ("data", "option", "message"),
    [
        ("exam", "clients", "--clients is for digits and fairface, not for exam: leave it out."),
        (
            "exam",
            "folder",
            "--data is for digits, fairface, eicu, covid-mx and acs-income, not for exam: leave it out.",
        ),
        ("digits", "difference", "--difference is for exam, not for digits: leave it out."),
        ("eicu", "image_size", "--image-size is for tables and fairface, not for eicu: leave it out."),
        ("study.csv", "alpha", "--alpha is for synthetic, digits and fairface, not for study.csv: leave it out."),
    ],
)
def test_an_option_of_another_source_is_refused_with_the_sources_that_have_it(data, option, message):
    with pytest.raises(UserError) as error:
        resolve_options(source_named(data), data, {option: 3})
    assert str(error.value) == message


def test_an_option_that_no_source_has_is_refused_wherever_it_stands():
    for given, file in (({"clientz": 3}, {}), ({}, {"clientz": 3})):
        with pytest.raises(UserError, match="unknown option 'clientz': did you mean 'clients'"):
            resolve_options(BUILT_IN["digits"], "digits", given, file)


@pytest.mark.parametrize("data", ["study.csv", *BUILT_IN])
def test_a_file_of_version_0_1_is_taken_for_every_source(data):
    source = source_named(data)
    options = resolve_options(source, data, {}, {"data": "another", **VERSION_0_1})
    assert type(options) is source.options
    assert (options.data, options.test) == (data, 0.25)
    for name, value in VERSION_0_1.items():
        assert getattr(options, name, value) == value
    assert resolve_options(source, data, {"test": 0.5}, VERSION_0_1).test == 0.5


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_what_is_written_is_the_sources_own_and_is_read_back_the_same(source, tmp_path):
    options = source.options(data="somewhere", test=0.3)
    write_config(tmp_path / "config.toml", data=options)
    written = read_config(tmp_path / "config.toml")["data"]
    assert set(written) <= set(source.options.model_fields)
    assert read_options(source.options, written) == options


def test_a_wrong_value_is_one_sentence():
    with pytest.raises(UserError, match="image_size should be greater than or equal to 8; given was 3"):
        resolve_options(BUILT_IN["fairface"], "fairface", {"image_size": 3})


def test_sources_are_found_by_name_or_path(tmp_path):
    assert find_source("exam") is BUILT_IN["exam"]
    assert find_source(str(tmp_path)).name == "tables"
    for data, message in (("exma", "did you mean 'exam'"), ("no.csv", "there is no file or folder no.csv")):
        with pytest.raises(UserError, match=message):
            find_source(data)


def test_flags():
    assert flag_of("image_size") == "--image-size"
    assert flag_of("folder") == "--data"


def test_every_source_is_a_kind_of_data_settings():
    assert all(issubclass(source.options, DataSettings) for source in SOURCES)


def test_options_are_known_without_heavy_packages():
    heavy = {"numpy", "torch", "pandas", "PIL"}
    code = f"import sys, feddar.data.sources; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
