"""A run whose door is under attack all the time ends with the result of a run that nobody attacked, for as much memory.

`pytest -s tests/attacks/test_siege.py` prints what both have taken of memory and of the processor.
"""

import resource
from contextlib import ExitStack, contextmanager

import pandas as pd
import pytest
import torch
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import load_pem_x509_certificate

from helpers.intruder import Intruder
from helpers.processes import federation, weights
from helpers.sites import NAMES, make_study, with_patience, write_tables
from helpers.usage import Usage


def in_peace(folder, address):
    """Do nothing while the run goes on."""
    return ExitStack()


@contextmanager
def besieged(folder, address):
    """Hold 1,000 idle connections and 30 bodies in the name of a site that never end, and send 200 MB of headers."""
    intruder = Intruder(int(address.rpartition(":")[2]))
    certificate = load_pem_x509_certificate((folder / "keys" / "server" / "clients" / "hospital-1.pem").read_bytes())
    key = certificate.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    with intruder.idle(1000), intruder.held_bodies(30, key):
        yield intruder


def run_of(folder, around):
    """Run a study between processes; return what the coordinator's processes took. It may open 1,024 files."""
    write_tables(folder / "data")
    study, before = with_patience(make_study(folder / "data", rounds=3)), resource.getrlimit(resource.RLIMIT_NOFILE)
    with federation(folder, study) as (server, client), ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        coordinator = server()
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        usage = stack.enter_context(Usage(coordinator.running.pid))
        coordinator.wait_for("waiting for 3 sites")
        address = coordinator.running.args[coordinator.running.args.index("--listen") + 1]
        intruder = stack.enter_context(around(folder, address))
        sites = [client(name) for name in NAMES]
        if isinstance(intruder, Intruder):
            intruder.short_headers(100_000_000)
            intruder.long_header(100_000_000)
        assert coordinator.ends() == 0, coordinator.text()
        assert [each.ends() for each in sites] == [0, 0, 0]
    print(f"{around.__name__}: {usage.megabytes:.0f} MB, {usage.seconds:.1f} s of the processor")
    return usage


@pytest.mark.slow
@pytest.mark.more
def test_a_run_under_siege_has_the_result_of_one_in_peace(tmp_path):
    peace, siege = (run_of(tmp_path / each.__name__, each) for each in (in_peace, besieged))
    found, expected = weights(tmp_path / "besieged" / "run"), weights(tmp_path / "in_peace" / "run")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert pd.read_csv(tmp_path / "besieged" / "run" / "exchanges.csv")["problem"].isna().all()
    assert "refused a call from 127.0.0.1" in (tmp_path / "besieged" / "run" / "refusals.log").read_text()
    assert siege.megabytes < 2 * peace.megabytes
