"""The same study on every engine: the same weights, after three rounds, of methods of each kind."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import feddar
from feddar.algorithm.names import named_state
from feddar.data.cohort import Cohort
from feddar.federation.coordinator import coordinate
from feddar.federation.deployment import simulate as run_on
from feddar.federation.links.flower.connect import flower_link, flower_site
from feddar.federation.links.flower.gate import ServerTls
from feddar.federation.links.flower.programs import free_port
from feddar.federation.security.keys import check_client_files, check_server_files, load_clients, make_keys
from feddar.results.run_folder import read_model
from helpers.marks import first
from helpers.sites import NAMES, local_link, make_sites, make_study, with_patience, write_tables

METHODS = ("feddar-sa", "fedavg", "fedrep")
ONE_OR_MORE = pytest.mark.parametrize("method", first(METHODS[:1], METHODS))


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Return the folder of the tables, and the study of each method."""
    data = write_tables(tmp_path_factory.mktemp("federation") / "data")
    return data, {name: make_study(data, method=name, rounds=3) for name in METHODS}


@pytest.fixture(scope="module")
def expected(studies, tmp_path_factory):
    """Return the weights without any engine."""
    data, each = studies
    out = tmp_path_factory.mktemp("local")
    return {
        name: train_over(local_link(make_sites(data, out / name / "kept")), each[name], out / name) for name in each
    }


def train_over(link, study, out: Path) -> dict[str, torch.Tensor]:
    coordinate(study, link, out)
    return weights(out)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return named_state(read_model(out)[1])


def require_same(found, expected):
    assert found.keys() == expected.keys()
    for tensor, wanted in expected.items():
        torch.testing.assert_close(found[tensor], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_in_process(studies, tmp_path, method):
    """`feddar.train` on what the sites train on, together in one cohort, gives the weights of sites that keep it."""
    data, _ = studies
    study = make_study(data, method=method, rounds=3, validation=0)
    sites = make_sites(data, tmp_path / "kept", min_cell=1)
    found = train_over(local_link(sites), study, tmp_path / "out")
    parts = [site.participation.client.train for site in sites.values()]
    settings = study.training.model_dump() | {"encoder": study.training.encoder}
    run = feddar.train(pooled(parts), **settings)
    for tensor, value in named_state(run.state).items():
        torch.testing.assert_close(value, found[tensor], rtol=0, atol=1e-6)


def pooled(parts: list[Cohort]) -> Cohort:
    first = parts[0]
    x = tuple(torch.cat(inputs) for inputs in zip(*(part.x for part in parts), strict=True))
    client = torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts)])
    y, domain = (torch.cat([getattr(part, name) for part in parts]) for name in ("y", "domain"))
    return Cohort(x, y, domain, client, first.domains, NAMES, first.objective, columns=first.columns)


SIMULATION = """
import sys
from functools import partial
from pathlib import Path

from feddar.federation.links.flower.simulate import simulate
from feddar.federation.coordinator import coordinate
from feddar.federation.deployment import simulated_site
from feddar.federation.study import Study

data, out, *names = sys.argv[1:]


def work(link):
    for name in names:
        coordinate(Study.read(Path(out, f"{name}.toml")), link, Path(out, name))


simulate(["hospital-1", "hospital-2", "hospital-3"], partial(simulated_site, Path(data), Path(out, "kept")), work)
"""


@pytest.mark.slow
@pytest.mark.more
def test_flower_simulation(studies, expected, tmp_path):
    """All three in one simulation, which takes long to start, in a process of its own, which ray leaves in disorder."""
    data, each = studies
    for name in each:
        with_patience(each[name]).write(tmp_path / f"{name}.toml")
    command = [sys.executable, "-c", SIMULATION, str(data), str(tmp_path), *each]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in each:
        require_same(weights(tmp_path / name), expected[name])


@pytest.fixture(scope="module")
def deployment(studies, tmp_path_factory):
    """Return the link of a Flower deployment with TLS and keys whose three sites run until the end of these tests."""
    data, _ = studies
    folder = tmp_path_factory.mktemp("deployment")
    make_keys(folder / "keys", ["127.0.0.1"], NAMES)
    server = check_server_files(folder / "keys" / "server")
    clients = load_clients(folder / "keys" / "server" / "clients", server.ca)
    keys = {name: each.public_key for name, each in clients.items()}
    address, stop = f"127.0.0.1:{free_port()}", threading.Event()
    sites = make_sites(data, folder / "kept")

    def take_part(name: str) -> None:
        files = check_client_files(folder / "keys" / "clients" / name)
        (folder / name).mkdir()
        flower_site(address, name, sites[name].answer, folder / name, files.ca, files.key, lambda _: None, stop)

    with flower_link(address, folder, ServerTls(server.certificate, server.key), lambda: keys, lambda _: None) as link:
        threads = [threading.Thread(target=take_part, args=(name,), daemon=True) for name in NAMES]
        for thread in threads:
            thread.start()
        yield link
        stop.set()
        for thread in threads:
            thread.join(60)


@pytest.mark.slow
@ONE_OR_MORE
def test_flower_deployment_with_tls_and_keys(studies, expected, deployment, tmp_path, method):
    found = train_over(deployment, with_patience(studies[1][method]), tmp_path / "run")
    require_same(found, expected[method])


@pytest.mark.slow
@ONE_OR_MORE
def test_flare_simulator(studies, expected, tmp_path, method):
    data, each = studies
    where = run_on(with_patience(each[method]), data, tmp_path / "out", engine="nvflare", resume=False, events=None)
    require_same(weights(where), expected[method])
