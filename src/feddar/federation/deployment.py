"""The commands ``server``, ``client`` and ``simulate``: each connects a study, a link and sites.

Connections are encrypted, and sites are authenticated by keys (``feddar keys``). Plain text needs --insecure, and
--insecure twice if it would leave this machine.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from feddar.data.table_paths import by_name, files_of
from feddar.errors import UserError
from feddar.federation.coordinator import CoordinatorEvents, coordinate, run_name
from feddar.federation.links.link import Handler, Link
from feddar.federation.links.local import LocalLink
from feddar.federation.private_folder import private_folder
from feddar.federation.site import MIN_CELL, Site
from feddar.federation.study import Study
from feddar.results.run import Run
from feddar.results.tracking import require_tracker

ENGINES = ("flower", "nvflare", "local")
Say = Callable[[str], None]


def serve(
    study: Study,
    listen: str,
    out: Path,
    *,
    keys: Path | None,
    insecure: int,
    resume: bool,
    events: CoordinatorEvents,
    passphrase: Path | None = None,
) -> Run:
    """Coordinate a study over Flower: start a SuperLink, wait for sites, train, and stop the SuperLink.

    ``passphrase`` is a file with that of the key; without it, the environment or the terminal has it.
    """
    from feddar.federation.links.flower.connect import flower_link
    from feddar.federation.links.flower.gate import ServerTls
    from feddar.federation.security.keys import check_server_files, load_clients
    from feddar.federation.security.passphrase import Passphrase

    _require_address("--listen", listen)
    _require_secure(listen, keys, insecure)
    # What cannot be used is said before anything is started.
    run_name(study, out, resume)
    require_tracker(study.training, out)
    if keys is None:
        with flower_link(listen, out, None, None, events.say) as link:
            return coordinate(study, link, out, resume=resume, events=events)
    files = check_server_files(keys, passphrase=Passphrase(passphrase))
    refusals: set[str] = set()

    def known() -> dict[str, bytes]:
        """Return the keys of sites whose certificates are valid now; they may expire or be removed during a run."""

        def refused(why: str) -> None:
            if why not in refusals:
                refusals.add(why)
                events.say(why)

        return {name: each.public_key for name, each in load_clients(keys / "clients", files.ca, None, refused).items()}

    tls = ServerTls(files.certificate, files.key, clients=files.ca, passphrase=files.passphrase)
    with flower_link(listen, out, tls, known, events.say) as link:
        return coordinate(study, link, out, resume=resume, events=events)


def take_part(
    server: str,
    data: Path,
    name: str | None,
    state: Path | None,
    *,
    keys: Path | None,
    insecure: int,
    study: Study,
    min_cell: int = MIN_CELL,
    say: Say = print,
    passphrase: Path | None = None,
    device: str = "cpu",
) -> None:
    """Take part in a study as a site: answer the coordinator over a Flower SuperNode, until the run is finished."""
    from feddar.federation.links.flower.connect import flower_site
    from feddar.federation.security.keys import check_client_files
    from feddar.federation.security.passphrase import Passphrase

    _require_address("--server", server)
    _require_found(server)
    _require_secure(server, keys, insecure)
    files = None if keys is None else check_client_files(keys, passphrase=Passphrase(passphrase))
    if files is not None and name not in (None, files.name):
        raise UserError(f"the keys in {keys} are those of '{files.name}', not of '{name}': leave out --name.")
    called = name if files is None else files.name
    if called is None:
        raise UserError("say what this site is called: --name NAME.")
    if not data.exists():
        raise UserError(f"there is no table {data}: name the CSV or Parquet file of this site with --data.")
    done, folder, reasons = threading.Event(), state or Path(f"feddar-{called}"), list[str]()

    def ended(why: str) -> None:
        reasons.append(why)
        done.set()

    identity = None if files is None else files.private_key()
    how: dict[str, Any] = {"min_cell": min_cell, "study": study, "identity": identity, "device": device}
    site = Site(called, data, folder, say=say, ended=ended, **how)
    study.read_site(data, called)  # report data that does not fit before connecting
    ca, key, certificate = (None, None, None) if files is None else (files.ca, files.key, files.certificate)
    in_memory = files.openssh_key() if files is not None and files.passphrase else ""
    flower_site(server, called, site.answer, folder, ca, key, say, done, certificate, in_memory)
    if reasons and reasons[0]:
        raise UserError(reasons[0])


def simulate(study: Study, folder: Path, out: Path, *, engine: str, resume: bool, events: CoordinatorEvents) -> Path:
    """Run a study with all sites on this machine, one table each in ``folder``; return the folder of the run."""
    names = [*by_name(files_of(folder))]
    if len(names) < study.coordinator.min_clients:
        raise UserError(
            f"{folder} holds {len(names)} of the {study.coordinator.min_clients} tables that the study needs: put one "
            "per site there."
        )
    # Sites of a rehearsal have no certificates: they know each other by keys that they make themselves.
    facts = study.facts.model_copy(update={"keys": None})
    study = replace(study, facts=facts, coordinator=study.coordinator.model_copy(update={"sites": len(names)}))
    make = partial(simulated_site, folder, out / "sites")
    if engine == "nvflare":
        if resume:
            raise UserError("a simulation on FLARE cannot be resumed: start it again, in another folder (--out).")
        return _simulate_on_flare(study, folder, out)
    private_folder(out)

    def work(link: Link) -> None:
        coordinate(study, link, out, resume=resume, events=events)

    if engine == "flower":
        from feddar.federation.links.flower.simulate import simulate as simulate_on_flower

        simulate_on_flower(names, make, work)
    else:
        work(LocalLink({name: make(name) for name in names}))
    return out


def simulated_site(folder: Path, kept: Path, name: str) -> Handler:
    """Return the handler of the site whose table in ``folder`` has this name; simulators call it in any process."""
    return Site(name, by_name(files_of(folder))[name], kept / name, say=lambda _: None).answer


def _simulate_on_flare(study: Study, folder: Path, out: Path) -> Path:
    from feddar.federation.links.nvflare.job import write_job
    from feddar.federation.links.nvflare.simulator import simulate as simulate_on_flare

    private_folder(out)
    study.write(out / "study.toml")
    text = (out / "study.toml").read_text(encoding="utf-8")
    files, agreed = by_name(files_of(folder)), str((out / "study.toml").resolve())
    job = write_job(text, out / "job", [*files], study.coordinator.min_clients)
    sites = {name: {"data": str(file.resolve()), "study": agreed} for name, file in files.items()}
    return simulate_on_flare(job, out / "workspace", sites)


def _require_address(option: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise UserError(f"{option} {address} is not of the form HOST:PORT, such as 127.0.0.1:9092.")


def _require_found(server: str) -> None:
    """Refuse a host name that cannot be resolved."""
    host = server.rpartition(":")[0].strip("[]")
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        raise UserError(f"there is no host {host}, or it cannot be looked up here: is it spelt right?") from None


def _require_secure(address: str, keys: Path | None, insecure: int) -> None:
    """Refuse plain text without --insecure, or without --insecure twice if the address is not this machine."""
    if keys is not None and insecure:
        raise UserError("--keys and --insecure contradict each other: leave one out.")
    if keys is not None:
        return
    if not insecure:
        raise UserError(
            "connections are encrypted and sites prove who they are: make keys with `feddar keys`, and name the folder "
            "with --keys; or, to try things out on this machine, say --insecure."
        )
    if insecure < 2 and not _is_loopback(address.rpartition(":")[0].strip("[]")):
        raise UserError(
            f"--insecure sends patients' statistics in plain text, to whoever asks: {address} is not this machine "
            "alone. Use --keys, or 127.0.0.1, or say --insecure twice if you mean it."
        )


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
