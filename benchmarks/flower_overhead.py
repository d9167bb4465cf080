"""Measure what Flower costs per phase beyond the work at the sites: through feddar, and through a plain Flower app.

The same bytes go to sites that send them straight back. The plain app does as Flower's tutorials do: messages by
``send_and_receive``, and all of a site's work in the process that Flower starts for each message, so that a training
app has torch to import there.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.figures import Figure
from feddar.federation.links.flower.connect import flower_link, flower_site
from feddar.federation.links.flower.programs import command, environment, free_port, program, started

SITES, BYTES, PHASES = 2, 1_000_000, 9

PLAIN_APP = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "plain"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "plain"
[tool.flwr.app.components]
serverapp = "plain_server:app"
clientapp = "plain_client:app"
[tool.flwr.app.config]
sites = 0
size = 0
phases = 0
results = ""
"""

PLAIN_SERVER = """
import json, time
from pathlib import Path
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    settings = context.run_config
    while len(list(grid.get_node_ids())) < settings["sites"]:
        time.sleep(0.2)
    seconds = []
    for phase in range(settings["phases"]):
        start = time.monotonic()
        array = Array(np.full(settings["size"], phase, np.uint8))
        record = RecordDict({"arrays": ArrayRecord({"array": array})})
        messages = [Message(record, node, "query") for node in grid.get_node_ids()]
        replies = list(grid.send_and_receive(messages, timeout=300))
        assert len(replies) == settings["sites"] and not any(reply.has_error() for reply in replies)
        seconds.append(time.monotonic() - start)
    Path(settings["results"]).write_text(json.dumps(seconds))
"""

PLAIN_CLIENT = """
{imports}
from flwr.app import Message
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def query(message, context):
    return Message(message.content, reply_to=message)
"""


def through_feddar(folder: Path, sites: int, size: int, phases: int) -> list[float]:
    address, stop, seconds = f"127.0.0.1:{free_port()}", threading.Event(), list[float]()
    names = [f"site-{number}" for number in range(sites)]
    with flower_link(address, folder, None, None, str) as link:
        threads = []
        for name in names:
            (folder / name).mkdir()
            arguments = (address, name, bytes, folder / name, None, None, str, stop)
            threads.append(threading.Thread(target=flower_site, args=arguments))
            threads[-1].start()
        try:
            while link.sites() != names:
                time.sleep(0.2)
            for phase in range(phases):
                start, message = time.monotonic(), bytes([phase]) * size
                assert all(answer.content == message for answer in link.ask(message, names, 300))
                seconds.append(time.monotonic() - start)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    return seconds


def through_plain_app(folder: Path, sites: int, size: int, phases: int, imports: str = "") -> list[float]:
    (folder / "app").mkdir()
    (folder / "app" / "pyproject.toml").write_text(PLAIN_APP)
    (folder / "app" / "plain_server.py").write_text(PLAIN_SERVER)
    (folder / "app" / "plain_client.py").write_text(PLAIN_CLIENT.format(imports=imports))
    results, port, variables = folder / "results.json", free_port(), environment(folder / "flower")
    # Flower's own value, which our environment shortens.
    del variables["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"]
    known = f'[superlink.plain]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    Path(variables["FLWR_HOME"], "config.toml").write_text(known)
    with ExitStack() as stack:
        options = ["--insecure", "--port", str(port), "--disable-runtime-dependency-installation"]
        server = [program("flower-superlink"), *options]
        superlink = stack.enter_context(started(server, folder / "superlink.log", variables))
        while "startup complete" not in " ".join(superlink.tail):
            superlink.check()
            time.sleep(0.2)
        for number in range(sites):
            options = ["--insecure", f"--superlink=127.0.0.1:{port}", "--port", str(free_port())]
            site = [program("flower-supernode"), *options]
            stack.enter_context(started(site, folder / f"{number}.log", variables))
        settings = f'sites={sites} size={size} phases={phases} results="{results}"'
        command(["run", str(folder / "app"), "plain", "--run-config", settings], variables)
        while not results.exists():
            superlink.check()
            time.sleep(0.2)
    return [float(value) for value in json.loads(results.read_text())]


def measured(name: str, *extra: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        work = through_plain_app if name.startswith("plain") else through_feddar
        seconds = work(Path(folder), SITES, BYTES, PHASES, *extra)
    print(f"{name}: {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})", flush=True)
    return statistics.median(seconds)


def figures() -> Iterator[Figure]:
    ours = measured("feddar on Flower")
    yield Figure("seconds for a phase on Flower, 1 MB each way", ours, "<= 1.5", f"median of {PHASES}, {SITES} sites")
    for name, imports in (("plain Flower app", ""), ("plain Flower app that imports torch", "import torch")):
        theirs = measured(name, imports)
        note = f"median seconds {ours:.2f} / {theirs:.2f}, {PHASES} phases, {SITES} sites"
        yield Figure(f"phase on Flower, 1 MB each way / {name}", ours / theirs, "", note)
