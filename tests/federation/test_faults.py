"""Real processes over Flower, with keys, that are killed at the worst moments: the result is right, or says why not."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from feddar.federation.coordinator import coordinate
from feddar.federation.coordinator_settings import CoordinatorSettings
from feddar.federation.security.keys import make_keys
from helpers.processes import TWO_DAYS_AGO, Process, federation, weights
from helpers.sites import NAMES, local_link, make_sites, make_study, with_patience, write_tables


@pytest.mark.slow
def test_a_coordinator_that_is_killed_goes_on_as_if_it_had_not_been(tmp_path):
    """Killed in the middle of a round of FedRep, whose heads live at the sites."""
    write_tables(tmp_path / "data")
    study = make_study(tmp_path / "data", method="fedrep", rounds=3)
    study = with_patience(study)
    coordinate(study, local_link(make_sites(tmp_path / "data", tmp_path / "kept")), tmp_path / "expected")
    with federation(tmp_path, study) as (server, client):
        first, clients = server(), [client(name) for name in NAMES]
        first.wait_for(r"round 2 of 3, heads")
        first.kill()
        second = server("--resume")
        assert second.ends() == 0, second.text()
        assert [each.ends() for each in clients] == [0, 0, 0]
    found, expected = weights(tmp_path / "run"), weights(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    metrics = pd.read_csv(tmp_path / "run" / "metrics.csv")
    losses = metrics[(metrics["metric"] == "loss") & (metrics["scope"] == "all")]
    for split in ("train", "validation"):
        assert losses[losses["split"] == split]["round"].tolist() == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.more
def test_a_site_that_is_killed_in_any_phase_costs_its_part_and_comes_back(tmp_path):
    write_tables(tmp_path / "data", rows=400)
    # Phases take long, and yet move the model by no more than a coordinator takes.
    study = make_study(tmp_path / "data", rounds=4, head_epochs=400, encoder_epochs=60, lr=1e-4)
    study = replace(study, coordinator=CoordinatorSettings(sites=3, min_clients=1, wait=200, timeout=60))
    with federation(tmp_path, study) as (server, client):
        coordinator, sites = server(), {name: client(name) for name in NAMES}
        for number, doing, name in (
            (1, "training heads", "hospital-3"),
            (2, "training the encoder", "hospital-1"),
            (3, "evaluating", "hospital-2"),  # which takes no time: its answer may have left, or not
        ):
            sites[name].wait_for(f"round {number}: {doing}")
            sites[name].kill()
            sites[name] = client(name)
        assert coordinator.ends() == 0, coordinator.text()
    exchanges = pd.read_csv(tmp_path / "run" / "exchanges.csv")
    lost = exchanges[exchanges["problem"].notna()]
    cells = set(lost[["round", "phase", "site"]].itertuples(index=False, name=None))
    assert {(1, "heads", "hospital-3"), (2, "encoder", "hospital-1")} <= cells, exchanges
    back = exchanges[(exchanges["site"] == "hospital-3") & exchanges["problem"].isna()]
    assert back["round"].max() >= 2, exchanges
    assert all(torch.isfinite(value).all() for value in weights(tmp_path / "run").values())


@pytest.mark.slow
@pytest.mark.more
def test_who_may_not_come_is_refused_and_the_run_goes_on(tmp_path):
    write_tables(tmp_path / "data")
    study = with_patience(make_study(tmp_path / "data", rounds=2))
    table = tmp_path / "data" / "hospital-1.csv"
    with federation(tmp_path, study) as (server, client):
        keys = tmp_path / "keys"
        make_keys(keys, clients=["taken-out"])
        (keys / "server" / "clients" / "taken-out.pem").unlink()
        make_keys(keys, clients=["late"], days=1, now=TWO_DAYS_AGO)
        make_keys(tmp_path / "others", ["127.0.0.1"], ["hospital-9"])
        coordinator = server()
        address = coordinator.running.args[coordinator.running.args.index("--listen") + 1]
        agreed = ["--study", "study.toml"]
        refused = {
            name: Process(tmp_path, f"{name}.log", "client", "--server", address, "--data", table, *agreed, *options)
            for name, options in {
                "no key": ["--insecure", "--name", "hospital-1"],
                "unknown key": ["--keys", keys / "clients" / "taken-out"],
                "wrong authority": ["--keys", tmp_path / "others" / "clients" / "hospital-9"],
                "expired": ["--keys", keys / "clients" / "late"],
            }.items()
        }
        sites = [client(name) for name in NAMES]
        assert {name: each.ends() for name, each in refused.items()} == dict.fromkeys(refused, 2)
        assert coordinator.ends() == 0, coordinator.text()
        assert [each.ends() for each in sites] == [0, 0, 0]
    for name, reason in {
        "no key": "takes encrypted connections only",
        "unknown key": "this key is not among those of the study",
        "wrong authority": "not from the authority",
        "expired": "expired",
    }.items():
        text = (tmp_path / f"{name}.log").read_text()
        assert reason in text.splitlines()[-1], text
    assert "expired" in (tmp_path / "server.log").read_text()  # it is not let in, were it to try
    assert pd.read_csv(tmp_path / "run" / "exchanges.csv")["problem"].isna().all()
