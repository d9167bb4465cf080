"""A run whose door is under attack all the time ends with the result of a run that nobody attacked."""

import resource
from contextlib import ExitStack

import pandas as pd
import pytest
import torch
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import load_pem_x509_certificate

from feddar.federation.coordinator import coordinate
from helpers.intruder import Intruder
from helpers.processes import federation, weights
from helpers.sites import NAMES, local_link, make_sites, make_study, with_patience, write_tables


@pytest.mark.slow
@pytest.mark.more
def test_a_run_under_siege_has_the_result_of_one_in_peace(tmp_path):
    """1,000 idle connections, 100 MB of headers in two ways, and 30 bodies in the name of a site that never end."""
    write_tables(tmp_path / "data")
    study = with_patience(make_study(tmp_path / "data", rounds=3))
    coordinate(study, local_link(make_sites(tmp_path / "data", tmp_path / "kept")), tmp_path / "expected")
    with federation(tmp_path, study) as (server, client), ExitStack() as siege:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        coordinator = server()
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
        siege.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        coordinator.wait_for("waiting for 3 sites")
        address = coordinator.running.args[coordinator.running.args.index("--listen") + 1]
        intruder = Intruder(int(address.rpartition(":")[2]))
        certificate = load_pem_x509_certificate(
            (tmp_path / "keys" / "server" / "clients" / "hospital-1.pem").read_bytes()
        )
        key = certificate.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        siege.enter_context(intruder.idle(1000))
        siege.enter_context(intruder.held_bodies(30, key))
        sites = [client(name) for name in NAMES]
        intruder.short_headers(100_000_000)
        intruder.long_header(100_000_000)
        assert coordinator.ends() == 0, coordinator.text()
        assert [each.ends() for each in sites] == [0, 0, 0]
    found, expected = weights(tmp_path / "run"), weights(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert pd.read_csv(tmp_path / "run" / "exchanges.csv")["problem"].isna().all()
    assert "refused a call from 127.0.0.1" in (tmp_path / "run" / "refusals.log").read_text()
